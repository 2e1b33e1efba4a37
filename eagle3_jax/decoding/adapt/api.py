"""A live head as the scheduler sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from eagle3_jax.decoding.rounds.observed import Observed
from eagle3_jax.models.drafts.head import Draft


@dataclasses.dataclass
class AdaptStats:
    """What a live head has learnt since the engine was made."""

    requests: int = 0  # that ended and entered the ring
    tokens: int = 0  # in the ring now
    steps: int = 0  # of training, those rolled back included
    loss: float = float("nan")  # of the latest step
    heads: int = 0  # that were judged better (cross entropy, and drafts accepted) and draft since
    rollbacks: int = 0  # heads that were not: of higher cross entropy on the held-back requests, or NaN
    new_tokens: int = 0  # that took a place in the draft vocabulary
    # Tokens per round, replayed on the held-back requests of the latest judgement: of the head before it, and since.
    tau_before: float = float("nan")
    tau_after: float = float("nan")
    seconds: float = 0.0  # of steps and judgements
    share: float = 0.0  # of the engine's time in the last minutes


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
