"""`TrainingKind`: a kind of draft head as training sees it (`config.kinds.KINDS`)."""

from __future__ import annotations

import abc
import dataclasses
import pathlib
import pkgutil
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle3_jax.config import RunConfig, TrainConfig
from eagle3_jax.config.kinds import KINDS
from eagle3_jax.formats import kinds
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.shapes import shapes_of
from eagle3_jax.models.target import TargetModel
from eagle3_jax.models.target_config import ModelConfig
from eagle3_jax.training.batch import Batch, Teacher
from eagle3_jax.training.losses import Divisors, Loss, Sums

Step = Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class TrainingKind(abc.ABC):
    """A kind of head: its inputs from the target, initialisation, loss, replayed acceptance, and drafts."""

    name: ClassVar[str]  # in `draft.kind`
    settings: ClassVar[tuple[str, ...]] = ("ttt_steps", "step_decay")  # that shape its loss, for the model card
    lives: ClassVar[bool] = True  # whether a head that serves learns by it (`serve.adapt`)
    shape: Any  # the config of the head
    train: TrainConfig
    total_steps: int = 0  # for schedules of the loss
    seed: int = 0  # of draws in the loss

    @classmethod
    def of(cls, config: RunConfig, target: ModelConfig) -> TrainingKind:
        """Makes the kind for a target. Raises ValueError: sizes that the target does not fit."""
        shape = kinds.named(cls.name).shape
        assert shape is not None, "the kind is one that is trained"
        return cls(shape(config.draft, target), config.train, seed=config.seed)

    @property
    def network(self) -> Any:
        """Class of the heads."""
        return kinds.named(self.name).network

    def build(self, rngs: nnx.Rngs) -> Any:
        """Makes a float32 head of this shape, whose parameters are trained and kept in checkpoints."""
        return self.network(self.shape, dtype=jnp.float32, rngs=rngs)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Boundaries of the target that the head reads beside the last hidden state."""
        return self.shape.aux_layers

    def blocks(self, model: TargetModel) -> Any:
        """Returns the target's blocks that the loss reads as `Teacher.blocks`."""
        return ()

    @property
    def num_drafts(self) -> int:
        """Number of tokens that a round drafts in training."""
        return self.train.ttt_steps

    def abstract(self) -> Any:
        """Returns the head's shapes."""
        return shapes_of(self.build)

    def vocabulary(self, chosen: Int[np.ndarray, " dv"]) -> Int[np.ndarray, " ids"]:
        """Returns the draft vocabulary in target ids: what `extract` chose. Raises ValueError: not the head's size."""
        size = self.shape.draft_vocab_size
        if len(chosen) != size:
            raise ValueError(f"draft.vocab_size: got {size}, expected {len(chosen)}, as the features have it")
        return chosen

    def new(self, seed: int, rows: Float[Array, "dv h"]) -> Any:
        """Initialises a head; an LM head of its own starts as the target's rows of the draft vocabulary."""
        head = self.build(nnx.Rngs(seed))
        if hasattr(head, "lm_head"):
            head.lm_head[...] = rows.astype(jnp.float32)
        return head

    def warm(self, source: str | pathlib.Path, target: Target) -> Draft:
        """Loads an exported head to begin with. Raises ValueError: the kind has none, or another kind or shape."""
        raise ValueError(f"train.warm_start: got {str(source)!r}, expected null for draft.kind {self.name!r}")

    @abc.abstractmethod
    def loss(self, head: Any, teacher: Teacher, batch: Batch, step: Step, divisors: Divisors = None) -> Loss:
        """Computes the loss at an optimizer step, and sums for `metrics.summarise`.

        `divisors` are the `loss_divisors` of the batch that this is a part of; None where it is the whole. A kind whose
        divisor depends on its head refuses `train.accumulate` in `of`.
        """

    @abc.abstractmethod
    def evaluate(self, head: Any, teacher: Teacher, batch: Batch) -> Sums:
        """Computes the sums of `loss`, the loss itself as `loss`, and those of `replay.replay`."""

    def draft(self, head: Any, output_rows: Float[Array | np.ndarray, "v h"], token_ids: Int[Array, " dv"]) -> Draft:
        """Returns the trained head as the engine drafts with it; `output_rows` is the LM head where it has none."""
        head = jax.tree.map(jnp.asarray, head)
        if not hasattr(head, "lm_head"):
            head.lm_head = nnx.Param(jnp.asarray(output_rows, head.dtype))
        return Draft(head, token_ids)


def named(name: str) -> type[TrainingKind] | None:
    """Returns how heads of a kind are trained; None: they are not."""
    training = KINDS[name].training
    return None if training is None else pkgutil.resolve_name(training)


def kind_of(config: RunConfig, target: ModelConfig) -> TrainingKind:
    """Makes the kind of head that `config.draft` names. Raises ValueError: the target does not fit it."""
    kind = named(config.draft.kind)
    assert kind is not None, "the config names a kind that is trained"
    return kind.of(config, target)
