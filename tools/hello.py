"""Streams the same answers without drafts and with them, marks the accepted drafts, and prints the speed-up.

The target that comes with the package answers from its 4 bits first; the same in float32 stands beside it as figures.
Each prompt is answered in several turns, without drafts and with them alternately; the table has medians.

    .venv/bin/python tools/hello.py                                  # drafts of this package's head
    .venv/bin/python tools/hello.py --draft lookup                   # drafts copied from the text, without a head
    .venv/bin/python tools/hello.py --draft runs/quickstart/export   # drafts of your own head

`bash tools/hello.sh` installs the requirements first. On a terminal accepted drafts are coloured by depth; elsewhere,
and under NO_COLOR (https://no-color.org), the accepted drafts of a round are in brackets.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from eagle3_jax.runs import environment

environment.prepare()

from eagle3_jax import Engine, SamplingParams, load_target
from eagle3_jax.acceptance import AcceptanceCounts
from eagle3_jax.chat import Marker, in_colours
from eagle3_jax.config import TargetConfig
from eagle3_jax.decoding.measure.compare import first_difference
from eagle3_jax.formats.packaged import AUTO, LOOKUP, packaged_head
from eagle3_jax.models.checkpoint.fetch import Target, packaged_model
from eagle3_jax.runs import command, machine, progress

# What a model of 135M parameters can do: a list, code that the answer quotes, and a question.
PROMPTS = {
    "list": "Write the numbers from 1 to 20, separated by commas.",
    "code": "Explain this function in two sentences:\n\n```python\ndef add(a, b):\n    return a + b\n```",
    "chat": "What is a program?",
}
TURNS = 3
MAX_TOKENS, MAX_LENGTH = 96, 512


@dataclasses.dataclass(frozen=True)
class Streamed:
    """A streamed answer; `counts` of its rounds, `drafted`: accepted drafts in it."""

    token_ids: list[int]
    counts: AcceptanceCounts
    drafted: int
    seconds: float


def stream(
    engine: Engine, prompt: str, params: SamplingParams, show: Callable[[str], object], *, colours: bool
) -> Streamed:
    marker, drafted, start = Marker(engine.tokenizer, colours=colours), 0, time.perf_counter()
    request = engine.submit(prompt, params)
    for piece in request:
        show(marker.mark(piece.token_ids, piece.depths, last=piece.finish_reason is not None))
        drafted += sum(depth > 0 for depth in piece.depths)
    seconds, output = time.perf_counter() - start, request.result()
    return Streamed(output.token_ids, output.stats.counts, drafted, seconds)


def median(turns: Sequence[Streamed]) -> Streamed:
    """Returns an answer of several turns, with the median of their times. Raises ValueError: they differ."""
    if any(turn.token_ids != turns[0].token_ids for turn in turns):
        raise ValueError("answers: got another one in a later turn, expected the same")
    return dataclasses.replace(turns[0], seconds=statistics.median(turn.seconds for turn in turns))


def table(answers: Sequence[tuple[str, Streamed, Streamed]]) -> str:
    """Formats (name, without drafts, with them) of each prompt as a table, with a total."""
    rows = [("", "tokens/s without", "with drafts", "speed-up", "tau", "drafted", "identical")]
    parts = [(name, [plain], [fast]) for name, plain, fast in answers]
    for name, plain, fast in [*parts, ("all", [x for _, x, _ in answers], [x for *_, x in answers])]:
        before, now = (sum(len(x.token_ids) for x in of) / sum(x.seconds for x in of) for of in (plain, fast))
        tau = AcceptanceCounts.total(x.counts for x in fast).tau
        drafted = sum(x.drafted for x in fast) / sum(len(x.token_ids) for x in fast)
        same = all(a.token_ids == b.token_ids for a, b in zip(plain, fast, strict=True))
        numbers = f"{before:.1f}", f"{now:.1f}", f"{now / before:.2f}x", f"{tau:.2f}", f"{drafted:.0%}"
        rows.append((name, *numbers, "yes" if same else "NO"))
    return "\n".join(command.aligned(rows))


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m-instruct", help="a name, a hub id, or a Hugging Face folder")
    parser.add_argument("--draft", help="a head's folder, or lookup; the default is the target's own head, else lookup")
    arguments = parser.parse_args(argv)
    colours = in_colours()
    with command.run("hello", resumes=False):
        print(f"Loading {arguments.target} onto {where()} ...", flush=True)
        with beating("loading"):
            target = load_target(arguments.target)
        draft = arguments.draft or (AUTO if packaged_head(target) else LOOKUP)
        beside = packaged_model(arguments.target) is not None
        if beside:
            print("A model of 135M parameters: watch the speed, not the wit.", flush=True)
            with beating("loading its 4 bits"):
                stored = load_target(TargetConfig(name=arguments.target, weights="stored"))
            run(stored, draft, colours=colours)
            print("\nThe same in float32:\n", flush=True)
        run(target, draft, colours=colours, quiet=beside)


def where() -> str:
    """Names the device. Raises ValueError: JAX does not see the TPU of this machine, and would use its CPU."""
    hardware = machine.hardware()
    if machine.has_tpu() and hardware["accelerator"] is None:
        raise ValueError("devices: got a CPU, expected this machine's TPU: pip install 'eagle3-jax[tpu]'")
    return hardware["accelerator"] or hardware["cpu"]


def beating(what: str) -> contextlib.AbstractContextManager[None]:
    """Tells a log that work goes on; a terminal has bars."""
    return contextlib.nullcontext() if sys.stderr.isatty() else progress.told(what)


def run(target: Target, draft: str, *, colours: bool, quiet: bool = False) -> None:
    """Answers each prompt both ways in turns and compares. Raises ValueError: another target's head, other answers."""
    start = time.monotonic()
    print("Compiling, and measuring what drafts cost here ...", flush=True)
    with beating("compiling and measuring"):
        vanilla = Engine.load(target, None, max_length=MAX_LENGTH, prefix_cache=False)
        drafting = Engine.load(target, draft, max_length=MAX_LENGTH, prefix_cache=False)
        for engine in (vanilla, drafting):
            engine.warm_up(progress=sys.stderr.isatty(), greedy_alone=True)
            engine.generate(["Hello!"], SamplingParams(max_tokens=16))  # wakes threads, allocators and caches
    print(f"Ready after {time.monotonic() - start:.0f} s.", flush=True)

    def say(text: str) -> None:
        if not quiet:
            print(text, end="", flush=True)

    marked = "coloured, a colour for each depth" if colours else "in [brackets]"
    sources = {LOOKUP: "copied from the text", AUTO: "of the head that comes with the package"}
    source, params, answers = sources.get(draft, f"of the head {draft}"), SamplingParams(max_tokens=MAX_TOKENS), []
    for name, prompt in PROMPTS.items():
        turns: dict[Engine, list[Streamed]] = {vanilla: [], drafting: []}
        say(f"\n== {name}: {prompt}\n\n-- without drafts\n")
        if not quiet:
            turns[vanilla].append(stream(vanilla, prompt, params, say, colours=colours))
            say(f"\n\n-- with drafts {source}; the accepted ones are {marked}\n")
            turns[drafting].append(stream(drafting, prompt, params, say, colours=colours))
            say("\n")
        with beating(f"{name}: {TURNS} turns of each way"):
            for turn in range(not quiet, TURNS):
                for engine in (drafting, vanilla) if turn % 2 else (vanilla, drafting):
                    turns[engine].append(stream(engine, prompt, params, len, colours=False))  # shows nothing
        answers.append((name, median(turns[vanilla]), median(turns[drafting])))
    print(f"\n{table(answers)}\nMedians of {TURNS} turns.")
    print("tau: tokens a round. drafted: share of the answer's tokens that were accepted drafts.")
    differ = [(name, at) for name, a, b in answers if (at := first_difference(a.token_ids, b.token_ids)) is not None]
    if differ:
        raise ValueError("answers: " + ", ".join(f"{name} differs from token {at} on" for name, at in differ))


if __name__ == "__main__":
    main()
