"""The training state, its placement on a mesh, and the steps over it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import P
from jax.sharding import Mesh, use_abstract_mesh
from jaxtyping import Array, Float

from eagle3_jax.config import TrainConfig
from eagle3_jax.mesh import replicated, shardings
from eagle3_jax.models.drafts.eagle3 import DraftHead, DraftHeadConfig
from eagle3_jax.training.batch import Batch, Leaf, Teacher
from eagle3_jax.training.losses import states_loss, ttt_loss
from eagle3_jax.training.replay import replay_rounds
from eagle3_jax.training.ttt import training_time_test

Metrics = dict[str, Array]

# Weights and moments are sharded over the data axis too (FSDP): a step gathers each weight for its use.
STATE_SHARDING_RULES = (
    (r"lm_head", P(("model", "data"), None)),
    (r"attention/qkv|mlp/(gate|up)|(^|/)fc$", P("data", "model")),
    (r"attention/o|mlp/down", P("model", "data")),
)

# Rate at which the LK loss shifts from cross entropy to acceptance, as its authors chose it (arXiv 2602.23881).
LK_DECAY = 3.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state that a step updates: the number of steps (int32), float32 weights, and the optimizer's moments."""

    step: Leaf
    head: DraftHead
    opt_state: Any


def init_head(config: DraftHeadConfig, seed: int, rows: Float[Array, "dv h"]) -> DraftHead:
    """Initialises a head by N(0, 0.02) and from the target.

    The LM head starts as the target's. `fc` starts with an identity added for the highest aux feature, so that the
    residual stream starts as a late one of the target. On 40 steps of real features both together gave the lowest
    held-out loss. Starting from the target's final norm raised the loss: its large weights make the first logits
    overconfident.

    Args:
        rows: the target's output rows at the draft vocabulary.
    """
    head = DraftHead(config, dtype=jnp.float32, rngs=nnx.Rngs(seed))
    head.lm_head[...] = rows.astype(jnp.float32)
    head.fc[...] = (
        head.fc[...].at[-config.target_hidden_size :].add(jnp.eye(config.target_hidden_size, config.hidden_size))
    )
    return head


def init_state(
    make_head: Callable[[Any], DraftHead], arrays: Any, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """Initialises the state of the head `make_head(arrays)`, directly in its sharding."""

    def build(arrays: Any) -> TrainState:
        head: Any = make_head(arrays)
        return TrainState(jnp.zeros((), jnp.int32), head, optimizer.init(head))

    where = shardings(jax.eval_shape(build, arrays), mesh, STATE_SHARDING_RULES)
    return jax.jit(build, out_shardings=where)(arrays)


def make_train_step(
    config: TrainConfig, optimizer: optax.GradientTransformation, mesh: Mesh, lk_from: int = 0
) -> jax.stages.Wrapped:
    """Makes one jitted optimizer step. The input state is donated; the new state keeps its sharding.

    The caller places the batch (over the data axis).

    Args:
        lk_from: the step at which the LK loss begins, if `config.loss` is "lk".
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: TrainState, teacher: Teacher, batch: Batch) -> tuple[TrainState, Metrics]:
        lk_decay = jnp.where(state.step >= lk_from, LK_DECAY, 0.0) if config.loss == "lk" else None
        with use_abstract_mesh(mesh.abstract_mesh):  # kernels are sharded over it
            loss_and_gradients = jax.value_and_grad(ttt_loss, has_aux=True)
            (loss, sums), gradients = loss_and_gradients(state.head, teacher, batch, config, lk_decay)
        head: Any = state.head  # a pytree to optax
        with jax.numpy_dtype_promotion("standard"):  # optax computes powers of Python floats by its int32 step
            updates, opt_state = optimizer.update(gradients, state.opt_state, head)
        head = optax.apply_updates(head, updates)
        sums = sums | {"loss": loss, "gradient_norm": optax.tree.norm(gradients)}
        new = TrainState(state.step + 1, head, opt_state)
        constrain = jax.lax.with_sharding_constraint
        return constrain(new, shardings(new, mesh, STATE_SHARDING_RULES)), constrain(sums, replicated(mesh))

    return train_step


def make_eval_step(config: TrainConfig, mesh: Mesh) -> jax.stages.Wrapped:
    """Makes a jitted step that returns the sums of `ttt_loss` and `replay_rounds` on a batch, without gradients."""

    @jax.jit
    def eval_step(head: DraftHead, teacher: Teacher, batch: Batch) -> Metrics:
        with use_abstract_mesh(mesh.abstract_mesh):
            states = training_time_test(head, teacher.embed, batch, config.ttt_steps)
            loss, sums = states_loss(head, states, teacher, batch, config)
            return sums | {"loss": loss} | replay_rounds(head, states, teacher, batch, config.loss_block)

    return eval_step
