"""Gemma 4's assistant, trained on by the training-time test over its target's own keys and values.

All steps from a position see what the target has read there, and none another's. The keys and values that the target
lends are functions of the residual stream that enters two of its layers: a step computes them again.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from eagle3_jax.config import RunConfig
from eagle3_jax.formats import draft_models, files
from eagle3_jax.formats.gemma4_assistant import ASSISTANT, read_shape
from eagle3_jax.kernels.ttt_attention.api import ttt_attention
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.models.drafts.gemma4_assistant import AssistantShape, Gemma4Assistant
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.families import gemma3
from eagle3_jax.models.target import TargetModel
from eagle3_jax.models.target_config import ModelConfig
from eagle3_jax.training.batch import Batch, Teacher
from eagle3_jax.training.fsdp import on_own_rows
from eagle3_jax.training.kinds.kind import Step, TrainingKind
from eagle3_jax.training.losses import Divisors, Loss, Sums, states_loss
from eagle3_jax.training.replay import replay_rounds
from eagle3_jax.training.ttt import REMAT_POLICY


@dataclasses.dataclass(frozen=True)
class Assistant(TrainingKind):
    """An assistant; `train.warm_start` names the one that training begins with, and its shape.

    The trained one drafts all tokens: clusters of its vocabulary, if it had any, are dropped.
    """

    name: ClassVar[str] = "assistant"
    lives: ClassVar[bool] = False
    shape: AssistantShape

    @classmethod
    def of(cls, config: RunConfig, target: ModelConfig) -> TrainingKind:
        """See `TrainingKind`; states are the target's own, computed online: stored ones lack its layers."""
        run, whom = config.train, f"for draft.kind {cls.name!r}"
        if run.features != "online":
            raise ValueError(
                f"train.features: got {run.features!r}, expected 'online' {whom}, which reads layers of it"
            )
        if run.sequence > 1:
            raise ValueError(f"train.sequence: got {run.sequence}, expected 1 {whom}")
        if run.warm_start is None:
            raise ValueError(f"train.warm_start: got None, expected the name or folder of an assistant {whom}")
        folder = draft_models.resolve(run.warm_start, "train.warm_start", "the folder of an assistant")
        shape = read_shape(files.read_config(folder), target)
        return cls(dataclasses.replace(shape, num_centroids=0), run, seed=config.seed)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """See `TrainingKind`: what enters the two layers that lend."""
        target: Any = self.shape.model
        return tuple(sorted(target.lender(local=local) for local in (False, True)))

    def blocks(self, model: TargetModel) -> Any:
        """See `TrainingKind`: the two layers."""
        return tuple(model.blocks[layer] for layer in self.aux_layers)

    def vocabulary(self, chosen: Int[np.ndarray, " dv"]) -> Int[np.ndarray, " ids"]:
        """See `TrainingKind`: the target's, whatever was chosen."""
        return np.arange(self.shape.vocab_size, dtype=np.int32)

    def warm(self, source: str | pathlib.Path, target: Target) -> Draft:
        """See `TrainingKind`."""
        return ASSISTANT.load(pathlib.Path(source), target, jnp.float32, clusters=False)

    def loss(
        self, head: Gemma4Assistant, teacher: Teacher, batch: Batch, step: Step, divisors: Divisors = None
    ) -> Loss:
        """See `TrainingKind`."""
        states = assistant_states(head, teacher, batch, self.train.ttt_steps, self.train.remat)
        return states_loss(head.lm_head[...], states, teacher, batch, self.train, None, divisors)

    def evaluate(self, head: Gemma4Assistant, teacher: Teacher, batch: Batch) -> Sums:
        """See `TrainingKind`."""
        states, rows = assistant_states(head, teacher, batch, self.train.ttt_steps, False), head.lm_head[...]
        loss, sums = states_loss(rows, states, teacher, batch, self.train)
        return sums | {"loss": loss} | replay_rounds(rows, states, teacher, batch, self.train.loss_block)


def assistant_states(
    head: Gemma4Assistant, teacher: Teacher, batch: Batch, steps: int, remat: bool
) -> Float[Array, "steps b t own"]:
    """Computes the LM head's inputs, as `training_time_test`."""
    tokens = batch.split.cut(batch.token_ids, beyond=steps)
    dtype = teacher.embed.dtype
    rows = tokens, batch.positions, batch.segment_ids, batch.aux.astype(dtype), batch.last_hidden.astype(dtype)
    frozen = jax.lax.stop_gradient((teacher.embed, teacher.blocks))
    run = functools.partial(_each_step, steps=steps, remat=remat)
    return on_own_rows(run, head, rows, dtype, frozen=frozen, tables=False)


def _each_step(head: Gemma4Assistant, rows: tuple[Array, ...], frozen: Any, steps: int, remat: bool) -> Array:
    tokens, positions, segment_ids, aux, state = rows
    (embed, lenders), target = frozen, head.config.model
    lent: dict[bool, _Lent] = {}
    for block, x in zip(lenders, jnp.split(aux, len(lenders), axis=-1), strict=True):

        def keep(q: Array, k: Array, v: Array, *, window: int | None, local: bool = block.local) -> Array:
            lent[local] = _Lent((k, v), segment_ids)
            return q

        block.attended(x, gemma3.ropes(target, positions), keep)  # of the layer nothing else is computed
    embeds, ropes = gemma3.scaled_embeddings(embed, tokens), gemma3.ropes(head.config.own, positions + 1)

    def step(head: Gemma4Assistant, following: Array, state: Array) -> Array:
        x = head.entering(following, state)
        for block in head.blocks:
            x = block(x, (ropes, None), lent[block.local])
        return head.leaving(x)

    run = jax.checkpoint(step, policy=REMAT_POLICY) if remat else step
    states = []
    for i in range(steps):
        state = run(head, embeds[:, 1 + i : 1 + i + positions.shape[1]], state)
        states.append(state)
    return head.output_hidden(jnp.stack(states))


@dataclasses.dataclass(frozen=True)
class _Lent:
    """A layer's attention to keys and values of another, up to a query's own index in its document."""

    entries: tuple[Array, Array]
    segment_ids: Array

    def __call__(self, q: Array, k: Array, v: Array, *, window: int | None) -> Array:
        return ttt_attention(q, k[None], v[None], self.segment_ids, 0, window=window)
