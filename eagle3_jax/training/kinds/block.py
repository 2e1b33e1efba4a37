"""Block heads: DFlash, DSpark and DFlash2, trained on blocks behind random anchors (`training.block`)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle3_jax.config import RunConfig
from eagle3_jax.formats.blocks.config import contradictions
from eagle3_jax.formats.blocks.kinds import KINDS
from eagle3_jax.models.drafts.dflash import FULL, BlockHeadConfig, DFlash
from eagle3_jax.models.drafts.dflash2 import DFlash2
from eagle3_jax.models.drafts.dspark import DSpark
from eagle3_jax.models.drafts.eagle3 import DraftHeadConfig
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.target import ModelConfig
from eagle3_jax.training.batch import Batch, Teacher
from eagle3_jax.training.block import BlockLossConfig, block_loss, draw_anchors, replay_blocks
from eagle3_jax.training.kinds.kind import Kind, Sums

# Anchors of a row whose blocks a replay computes at a time.
_REPLAYED = 64


@dataclasses.dataclass(frozen=True)
class BlockHead(Kind):
    """A block head; its LM head is the target's where the draft vocabulary is, else its own."""

    head: ClassVar[type[DFlash]]
    shape: BlockHeadConfig

    @classmethod
    def of(cls, config: RunConfig, target: ModelConfig) -> BlockHead:
        """See `Kind`."""
        if (parts := config.train.accumulate) > 1:  # the loss divides by what the head computes
            raise ValueError(f"train.accumulate: got {parts}, expected 1 for draft.kind {cls.name!r}")
        if (pieces := config.train.sequence) > 1:  # an anchor's block attends to the whole row before it
            raise ValueError(f"train.sequence: got {pieces}, expected 1 for draft.kind {cls.name!r}")
        draft, eagle = config.draft, DraftHeadConfig.for_target(config.draft, target)
        mask = draft.mask_token_id
        if mask is None or mask >= target.vocab_size:
            expected = f"a token of the target without another use, below {target.vocab_size}"
            raise ValueError(f"draft.mask_token_id: got {mask}, expected {expected}, for draft.kind {cls.name!r}")
        names = {field.name for field in dataclasses.fields(BlockHeadConfig)}
        shared: dict[str, Any] = {name: x for name, x in dataclasses.asdict(eagle).items() if name in names}
        shape = BlockHeadConfig(
            **shared,
            block_size=draft.block_size,
            mask_token_id=mask,
            layer_types=draft.layer_types or (FULL,) * draft.num_layers,
            sliding_window=draft.sliding_window,
            is_causal=draft.is_causal,
            selector_rank=draft.selector_rank,
        )
        form = next(kind for kind in KINDS if kind.network is cls.head)
        if problems := contradictions(form, shape):  # no form of an export could hold the head
            raise ValueError(f"draft.kind {cls.name!r} for this target: {'; '.join(problems)}")
        return cls(shape, config.train, seed=config.seed)

    def build(self, rngs: nnx.Rngs) -> DFlash:
        """See `Kind`."""
        return self.head(self.shape, dtype=jnp.float32, rngs=rngs)

    @property
    def num_drafts(self) -> int:
        """See `Kind`."""
        return self.shape.block_size - self.head.first_row

    def new(self, seed: int, rows: Float[Array, "dv h"]) -> DFlash:
        """See `Kind`; an LM head of its own starts as the target's."""
        head = super().new(seed, rows)
        if hasattr(head, "lm_head"):
            head.lm_head[...] = rows.astype(jnp.float32)
        return head

    def loss(
        self,
        head: DFlash,
        teacher: Teacher,
        batch: Batch,
        step: Int[Array, ""],
        divisors: Int[Array, " steps"] | None = None,
    ) -> tuple[Float[Array, ""], Sums]:
        """See `Kind`; each step draws its own anchors."""
        return self._loss(head, teacher, batch, jax.random.fold_in(jax.random.key(self.seed), step))

    def evaluate(self, head: DFlash, teacher: Teacher, batch: Batch) -> Sums:
        """See `Kind`; the anchors are the same at every evaluation."""
        loss, sums = self._loss(head, teacher, batch, jax.random.key(self.seed))
        size = next(
            size
            for size in range(min(_REPLAYED, batch.token_ids.shape[1]), 0, -1)
            if batch.token_ids.shape[1] % size == 0
        )
        return sums | {"loss": loss} | replay_blocks(head, teacher, teacher.token_ids, batch, size)

    def _loss(self, head: DFlash, teacher: Teacher, batch: Batch, key: Array) -> tuple[Float[Array, ""], Sums]:
        anchors = draw_anchors(key, batch, min(self.train.anchors, batch.token_ids.shape[1]))
        run = self.train
        options = BlockLossConfig(run.block_weights, run.dpace_alpha, run.loss_decay_gamma, remat=run.remat)
        return block_loss(head, teacher, batch, anchors, options)

    def draft(self, head: DFlash, output_rows: Float[Array | np.ndarray, "v h"], token_ids: Int[Array, " dv"]) -> Draft:
        """See `Kind`; the target's LM head is the head's where it has none of its own."""
        head = jax.tree.map(jnp.asarray, head)
        if not hasattr(head, "lm_head"):
            head.lm_head = nnx.Param(jnp.asarray(output_rows, head.dtype))
        return Draft(head, token_ids)


class DFlashKind(BlockHead):
    """DFlash (arXiv 2602.06036)."""

    name, head = "dflash", DFlash


class DSparkKind(BlockHead):
    """DSpark (arXiv 2607.05147)."""

    name, head = "dspark", DSpark


class DFlash2Kind(BlockHead):
    """DFlash2 (z-lab/dflash)."""

    name, head = "dflash2", DFlash2
