"""The blockwise loss and its closed-form gradients against plain jnp."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eagle3_jax.config import MeshConfig
from eagle3_jax.kernels.soft_cross_entropy import soft_cross_entropy
from eagle3_jax.mesh import make_mesh


def reference(hidden, rows, teacher_hidden, teacher_rows, labels, weights, cap=None):
    """All logits at once."""
    wanted = teacher_hidden @ teacher_rows.T
    wanted = wanted if cap is None else cap * jnp.tanh(wanted / cap)
    p = jax.nn.softmax(wanted)
    logits = hidden @ rows.T
    ce = -jnp.sum(p[None] * jax.nn.log_softmax(logits), axis=-1)
    entropy = -jnp.sum(p * jax.nn.log_softmax(wanted), axis=-1)
    return jnp.sum(weights * ce), ce, entropy, jnp.argmax(logits, -1) == labels[None]


def lk_reference(hidden, rows, teacher_hidden, teacher_rows, labels, weights, decay):
    """The LK loss with all logits at once, differentiated by JAX; and the acceptance."""
    p = jax.nn.softmax(teacher_hidden @ teacher_rows.T)[None]
    log_q = jax.nn.log_softmax(hidden @ rows.T)
    acceptance = jnp.sum(jnp.minimum(p, jnp.exp(log_q)), axis=-1)
    share = jax.lax.stop_gradient(jnp.exp(-decay * acceptance))
    return jnp.sum(weights * (-share * jnp.sum(p * log_q, axis=-1) + (1 - share) * (1 - acceptance))), acceptance


def random_inputs(seed, k=3, b=2, t=11, h=8, v=20):
    keys = jax.random.split(jax.random.key(seed), 6)
    hidden = jax.random.normal(keys[0], (k, b, t, h))
    rows, teacher_rows = jax.random.normal(keys[1], (2, v, h))
    teacher_hidden = jax.random.normal(keys[2], (b, t, h))
    labels = jax.random.randint(keys[3], (b, t), -1, v)
    counted = jax.random.uniform(keys[5], (1, b, t)) > 0.3
    weights = jnp.where(counted, jax.random.uniform(keys[4], (k, b, t)), 0.0)
    return hidden, rows, teacher_hidden, teacher_rows, labels, weights


@pytest.mark.slow
# Positions one by one; a last block that is not full; all at once.
@pytest.mark.parametrize(("block", "cap"), [(1, None), (8, 2.0), (100, None)])
def test_loss_and_gradients_equal_the_reference_for_any_block(block, cap):
    hidden, rows, *rest = random_inputs(block)

    def scaled(hidden, rows):
        loss, comparison = soft_cross_entropy(hidden, rows, *rest, block=block, cap=cap)
        return 3 * loss, comparison

    (loss, comparison), gradients = jax.jit(jax.value_and_grad(scaled, (0, 1), has_aux=True))(hidden, rows)
    expected = jax.jit(jax.value_and_grad(lambda h, r: 3 * reference(h, r, *rest, cap=cap)[0], (0, 1)))(hidden, rows)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    for got, want in zip(gradients, expected[1], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    _, ce, entropy, hits = reference(hidden, rows, *rest, cap=cap)
    used = np.asarray(rest[-1]) > 0
    np.testing.assert_allclose(np.where(used, comparison.cross_entropy, 0), np.where(used, ce, 0), rtol=1e-4)
    at = used.any(0)
    np.testing.assert_allclose(np.where(at, comparison.entropy, 0), np.where(at, entropy, 0), rtol=1e-4)
    np.testing.assert_array_equal(comparison.hits & used, hits & used)
    without, _ = soft_cross_entropy(hidden, rows, *rest, block=block, cap=cap)
    np.testing.assert_allclose(3 * without, loss, rtol=1e-6)


@pytest.mark.slow
def test_blocks_without_weight_are_skipped():
    hidden, rows, *teacher, weights = random_inputs(0, t=12)
    weights = weights.at[:, :, 4:].set(0)
    poisoned = hidden.at[:, :, 4:].set(jnp.nan)
    loss, comparison = soft_cross_entropy(poisoned, rows, *teacher, weights=weights, block=8)
    np.testing.assert_allclose(loss, reference(hidden, rows, *teacher, weights=weights)[0], rtol=1e-5)
    assert not np.any(comparison.cross_entropy[:, :, 4:])
    assert not np.any(comparison.hits[:, :, 4:])


def test_the_teacher_gets_no_gradient():
    hidden, rows, teacher_hidden, *rest = random_inputs(0)
    gradient = jax.grad(lambda x: soft_cross_entropy(hidden, rows, x, *rest, block=8)[0])(teacher_hidden)
    assert not np.any(gradient)


def test_a_label_outside_the_vocabulary_is_never_a_hit():
    hidden, rows, teacher_hidden, teacher_rows, labels, weights = random_inputs(0)
    _, comparison = soft_cross_entropy(
        hidden, rows, teacher_hidden, teacher_rows, jnp.full_like(labels, -1), jnp.ones_like(weights), block=8
    )
    assert not np.any(comparison.hits)


@pytest.mark.slow
def test_no_logits_of_all_positions_exist():
    """Neither forward nor backward holds an array of positions x vocabulary beyond one block."""
    b, t, h, v, block = 2, 64, 8, 512, 8
    hidden, rows, *rest = random_inputs(0, b=b, t=t, h=h, v=v)
    run = jax.jit(jax.grad(lambda x, r: soft_cross_entropy(x, r, *rest, block=block)[0], (0, 1)))
    memory = run.lower(hidden, rows).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < b * t * v * 4


@pytest.mark.slow
def test_bfloat16_operands_keep_a_float32_softmax():
    """Products of bfloat16 numbers are exact in float32, so the loss is that of the rounded operands in float32."""
    dtype = jnp.bfloat16
    hidden, rows, teacher_hidden, teacher_rows, labels, weights = random_inputs(1)
    half: Any = [x.astype(dtype) for x in (hidden, rows, teacher_hidden, teacher_rows)]
    rounded: Any = [x.astype(jnp.float32) for x in half]

    def run(hidden, rows):
        return soft_cross_entropy(hidden, rows, half[2], half[3], labels, weights, block=8)

    (loss, comparison), gradients = jax.value_and_grad(run, (0, 1), has_aux=True)(half[0], rounded[1])
    exact, cross_entropy, entropy, _ = reference(rounded[0], rounded[1], rounded[2], rounded[3], labels, weights)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, exact, rtol=1e-5)
    counted = np.asarray(weights) != 0
    np.testing.assert_allclose(comparison.cross_entropy[counted], cross_entropy[counted], rtol=1e-5)
    np.testing.assert_allclose(comparison.entropy[counted.any(0)], entropy[counted.any(0)], atol=1e-5)
    wanted = jax.grad(lambda h, r: reference(h, r, rounded[2], rounded[3], labels, weights)[0], (0, 1))(*rounded[:2])
    assert [g.dtype for g in gradients] == [dtype, jnp.float32]
    for got, want in zip(gradients, wanted, strict=True):  # logits' gradients are rounded once, what they give once
        got = got.astype(jnp.float32)
        np.testing.assert_allclose(got, want, atol=2**-7 * float(jnp.abs(want).max()))


def test_no_label_is_never_a_hit():
    """The student's best token is 0, as which a clipped -1 would count."""
    hidden, rows, teacher_hidden, teacher_rows, labels, weights = random_inputs(2)
    rows = jnp.zeros_like(rows).at[0].set(1.0)
    hidden, weights = jnp.abs(hidden), jnp.ones_like(weights)
    for label, expected in ((0, True), (-1, False)):
        labels = jnp.full_like(labels, label)
        _, comparison = soft_cross_entropy(hidden, rows, teacher_hidden, teacher_rows, labels, weights, block=8)
        assert np.asarray(comparison.hits == expected).all()


