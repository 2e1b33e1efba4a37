"""Functions and modules that targets and draft heads share.

Conventions: activations have the compute dtype, and weights are cast to it; norms, RoPE and softmax run in float32.
Every contraction has the highest precision, so float32 means float32 on a TPU too (bfloat16 is unaffected).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import P
from jaxtyping import Array, Float, Int

from eagle3_jax.kernels.dispatch import default_implementation
from eagle3_jax.kernels.linear.api import gated_linear, linear
from eagle3_jax.kernels.linear.layouts import Quantised
from eagle3_jax.mesh import constrain

# (regex over a parameter's path, partition), for targets and draft heads: the model axis splits vocabulary rows, KV
# heads, FFN columns and the aux features' columns.
SHARDING_RULES = (
    (r"embed|lm_head", P("model", None)),
    (r"\bfc$", P("model", None)),
    (r"attention/qkv", P(None, "model")),
    (r"qkv_bias", P("model")),
    (r"attention/(q|q_up)$", P(None, "model")),
    (r"attention/kv_up", P("model")),
    (r"attention/o", P("model", None)),
    (r"layers/\d+/(q|kv)$", P(None, "model")),  # a block head's
    (r"layers/\d+/o$", P("model", None)),
    (r"(convolution|delta)/(project|gates|taps)$", P(None, "model")),
    (r"(convolution|delta)/o$", P("model", None)),
    (r"delta/decay", P("model")),
    (r"markov_out|successors", P("model", None)),
    (r"(mlp|shared)/(gate|up)", P(None, "model")),
    (r"(mlp|shared)/down", P("model", None)),
    (r"expert_(gate|up|gate_up)$", P(None, None, "model")),
    (r"expert_down$", P(None, "model", None)),
    (r"expert_gate_up_bias$", P(None, "model")),
    (r"sinks$", P("model")),
)


def whole_states(states: Any) -> Any:
    """Keeps states [b, t, h] whole on each device of the current mesh's model axis.

    The partitioner would split them along h where a product behind them is split by rows, as a head's `fc` is, and with
    them the residual stream of all layers: six collectives a layer instead of two.
    """
    if jax.sharding.get_abstract_mesh().shape.get("model", 1) == 1:
        return states
    return constrain(states, ((r"", P(P.UNCONSTRAINED, P.UNCONSTRAINED, None)),))


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama-3.1's frequency scaling (Hugging Face `rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor` (Hugging Face `rope_type: linear`)."""

    factor: float


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN (https://arxiv.org/abs/2309.00071, Hugging Face `rope_type: yarn`).

    Frequencies that turn fewer than `beta_slow` times over the original length are divided by `factor`. Those that turn
    more than `beta_fast` times are kept, and those between are blended. Cosines and sines are multiplied by
    `amplitude`.

    Attributes:
        truncate: rounds the two bounds to whole dimensions.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None

    @property
    def amplitude(self) -> float:
        return 0.1 * math.log(max(self.factor, 1.0)) + 1 if self.attention_factor is None else self.attention_factor

    def blend(self, inverse: Float[Array, " half"], theta: float) -> Float[Array, " half"]:
        dim = 2 * inverse.shape[0]

        def bound(turns: float) -> float:
            return dim * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = bound(self.beta_fast), bound(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        ramp = (jnp.arange(dim // 2, dtype=jnp.float32) - low) / max(high - low, 0.001)
        divided = jnp.clip(ramp, 0, 1)
        return inverse / self.factor * divided + inverse * (1 - divided)


@dataclasses.dataclass(frozen=True)
class LongScaling:
    """LongRoPE (https://arxiv.org/abs/2402.13753, Hugging Face `rope_type: longrope`): a divisor for each frequency.

    A context longer than the original one (`factor` > 1) has the long divisors from its first token on, as in vLLM, so
    that no cached key changes. transformers has the short ones for a text up to the original length.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    factor: float
    attention_factor: float | None = None

    @property
    def divisors(self) -> tuple[float, ...]:
        return self.long_factor if self.factor > 1 else self.short_factor

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(max(self.factor, 1.0)) / math.log(self.original_max_position_embeddings))


@dataclasses.dataclass(frozen=True)
class AlphaScaling:
    """NTK-aware scaling by a fixed `alpha`, which stretches the base (Hunyuan's `rope_type: dynamic`)."""

    alpha: float


@dataclasses.dataclass(frozen=True)
class ProportionalScaling:
    """RoPE of a share of each half of a head, at the whole head's frequencies (`rope_type: proportional`)."""

    factor: float = 1.0
    partial_rotary_factor: float = 1.0


Scaling = RopeScaling | LinearScaling | YarnScaling | LongScaling | AlphaScaling | ProportionalScaling


def rope_frequencies(head_dim: int, theta: float, scaling: Scaling | None = None) -> Float[Array, " half"]:
    """Computes inverse frequencies of the rotate-half (NeoX) layout, float32 [head_dim // 2]."""
    if isinstance(scaling, AlphaScaling):
        theta *= scaling.alpha ** (head_dim / (head_dim - 2))
    inverse = 1.0 / theta ** (jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is None or isinstance(scaling, AlphaScaling):
        return inverse
    if isinstance(scaling, LongScaling):
        return inverse / jnp.asarray(scaling.divisors, jnp.float32)
    if isinstance(scaling, YarnScaling):
        return scaling.blend(inverse, theta)
    if isinstance(scaling, LinearScaling):
        return inverse / scaling.factor
    if isinstance(scaling, ProportionalScaling):
        turned = int(scaling.partial_rotary_factor * head_dim // 2)
        return jnp.where(jnp.arange(head_dim // 2) < turned, inverse / scaling.factor, 0.0)
    wavelength = 2 * math.pi / inverse
    original = scaling.original_max_position_embeddings
    low, high = original / scaling.low_freq_factor, original / scaling.high_freq_factor
    span = scaling.high_freq_factor - scaling.low_freq_factor or 1.0  # 0 for Llama 4: no frequency is blended
    smooth = (original / wavelength - scaling.low_freq_factor) / span
    blended = (1 - smooth) * inverse / scaling.factor + smooth * inverse
    return jnp.where(wavelength > low, inverse / scaling.factor, jnp.where(wavelength < high, inverse, blended))


def rope_table(
    positions: Int[Array, "b t"], frequencies: Float[Array, " half"], amplitude: float = 1.0
) -> tuple[Float[Array, "b t 1 half"], Float[Array, "b t 1 half"]]:
    """Computes cosines and sines of every position, float32, which broadcast over heads."""
    angles = positions[..., None, None].astype(jnp.float32) * frequencies[None, None, None]

    def table() -> tuple[Array, Array]:
        return jnp.cos(angles) * amplitude, jnp.sin(angles) * amplitude

    if default_implementation() != "pallas":
        # XLA for CPUs drops barriers before it fuses; it keeps a branch that it cannot foresee.
        return jax.lax.cond(positions.min() > -(2**30), table, lambda: (jnp.zeros_like(angles),) * 2)
    # The barrier keeps XLA from recomputing them in every layer, for every head.
    return jax.lax.optimization_barrier(table())


def scaled_rope_table(
    positions: Int[Array, "b t"], head_dim: int, theta: float, scaling: Scaling | None
) -> tuple[Float[Array, "b t 1 half"], Float[Array, "b t 1 half"]]:
    """Computes `rope_table` from the RoPE fields of a config.json."""
    return rope_table(positions, rope_frequencies(head_dim, theta, scaling), getattr(scaling, "amplitude", 1.0))


def apply_rope(
    x: Float[Array, "b t heads d"], table: tuple[Float[Array, "b t 1 half"], Float[Array, "b t 1 half"]]
) -> Float[Array, "b t heads d"]:
    """Rotates the two halves of each head (rotate-half layout), or of its first 2 * half numbers, in float32."""
    cos, sin = table
    half = cos.shape[-1]
    first, second = (x[..., part : part + half].astype(jnp.float32) for part in (0, half))
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([turned, x[..., 2 * half :]], axis=-1) if x.shape[-1] > 2 * half else turned


def halves(x: Float[Array, "b t heads d"]) -> Float[Array, "b t heads d"]:
    """Moves pairs of neighbours into the two halves of a head, for families whose RoPE rotates neighbours.

    Applied to queries and keys alike, it changes no product of the two.
    """
    return jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)


def rms_norm(x: Float[Array, "*batch h"], weight: Float[Array, " h"], eps: float) -> Float[Array, "*batch h"]:
    """Computes x / rms(x) * weight, with the variance in float32, as Llama does."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * jnp.expand_dims(weight.astype(x.dtype), range(x.ndim - 1))


def at_row(array: Float[Array, "b t ..."], row: Int[Array, " b"] | None) -> Float[Array, "b r ..."]:
    """Selects array[b, row[b]] and keeps the axis of rows; None keeps all rows."""
    return array if row is None else jax.vmap(lambda rows, i: rows[i][None])(array, row)


def embeddings(table: Float[Array, "v h"] | Quantised, tokens: Int[Array, "*batch"]) -> Float[Array, "*batch h"]:
    """Looks up table[tokens]."""
    if default_implementation() != "pallas":
        # The barrier keeps XLA for CPUs from converting a whole bfloat16 table before a loop that gathers from it.
        table, tokens = jax.lax.optimization_barrier((table, tokens))
    return table.rows(tokens) if isinstance(table, Quantised) else table[tokens]


class Attention(nnx.Module):
    """Projections of grouped-query attention; the caller supplies the attention.

    `qkv` [in, kv_heads * (group + 2) * head_dim] has each KV head next to its queries: one contraction, which the model
    axis splits between KV heads. It has two dimensions: a TPU would keep a copy of more in another layout.
    """

    def __init__(
        self, in_features: int, hidden: int, heads: int, kv_heads: int, head_dim: int, *, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.qkv = normal((in_features, (heads + 2 * kv_heads) * head_dim), dtype, rngs)
        self.o = normal((heads * head_dim, hidden), dtype, rngs)

    def fused(self, x: Float[Array, "b t h"]) -> Float[Array, "b t out"]:
        """Computes x @ qkv."""
        # The barrier keeps per-head layouts out of the product; else a TPU keeps a copy of the kernel in such a layout.
        return jax.lax.optimization_barrier(linear(x, self.qkv[...]))

    def heads(
        self, fused: Float[Array, "b t out"]
    ) -> tuple[Float[Array, "b t n d"], Float[Array, "b t k d"], Float[Array, "b t k d"]]:
        """Splits the projection into queries, keys and values by head."""
        b, t, _ = fused.shape
        qkv = fused.reshape(b, t, self.kv_heads, -1, self.head_dim)
        q, k, v = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
        return q.reshape(b, t, -1, q.shape[-1]), k, v

    def output(self, attended: Float[Array, "b t n d"]) -> Float[Array, "b t h"]:
        return linear(attended.reshape(*attended.shape[:2], -1), self.o[...])


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)); `gate` and `up` [hidden, intermediate], `down` [intermediate, hidden]."""

    def __init__(self, hidden: int, intermediate: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        self.gate = normal((hidden, intermediate), dtype, rngs)
        self.up = normal((hidden, intermediate), dtype, rngs)
        self.down = normal((intermediate, hidden), dtype, rngs)

    def __call__(self, x: Float[Array, "b t h"]) -> Float[Array, "b t h"]:
        return linear(gated_linear(x, self.gate[...], self.up[...]), self.down[...])


def normal(shape: tuple[int, ...], dtype: Any, rngs: nnx.Rngs, scale: float = 0.02) -> nnx.Param:
    """Draws a parameter from N(0, scale^2), Hugging Face's initialisation."""
    return nnx.Param((scale * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype))


def zeros(size: int, dtype: Any) -> nnx.Param:
    """Makes a bias of zeros."""
    return nnx.Param(jnp.zeros((size,), dtype))


def ones(size: int, dtype: Any) -> nnx.Param:
    """Makes a norm's weight of ones."""
    return nnx.Param(jnp.ones((size,), dtype))
