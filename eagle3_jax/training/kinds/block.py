"""Block heads: DFlash, DSpark and DFlash2, trained on blocks behind random anchors (`training.block`)."""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Float

from eagle3_jax.config import RunConfig
from eagle3_jax.models.drafts.dflash import BlockHeadConfig, DFlash
from eagle3_jax.models.target_config import ModelConfig
from eagle3_jax.training.batch import Batch, Teacher
from eagle3_jax.training.block import BlockLossConfig, block_loss, draw_anchors, replay_blocks
from eagle3_jax.training.kinds.kind import Step, TrainingKind
from eagle3_jax.training.losses import Divisors, Loss, Sums

# Anchors of a row whose blocks a replay computes at a time.
_REPLAYED = 64


@dataclasses.dataclass(frozen=True)
class BlockHead(TrainingKind):
    """A block head; its LM head is the target's where the draft vocabulary is, else its own."""

    settings = ("anchors", "block_weights")
    shape: BlockHeadConfig

    @classmethod
    def of(cls, config: RunConfig, target: ModelConfig) -> TrainingKind:
        if (parts := config.train.accumulate) > 1:  # the loss divides by what the head computes
            raise ValueError(f"train.accumulate: got {parts}, expected 1 for draft.kind {cls.name!r}")
        if (pieces := config.train.sequence) > 1:  # an anchor's block attends to the whole row before it
            raise ValueError(f"train.sequence: got {pieces}, expected 1 for draft.kind {cls.name!r}")
        return super().of(config, target)

    @property
    def num_drafts(self) -> int:
        return self.shape.block_size - self.network.first_row

    def loss(self, head: DFlash, teacher: Teacher, batch: Batch, step: Step, divisors: Divisors = None) -> Loss:
        """See `TrainingKind`; each step draws its own anchors."""
        return self._loss(head, teacher, batch, jax.random.fold_in(jax.random.key(self.seed), step))

    def evaluate(self, head: DFlash, teacher: Teacher, batch: Batch) -> Sums:
        """See `TrainingKind`; the anchors are the same at every evaluation."""
        loss, sums = self._loss(head, teacher, batch, jax.random.key(self.seed))
        length = batch.token_ids.shape[1]
        size = max(size for size in range(1, _REPLAYED + 1) if length % size == 0)
        return sums | {"loss": loss} | replay_blocks(head, teacher, teacher.token_ids, batch, size)

    def _loss(self, head: DFlash, teacher: Teacher, batch: Batch, key: Array) -> tuple[Float[Array, ""], Sums]:
        anchors = draw_anchors(key, batch, min(self.train.anchors, batch.token_ids.shape[1]))
        run = self.train
        options = BlockLossConfig(run.block_weights, run.dpace_alpha, run.loss_decay_gamma, remat=run.remat)
        return block_loss(head, teacher, batch, anchors, options)


class DFlashKind(BlockHead):
    """DFlash (arXiv 2602.06036)."""

    name = "dflash"


class DSparkKind(BlockHead):
    """DSpark (arXiv 2607.05147)."""

    name = "dspark"


class DFlash2Kind(BlockHead):
    """DFlash2 (z-lab/dflash)."""

    name = "dflash2"
