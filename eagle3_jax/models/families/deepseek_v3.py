"""DeepSeek-V3 and R1: multi-head latent attention (MLA), grouped experts and shared ones.

The cache holds one row for a token, its latent and its rotated key, which all heads share. A head's keys and values are
projections of the latent. Queries are therefore projected into the latent's space, and attended latents out of it
("absorbed", DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1.2). The MTP layers of its checkpoints are in
`drafts.mtp`. Checkpoints hold weights in FP8 (one factor per 128 x 128) or unquantised.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from eagle3_jax.kernels.contraction import contract
from eagle3_jax.kernels.linear.api import linear
from eagle3_jax.models.checkpoint.quantised import BLOCK, BLOCK_FP8, with_scales
from eagle3_jax.models.checkpoint.table import Entry, kernel, plain, stacked
from eagle3_jax.models.experts import Experts
from eagle3_jax.models.families import llama
from eagle3_jax.models.layers import SwiGLU, YarnScaling, apply_rope, halves, normal, ones, rms_norm, zeros
from eagle3_jax.models.rope import SCALINGS, Scalings
from eagle3_jax.models.target import Attend, Rope, TargetModel
from eagle3_jax.models.target_config import ModelConfig

_LATENT_EPS = 1e-6  # epsilon of the norms inside attention, independent of `rms_norm_eps`


@dataclasses.dataclass(frozen=True)
class DeepseekYarnScaling(YarnScaling):
    """YaRN that also scales attention scores, by `temperature`; cosines and sines are scaled by `amplitude`."""

    mscale: float | None = None
    mscale_all_dim: float | None = None

    @property
    def amplitude(self) -> float:
        if self.attention_factor is None and self.mscale and self.mscale_all_dim:
            return self._growth(self.mscale) / self._growth(self.mscale_all_dim)
        return super().amplitude

    @property
    def temperature(self) -> float:
        return self._growth(self.mscale_all_dim or 0.0) ** 2

    def _growth(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(max(self.factor, 1.0)) + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedExpertsConfig(ModelConfig):
    """Fields of `ModelConfig`, with `intermediate_size` of the layers without experts; `defaults` has all own fields.

    Attributes:
        n_group, topk_group: experts are chosen from the best `topk_group` of `n_group` groups.
        n_shared_experts: shared experts, computed as one of that many times the size.
        first_k_dense_replace: number of first layers without experts.
        num_nextn_predict_layers: MTP layers in the checkpoint, after the target's own.
    """

    # Facts of a family: the function of scores; how a checkpoint names the mixture, its bias and experts' matrices, and
    # whether the bias is a row of a matrix.
    scores: ClassVar[Any] = staticmethod(jax.nn.sigmoid)
    mixture: ClassVar[str] = "mlp"
    bias: ClassVar[str] = "gate.e_score_correction_bias"
    bias_rows: ClassVar[tuple[int, ...]] = ()
    matrices: ClassVar[tuple[str, str, str]] = ("gate_proj", "up_proj", "down_proj")

    n_routed_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    n_shared_experts: int
    moe_intermediate_size: int
    first_k_dense_replace: int
    # Not compared: a written model has no MTP layers.
    num_nextn_predict_layers: int = dataclasses.field(default=0, compare=False)

    @classmethod
    def own(cls, values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
        """See `ModelConfig`."""
        own = dataclasses.fields(GroupedExpertsConfig)[len(dataclasses.fields(ModelConfig)) : -1]
        found = {field.name: values[field.name] for field in own}
        count, groups, best = found["n_routed_experts"], found["n_group"], found["topk_group"]
        if count % groups or count < 2 * groups:
            problems.append(f"n_group: got {groups}, expected to divide {count} experts into groups of two or more")
        elif not 1 <= best <= groups:
            problems.append(f"topk_group: got {best}, expected 1 to n_group = {groups}")
        elif not 1 <= found["num_experts_per_tok"] <= count // groups * best:
            among = f"1 to {count // groups * best}, the experts in {best} groups"
            problems.append(f"num_experts_per_tok: got {found['num_experts_per_tok']}, expected {among}")
        found |= {
            "routed_scaling_factor": float(found["routed_scaling_factor"]),
            # MTP layers have experts.
            "first_k_dense_replace": min(found["first_k_dense_replace"], values.get("num_hidden_layers", 0)),
            "num_nextn_predict_layers": values.get("num_nextn_predict_layers", values.get("num_mtp_layers")) or 0,
        }
        return super().own(values, problems) | found

    def to_hf(self) -> dict[str, Any]:
        """See `ModelConfig`."""
        return super().to_hf() | {"num_nextn_predict_layers": 0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(GroupedExpertsConfig):
    """Fields of `GroupedExpertsConfig`, with those of its attention.

    `num_key_value_heads` (1) and `head_dim` (`kv_lora_rank + qk_rope_head_dim`) are those of the cache.

    Attributes:
        q_lora_rank: width of the queries' latent; None: queries are projected from the hidden state.
        kv_lora_rank: width of the cached latent.
        qk_nope_head_dim, qk_rope_head_dim: the parts of a head's query and key without RoPE and with it.
        rope_interleave: RoPE rotates neighbouring dimensions, not halves.
        fp8: whether the checkpoint holds the layers' matrices in FP8.
    """

    architecture: ClassVar[str] = "DeepseekV3ForCausalLM"
    model_type: ClassVar[str] = "deepseek_v3"
    supported: ClassVar[dict[str, Any]] = {
        "hidden_act": "silu",
        "attention_bias": False,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    }
    scalings: ClassVar[Scalings] = {**SCALINGS, "yarn": DeepseekYarnScaling}
    latent_cache: ClassVar[bool] = True
    _own: ClassVar[dict[str, Any]] = {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_interleave": True,
    }
    defaults: ClassVar[dict[str, Any]] = {
        **_own,
        "max_position_embeddings": 4096,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
    }

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool
    fp8: bool

    @classmethod
    def from_hf(cls, values: dict[str, Any], aux_layers: tuple[int, ...] | None = None) -> ModelConfig:
        config: Any = super().from_hf(values, aux_layers)
        width = config.kv_lora_rank + config.qk_rope_head_dim
        return dataclasses.replace(config, num_key_value_heads=1, head_dim=width)

    @classmethod
    def own(cls, values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
        heads, kv_heads = values.get("num_attention_heads"), values.get("num_key_value_heads")
        if kv_heads not in (None, heads):
            problems.append(f"num_key_value_heads: got {kv_heads}, expected num_attention_heads = {heads}")
        method = (values.get("quantization_config") or {}).get("quant_method")
        return super().own(values, problems) | {name: values[name] for name in cls._own} | {"fp8": method == "fp8"}

    @property
    def rope_dim(self) -> int:
        return self.qk_rope_head_dim

    def to_hf(self) -> dict[str, Any]:
        values = super().to_hf()
        del values["head_dim"]
        quantised = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
        method = {"quantization_config": quantised} if values.pop("fp8") else {}
        return values | {"num_key_value_heads": self.num_attention_heads} | method


class LatentAttention(nnx.Module):
    """Multi-head latent attention, n query heads over one KV head [latent, rotated key].

    `q` [H, n * (nope + rope)], or through a latent: `q_down` [H, q_rank], `q_norm` and `q_up`; `kv_down` [H, kv_rank +
    rope] and `kv_norm` [kv_rank]; `kv_up` [n, nope + v, kv_rank], each head's keys and values from the latent; `o`
    [n * v, H].
    """

    def __init__(self, config: DeepseekV3Config, *, dtype: Any, rngs: nnx.Rngs) -> None:
        c = config
        heads, plain_dim, width = c.num_attention_heads, c.qk_nope_head_dim, c.qk_nope_head_dim + c.qk_rope_head_dim
        self.heads, self.plain_dim, self.rank, self.neighbours = heads, plain_dim, c.kv_lora_rank, c.rope_interleave
        # `attend` divides scores by the root of the width of cached keys, not of a head's own keys.
        self.scale = (c.head_dim / width) ** 0.5
        if isinstance(c.rope_scaling, DeepseekYarnScaling):
            self.scale *= c.rope_scaling.temperature
        if c.q_lora_rank is None:
            self.q = normal((c.hidden_size, heads * width), dtype, rngs)
        else:
            self.q_down = normal((c.hidden_size, c.q_lora_rank), dtype, rngs)
            self.q_norm = ones(c.q_lora_rank, dtype)
            self.q_up = normal((c.q_lora_rank, heads * width), dtype, rngs)
        self.kv_down = normal((c.hidden_size, c.head_dim), dtype, rngs)
        self.kv_norm = ones(c.kv_lora_rank, dtype)
        self.kv_up = normal((heads, plain_dim + c.v_head_dim, c.kv_lora_rank), dtype, rngs)
        self.o = normal((heads * c.v_head_dim, c.hidden_size), dtype, rngs)

    def __call__(self, x: Float[Array, "b t h"], rope: Rope, attend: Attend) -> Float[Array, "b t h"]:
        up, rank = self.kv_up[...], self.rank
        given = self.query_latent(x)
        q, shared = self.queries(given), linear(x, self.kv_down[...])[:, :, None]
        # Heads come first: for `btnr` of few rows XLA on CPUs with AVX512_BF16 emits a product that it does not
        # support in bfloat16 ("Unsupported element type for DotThunk"; jax 0.10.1 to 0.12.0.1).
        within = jnp.moveaxis(contract("btnd,ndr->nbtr", q[..., : self.plain_dim], up[:, : self.plain_dim]), 0, 2)
        q = jnp.concatenate([within, self.turned(q[..., self.plain_dim :], rope).astype(jnp.float32)], axis=-1)
        latent = rms_norm(shared[..., :rank], self.kv_norm[...], _LATENT_EPS)
        key = jnp.concatenate([latent, self.turned(shared[..., rank:], rope)], axis=-1)
        attended = self.attended(x, given, rope, attend, (q * self.scale).astype(x.dtype), key)[..., :rank]
        attended = contract("btnr,nvr->btnv", attended, up[:, self.plain_dim :]).astype(x.dtype)
        return linear(attended.reshape(*x.shape[:2], -1), self.o[...])

    def attended(self, x: Array, latent: Array, rope: Rope, attend: Attend, q: Array, key: Array) -> Array:
        """Attends to the rows of latents and rotated keys that the tokens see."""
        return attend(q, key)

    def query_latent(self, x: Float[Array, "b t h"]) -> Float[Array, "b t r"]:
        """Returns what queries are projected from."""
        return x if hasattr(self, "q") else rms_norm(linear(x, self.q_down[...]), self.q_norm[...], _LATENT_EPS)

    def queries(self, latent: Float[Array, "b t r"]) -> Float[Array, "b t n d"]:
        q = linear(latent, (self.q if hasattr(self, "q") else self.q_up)[...])
        # The barrier keeps per-head layouts out of the product, as in `Attention.fused`.
        return jax.lax.optimization_barrier(q).reshape(*latent.shape[:2], self.heads, -1)

    def turned(self, x: Float[Array, "b t n d"], rope: Rope) -> Float[Array, "b t n d"]:
        return apply_rope(halves(x) if self.neighbours else x, rope)


class SparseMLP(nnx.Module):
    """Routed experts and perhaps a shared one; `router` [hidden, experts], `router_bias` [experts].

    A token's experts are the best of its best groups, by scores plus the bias. A group's score is the sum of
    its two best experts'. The weights of the chosen experts come from the scores without the bias.
    """

    def __init__(self, config: GroupedExpertsConfig, *, dtype: Any, rngs: nnx.Rngs) -> None:
        c = config
        h, f, count = c.hidden_size, c.moe_intermediate_size, c.n_routed_experts
        self.chosen, self.groups, self.best_groups = c.num_experts_per_tok, c.n_group, c.topk_group
        self.normalised, self.scale, self.scores = c.norm_topk_prob, c.routed_scaling_factor, c.scores
        self.router = normal((h, count), dtype, rngs)
        self.router_bias = zeros(count, jnp.float32)  # bfloat16 is too coarse to tell experts apart
        self.experts = Experts(h, f, count, dtype=dtype, rngs=rngs)
        if c.n_shared_experts:
            self.shared = SwiGLU(h, f * c.n_shared_experts, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b t h"]) -> Float[Array, "b t h"]:
        weights, chosen = self.choice(self.scores(linear(x.astype(jnp.float32), self.router[...])))
        routed = self.experts(x, chosen, weights)
        return self.shared(x) + routed if hasattr(self, "shared") else routed

    def choice(self, scores: Float32[Array, "b t e"]) -> tuple[Float32[Array, "b t k"], Int[Array, "b t k"]]:
        """Chooses each token's experts. Returns their weights and indices."""
        biased = scores + self.router_bias[...][None, None]
        grouped = biased.reshape(*scores.shape[:2], self.groups, -1)
        _, best = jax.lax.top_k(jax.lax.top_k(grouped, 2)[0].sum(axis=-1), self.best_groups)
        among = jax.nn.one_hot(best, self.groups, dtype=bool).any(axis=2)
        _, chosen = jax.lax.top_k(jnp.where(among[..., None], grouped, -jnp.inf).reshape(scores.shape), self.chosen)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if self.normalised:
            weights /= weights.sum(axis=-1, keepdims=True) + 1e-20
        return weights * self.scale, chosen