@pytest.mark.slow
@pytest.mark.parametrize("block", [8, 100])
def test_the_lk_loss_and_its_gradients_equal_the_reference(block):
    hidden, rows, *rest = random_inputs(3)
    teacher_hidden, teacher_rows, labels, weights = rest
    decay = jnp.float32(3.0)

    def scaled(hidden, rows):
        loss, comparison = soft_cross_entropy(hidden, rows, *rest, block=block, lk_decay=decay)
        return 3 * loss, comparison.acceptance

    def expected(hidden, rows):
        loss, acceptance = lk_reference(hidden, rows, teacher_hidden, teacher_rows, labels, weights, decay)
        return 3 * loss, acceptance

    ours, wanted = (jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(hidden, rows) for f in (scaled, expected))
    counted = np.asarray(rest[-1]) != 0
    np.testing.assert_allclose(ours[0][1][counted], wanted[0][1][counted], rtol=1e-5)
    for got, want in zip((ours[0][0], *ours[1]), (wanted[0][0], *wanted[1]), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    without, _ = soft_cross_entropy(hidden, rows, *rest, block=block, lk_decay=decay)
    np.testing.assert_allclose(3 * without, ours[0][0], rtol=1e-6)


def test_an_lk_loss_without_decay_is_cross_entropy():
    hidden, rows, *rest = random_inputs(4)

    def run(decay):
        def loss(hidden, rows):
            return soft_cross_entropy(hidden, rows, *rest, block=8, lk_decay=decay)[0]

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(hidden, rows)

    for got, want in zip(jax.tree.leaves(run(jnp.float32(0))), jax.tree.leaves(run(None)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_lk_loss_of_bfloat16_operands_keeps_a_float32_softmax():
    hidden, rows, teacher_hidden, teacher_rows, labels, weights = random_inputs(5)
    half: Any = [x.astype(jnp.bfloat16) for x in (hidden, rows, teacher_hidden, teacher_rows)]
    rounded: Any = [x.astype(jnp.float32) for x in half]
    decay = jnp.float32(3.0)

    def run(hidden, rows):
        return soft_cross_entropy(hidden, rows, half[2], half[3], labels, weights, block=8, lk_decay=decay)[0]

    def exact(hidden, rows):
        return lk_reference(hidden, rows, rounded[2], rounded[3], labels, weights, decay)[0]

    loss, gradients = jax.value_and_grad(run, (0, 1))(half[0], rounded[1])
    expected, wanted = jax.value_and_grad(exact, (0, 1))(*rounded[:2])
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for got, want in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(got.astype(jnp.float32), want, atol=2**-7 * float(jnp.abs(want).max()))


def test_the_lk_loss_on_a_mesh_is_that_of_one_device():
    """Batch over the data axis, vocabulary over the model axis: acceptance is a sum over both of its halves."""
    hidden, rows, teacher_hidden, teacher_rows, labels, weights = random_inputs(6)
    mesh = make_mesh(MeshConfig(data=2, model=2), jax.devices()[:4])
    of_rows, of_vocabulary = P("data"), P("model")
    places = (P(None, "data"), of_vocabulary, of_rows, of_vocabulary, of_rows, P(None, "data"))
    inputs = (hidden, rows, teacher_hidden, teacher_rows, labels, weights)
    placed = [jax.device_put(x, NamedSharding(mesh, place)) for x, place in zip(inputs, places, strict=True)]

    def run(hidden, rows, *rest):
        return soft_cross_entropy(hidden, rows, *rest, block=8, lk_decay=jnp.float32(3.0))[0]

    both = jax.jit(jax.value_and_grad(run, (0, 1)))
    for got, want in zip(jax.tree.leaves(both(*placed)), jax.tree.leaves(both(*inputs)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
