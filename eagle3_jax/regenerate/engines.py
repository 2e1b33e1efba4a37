"""Answers with engines in this process, one for each row of the mesh."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from eagle3_jax.config import RegenerateConfig
from eagle3_jax.decoding import data_parallel
from eagle3_jax.decoding.engine import Asked, Engine, SamplingParams
from eagle3_jax.decoding.request import Output
from eagle3_jax.mesh import Replica
from eagle3_jax.models.checkpoint.fetch import Target, cache_folder
from eagle3_jax.regenerate.dialogue import Answer, Dialogue, Known, sampling
from eagle3_jax.runs import command, processes


def load(settings: RegenerateConfig, target: Target, replica: Replica) -> list[Engine]:
    """Loads an engine for each row of a replica, over a target on its mesh; those that choose draft sizes measure them.

    Drafts change no answer: see `Engine`, `sample_drafts`. Raises as `Engine.load` does.
    """
    sizes: Any = None if settings.draft == "none" else settings.draft, "auto", settings.batch_size, settings.max_length
    how: Any = {"memory_fraction": settings.memory_fraction, "sample_drafts": False}
    engines = [Engine.load(row, *sizes, **how) for row in data_parallel.targets(target, replica)]
    with processes.among(replica.processes):
        for engine in engines:  # one behind the other: times are measured
            if len(engine.tiers.tiers) > 1:
                engine.warm_up(cache_folder() / "programs", progress=sys.stderr.isatty() or processes.say)
    return engines


def converse(
    engines: Sequence[Engine],
    settings: RegenerateConfig,
    dialogues: Iterable[Dialogue],
    known: Known,
    seed: int,
    store: Callable[[Answer], None],
) -> None:
    """Has every turn answered that is not known; a dialogue's next turn follows its last answer at once.

    `store` takes each new answer before anything follows it, one at a time. Raises Stopped: a signal came.
    """
    tokenizer = engines[0].tokenizer

    def asked(dialogue: Dialogue, known: Known) -> Asked[Dialogue] | None:
        """A dialogue's next turn, or None behind its end."""
        if (ids := dialogue.next_prompt(known, tokenizer, settings)) is None:
            return None
        return dialogue, ids, SamplingParams(**sampling(settings, seed, dialogue.prompt["id"], dialogue.turn))

    def first() -> Iterator[Asked[Dialogue]]:
        for dialogue in dialogues:
            if (item := asked(dialogue, known)) is not None:
                yield item

    def take(dialogue: Dialogue, output: Output) -> Asked[Dialogue] | None:
        text, ids, end = output.text, output.token_ids, output.finish_reason
        failed, thoughts, why = end == "error", output.reasoning, output.error or ""
        answer = Answer(dialogue.prompt["id"], dialogue.turn, text, ids, end == "length", failed, thoughts, why=why)
        store(answer)
        command.stop_point()
        dialogue.take(answer)
        return asked(dialogue, {})

    data_parallel.converse(engines, first(), take)