class Block(nnx.Module):
    """One decoder layer."""

    def __init__(self, config: DeepseekV3Config, layer: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        c = config
        self.eps = c.rms_norm_eps
        self.input_norm = ones(c.hidden_size, dtype)
        self.attention = LatentAttention(c, dtype=dtype, rngs=rngs)
        self.post_norm = ones(c.hidden_size, dtype)
        if layer < c.first_k_dense_replace:
            self.mlp = SwiGLU(c.hidden_size, c.intermediate_size, dtype=dtype, rngs=rngs)
        else:
            self.mlp = SparseMLP(c, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b t h"], rope: Rope, attend: Attend) -> Float[Array, "b t h"]:
        x = x + self.attention(rms_norm(x, self.input_norm[...], self.eps), rope, attend)
        return x + self.mlp(rms_norm(x, self.post_norm[...], self.eps))


class DeepseekV3(TargetModel):
    block = Block


def unused(config: GroupedExpertsConfig) -> tuple[str, ...]:
    """Prefixes of the MTP layers, which follow the target's own."""
    own = config.num_hidden_layers
    return tuple(f"model.layers.{i}." for i in range(own, own + config.num_nextn_predict_layers))


def table(config: DeepseekV3Config) -> dict[str, Entry]:
    """Maps parameter paths to Hugging Face tensors."""
    return llama.by_layer(config, layer_table)


def layer_table(config: DeepseekV3Config, layer: int) -> dict[str, Entry]:
    """Maps parameter paths in `Block` to the tensors of one layer."""
    c, source = config, f"model.layers.{layer}"
    h, heads, attention = c.hidden_size, c.num_attention_heads, f"{source}.self_attn"
    queries = heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
    entries = {
        "input_norm": plain(f"{source}.input_layernorm.weight", h),
        "post_norm": plain(f"{source}.post_attention_layernorm.weight", h),
        "attention/kv_down": kernel(f"{attention}.kv_a_proj_with_mqa.weight", c.head_dim, h),
        "attention/kv_norm": plain(f"{attention}.kv_a_layernorm.weight", c.kv_lora_rank),
        "attention/kv_up": _by_head(
            f"{attention}.kv_b_proj.weight", heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank
        ),
        "attention/o": kernel(f"{attention}.o_proj.weight", h, heads * c.v_head_dim),
    }
    if c.q_lora_rank is None:
        entries["attention/q"] = kernel(f"{attention}.q_proj.weight", queries, h)
    else:
        entries["attention/q_down"] = kernel(f"{attention}.q_a_proj.weight", c.q_lora_rank, h)
        entries["attention/q_norm"] = plain(f"{attention}.q_a_layernorm.weight", c.q_lora_rank)
        entries["attention/q_up"] = kernel(f"{attention}.q_b_proj.weight", queries, c.q_lora_rank)
    entries |= mlp_table(c, layer)
    return scaled(c, entries)


def scaled(config: DeepseekV3Config, entries: dict[str, Entry]) -> dict[str, Entry]:
    """Gives the matrices of a layer, but its router, their factors if the checkpoint holds FP8."""
    if not config.fp8:
        return entries
    matrices = {path: x for path, x in entries.items() if x.dimensions > 1 and path != "mlp/router"}
    return entries | {path: with_scales(x, BLOCK_FP8, {}) for path, x in matrices.items()}


def mlp_table(config: GroupedExpertsConfig, layer: int) -> dict[str, Entry]:
    """Maps the parameter paths of a layer's MLP, with experts or without."""
    c, h, mlp = config, config.hidden_size, f"model.layers.{layer}.mlp"
    entries: dict[str, Entry] = {}
    dense, width = "mlp", c.intermediate_size
    if layer >= c.first_k_dense_replace:
        mlp, count = f"model.layers.{layer}.{c.mixture}", c.n_routed_experts
        entries["mlp/router"] = kernel(f"{mlp}.gate.weight", count, h)
        entries["mlp/router_bias"] = Entry(
            {f"{mlp}.{c.bias}": (*c.bias_rows, count)},
            lambda index, x: x[:].reshape(-1)[index],
            lambda x: (x.reshape(*c.bias_rows, -1),),
            1,
        )
        for (name, shape), theirs in zip(_projections(h, c.moe_intermediate_size).items(), c.matrices, strict=True):
            names = [f"{mlp}.experts.{j}.{theirs}.weight" for j in range(count)]
            entries[f"mlp/experts/expert_{name}"] = stacked(names, *shape)
        if not c.n_shared_experts:
            return entries
        dense, mlp, width = "mlp/shared", f"{mlp}.shared_experts", c.moe_intermediate_size * c.n_shared_experts
    for name, shape in _projections(h, width).items():
        entries[f"{dense}/{name}"] = kernel(f"{mlp}.{name}_proj.weight", *shape)
    return entries


def _projections(hidden: int, intermediate: int) -> dict[str, tuple[int, int]]:
    return {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}


def _by_head(name: str, heads: int, rows: int, columns: int) -> Entry:
    """Splits heads: [heads * rows, columns] on disk, [heads, rows, columns] in memory."""

    def part(index: tuple[slice, slice, slice], x: Any) -> np.ndarray:
        head, row, column = index
        start, stop, _ = head.indices(heads)
        block = x[start * rows : stop * rows, column]
        return block.reshape(stop - start, rows, block.shape[-1])[:, row]

    return Entry({name: (heads * rows, columns)}, part, lambda x: (x.reshape(-1, columns),), 3)
