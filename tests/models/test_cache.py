"""A layer that reads an earlier layer's keys and values; layers whose caches have shapes of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_families
from flax import nnx

from eagle3_jax.models.cache import BorrowedCache, KVCache, LayerPass, Pass
from eagle3_jax.models.drafts.mtp import DeepseekMtp
from eagle3_jax.models.families import FAMILIES, llama
from eagle3_jax.models.layers import Attention, rms_norm
from eagle3_jax.models.target import TargetModel


class Block(llama.Block):
    """Llama's; the third layer attends with its own queries to the second one's keys and values, the first is wider."""

    def __init__(self, config, layer, *, dtype, rngs) -> None:
        super().__init__(config, layer, dtype=dtype, rngs=rngs)
        self.borrows = layer == 2
        if layer == 0:
            self.attention = Attention(32, 32, 4, 4, 16, dtype=dtype, rngs=rngs)

    def __call__(self, x, rope, own: LayerPass):
        if not self.borrows:
            q, k, v = self.attention.heads(self.attention.fused(rms_norm(x, self.input_norm[...], self.eps)))
        else:
            assert own.entries is not None
            q, (k, v) = self.attention.heads(self.attention.fused(x))[0], own.entries
        return x + self.attention.output(own(q, k, v))


class Borrowing(TargetModel):
    block = Block

    def layer_cache(self, layer, pages, page_size, dtype, states, tail):
        if layer == 0:
            return KVCache.pages(pages, 4, page_size, 16, dtype)
        own = super().layer_cache(layer, pages, page_size, dtype, states, tail)
        return BorrowedCache(1) if layer == 2 else own


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> np.ndarray:
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = np.where(mask[None], np.einsum("ind,jnd->nij", q, k) / q.shape[-1] ** 0.5, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("nij,jnd->ind", weights / weights.sum(-1, keepdims=True), v)


def plain(model: TargetModel, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """One text, all layers by hand, from the projections alone."""
    x, before = np.asarray(model.embed[...])[tokens], (np.zeros(0), np.zeros(0))
    for block in model.blocks:
        given = x if block.borrows else np.asarray(rms_norm(jnp.asarray(x), block.input_norm[...], block.eps))
        q, k, v = (np.asarray(y[0]) for y in block.attention.heads(block.attention.fused(jnp.asarray(given)[None])))
        k, v = before if block.borrows else (k, v)
        before = k, v
        x = x + attended(q, k, v, mask).reshape(len(tokens), -1) @ np.asarray(block.attention.o[...])
    return np.asarray(model.final_norm(jnp.asarray(x)[None])[0])


@pytest.mark.slow
def test_a_layer_reads_another_s_keys_and_values():
    """A prompt, a tree of nodes, the committed branch, and a token behind it."""
    family = next(family for family in FAMILIES if family.config is llama.LlamaConfig)
    config = tiny_families.config_of(family, num_hidden_layers=3)
    model = Borrowing(config, rngs=nnx.Rngs(0))
    model = jax.tree.map(lambda leaf: leaf * 10 if leaf.ndim > 1 else leaf, model)
    text = np.random.default_rng(0).integers(0, 60, 12)
    cache = model.empty_cache(1, 32, tail=4)
    assert len(jax.tree.leaves(cache)) == 4
    whole = Pass(jnp.arange(6)[None], jnp.zeros(1, jnp.int32), counts=jnp.asarray([6]))
    _, _, cache = model(jnp.asarray(text[None, :6]), whole, cache)
    tail = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)  # 6, then 7 beside 8, 9 behind 8
    this = Pass(jnp.asarray([[6, 7, 7, 8]]), jnp.asarray([6]), jnp.asarray(tail[None]))
    hidden, _, cache = model(jnp.asarray(text[None, 6:10]), this, cache)
    mask = np.tril(np.ones((10, 10), bool))
    mask[6:, 6:] = tail
    np.testing.assert_allclose(hidden[0], plain(model, text[:10], mask)[6:], atol=1e-4, rtol=1e-4)
    cache = cache.commit(this, jnp.asarray([[0, 2, 3, 3]]), jnp.asarray([3]))
    behind = Pass(jnp.asarray([[9]]), jnp.asarray([9]))
    hidden, _, _ = model(jnp.asarray(text[None, 10:11]), behind, cache)
    path = text[[0, 1, 2, 3, 4, 5, 6, 8, 9, 10]]
    np.testing.assert_allclose(hidden[0, 0], plain(model, path, np.tril(mask | True))[-1], atol=1e-4, rtol=1e-4)


def test_a_latent_is_kept_once():
    """One row a token and layer, of the latent and the rotated key, in the target and in its MTP layer."""
    family = next(family for family in FAMILIES if family.config.architecture == "DeepseekV3ForCausalLM")
    config = tiny_families.config_of(family, num_hidden_layers=3)
    model, head = family.model(config, rngs=nnx.Rngs(0)), DeepseekMtp(config, rngs=nnx.Rngs(0))
    assert [x.shape for x in jax.tree.leaves(model.empty_pages(5, 16))] == [(5, 1, 16, 24 + 8)] * 3
    assert [x.shape for x in jax.tree.leaves(head.empty_pages(5, 16))] == [(5, 1, 16, 24 + 8)]
