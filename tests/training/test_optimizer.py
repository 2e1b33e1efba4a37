"""The optimizer against AdamW written out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eagle3_jax.config import TrainConfig
from eagle3_jax.training.optimizer import learning_rate, make_optimizer


def test_updates_are_those_of_adamw_on_clipped_gradients():
    """Gradients above and below the limit of their norm, over all parameters together."""
    config = TrainConfig(learning_rate=1e-2, b1=0.8, b2=0.9, weight_decay=0.1, clip_norm=0.5, warmup_ratio=0.5)
    rng = np.random.default_rng(0)
    weights = {"matrix": rng.normal(size=(3, 2)), "norm": rng.normal(size=2)}
    optimizer = make_optimizer(config, 4)
    ours: Any = {name: jnp.asarray(value, jnp.float32) for name, value in weights.items()}  # a pytree to optax
    state = optimizer.init(ours)
    first, second = ({name: np.zeros_like(value) for name, value in weights.items()} for _ in range(2))
    for step, size in enumerate((3.0, 0.01, 1.0, 0.1)):
        gradients = {name: size * rng.normal(size=value.shape) for name, value in weights.items()}
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(
                {name: jnp.asarray(value, jnp.float32) for name, value in gradients.items()}, state, ours
            )
            ours = optax.apply_updates(ours, updates)
            rate = float(np.asarray(learning_rate(config, 4)(step)))
        norm = np.sqrt(sum((value**2).sum() for value in gradients.values()))
        for name, weight in weights.items():
            gradient = gradients[name] * min(1, config.clip_norm / norm)
            first[name] = config.b1 * first[name] + (1 - config.b1) * gradient
            second[name] = config.b2 * second[name] + (1 - config.b2) * gradient**2
            scaled = np.sqrt(second[name] / (1 - config.b2 ** (step + 1))) + 1e-8
            move = first[name] / (1 - config.b1 ** (step + 1)) / scaled
            decay = config.weight_decay * weight if name == "matrix" else 0
            weights[name] = weight - rate * (move + decay)
    for name, weight in weights.items():
        np.testing.assert_allclose(ours[name], weight, rtol=1e-5, err_msg=name)
