"""Training steps: on a mesh as on one device, frozen parts, the optimizer, and a state's checkpoints."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hlo import product_and_sum_fusions

from eagle3_jax.config import MeshConfig, TrainConfig
from eagle3_jax.mesh import batch_sharding, make_mesh, shardings
from eagle3_jax.models.fp8 import Fp8
from eagle3_jax.training.batch import TEACHER_SHARDING_RULES
from eagle3_jax.training.checkpoint import Checkpoints, load_head
from eagle3_jax.training.kinds.eagle3 import Eagle3
from eagle3_jax.training.state import init_state, learning_rate, make_optimizer, make_train_step

CONFIG = TrainConfig(ttt_steps=3, batch_size=4, row_length=16, loss_block=16, learning_rate=1e-2)


@pytest.fixture(scope="module")
def run(head_config, teacher, make_batch):
    """Two steps on a mesh: (state, sums of the second)."""
    batch = make_batch([[6, 9], [16], [4, 4, 4], [12]], 16)
    results = {}

    def steps(data, model):
        if (data, model) not in results:
            mesh = make_mesh(MeshConfig(data=data, model=model))
            placed = jax.device_put(teacher, shardings(teacher, mesh, TEACHER_SHARDING_RULES))
            on_mesh = jax.device_put(batch, batch_sharding(mesh))
            optimizer = make_optimizer(CONFIG, 10)
            state = init_state(functools.partial(Eagle3(head_config, CONFIG).new, 0), placed.rows, optimizer, mesh)
            step = make_train_step(Eagle3(head_config, CONFIG), optimizer, mesh)
            for _ in range(2):
                state, sums = step(state, placed, on_mesh)
            results[data, model] = state, jax.device_get(sums), mesh
        return results[data, model]

    return steps


@pytest.mark.slow
def test_a_mesh_computes_what_one_device_computes(run):
    one, sums, _ = run(1, 1)
    many, sharded_sums, _ = run(4, 2)
    for name, value in sums.items():
        np.testing.assert_allclose(sharded_sums[name], value, rtol=1e-4, err_msg=name)
    for x, y in zip(jax.tree.leaves(one.head), jax.tree.leaves(many.head), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-4)


@pytest.mark.slow
def test_the_loss_of_states_in_8_bits_is_close(run, head_config, teacher, make_batch):
    """The step decodes them."""
    batch = make_batch([[6, 9], [16], [4, 4, 4], [12]], 16)
    coded = dataclasses.replace(batch, aux=Fp8.of(batch.aux, 3), last_hidden=Fp8.of(batch.last_hidden, 1))
    _, _, mesh = run(1, 1)
    kind = Eagle3(head_config, CONFIG)
    optimizer = make_optimizer(CONFIG, 10)
    fresh = [init_state(functools.partial(kind.new, 0), teacher.rows, optimizer, mesh) for _ in range(2)]
    step = make_train_step(kind, optimizer, mesh)
    losses = [step(state, teacher, x)[1]["loss"] for state, x in zip(fresh, (batch, coded), strict=True)]
    assert losses[1] != losses[0] and losses[1] == pytest.approx(float(losses[0]), rel=5e-3)


@pytest.mark.slow
def test_the_state_stays_where_it_lies(run):
    state, _, mesh = run(4, 2)
    assert tuple(state.head.attention.qkv[...].sharding.spec)[:2] == ("data", "model")
    moments = optax.tree.get(state.opt_state, "mu")
    assert tuple(moments.attention.qkv[...].sharding.spec)[:2] == ("data", "model")
    assert state.head.mlp.down[...].addressable_shards[0].data.size == state.head.mlp.down[...].size // 8
    assert mesh.shape == {"data": 4, "model": 2}


@pytest.mark.slow
@pytest.mark.smoke
def test_a_step_has_no_fusion_that_cpus_compute_wrongly(head_config, teacher, make_batch):
    optimizer = make_optimizer(CONFIG, 10)
    mesh = make_mesh(MeshConfig(data=1, model=1))
    state = init_state(functools.partial(Eagle3(head_config, CONFIG).new, 0), teacher.rows, optimizer, mesh)
    batch = make_batch([[6, 9], [16], [4, 4, 4], [12]], 16)
    text = (
        make_train_step(Eagle3(head_config, CONFIG), optimizer, mesh).lower(state, teacher, batch).compile().as_text()
    )
    assert text is not None and "__ynn_fusion" in text
    assert product_and_sum_fusions(text) == []


@pytest.mark.slow
def test_checkpoints_restore_onto_another_mesh(run, tmp_path, head_config):
    state, _, _ = run(4, 2)
    elsewhere, _, _ = run(1, 1)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(state)
        restored = checkpoints.restore(elsewhere)
    assert int(restored.step) == int(state.step) == 2
    for got, want, like in zip(*(jax.tree.leaves(x) for x in (restored, state, elsewhere)), strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.sharding == like.sharding
    head = load_head(tmp_path, Eagle3(head_config, CONFIG).abstract())
    for got, want in zip(jax.tree.leaves(head), jax.tree.leaves(state.head), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_new_head_begins_where_the_target_stands(head_config, teacher):
    """Beside noise of 0.02 a weight, `fc` hands on the highest aux feature as it is."""
    head = Eagle3(head_config, CONFIG).new(0, teacher.rows)
    np.testing.assert_array_equal(head.lm_head[...], teacher.rows)
    noise = np.array(head.fc[...])
    noise[-head_config.hidden_size :] -= np.eye(head_config.hidden_size)
    assert np.abs(noise).max() < 0.12
    assert 0.015 < noise.std() < 0.025


def test_the_rate_warms_up_and_ends_near_zero():
    schedule = learning_rate(TrainConfig(learning_rate=1.0, warmup_ratio=0.1), 100)
    rates = [float(np.asarray(schedule(step))) for step in range(100)]
    np.testing.assert_allclose(rates[:10], np.arange(1, 11) / 10, rtol=1e-5)
    assert np.all(np.diff(rates[9:]) < 0)
    assert 0 < rates[-1] < 1e-3
    assert float(np.asarray(learning_rate(TrainConfig(learning_rate=1.0, warmup_ratio=0.0), 10)(0))) > 0.9


@pytest.mark.slow
def test_weights_and_moments_are_float32_whatever_the_target_is(head_config, teacher, make_batch):
    """A step of 3e-5 on a weight of 0.02 vanishes in bfloat16; here it moves every matrix."""
    config = TrainConfig(ttt_steps=2, loss_block=16, learning_rate=3e-5, warmup_ratio=0.0)
    optimizer, mesh = make_optimizer(config, 10**6), make_mesh(MeshConfig(data=1, model=1))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x, teacher)
    state = init_state(functools.partial(Eagle3(head_config, CONFIG).new, 0), half.rows, optimizer, mesh)
    moments = [optax.tree.get(state.opt_state, name) for name in ("mu", "nu")]
    assert {x.dtype for x in jax.tree.leaves((state.head, moments))} == {jnp.dtype(jnp.float32)}
    before = jax.device_get(state.head)
    state, _ = make_train_step(Eagle3(head_config, config), optimizer, mesh)(
        state, half, make_batch([[6, 9], [16]], 16)
    )
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(state.head), strict=True):
        if old.ndim > 1:
            assert 1e-5 < np.abs(np.asarray(new) - old).max() < 4e-5
