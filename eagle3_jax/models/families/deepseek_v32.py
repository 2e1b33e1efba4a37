"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 whose tokens attend to `index_topk` positions of those that they see.

An indexer of its own heads scores all of them, and the best are attended (https://arxiv.org/abs/2512.02556, section
2.1). A cache of no more slots has nothing to choose: there attention is DeepSeek-V3's, and the scores are not computed.
The published kernels rotate queries and keys of the indexer by Hadamard's matrix and round them to FP8; the first
changes no score, the second is left out, as in transformers. The MTP layers are in `drafts.mtp`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from eagle3_jax.kernels.linear.api import linear
from eagle3_jax.kernels.tree_attention.chosen import Index
from eagle3_jax.models.cache import LayerPass
from eagle3_jax.models.checkpoint.table import Entry, kernel, plain
from eagle3_jax.models.families import deepseek_v3, llama
from eagle3_jax.models.families.deepseek_v3 import DeepseekV3Config
from eagle3_jax.models.layers import apply_rope, halves, normal, ones, zeros
from eagle3_jax.models.target import Attend, Rope, TargetModel

_KINDS = {"F": "full", "S": "shared"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekV32Config(DeepseekV3Config):
    """Fields of `DeepseekV3Config`, with those of its indexers.

    Attributes:
        index_topk: positions that a token attends to.
        index_n_heads, index_head_dim: heads of an indexer, and their width.
        indexer_types: for each layer "full", or "shared" for one that attends to the choice of the last full layer.
    """

    architecture: ClassVar[str] = "DeepseekV32ForCausalLM"
    model_type: ClassVar[str] = "deepseek_v32"
    index_neighbours: ClassVar[bool] = False  # whether RoPE rotates neighbours in the indexer too
    supported: ClassVar[dict[str, Any]] = {
        **DeepseekV3Config.supported,
        "rope_interleave": True,
        "indexer_rope_interleave": False,
    }
    _own: ClassVar[dict[str, Any]] = {
        **DeepseekV3Config._own,
        **{"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128},
    }
    defaults: ClassVar[dict[str, Any]] = {**DeepseekV3Config.defaults, **_own, "max_position_embeddings": 163840}

    index_topk: int
    index_n_heads: int
    index_head_dim: int
    indexer_types: tuple[str, ...]

    @classmethod
    def own(cls, values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
        layers = values.get("num_hidden_layers", 0)
        if values["q_lora_rank"] is None:
            problems.append("q_lora_rank: got None, expected a width: the indexer reads the queries' latent")
        types = values.get("indexer_types") or values.get("index_topk_pattern")
        if types is None:
            every, offset = values.get("index_topk_freq") or 1, values.get("index_skip_topk_offset") or 2
            types = ["F" if max(i - offset + 1, 0) % every == 0 else "S" for i in range(layers)]
        types = tuple(_KINDS.get(kind, kind) for kind in types)[:layers]
        if len(types) < layers or {*types} - {*_KINDS.values()} or types[:1] == ("shared",):
            wanted = "'full' or 'shared' for each of num_hidden_layers, the first 'full'"
            problems.append(f"indexer_types: got {types}, expected {wanted}")
        return super().own(values, problems) | {"indexer_types": types}

    def chooser(self, layer: int) -> int:
        """Returns the layer whose indexer chooses for a layer; an MTP layer has its own."""
        kinds = (*self.indexer_types[: layer + 1], "full")
        return max(i for i in range(layer + 1) if kinds[i] == "full")

    def index_width(self, layer: int) -> int:
        return self.index_head_dim if self.chooser(layer) == layer else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlmMoeDsaConfig(DeepseekV32Config):
    """Fields of `DeepseekV32Config`."""

    architecture: ClassVar[str] = "GlmMoeDsaForCausalLM"
    model_type: ClassVar[str] = "glm_moe_dsa"
    index_neighbours: ClassVar[bool] = True
    supported: ClassVar[dict[str, Any]] = {**DeepseekV32Config.supported, "indexer_rope_interleave": True}
    defaults: ClassVar[dict[str, Any]] = {
        **DeepseekV32Config.defaults,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_group": 1,
        "topk_group": 1,
        "index_n_heads": 32,
    }


class IndexedAttention(deepseek_v3.LatentAttention):
    """Latent attention to what the layer's own indexer chooses, or an earlier layer's.

    The indexer's heads have queries `index_q` [q_rank, h * d] of the queries' latent and weights `index_weights` [H, h]
    of the hidden state, over one key `index_k` [H, d] with the layer norm `index_norm` and `index_bias` [d].
    """

    def __init__(self, config: DeepseekV32Config, layer: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        super().__init__(config, dtype=dtype, rngs=rngs)
        c, heads, width = config, config.index_n_heads, config.index_head_dim
        self.count, self.rotated, self.index_neighbours = c.index_topk, c.qk_rope_head_dim, c.index_neighbours
        self.chooses, self.index_scale = bool(c.index_width(layer)), (heads * width) ** -0.5
        if self.chooses:
            self.index_q = normal((c.q_lora_rank or 0, heads * width), dtype, rngs)
            self.index_k = normal((c.hidden_size, width), dtype, rngs)
            self.index_norm, self.index_bias = ones(width, dtype), zeros(width, dtype)
            self.index_weights = normal((c.hidden_size, heads), dtype, rngs)

    def attended(self, x: Array, latent: Array, rope: Rope, attend: Attend, q: Array, key: Array) -> Array:
        if not isinstance(attend, LayerPass):  # in a head's training a token attends to all
            return attend(q, key)
        if self.chooses:
            attend.choose(self.index(x, latent, rope), self.count)
        return attend(q, key, chosen=attend.entries)

    def index(self, x: Float[Array, "b t h"], latent: Float[Array, "b t r"], rope: Rope) -> Index:
        normed = jax.nn.standardize(linear(x, self.index_k[...]).astype(jnp.float32), epsilon=1e-6)
        key = (normed * self.index_norm[...][None, None] + self.index_bias[...][None, None]).astype(x.dtype)
        queries = linear(latent, self.index_q[...]).reshape(*x.shape[:2], -1, key.shape[-1])
        weights = linear(x.astype(jnp.float32), self.index_weights[...]) * self.index_scale
        return Index(self.index_turned(queries, rope), weights, self.index_turned(key[:, :, None], rope))

    def index_turned(self, x: Float[Array, "b t n d"], rope: Rope) -> Float[Array, "b t n d"]:
        if self.index_neighbours:
            x = jnp.concatenate([halves(x[..., : self.rotated]), x[..., self.rotated :]], axis=-1)
        return apply_rope(x, rope)


class Block(deepseek_v3.Block):
    """One decoder layer."""

    def __init__(self, config: DeepseekV32Config, layer: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        super().__init__(config, layer, dtype=dtype, rngs=rngs)
        self.attention = IndexedAttention(config, layer, dtype=dtype, rngs=rngs)


class DeepseekV32(TargetModel):
    block = Block


def unused(config: DeepseekV32Config) -> tuple[str, ...]:
    """Prefixes of the MTP layers, and of indexers that a checkpoint ships for layers which share."""
    shared = (i for i in range(config.num_hidden_layers) if not config.index_width(i))
    return (*deepseek_v3.unused(config), *(f"model.layers.{i}.self_attn.indexer." for i in shared))


def table(config: DeepseekV32Config) -> dict[str, Entry]:
    """Maps parameter paths to Hugging Face tensors."""
    return llama.by_layer(config, layer_table)


def layer_table(config: DeepseekV32Config, layer: int) -> dict[str, Entry]:
    """Maps parameter paths in `Block` to the tensors of one layer."""
    c, source = config, f"model.layers.{layer}.self_attn.indexer"
    entries = deepseek_v3.layer_table(c, layer)
    if not c.index_width(layer):
        return entries
    quantised = {
        "attention/index_q": kernel(f"{source}.wq_b.weight", c.index_n_heads * c.index_head_dim, c.q_lora_rank or 0),
        "attention/index_k": kernel(f"{source}.wk.weight", c.index_head_dim, c.hidden_size),
    }
    entries |= deepseek_v3.scaled(c, quantised)
    entries["attention/index_norm"] = plain(f"{source}.k_norm.weight", c.index_head_dim)
    entries["attention/index_bias"] = plain(f"{source}.k_norm.bias", c.index_head_dim)
    entries["attention/index_weights"] = kernel(f"{source}.weights_proj.weight", c.index_n_heads, c.hidden_size)
    return entries
