"""Muon's parameters, rates and products."""

from typing import Any

import jax
import numpy as np
import optax

from eagle3_jax.config import TrainConfig
from eagle3_jax.mesh import parameter_path
from eagle3_jax.training.state import groups, learning_rate, make_optimizer


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
