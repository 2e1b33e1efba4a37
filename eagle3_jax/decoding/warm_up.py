"""The warm-up: compiles an engine's programs and measures its rounds, in the order in which requests need them.

First come the programs that answer every request: one reads prompts, one runs rounds of the whole batch without drafts.
Then come rounds with the default drafts, the other ways to read prompts, the same rounds in fewer rows, and width by
width the other tiers. The default tier is taken once its program is compiled, another one once its costs are known too.

Two programs are compiled at a time, since a compilation keeps little more than one core busy.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import pathlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from eagle3_jax.decoding.choice import costs
from eagle3_jax.decoding.choice.costs import Costs
from eagle3_jax.decoding.choice.tiers import TierChoice
from eagle3_jax.decoding.device import calls
from eagle3_jax.decoding.device.calls import Call
from eagle3_jax.decoding.device.runner import ModelRunner
from eagle3_jax.decoding.tier import Tier
from eagle3_jax.runs import command, machine
from eagle3_jax.runs.progress import Progress, shown

# `EngineLoop.lend`, or what stands for it where no request can come.
Lender = Callable[[Callable[[], object]], contextlib.AbstractContextManager[Callable[[], object]]]

_log = logging.getLogger(__name__)
_ending = threading.Event()  # the interpreter's end


class WarmUp:
    """One warm-up of an engine: arguments as of `Engine.warm_up`; `planned`: the most programs that it will compile."""

    def __init__(
        self, runner: ModelRunner, tiers: TierChoice, cache: pathlib.Path | None, progress: Progress, greedy_alone: bool
    ) -> None:
        self._runner, self._tiers, self._folder, self._progress = runner, tiers, cache, progress
        self._passes = (True,) if greedy_alone else (True, False)
        self._base = list(dict.fromkeys((tiers.tiers[0], tiers.default)))
        self._thread: threading.Thread | None = None
        self._made: set[tuple[Any, ...]] = set()
        sizes = runner.sizes
        self.planned = 1 + len(sizes.prefill_shapes) + len(sizes.widths) * len(tiers.tiers)
        self.planned += runner.rests + bool(sizes.kept_states) + bool(sizes.tables)

    @property
    def ready(self) -> int:
        """Number of programs that are compiled for requests."""
        return len(self._made)

    @property
    def running(self) -> bool:
        """True while `rest` runs in its thread."""
        return self._thread is not None and self._thread.is_alive()

    def first(self) -> None:
        """Compiles what answers every request. Forgets the runner's state."""
        runner, sizes, tier = self._runner, self._runner.sizes, self._base[0]
        runner.use(sizes.widths[-1:], sizes.prefill_shapes[-1:])
        self._tiers.default = tier
        rows, length = sizes.prefill_shapes[-1]
        reads = calls.prefill(sizes, rows=rows, length=length)
        states = [calls.copy_state(sizes)] if sizes.kept_states else []
        states += [calls.write_table(sizes)] if sizes.tables else []
        first = [calls.note_prompt(sizes), *states, reads, self._rounds(sizes.batch, [tier])[0]]
        self._say(f"{self.planned} programs are to compile, at most; {len(first)} answer every request")
        runner.begin()
        self._compile(first, shown(first, "compile", "program", self._progress))

    def rest(self, lend: Lender) -> None:
        """Compiles all others, and measures what rounds cost."""
        runner, sizes = self._runner, self._runner.sizes
        wakes = [calls.catch_up(sizes)] if runner.rests else []
        self._compile([*self._rounds(sizes.batch, self._base), *wakes])
        self._tiers.default = self._base[-1]
        readers = [calls.prefill(sizes, rows=rows, length=length) for rows, length in sizes.prefill_shapes[:-1]]
        self._compile(readers, shown(readers, "compile readers of prompts", "program", self._progress))
        runner.use(runner.widths, sizes.prefill_shapes)
        for width in shown(sizes.widths[:-1], "compile narrow rounds", "width", self._progress):
            self._compile(self._rounds(width, self._base))
            runner.use({width, *runner.widths}, runner.prefill_shapes)
        if len(self._tiers.tiers) > 1:
            self._price(lend)
        self._say(f"{self.ready} programs are compiled")

    def _say(self, line: str) -> None:
        if callable(self._progress):
            self._progress(line)

    def rest_in_background(self, lend: Lender) -> None:
        """Runs `rest` in a thread of low priority. A failure is logged; requests go on with what is compiled."""

        def run() -> None:
            machine.lower_priority()
            try:
                self.rest(lend)
            except command.Stopped:
                pass
            except Exception:
                _log.exception("warm-up: it failed; requests go on with %d programs", self.ready)
                self.planned = self.ready
            finally:
                atexit.unregister(end)

        def end() -> None:
            _ending.set()
            thread.join()

        # A daemon that ends before the interpreter does, behind the program that it compiles.
        self._thread = thread = threading.Thread(target=run, name="eagle3_jax warm-up", daemon=True)
        atexit.register(end)
        thread.start()

    def _price(self, lend: Lender) -> None:
        """Sets the costs of the tiers that may pay, width by width.

        A tier that does not pay in few rows pays less in many, whose drafts cost more. One that does not pay for greedy
        requests pays less for others, whose rounds cost more.
        """
        tiers, widths = self._tiers, self._runner.sizes.widths
        useful = {greedy: list(tiers.tiers) for greedy in self._passes}
        for number, width in enumerate(shown(widths, "measure rounds", "width", self._progress), start=1):
            for greedy in self._passes:
                could_be = [tier for tier in useful[greedy] if tier in useful[True]]
                known = tiers.useful(self._costs(could_be, lend, greedy=greedy, width=width))
                useful[greedy] = [tier for tier in could_be if tier.name in known.rounds]
                self._compile(self._rounds(width, useful[greedy]))
                tiers.price({width: known}, greedy=greedy)
            others = sum(tier not in self._base for tier in useful[True])
            self.planned = self.ready + others * (len(widths) - number)

    def _costs(self, of: list[Tier], lend: Lender, *, greedy: bool, width: int) -> Costs:
        def measure() -> Costs:
            self._compile([calls.rehearse(self._runner.sizes.measured_length), *self._rounds(width, of)])
            with lend(self._stop_point) as give_way:
                return costs.round_costs(self._runner, of, greedy=greedy, width=width, give_way=give_way)

        return costs.kept_or_measured(self._folder, costs.key(self._runner, of, greedy, width), measure)

    def _rounds(self, width: int, tiers: Sequence[Tier]) -> list[Call]:
        return [calls.decode(self._runner.sizes, width=width, tier=tier) for tier in tiers]

    def _compile(self, calls: Sequence[Call], shown: Iterable[Call] | None = None) -> None:
        """Compiles the calls' programs from the first on, and in a thread beside from the last on, until both meet."""

        def each(calls: Iterable[Call]) -> None:
            for call in calls:
                self._stop_point()
                self._runner.compile(call)
                if call.name != "rehearse":
                    self._made.add(call.key)

        def beside() -> None:
            with contextlib.suppress(Exception):  # the failure meets this thread, too
                each(reversed(calls))

        thread = threading.Thread(target=beside, name="eagle3_jax warm-up beside", daemon=True)
        thread.start()
        try:
            each(calls if shown is None else shown)
        finally:
            thread.join()

    def _stop_point(self) -> None:
        if _ending.is_set():
            raise command.Stopped
        command.stop_point()
