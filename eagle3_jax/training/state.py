"""The training state, its placement on a mesh, and the steps over it, by an optimizer: AdamW alone or with Muon."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax import P
from jax.sharding import Mesh, use_abstract_mesh
from jaxtyping import Array

from eagle3_jax.config import TrainConfig
from eagle3_jax.mesh import constrain, parameter_path, replicated, shardings
from eagle3_jax.models import fp8
from eagle3_jax.training.batch import Batch, Leaf, Teacher
from eagle3_jax.training.fsdp import TRAINED_SHARDING_RULES
from eagle3_jax.training.kinds.kind import TrainingKind
from eagle3_jax.training.losses import loss_divisors

Metrics = dict[str, Array]
_B1, _B2 = 0.9, 0.95  # decay of AdamW's moments, as in EAGLE's training
_CLIP_NORM = 0.5  # longer gradients are scaled to it
# Root mean square of Muon's updates, AdamW's (arXiv 2502.16982), so that one learning rate fits both groups.
_MUON_RMS = 0.2
# Tables with one row per token, which are looked up or compared; Muon is for maps between features.
_TABLES = ("lm_head", "markov_in", "markov_out", "predecessors", "successors")


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
    """Makes one jitted optimizer step of a placed batch. The input state is donated; the new one keeps its sharding."""

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
    """Computes the sums of a batch, its loss among them, and the gradients, over `train.accumulate` parts in turn."""
    parts = kind.train.accumulate
    divisors = None if parts == 1 else loss_divisors(batch, kind.train)

    def compute(part: Batch) -> tuple[Metrics, Any]:
        loss_and_gradients = jax.value_and_grad(kind.loss, has_aux=True)
        (loss, sums), gradients = loss_and_gradients(state.head, teacher, part, state.step, divisors)
        return sums | {"loss": loss}, gradients

    if parts == 1:
        return compute(batch)

    def cut(x: Array) -> Array:  # rows a, a + A, ...: each data shard's stay where they lie
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


def learning_rate(config: TrainConfig, total_steps: int) -> optax.Schedule:
    """Rises linearly over `warmup_ratio` of the steps, then follows a cosine to zero; no step has a rate of zero."""
    warmup = round(config.warmup_ratio * total_steps)
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0 if warmup else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=total_steps + 1,
    )
    return lambda count: schedule(count + 1)


def make_optimizer(config: TrainConfig, total_steps: int) -> optax.GradientTransformation:
    """Makes the optimizer, clipped by the global norm, without weight decay. Moments are float32, as parameters are."""
    rate = learning_rate(config, total_steps)
    adamw = optax.adamw(rate, b1=_B1, b2=_B2, weight_decay=0.0)
    if config.optimizer == "muon":
        muon = _exact(optax.contrib.muon(rate, consistent_rms=_MUON_RMS))
        chosen = optax.partition({"muon": muon, "adamw": adamw}, groups)
    else:
        chosen = adamw
    return optax.chain(optax.clip_by_global_norm(_CLIP_NORM), chosen)


def _exact(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Computes its products in float32 on all hardware: TPUs would round Muon's factors to bfloat16, CPUs do not."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        with jax.default_matmul_precision("highest"):
            return optimizer.update(updates, state, params)

    return optax.GradientTransformation(optimizer.init, update)


def groups(params: Any) -> Any:
    """Labels parameters by optimizer: "muon" for matrices between features, "adamw" for token tables and norms."""

    def group(path: tuple[Any, ...], x: jax.Array) -> str:
        return "muon" if x.ndim == 2 and not parameter_path(path).endswith(_TABLES) else "adamw"

    return jax.tree_util.tree_map_with_path(group, params)
