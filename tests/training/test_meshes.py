"""Losses, gradients and judgements of every kind of head are the same on every mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_families
from test_kinds import KINDS, RUN, batch_of, family, run_config

from eagle3_jax.config import MeshConfig
from eagle3_jax.mesh import batch_sharding, make_mesh, parameter_path, shardings
from eagle3_jax.training.batch import TEACHER_SHARDING_RULES, Teacher
from eagle3_jax.training.fsdp import TRAINED_SHARDING_RULES
from eagle3_jax.training.kinds.kind import kind_of

ROWS = ((7, 8), (12,), (16,), (5, 4, 6), (9,), (3, 11), (14,), (10, 6))


@pytest.fixture(scope="module")
def computed():
    """(kind, data, model) -> (sums of the loss and of the evaluation, gradients)."""
    target, results = tiny_families.make(family("MiMoForCausalLM")), {}

    def compute(name: str, data: int, model: int):
        if (name, data, model) in results:
            return results[name, data, model]
        train = dataclasses.replace(RUN, loss_block=8, batch_size=len(ROWS))
        kind = kind_of(dataclasses.replace(run_config(name), train=train), target.config)
        ids = kind.vocabulary(np.arange(24, dtype=np.int32))
        teacher = Teacher.of(target.embed[...], target.lm_head[...], jnp.asarray(ids))
        head, batch = kind.new(0, teacher.rows), batch_of(target.config.hidden_size, ROWS)
        mesh = make_mesh(MeshConfig(data=data, model=model), jax.devices()[: data * model])

        def run(head, teacher, batch):
            loss = jax.value_and_grad(kind.loss, has_aux=True)
            (loss, sums), gradients = loss(head, teacher, batch, jnp.int32(0))
            judged = kind.evaluate(head, teacher, batch)
            return sums | {"loss": loss} | {f"judged: {key}": x for key, x in judged.items()}, gradients

        with jax.set_mesh(mesh):
            on_mesh = (
                jax.device_put(head, shardings(head, mesh, TRAINED_SHARDING_RULES)),
                jax.device_put(teacher, shardings(teacher, mesh, TEACHER_SHARDING_RULES)),
                jax.device_put(batch, batch_sharding(mesh)),
            )
            results[name, data, model] = jax.device_get(jax.jit(run)(*on_mesh))
        return results[name, data, model]

    return compute


OFTEN = (("eagle3", (4, 2)), ("eagle3", (8, 1)))
MESHES = [
    pytest.param(name, *mesh, marks=() if (name, mesh) in OFTEN else pytest.mark.long)
    for name in KINDS
    for mesh in ((4, 2), (8, 1), (2, 4), (1, 8))
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "data", "model"), MESHES)
def test_a_mesh_changes_neither_losses_nor_gradients(computed, name, data, model):
    expected, gradients = computed(name, 1, 1)
    sums, found = computed(name, data, model)
    for key, value in expected.items():
        np.testing.assert_allclose(sums[key], value, rtol=2e-6, err_msg=key)
    for (path, want), got in zip(jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6, err_msg=parameter_path(path))
