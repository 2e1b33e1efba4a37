"""The training state, its placement on a mesh, and the steps over it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import P
from jax.sharding import Mesh, use_abstract_mesh
from jaxtyping import Array

from eagle3_jax.mesh import constrain, replicated, shardings
from eagle3_jax.models import fp8
from eagle3_jax.training.batch import Batch, Leaf, Teacher
from eagle3_jax.training.fsdp import TRAINED_SHARDING_RULES
from eagle3_jax.training.kinds.kind import TrainingKind
from eagle3_jax.training.losses import loss_divisors

Metrics = dict[str, Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state that a step updates: the number of steps (int32), float32 weights, and the optimizer's moments."""

    step: Leaf
    head: Any
    opt_state: Any


def init_state(
    make_head: Callable[[Any], Any], arrays: Any, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """Initialises the state of the head `make_head(arrays)`, directly in its sharding."""

    def build(arrays: Any) -> TrainState:
        head = make_head(arrays)
        return TrainState(jnp.zeros((), jnp.int32), head, optimizer.init(head))

    where = shardings(jax.eval_shape(build, arrays), mesh, TRAINED_SHARDING_RULES)
    return jax.jit(build, out_shardings=where)(arrays)


def make_train_step(kind: TrainingKind, optimizer: optax.GradientTransformation, mesh: Mesh) -> jax.stages.Wrapped:
    """Makes one jitted optimizer step. The input state is donated; the new state keeps its sharding.

    The caller places the batch (over the data axis).
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: TrainState, teacher: Teacher, batch: Batch) -> tuple[TrainState, Metrics]:
        batch = fp8.decoded(batch)
        with use_abstract_mesh(mesh.abstract_mesh):  # kernels are sharded over it
            sums, gradients = _gradients(kind, state, teacher, batch)
        head: Any = state.head  # a pytree to optax
        with jax.numpy_dtype_promotion("standard"):  # optax computes powers of Python floats by its int32 step
            updates, opt_state = optimizer.update(gradients, state.opt_state, head)
        head = optax.apply_updates(head, updates)
        sums = sums | {"gradient_norm": optax.tree.norm(gradients)}
        new = TrainState(state.step + 1, head, opt_state)
        placed = jax.lax.with_sharding_constraint
        return placed(new, shardings(new, mesh, TRAINED_SHARDING_RULES)), placed(sums, replicated(mesh))

    return train_step


def _gradients(kind: TrainingKind, state: TrainState, teacher: Teacher, batch: Batch) -> tuple[Metrics, Any]:
    """Computes the sums of a batch, its loss among them, and the gradients, over `train.accumulate` parts in turn.

    Part a of A has the rows a, a + A, ..., so that each data shard's rows stay where they lie.
    """
    parts = kind.train.accumulate
    divisors = None if parts == 1 else loss_divisors(batch, kind.train)

    def compute(part: Batch) -> tuple[Metrics, Any]:
        loss_and_gradients = jax.value_and_grad(kind.loss, has_aux=True)
        (loss, sums), gradients = loss_and_gradients(state.head, teacher, part, state.step, divisors)
        return sums | {"loss": loss}, gradients

    if parts == 1:
        return compute(batch)

    def cut(x: Array) -> Array:
        cut = x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1)
        return constrain(cut, ((r"", P(None, "data")),))

    def add(total: Any, part: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, compute(part)), None

    cuts = jax.tree.map(cut, batch)
    shapes = jax.eval_shape(compute, jax.tree.map(lambda x: x[0], cuts))
    total, _ = jax.lax.scan(add, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), cuts)
    return total


def make_eval_step(kind: TrainingKind, mesh: Mesh) -> jax.stages.Wrapped:
    """Makes a jitted step that returns the sums of `kind.evaluate` on a batch, without gradients."""

    @jax.jit
    def eval_step(head: Any, teacher: Teacher, batch: Batch) -> Metrics:
        batch = fp8.decoded(batch)
        with use_abstract_mesh(mesh.abstract_mesh):
            return kind.evaluate(head, teacher, batch)

    return eval_step
