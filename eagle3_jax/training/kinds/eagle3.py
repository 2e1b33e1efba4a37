"""EAGLE-3 heads: the training-time test, and a start from the target's own states and LM head."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from eagle3_jax.config.kinds import in_target
from eagle3_jax.formats import heads
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.models.drafts.eagle3 import DraftHead, DraftHeadConfig
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.training.batch import Batch, Teacher
from eagle3_jax.training.kinds.kind import Step, TrainingKind
from eagle3_jax.training.losses import Divisors, Loss, Sums, states_loss
from eagle3_jax.training.replay import replay_rounds
from eagle3_jax.training.ttt import training_time_test

# Rate at which the LK loss shifts from cross entropy to acceptance, as its authors chose it (arXiv 2602.23881).
LK_DECAY = 3.0


@dataclasses.dataclass(frozen=True)
class Eagle3(TrainingKind):
    """The EAGLE-3 head, EAGLE-3.1 included."""

    name: ClassVar[str] = "eagle3"
    shape: DraftHeadConfig

    def __post_init__(self) -> None:
        window, steps = self.shape.sliding_window, self.train.ttt_steps
        if window is not None and window < steps:
            raise ValueError(f"sliding_window: got {window}, expected at least ttt_steps = {steps}")

    def new(self, seed: int, rows: Float[Array, "dv h"]) -> DraftHead:
        """See `TrainingKind`; `fc` hands on the highest aux feature: the residual stream starts as a late one there."""
        c, head = self.shape, super().new(seed, rows)
        identity = jnp.eye(c.target_hidden_size, c.hidden_size)
        head.fc[...] = head.fc[...].at[-c.target_hidden_size :].add(identity)
        return head

    def warm(self, source: str | pathlib.Path, target: Target) -> Draft:
        """See `TrainingKind`; an exported head of EAGLE-3."""
        if in_target(source):
            expected = f"the folder of a head, or null, for draft.kind {self.name!r}"
            raise ValueError(f"train.warm_start: got {source!r}, expected {expected}")
        draft = heads.load_draft(source, target=target, dtype=jnp.float32, exact=True)
        if type(draft.head) is not self.network:
            raise ValueError(f"train.warm_start {source}: got {type(draft.head).__name__}, expected a head of EAGLE-3")
        got, expected = dataclasses.asdict(draft.head.config), dataclasses.asdict(self.shape)
        if problems := [f"{n}: got {got[n]!r}, expected {expected[n]!r}" for n in got if got[n] != expected[n]]:
            raise ValueError(f"train.warm_start {source}: a head of another shape:\n  " + "\n  ".join(problems))
        return draft

    def loss(self, head: DraftHead, teacher: Teacher, batch: Batch, step: Step, divisors: Divisors = None) -> Loss:
        """See `TrainingKind`; the LK loss begins at the share `train.lk_from` of all steps."""
        run = self.train
        begins = round(run.lk_from * self.total_steps)
        lk_decay = jnp.where(step >= begins, LK_DECAY, 0.0) if run.loss == "lk" else None
        states = training_time_test(head, teacher.embed, batch, run.ttt_steps, run.remat)
        return states_loss(head.lm_head[...], states, teacher, batch, run, lk_decay, divisors)

    def evaluate(self, head: DraftHead, teacher: Teacher, batch: Batch) -> Sums:
        run: Any = self.train
        states = training_time_test(head, teacher.embed, batch, run.ttt_steps)
        loss, sums = states_loss(head.lm_head[...], states, teacher, batch, run)
        return sums | {"loss": loss} | replay_rounds(head.lm_head[...], states, teacher, batch, run.loss_block)
