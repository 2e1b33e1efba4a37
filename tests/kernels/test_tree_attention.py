"""Tree attention against an independent loop, over many shapes; unused slots may hold anything."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_jax.kernels.tree_attention import tree_attention


def reference(q, k, v, lengths, mask):
    """One query at a time, in float64."""
    b, t, n, d = q.shape
    group = n // k.shape[1]
    out = np.zeros(q.shape)
    for i in range(b):
        for j in range(t):
            seen = list(range(lengths[i])) + [lengths[i] + m for m in np.flatnonzero(mask[i, j])]
            for h in range(n):
                scores = k[i, h // group, seen].astype(float) @ q[i, j, h] / np.sqrt(d)
                weights = np.exp(scores - scores.max())
                out[i, j, h] = weights / weights.sum() @ v[i, h // group, seen]
    return out


@settings(max_examples=15, deadline=None)
@given(
    batch=st.integers(1, 3),
    nodes=st.integers(1, 6),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    causal=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_equals_the_loop(batch, nodes, kv_heads, group, causal, seed):
    rng = np.random.default_rng(seed)
    slots, d = 16, 4
    lengths = rng.integers(0, slots - nodes + 1, batch)
    q = rng.normal(size=(batch, nodes, kv_heads * group, d)).astype(np.float32)
    k, v = rng.normal(size=(2, batch, kv_heads, slots, d)).astype(np.float32)
    mask = np.tril(np.ones((nodes, nodes), bool)) & (rng.random((batch, nodes, nodes)) < 0.6)
    mask |= np.eye(nodes, dtype=bool)
    if causal:
        mask = np.broadcast_to(np.tril(np.ones((nodes, nodes), bool)), mask.shape)
    expected = reference(q, k, v, lengths, mask)
    for i in range(batch):  # poison what lies behind the tail
        k[i, :, lengths[i] + nodes :] = 1e9
        v[i, :, lengths[i] + nodes :] = 1e9
    got = tree_attention(
        jnp.asarray(q),
        jnp.asarray(k),
        jnp.asarray(v),
        jnp.asarray(lengths, jnp.int32),
        None if causal else jnp.asarray(mask),
    )
    np.testing.assert_allclose(got, expected, atol=2e-5, rtol=2e-5)
