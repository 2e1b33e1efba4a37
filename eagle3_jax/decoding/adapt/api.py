"""A live head as the scheduler sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from eagle3_jax.decoding.rounds.observed import Observed
from eagle3_jax.models.drafts.head import Draft


@dataclasses.dataclass
class AdaptStats:
    """What a live head has learnt since the engine was made.

    Attributes:
        requests: ended requests that entered the ring.
        tokens: tokens in the ring now.
        steps: training steps, those rolled back included.
        loss: of the latest step; NaN before the first.
        heads: heads that were judged better (cross entropy, and drafts accepted) and draft since.
        rollbacks: heads that were not: of higher cross entropy on the held-back requests, or NaN.
        new_tokens: tokens that took a place in the draft vocabulary.
        tau_before, tau_after: tokens per round, replayed on the held-back requests of the latest judgement: of the head
            that drafted before it, and of the one since; NaN before the first.
        seconds: time of steps and judgements.
        share: their share of the engine's time in the last minutes.
    """

    requests: int = 0
    tokens: int = 0
    steps: int = 0
    loss: float = float("nan")
    heads: int = 0
    rollbacks: int = 0
    new_tokens: int = 0
    tau_before: float = float("nan")
    tau_after: float = float("nan")
    seconds: float = 0.0
    share: float = 0.0


@runtime_checkable
class Learner(Protocol):
    """Learns from ended requests, between dispatches: see `learner.HeadLearner`."""

    stats: AdaptStats

    def keep(self, observed: Observed, slot: int, token_ids: Sequence[int], first: int, answer: int) -> None: ...
    @property
    def learns_on(self) -> bool: ...
    def learn(self, busy: float, idle: float, wait: Callable[[], None]) -> Draft | None: ...
    def teach(self, embed: Any, lm_head: Any) -> None: ...
    def compile(self) -> None: ...
