"""AdamW with a warm-up, a cosine to zero, and global clipping."""

from __future__ import annotations

from typing import Any

import jax
import optax

from eagle3_jax.config import TrainConfig


def learning_rate(config: TrainConfig, total_steps: int) -> optax.Schedule:
    """Linear over `warmup_ratio` of the steps, then a cosine to zero; no step is wasted on a rate of zero."""
    warmup = round(config.warmup_ratio * total_steps)
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0 if warmup else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=total_steps + 1,
    )
    return lambda count: schedule(count + 1)


def make_optimizer(config: TrainConfig, total_steps: int) -> optax.GradientTransformation:
    """Moments have the parameters' dtype, which is float32. Weight decay leaves the norms alone."""

    def decayed(params: Any) -> Any:
        return jax.tree.map(lambda x: x.ndim > 1, params)

    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate(config, total_steps),
            b1=config.b1,
            b2=config.b2,
            weight_decay=config.weight_decay,
            mask=decayed,
        ),
    )
