"""The optimizer: AdamW alone or with Muon, linear warm-up, cosine decay to zero, and clipping by the global norm."""

from __future__ import annotations

from typing import Any

import jax
import optax
import optax.contrib

from eagle3_jax.config import TrainConfig
from eagle3_jax.mesh import parameter_path

_B1, _B2 = 0.9, 0.95  # decay of AdamW's moments, as in EAGLE's training
_CLIP_NORM = 0.5  # longer gradients are scaled to it
# Root mean square of Muon's updates, AdamW's (arXiv 2502.16982), so that one learning rate fits both groups.
_MUON_RMS = 0.2
# Tables with one row per token, which are looked up or compared; Muon is for maps between features.
_TABLES = ("lm_head", "markov_in", "markov_out", "predecessors", "successors")


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
    """Makes the optimizer, without weight decay. Moments have the parameters' dtype, float32."""
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
