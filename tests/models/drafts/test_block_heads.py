"""Block heads: attention of a row, and the heads over the backbone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_blocks import DRAFT_VOCAB, HIDDEN, VOCAB, block_config, make_block_head

from eagle3_jax.kernels.block_attention import block_attention
from eagle3_jax.models.drafts.dflash import SLIDING, DFlash
from eagle3_jax.models.drafts.dflash2 import BlockConvolution, ConvolvedLayer, DFlash2
from eagle3_jax.models.drafts.dspark import DSpark


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, 3), (False, 2)])
def test_what_a_row_sees(causal, window):
    """Against a softmax over the slots that the definition names, in one stretch with the block's own rows."""
    b, a, r, n, kv, d, t = 2, 3, 4, 4, 2, 8, 10
    rng = np.random.default_rng(0)
    q = rng.normal(size=(b, a, r, n, d)).astype(np.float32)
    k, v = rng.normal(size=(2, b, a, r, kv, d)).astype(np.float32)
    context_k, context_v = rng.normal(size=(2, b, t, kv, d)).astype(np.float32)
    first, anchors = np.array([[0, 0, 5], [1, 4, 4]]), np.array([[0, 3, 9], [1, 6, 8]])
    got = block_attention(
        *map(jnp.asarray, (q, k, v, context_k, context_v, first, anchors)), causal=causal, window=window
    )
    for row, block, j, head in np.ndindex(b, a, r, n):
        p = anchors[row, block]
        lowest = first[row, block] if window is None else max(first[row, block], p + j - window + 1)
        slots = [s for s in range(t) if lowest <= s < p]
        own = [i for i in range(r) if (i <= j or not causal) and (window is None or i > j - window)]
        keys = np.concatenate([context_k[row, slots, head // 2], k[row, block, own, head // 2]])
        values = np.concatenate([context_v[row, slots, head // 2], v[row, block, own, head // 2]])
        weights = np.exp(keys @ q[row, block, j, head] / np.sqrt(d))
        np.testing.assert_allclose(got[row, block, j, head], weights @ values / weights.sum(), rtol=1e-4, atol=1e-5)


def test_causality_is_the_layers_unless_the_config_says_it():
    config = block_config(layer_types=(SLIDING, "full_attention"), sliding_window=5)
    assert [config.causal(i) for i in range(2)] == [True, False]
    assert [config.window(i) for i in range(2)] == [5, None]
    assert not block_config(layer_types=(SLIDING,), sliding_window=5, is_causal=False).causal(0)


def states_of(head):
    rng = np.random.default_rng(3)
    embed = jnp.asarray(rng.normal(size=(VOCAB, HIDDEN)), jnp.float32)
    aux = jnp.asarray(rng.normal(size=(2, 6, 3 * HIDDEN)), jnp.float32)
    tokens, at, positions = (jnp.array([list(x)] * 2) for x in ([7, 8, 9], [1, 4, 6], range(6)))

    @jax.jit
    def states(head):
        return head.states(embed, tokens, at, head.context(head.fuse(aux), positions), 0 * at, at)

    return states(head), tokens


@pytest.mark.slow
def test_dflash2_begins_as_dflash():
    """With convolutions as they are when new, and a predecessor codebook of zeros."""
    plain, other = make_block_head(DFlash), make_block_head(DFlash2)
    fresh = BlockConvolution(block_config(), dtype=jnp.float32, rngs=nnx.Rngs(0))
    for layer in other.layers:
        assert isinstance(layer, ConvolvedLayer)
        layer.attention_conv, layer.mlp_conv = fresh, fresh
    graph = dict(jax.tree_util.tree_leaves_with_path(plain))
    other = jax.tree_util.tree_map_with_path(lambda path, x: graph.get(path, x), other)
    other.predecessors[...] = jnp.zeros_like(other.predecessors[...])
    (states, tokens), (theirs, _) = states_of(plain), states_of(other)
    np.testing.assert_array_equal(states, theirs)
    rows, ids = plain.lm_head[...], jnp.arange(DRAFT_VOCAB)
    walk = jax.jit(lambda head: head.walk(states, rows, ids, tokens))
    drafts = walk(plain)
    np.testing.assert_array_equal(drafts, walk(other))
    np.testing.assert_array_equal(drafts, jnp.argmax(states @ rows.T, axis=-1))


def test_a_convolution_sees_the_rows_in_front_of_its_block_alone():
    layer = make_block_head(DFlash2).layers[0]
    assert isinstance(layer, ConvolvedLayer)
    conv = layer.mlp_conv
    x = np.random.default_rng(0).normal(size=(1, 8, HIDDEN)).astype(np.float32)  # two blocks
    base, taps = np.asarray(conv.base[...]), np.asarray(conv.taps[...])
    own = (x[0] @ taps).reshape(8, 2, 2, HIDDEN // 4)

    def convolved(side, y):
        expected = np.zeros_like(y)
        for i, c in np.ndindex(8, HIDDEN):
            for t in range(2):
                if i % 4 >= t:
                    expected[i, c] += (base[side, t, c] + own[i, side, t, c // 4]) * y[i - t, c]
        return expected

    got = conv(lambda y: jnp.tanh(y), jnp.asarray(x), 4)
    np.testing.assert_allclose(got[0], convolved(1, np.tanh(convolved(0, x[0]))), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DSpark, DFlash2])
def test_drafts_are_chosen_behind_the_drafts_in_front(kind):
    head = make_block_head(kind)
    states, tokens = states_of(head)
    rows, ids = head.lm_head[...], jnp.arange(DRAFT_VOCAB) * 2 + 1
    got = jax.jit(lambda head: head.walk(states, rows, ids, tokens))(head)
    head = jax.tree.map(np.asarray, head)
    x, before = np.asarray(states[0, 1]), int(tokens[0, 1])
    for i, draft in enumerate(np.asarray(got[0, 1])):
        logits = np.asarray(x[i] @ rows.T)
        if kind is DSpark:
            scores = logits + head.markov_out[...] @ head.markov_in[...][before]
        else:
            scores = np.full(DRAFT_VOCAB, -np.inf)
            for c in np.argsort(-logits)[:5]:
                read = head.predecessors[...][before] * (x[i] @ head.selector[...])
                scores[c] = logits[c] + read @ head.successors[...][c]
        assert draft == np.argmax(scores)
        before = int(ids[draft])
