"""A target's multi-token prediction layer (MTP), trained by the training-time test.

The layer reads the target's last hidden state alone. Embeddings and LM head are the target's and stay frozen, so that
neither weights nor moments of the LM head are kept. The draft vocabulary is the target's.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle3_jax.formats import mtp
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.models.drafts.head import Draft, ShapeOfModel
from eagle3_jax.models.drafts.mtp import MtpHead
from eagle3_jax.training.batch import Batch, Teacher
from eagle3_jax.training.kinds.kind import Step, TrainingKind
from eagle3_jax.training.losses import Divisors, Loss, Sums, states_loss
from eagle3_jax.training.replay import replay_rounds
from eagle3_jax.training.ttt import training_time_test


@dataclasses.dataclass(frozen=True)
class Mtp(TrainingKind):
    """An MTP layer; `train.warm_start: mtp` begins with the one in the target's checkpoint."""

    name: ClassVar[str] = "mtp"
    lives: ClassVar[bool] = False
    shape: ShapeOfModel

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """See `TrainingKind`: none, the last hidden state is the feature."""
        return ()

    def build(self, rngs: nnx.Rngs) -> MtpHead:
        """See `TrainingKind`; without `lm_head`."""
        head = mtp.head_of(self.shape.model, "draft.kind")(self.shape.model, dtype=jnp.float32, rngs=rngs)
        del head.lm_head
        return head

    def vocabulary(self, chosen: Int[np.ndarray, " dv"]) -> Int[np.ndarray, " ids"]:
        """See `TrainingKind`: the target's, whatever was chosen."""
        return np.arange(self.shape.vocab_size, dtype=np.int32)

    def warm(self, source: str | pathlib.Path, target: Target) -> Draft:
        """See `TrainingKind`; `source` is "mtp"."""
        if source != self.name:
            expected = f"{self.name!r}, the target's own layer, or null"
            raise ValueError(f"train.warm_start: got {str(source)!r}, expected {expected} for draft.kind {self.name!r}")
        draft = mtp.MTP.load(None, target, jnp.float32)
        head = jax.tree.map(lambda x: x, draft.head)
        del head.lm_head
        return Draft(head, draft.token_ids)

    def loss(self, head: MtpHead, teacher: Teacher, batch: Batch, step: Step, divisors: Divisors = None) -> Loss:
        states = self._states(head, teacher, batch, self.train.remat)
        return states_loss(None, states, teacher, batch, self.train, None, divisors)

    def evaluate(self, head: MtpHead, teacher: Teacher, batch: Batch) -> Sums:
        states = self._states(head, teacher, batch, False)
        loss, sums = states_loss(None, states, teacher, batch, self.train)
        return sums | {"loss": loss} | replay_rounds(None, states, teacher, batch, self.train.loss_block)

    def _states(self, head: MtpHead, teacher: Teacher, batch: Batch, remat: bool) -> Float[Array, "steps b t h"]:
        fed = dataclasses.replace(batch, aux=batch.last_hidden)
        return training_time_test(head, teacher.embed, fed, self.train.ttt_steps, remat)
