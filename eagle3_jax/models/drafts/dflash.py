"""DFlash: a head that drafts a block of tokens in one pass (arXiv 2602.06036).

The target's fused hidden states are the context of every layer, whose keys and values are computed from them without
the layer's norm. A block is the anchor (the last known token) followed by mask tokens. Row j stands at the anchor's
position + j and predicts the token there; row 0, the anchor's, predicts nothing.

Layers are Qwen 3's for every target. Embeddings are the target's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle3_jax.kernels.block_attention import block_attention
from eagle3_jax.kernels.linear.api import linear
from eagle3_jax.kernels.linear.layouts import Quantised
from eagle3_jax.kernels.vocabulary.api import vocabulary_logits
from eagle3_jax.models.cache import Cache, LayerPass, Pass
from eagle3_jax.models.drafts.head import HeadConfig
from eagle3_jax.models.drafts.one_pass import OnePassHead
from eagle3_jax.models.layers import SwiGLU, apply_rope, at_row, embeddings, normal, ones, rms_norm, scaled_rope_table
from eagle3_jax.models.target import Rope

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockHeadConfig(HeadConfig):
    """Shape of a block head; with the target's vocabulary it has the target's LM-head rows, with a smaller one its own.

    Attributes:
        target_hidden_size: the target's width.
        aux_layers: boundaries of the target that the head reads, ascending (`target_layer_ids` + 1).
        block_size: rows of a block, the anchor's included.
        mask_token_id: the target's token at the positions to draft.
        layer_types: "full_attention" or "sliding_attention" for each layer.
        sliding_window: window of the sliding layers, in tokens.
        is_causal: whether attention within a block is causal; None: in sliding layers only.
        markov_rank, confidence: for DSpark.
        conv_taps, conv_group, selector_rank, selector_top_k: for DFlash2.
    """

    target_hidden_size: int
    aux_layers: tuple[int, ...]
    block_size: int
    mask_token_id: int
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    is_causal: bool | None = None
    markov_rank: int = 256
    confidence: bool = True
    conv_taps: int = 2
    conv_group: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16

    @property
    def num_aux_layers(self) -> int:
        return len(self.aux_layers)

    def causal(self, layer: int) -> bool:
        return self.layer_types[layer] == SLIDING if self.is_causal is None else self.is_causal

    def window(self, layer: int) -> int | None:
        return self.sliding_window if self.layer_types[layer] == SLIDING else None


# Keys and values [b, t, k, d] of a layer's context.
Context = tuple[Float[Array, "b t k d"], Float[Array, "b t k d"]]
# (q [b m n d], k [b m k d], v [b m k d]) -> [b m n d]
Attend = Callable[[Array, Array, Array], Array]


class BlockLayer(nnx.Module):
    """One decoder layer over the rows of blocks.

    `q` [H, heads * d]; `kv` [H, kv_heads * 2 * d], each head's key next to its value; `o` [heads * d, H].
    """

    def __init__(self, config: BlockHeadConfig, *, dtype: Any, rngs: nnx.Rngs) -> None:
        c = config
        self.eps, self.head_dim = c.rms_norm_eps, c.head_dim
        self.input_norm = ones(c.hidden_size, dtype)
        self.q = normal((c.hidden_size, c.num_attention_heads * c.head_dim), dtype, rngs)
        self.kv = normal((c.hidden_size, 2 * c.num_key_value_heads * c.head_dim), dtype, rngs)
        self.o = normal((c.num_attention_heads * c.head_dim, c.hidden_size), dtype, rngs)
        self.q_norm, self.k_norm = ones(c.head_dim, dtype), ones(c.head_dim, dtype)
        self.post_norm = ones(c.hidden_size, dtype)
        self.mlp = SwiGLU(c.hidden_size, c.intermediate_size, dtype=dtype, rngs=rngs)

    def keys_and_values(self, x: Float[Array, "b t h"], rope: Rope) -> Context:
        """Computes keys and values of the context, which is not normed here, or of normed rows of blocks."""
        heads = linear(x, self.kv[...]).reshape(*x.shape[:2], -1, 2, self.head_dim)
        return apply_rope(rms_norm(heads[..., 0, :], self.k_norm[...], self.eps), rope), heads[..., 1, :]

    def __call__(self, x: Float[Array, "b m h"], rope: Rope, attend: Attend, rows: int) -> Float[Array, "b m h"]:
        """Runs the layer over blocks of `rows` rows, one behind the other."""

        def attention(u: Array) -> Array:
            q = linear(u, self.q[...]).reshape(*u.shape[:2], -1, self.head_dim)
            q = apply_rope(rms_norm(q, self.q_norm[...], self.eps), rope)
            return linear(attend(q, *self.keys_and_values(u, rope)).reshape(*u.shape[:2], -1), self.o[...])

        x = x + self.around("attention_conv", attention, rms_norm(x, self.input_norm[...], self.eps), rows)
        return x + self.around("mlp_conv", self.mlp, rms_norm(x, self.post_norm[...], self.eps), rows)

    def around(self, name: str, sublayer: Callable[[Array], Array], normed: Float[Array, "b m h"], rows: int) -> Array:
        """Runs a sublayer for the residual stream; `name` is the module that a subclass wraps around it."""
        return sublayer(normed)


class DFlash(OnePassHead):
    """The backbone, which drafts the tokens of a block independently of each other.

    A loaded head has LM-head rows of its own, the target's where it was trained with these (`lm_head`).

    Attributes:
        first_row: the first row that predicts, namely the token after the anchor.
        corrector: what reads the token before a draft: "markov" (DSpark), "selector" (DFlash2), or nothing.
    """

    config: BlockHeadConfig
    layer: ClassVar[Callable[..., BlockLayer]] = BlockLayer
    first_row: ClassVar[int] = 1
    corrector: ClassVar[str | None] = None

    def __init__(self, config: BlockHeadConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs) -> None:
        c = config
        self.config = c
        self.fc = normal((len(c.aux_layers) * c.target_hidden_size, c.hidden_size), dtype, rngs)
        self.hidden_norm = ones(c.hidden_size, dtype)
        self.layers = nnx.List([self.layer(c, dtype=dtype, rngs=rngs) for _ in c.layer_types])
        self.norm = ones(c.hidden_size, dtype)
        if c.draft_vocab_size < c.vocab_size:
            self.lm_head = normal((c.draft_vocab_size, c.hidden_size), dtype, rngs)

    @property
    def drafts(self) -> int:
        """See `Head`: the tokens of a block."""
        return self.config.block_size - self.first_row

    def fuse(self, aux: Float[Array, "b t aux"]) -> Float[Array, "b t h"]:
        """Fuses the target's states (concatenated, ascending boundaries) into the context, shared by all layers."""
        return rms_norm(linear(aux, self.fc[...]), self.hidden_norm[...], self.config.rms_norm_eps)

    def context(self, fused: Float[Array, "b t h"], positions: Int[Array, "b t"]) -> tuple[Context, ...]:
        """Computes every layer's keys and values of the context."""
        rope = self._rope(positions)
        return tuple(layer.keys_and_values(fused, rope) for layer in self.layers)

    def states(
        self,
        embed: Float[Array, "v h"] | Quantised,
        tokens: Int[Array, "b a"],
        positions: Int[Array, "b a"],
        context: tuple[Context, ...],
        first: Int[Array, "b a"],
        anchors: Int[Array, "b a"],
        policy: Callable[..., Any] | None = None,
    ) -> Float[Array, "b a drafts h"]:
        """Runs one pass over `a` blocks of each sequence.

        Args:
            embed: the target's embeddings; their dtype is the compute dtype.
            tokens, positions: the anchors, and their RoPE positions. context: see `context`.
            first, anchors: each block attends to the context's slots from `first` to before `anchors`.
            policy: of `jax.checkpoint`: which residuals of a layer are kept for the backward pass; None keeps all.

        Returns the LM head's inputs: index i predicts the token at the anchor's position + 1 + i.
        """
        c = self.config
        (b, a), r = tokens.shape, c.block_size
        masks = jnp.full((b, a, r - 1), c.mask_token_id, tokens.dtype)
        x = embeddings(embed, jnp.concatenate([tokens[..., None], masks], axis=-1).reshape(b, a * r))
        rope = self._rope((positions[..., None] + jnp.arange(r, dtype=positions.dtype)[None, None]).reshape(b, a * r))

        def run(layer: BlockLayer, x: Array, seen: Context, number: int) -> Array:
            def attend(q: Array, k: Array, v: Array) -> Array:
                own_q, own_k, own_v = (x.reshape(b, a, r, *x.shape[2:]) for x in (q, k, v))
                options = {"causal": c.causal(number), "window": c.window(number)}
                return block_attention(own_q, own_k, own_v, *seen, first, anchors, **options).reshape(q.shape)

            return layer(x, rope, attend, r)

        if policy is not None:
            run = jax.checkpoint(run, policy=policy, static_argnums=3)
        for number, (layer, seen) in enumerate(zip(self.layers, context, strict=True)):
            x = run(layer, x, seen, number)
        x = rms_norm(x, self.norm[...], c.rms_norm_eps)
        return x.reshape(b, a, r, -1)[:, :, self.first_row :]

    def feed(
        self,
        embed: Float[Array, "v h"] | Quantised,
        tokens: Int[Array, "b t"],
        features: Float[Array, "b t h"],
        this: Pass,
        cache: Cache,
    ) -> tuple[Float[Array, "b r h"], Cache]:
        """See `Head`: writes the context's keys and values. Tokens are not read, and the state is not used."""
        for number, (keys, values) in enumerate(self.context(features, this.positions)):
            cache = cache.with_layer(number, cache.layers[number].append(keys, values, this))
        return at_row(features, this.row), cache

    def rows(
        self,
        embed: Float[Array, "v h"] | Quantised,
        root: Int[Array, " b"],
        state: Float[Array, "b h"],
        this: Pass,
        cache: Cache,
        drafts: int,
    ) -> tuple[Float[Array, "b drafts h"], Cache]:
        """See `OnePassHead`: a block behind the context, whose anchor is the root. The state is not read."""
        c, rows = self.config, drafts + self.first_row
        masks = jnp.full((len(root), rows - 1), c.mask_token_id, root.dtype)
        x = embeddings(embed, jnp.concatenate([root[:, None], masks], axis=1))
        at, shape = this.lengths[:, None] + jnp.arange(rows)[None], (len(root), rows, rows)
        rope = self._rope(at)
        for number, layer in enumerate(self.layers):
            seen = jnp.tril(jnp.ones(shape, bool)) if c.causal(number) else jnp.ones(shape, bool)
            tail = {"tail_mask": seen, "tail_positions": jnp.broadcast_to(at[:, None], shape)}
            attend = LayerPass(dataclasses.replace(this, positions=at, **tail), cache.layers[number])
            x = layer(x, rope, functools.partial(attend, window=c.window(number)), rows)
            cache = cache.with_layer(number, attend.cache)
        return rms_norm(x, self.norm[...], c.rms_norm_eps)[:, self.first_row :], cache

    @property
    def cached_layers(self) -> int:
        return len(self.config.layer_types)

    def rows_of(self, rows: Float[Array, "dv h"]) -> Float[Array, "dv h"]:
        """Returns the LM-head rows, one per draft token; `rows` are the target's rows of these tokens."""
        return self.lm_head[...] if hasattr(self, "lm_head") else rows

    def walk(
        self,
        states: Float[Array, "*batch drafts h"],
        rows: Float[Array, "dv h"],
        token_ids: Int[Array, " dv"],
        anchor: Int[Array, "*batch"],
    ) -> Int[Array, "*batch drafts"]:
        """Drafts greedily, each token given the one before it, behind a block's first token. Returns draft ids.

        `token_ids` is the target's id of each draft token; `rows`: see `rows_of`.
        """
        flat = states.reshape(-1, *states.shape[-2:]).swapaxes(0, 1)

        def step(before: Array, state: Array) -> tuple[Array, Array]:
            scores = self.adjusted(vocabulary_logits(state, rows), state, before)
            best = jnp.argmax(scores, axis=-1).astype(jnp.int32)
            return token_ids[best].astype(before.dtype), best

        _, drafts = jax.lax.scan(step, anchor.reshape(-1), flat)
        return drafts.T.reshape(states.shape[:-1])

    def _rope(self, positions: Int[Array, "b t"]) -> Rope:
        c = self.config
        return scaled_rope_table(positions, c.head_dim, c.rope_theta, c.rope_scaling)
