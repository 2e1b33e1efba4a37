"""Answers of engines in this process, one for each row of the mesh."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence

import tqdm

from eagle3_jax import config as configs
from eagle3_jax.decoding import data_parallel
from eagle3_jax.decoding.engine import Engine, SamplingParams
from eagle3_jax.decoding.request import Output
from eagle3_jax.regenerate.dialogue import Answer, Dialogue, sampling
from eagle3_jax.runs import command, disk


class Answerer:
    """Has engines answer, and keeps the answers in a log file.

    Args:
        known: answers of an earlier run, by prompt and turn; they are not asked for again.
        log: where new ones are written; None writes none.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        settings: configs.RegenerateConfig,
        seed: int,
        known: dict[tuple[str, int], Answer],
        log: disk.Path | None,
    ) -> None:
        self.engines, self.settings, self.seed, self.known, self.log = engines, settings, seed, known, log
        self.tokens, self.seconds = 0, 0.0

    def rate(self) -> float:
        """Tokens a second of what was generated now; 0 when all was in the log."""
        return self.tokens / self.seconds if self.tokens else 0.0

    def converse(self, dialogues: Sequence[Dialogue], name: str) -> None:
        """Answers all first turns, then all second ones, and so on, until every dialogue has ended."""
        tokenizer = self.engines[0].tokenizer
        turn = 0
        while True:
            asked = [
                (dialogue, ids)
                for dialogue in dialogues
                if (ids := dialogue.next_prompt(self.known, tokenizer, self.settings)) and dialogue.turn == turn
            ]
            if all(dialogue.end is not None for dialogue in dialogues):
                return
            self._answer(asked, turn, f"{name}, turn {turn + 1}")
            turn += 1

    def _answer(self, asked: list[tuple[Dialogue, list[int]]], turn: int, name: str) -> None:
        """Fills `known` for all that is asked."""
        names = [dialogue.prompt["id"] for dialogue, _ in asked]
        start, before = time.monotonic(), self.tokens
        with (
            contextlib.nullcontext() if self.log is None else disk.Log(self.log) as stream,
            tqdm.tqdm(desc=name, total=len(asked), unit=" answers", disable=self.log is None) as progress,
        ):

            def on_output(index: int, output: Output) -> None:
                answer = _to_answer(names[index], turn, output)
                self.known[answer.id, turn] = answer
                if stream is not None:
                    stream.append(dataclasses.asdict(answer))
                self.tokens += len(output.token_ids)
                rate = (self.tokens - before) / (time.monotonic() - start)
                progress.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
                progress.update()
                command.stop_point()

            params = [SamplingParams(**sampling(self.settings, self.seed, name, turn)) for name in names]
            data_parallel.generate(self.engines, [ids for _, ids in asked], params, on_output)
        self.seconds += time.monotonic() - start


def _to_answer(name: str, turn: int, output: Output) -> Answer:
    truncated, failed = output.finish_reason == "length", output.finish_reason == "error"
    ids, why = output.token_ids, output.error or ""
    return Answer(name, turn, output.text, ids, truncated, failed, output.reasoning, why=why)
