"""The parallel training-time test against sequential drafting with the decoder's own code, and packing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from eagle3_jax.kernels.ttt_attention.api import ttt_attention
from eagle3_jax.models.cache import Pass
from eagle3_jax.models.families.llama import Llama
from eagle3_jax.training.ttt import training_time_test

STEPS = 5


@pytest.fixture(scope="module")
def target(head_config):
    c = head_config
    config = tiny.llama_config(vocab_size=c.vocab_size, hidden_size=c.hidden_size, num_hidden_layers=1, aux_layers=(0,))
    return Llama(config, rngs=nnx.Rngs(3))


@functools.partial(jax.jit, static_argnums=4)
def draft_sequentially(target, head, tokens, aux, steps):
    """Drafts from every prefix of one document, each a sequence of its own: [steps, prefixes, H].

    Prefix t holds the pairs up to (token t+1, feature t). The first pass over them is the decoder's extension with true
    features; the later ones are its chain drafting, fed the document's tokens.
    """
    length = len(tokens)
    prefixes = length - steps  # those whose tokens of all steps exist
    last = jnp.arange(prefixes)
    batch = jnp.broadcast_to(tokens[1:], (prefixes, length - 1))
    features = jnp.broadcast_to(head.fuse(aux[None, :-1]), (prefixes, length - 1, aux.shape[-1] // 3))
    positions = jnp.broadcast_to(jnp.arange(length - 1), batch.shape)
    cache = head.empty_cache(prefixes, length + steps)
    whole = Pass(positions, jnp.zeros(prefixes, jnp.int32))
    states, cache = head.feed(target.embed[...], batch, features, whole, cache)
    state = states[last, last][:, None]
    lengths = last + 1  # pairs with true features; whatever lies behind them is scratch
    outputs = [state]
    for i in range(1, steps):
        this = Pass((last + i)[:, None], lengths, tail_mask=jnp.ones((prefixes, 1, i), bool))
        state, cache = head.feed(target.embed[...], tokens[last + 1 + i][:, None], state, this, cache)
        outputs.append(state)
    return jnp.stack([head.output_hidden(x)[:, 0] for x in outputs])


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param({}, id="eagle-3"),
        pytest.param({"fc_norm": True, "norm_output": True}, id="eagle-3.1"),
        pytest.param({"norm_before_residual": True}, id="norm_before_residual"),
        pytest.param({"qk_norm": True}, id="qk_norm"),
        pytest.param({"sliding_window": STEPS}, id="sliding_window"),
    ],
)
def test_every_step_equals_sequential_drafting(new_head, target, make_batch, flags):
    head = new_head(**flags)
    length = 14
    batch = make_batch([[length]], row_length=length)
    parallel = jax.jit(training_time_test, static_argnums=3)(head, target.embed[...], batch, STEPS)
    sequential = draft_sequentially(target, head, batch.token_ids[0], batch.aux[0], STEPS)
    assert sequential.shape == (STEPS, length - STEPS, head.config.hidden_size)
    assert np.abs(np.diff(sequential, axis=0)).max(axis=(1, 2)).min() > 0.1, "the steps differ"
    np.testing.assert_allclose(parallel[:, 0, : length - STEPS], sequential, rtol=2e-4, atol=2e-4)


@pytest.mark.slow
def test_packed_documents_do_not_see_each_other(head, target, make_batch):
    run = jax.jit(training_time_test, static_argnums=3)
    packed = run(head, target.embed[...], make_batch([[6, 9]], 20), STEPS)
    alone = run(head, target.embed[...], make_batch([[6], [9]], 9), STEPS)
    for i in range(STEPS):
        kept = 6 - 1 - i, 9 - 1 - i  # where token t+1+i is still in the document
        np.testing.assert_allclose(packed[i, 0, : kept[0]], alone[i, 0, : kept[0]], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(packed[i, 0, 6 : 6 + kept[1]], alone[i, 1, : kept[1]], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_rematerialisation_changes_neither_values_nor_gradients(head, target, make_batch):
    batch = make_batch([[6, 9]], 16)

    def total(head, remat):
        states = training_time_test(head, target.embed[...], batch, 3, remat)
        return jnp.sum(jnp.sin(states[:, 0, :15]))

    one, other = (
        jax.jit(jax.value_and_grad(total), static_argnums=1).lower(head, remat).compile() for remat in (False, True)
    )
    exponentials = [str(compiled.as_text()).count(" exponential(") for compiled in (one, other)]
    assert exponentials[1] > exponentials[0], "what is not kept is computed again"
    for x, y in zip(jax.tree.leaves(one(head)), jax.tree.leaves(other(head)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_the_kernels_for_tpu_change_neither_values_nor_gradients(head, target, make_batch, monkeypatch):
    batch = make_batch([[6, 9], [17]], 20)

    def total(head):
        states = training_time_test(head, target.embed[...], batch, 3, True)
        return jnp.sum(jnp.sin(states[:, 0, :15]))

    expected = jax.jit(jax.value_and_grad(total))(head)
    monkeypatch.setattr(
        "eagle3_jax.training.ttt.ttt_attention",
        functools.partial(ttt_attention, implementation="pallas", interpret=True),
    )
    got = jax.jit(jax.value_and_grad(lambda head: total(head)))(head)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_bfloat16_stays_bfloat16(head, target, make_batch):
    states = training_time_test(head, target.embed[...].astype(jnp.bfloat16), make_batch([[9]], 9), 2)
    assert states.dtype == jnp.bfloat16
    exact = training_time_test(head, target.embed[...], make_batch([[9]], 9), 2)
    np.testing.assert_allclose(states[:, 0, :7].astype(np.float32), exact[:, 0, :7], atol=0.2, rtol=0.1)


def test_no_gradient_reaches_the_embeddings(head, target, make_batch):
    batch = dataclasses.replace(make_batch([[9]], 9))
    gradient = jax.grad(lambda embed: jnp.sum(training_time_test(head, embed, batch, 2)))(target.embed[...])
    assert not np.any(gradient)
