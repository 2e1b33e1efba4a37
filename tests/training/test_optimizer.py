"""The optimizer against AdamW written out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eagle3_jax.config import TrainConfig
from eagle3_jax.mesh import parameter_path
from eagle3_jax.training.optimizer import groups, learning_rate, make_optimizer


def test_updates_are_those_of_adamw_on_clipped_gradients():
    """Gradients above and below the limit of their norm, over all parameters together."""
    config, b1, b2 = TrainConfig(learning_rate=1e-2, warmup_ratio=0.5), 0.9, 0.95
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
            gradient = gradients[name] * min(1, 0.5 / norm)
            first[name] = b1 * first[name] + (1 - b1) * gradient
            second[name] = b2 * second[name] + (1 - b2) * gradient**2
            scaled = np.sqrt(second[name] / (1 - b2 ** (step + 1))) + 1e-8
            move = first[name] / (1 - b1 ** (step + 1)) / scaled
            weights[name] = weight - rate * move
    for name, weight in weights.items():
        np.testing.assert_allclose(ours[name], weight, rtol=1e-5, err_msg=name)  # pyrefly: ignore


def test_muon_takes_the_matrices_and_all_parameters_move_at_the_rate(head):
    """No parameter is left to another rate: updates have a root mean square of it (AdamW's first), or 0.2 of it."""
    config = TrainConfig(optimizer="muon", learning_rate=1e-2, warmup_ratio=0.0)
    optimizer, rate = make_optimizer(config, 100), float(np.asarray(learning_rate(config, 100)(0)))
    rng = np.random.default_rng(0)
    gradients: Any = jax.tree.unflatten(
        jax.tree.structure(head),
        [rng.normal(size=x.shape).astype(np.float32) for x in jax.tree.leaves(head)],
    )
    with jax.numpy_dtype_promotion("standard"):
        updates, state = jax.jit(optimizer.update)(gradients, optimizer.init(head), head)
    names = [parameter_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(head)]
    sizes = [np.sqrt(np.mean(np.asarray(x) ** 2)) / rate for x in jax.tree.leaves(updates)]
    matrices = {"fc", "attention/qkv", "attention/o", "mlp/gate", "mlp/up", "mlp/down"}
    assert {
        name for name, group in zip(names, jax.tree.leaves(groups(head)), strict=True) if group == "muon"
    } == matrices
    for name, size in zip(names, sizes, strict=True):
        np.testing.assert_allclose(size, 0.2 if name in matrices else 1.0, rtol=0.3, err_msg=name)
    moments = [optax.tree.get_all_with_path(state, name) for name in ("mu", "nu")]
    counted = [sum(len(jax.tree.leaves(x)) for _, x in found) for found in moments]
    assert counted == [len(names), len(names) - len(matrices)]


def test_muon_multiplies_in_float32_on_all_hardware(head):
    """Or a curve on CPUs would not be the curve on TPUs, which round the factors of other products to bfloat16."""
    optimizer = make_optimizer(TrainConfig(optimizer="muon"), 100)
    with jax.numpy_dtype_promotion("standard"):
        traced = jax.jit(optimizer.update).trace(head, jax.eval_shape(optimizer.init, head), head)
    text = str(traced.jaxpr)
    exact = text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)")
    assert exact == text.count("= dot_general[") > 0
