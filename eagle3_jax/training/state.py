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

from eagle3_jax.mesh import replicated, shardings
from eagle3_jax.training.batch import Batch, Leaf, Teacher
from eagle3_jax.training.kinds.kind import Kind

Metrics = dict[str, Array]

# Weights and moments are sharded over the data axis too (FSDP): a step gathers each weight for its use.
STATE_SHARDING_RULES = (
    (r"lm_head|markov_(in|out)|predecessors|successors", P(("model", "data"), None)),
    (r"expert_(gate|up)$", P(None, "data", "model")),
    (r"expert_down$", P(None, "model", "data")),
    (r"attention/(qkv|q|q_up)$|layers/\d+/(q|kv)$|(mlp|shared)/(gate|up)$|(^|/)fc$|taps$", P("data", "model")),
    (r"attention/o$|layers/\d+/o$|(mlp|shared)/down$", P("model", "data")),
    (r"attention/(q|kv)_down$|selector$", P("data", None)),
    (r"attention/kv_up$", P("model", None, "data")),
)


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

    where = shardings(jax.eval_shape(build, arrays), mesh, STATE_SHARDING_RULES)
    return jax.jit(build, out_shardings=where)(arrays)


def make_train_step(kind: Kind, optimizer: optax.GradientTransformation, mesh: Mesh) -> jax.stages.Wrapped:
    """Makes one jitted optimizer step. The input state is donated; the new state keeps its sharding.

    The caller places the batch (over the data axis).
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: TrainState, teacher: Teacher, batch: Batch) -> tuple[TrainState, Metrics]:
        with use_abstract_mesh(mesh.abstract_mesh):  # kernels are sharded over it
            loss_and_gradients = jax.value_and_grad(kind.loss, has_aux=True)
            (loss, sums), gradients = loss_and_gradients(state.head, teacher, batch, state.step)
        head: Any = state.head  # a pytree to optax
        with jax.numpy_dtype_promotion("standard"):  # optax computes powers of Python floats by its int32 step
            updates, opt_state = optimizer.update(gradients, state.opt_state, head)
        head = optax.apply_updates(head, updates)
        sums = sums | {"loss": loss, "gradient_norm": optax.tree.norm(gradients)}
        new = TrainState(state.step + 1, head, opt_state)
        constrain = jax.lax.with_sharding_constraint
        return constrain(new, shardings(new, mesh, STATE_SHARDING_RULES)), constrain(sums, replicated(mesh))

    return train_step


def make_eval_step(kind: Kind, mesh: Mesh) -> jax.stages.Wrapped:
    """Makes a jitted step that returns the sums of `kind.evaluate` on a batch, without gradients."""

    @jax.jit
    def eval_step(head: Any, teacher: Teacher, batch: Batch) -> Metrics:
        with use_abstract_mesh(mesh.abstract_mesh):
            return kind.evaluate(head, teacher, batch)

    return eval_step
