"""Multi-token prediction layers (MTP) of a target's own checkpoint as draft heads; NEXTN in SGLang.

A decoder layer of the target's family over fc(normed embedding of token t+1 and normed feature t, in the family's
order), then a norm. The first feature is the target's last hidden state after the final norm; later ones are the normed
outputs. Embeddings and LM head are the target's; a checkpoint's copies of them beside the layer are not read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from eagle3_jax.kernels.linear.api import linear
from eagle3_jax.models.cache import Cache, Pass
from eagle3_jax.models.checkpoint.table import Entry, kernel, plain
from eagle3_jax.models.drafts.head import Head, ShapeOfModel
from eagle3_jax.models.families import deepseek_v3, deepseek_v32, dense, glm4_moe, qwen2, qwen3_5
from eagle3_jax.models.families.gemma3 import offset_norm
from eagle3_jax.models.layers import at_row, normal, ones, rms_norm, zeros
from eagle3_jax.models.target import layer_pages, rotary
from eagle3_jax.models.target_config import ModelConfig, final_boundary


class MtpHead(Head):
    """An MTP layer as a head; `fc` [2H, H], the layer shaped as the target's.

    Attributes:
        counted_by: fields of config.json that count such layers.
        feature_first: the order of `fc`'s input; else the embedding comes first.
        zeroes_first: whether the token of a text's first pair is zeroed, as in engines.
        names: of the tensors of both norms of `fc`'s input, of `fc`, and of the norm behind the layer.
    """

    block_type: ClassVar[Callable[..., Any]]  # as `TargetModel.block`
    rotary: ClassVar[Callable[..., Any]] = staticmethod(rotary)  # (config, positions) -> the block's `Rope`
    counted_by: ClassVar[tuple[str, ...]] = ("num_nextn_predict_layers",)
    feature_first: ClassVar[bool] = False
    zeroes_first: ClassVar[bool] = False
    names: ClassVar[tuple[str, str, str, str]]
    config: ShapeOfModel

    def __init__(self, target: ModelConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs) -> None:
        h = target.hidden_size
        self.config = ShapeOfModel(target, aux_layers=(final_boundary(target.num_hidden_layers),))
        self.token_norm, self.hidden_norm = ones(h, dtype), ones(h, dtype)
        self.fc = normal((2 * h, h), dtype, rngs)
        self.block = self.block_type(target, target.num_hidden_layers, dtype=dtype, rngs=rngs)
        self.norm = ones(h, dtype)
        self.lm_head = normal((target.vocab_size, h), dtype, rngs)

    @classmethod
    def layer(cls, config: Any) -> tuple[dict[str, Entry], str]:
        """Maps parameter paths in `block` to tensors; and the prefix of the names of the other tensors."""
        raise NotImplementedError

    @classmethod
    def table(cls, config: Any) -> dict[str, Entry]:
        """Maps parameter paths in the head to tensors of the target's checkpoint; the LM head is the target's."""
        h, (layer, prefix) = config.hidden_size, cls.layer(config)
        token_norm, hidden_norm, fc, norm = (f"{prefix}{name}.weight" for name in cls.names)
        return {f"block/{path}": entry for path, entry in layer.items()} | {
            "token_norm": plain(token_norm, h),
            "hidden_norm": plain(hidden_norm, h),
            "fc": kernel(fc, h, 2 * h),
            "norm": plain(norm, h),
        }

    def empty_pages(self, pages: int, page_size: int) -> Cache:
        """See `Head`; the layer's cache is of the kind of the target's."""
        model = self.config.model
        return Cache((layer_pages(model, model.num_hidden_layers, pages, page_size, self.dtype),))

    def normed(self, x: Float[Array, "b t h"], weight: nnx.Param) -> Float[Array, "b t h"]:
        return rms_norm(x, weight[...], self.config.model.rms_norm_eps)

    def __call__(
        self,
        embeds: Float[Array, "b t h"],
        features: Float[Array, "b t h"],
        this: Pass,
        attend: Callable[[Array, Array, Array], Array],
    ) -> Float[Array, "b r h"]:
        if self.zeroes_first:
            embeds = jnp.where(this.positions[..., None] == 0, 0, embeds)
        both = self.normed(embeds, self.token_norm), self.normed(features, self.hidden_norm)
        joined = jnp.concatenate(both[::-1] if self.feature_first else both, axis=-1)
        x = self.block(linear(joined, self.fc[...]), self.rotary(self.config.model, this.positions), attend)
        return self.normed(at_row(x, this.row), self.norm)


class MimoMtp(MtpHead):
    """MiMo's, a Qwen 2 layer (vLLM's mimo_mtp.py).

    Engines differ in the feature. It is the target's state after its final norm here, as in SGLang; Xiaomi's code for
    vLLM, and vLLM itself, use the state before that norm.
    """

    block_type = qwen2.Block
    feature_first = zeroes_first = True
    names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")

    @classmethod
    def layer(cls, config: qwen2.MimoConfig) -> tuple[dict[str, Entry], str]:
        return _first_layer(qwen2.table(config), prefix := f"{qwen2.MTP}0."), prefix


class DeepseekMtp(MtpHead):
    """DeepSeek-V3's (https://arxiv.org/abs/2412.19437, section 2.2; SGLang's deepseek_nextn.py).

    As in SGLang and in transformers' MtpLayer, the normed output recurs, and the first pair is read as any other.
    vLLM's deepseek_mtp.py and glm4_moe_mtp.py zero the first token; the normed output recurs in 0.32.0, the un-normed
    one in 0.22.0.
    """

    block_type = deepseek_v3.Block
    names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    layer_table: ClassVar[Callable[[Any, int], dict[str, Entry]]] = staticmethod(deepseek_v3.layer_table)

    @classmethod
    def layer(cls, config: Any) -> tuple[dict[str, Entry], str]:
        number = config.num_hidden_layers
        return cls.layer_table(config, number), f"model.layers.{number}."


class GlmMtp(DeepseekMtp):
    """GLM-4.5's (SGLang's glm4_moe_nextn.py)."""

    block_type = glm4_moe.Block
    layer_table = staticmethod(glm4_moe.layer_table)
    rotary = staticmethod(dense.ropes)


class DeepseekV32Mtp(DeepseekMtp):
    """DeepSeek-V3.2's and GLM-5's, whose layer has an indexer of its own; in training it attends to all."""

    block_type = deepseek_v32.Block
    layer_table = staticmethod(deepseek_v32.layer_table)


class Qwen35Mtp(MtpHead):
    """Qwen 3.5's and Qwen3-Next's, a layer of full attention; norms multiply by 1 + the stored weight.

    The layer has experts where the target's first one has them. All is as in vLLM 0.32.0 (qwen3_5_mtp.py,
    qwen3_next_mtp.py) and SGLang 0.5.23.
    """

    block_type: ClassVar[Any] = staticmethod(lambda target, layer, **given: qwen3_5.Block(_alone(target), 0, **given))
    counted_by = (*MtpHead.counted_by, "mtp_num_hidden_layers")
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")

    def __init__(self, target: ModelConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs) -> None:
        super().__init__(target, dtype=dtype, rngs=rngs)
        self.token_norm, self.hidden_norm, self.norm = (zeros(target.hidden_size, dtype) for _ in range(3))

    @classmethod
    def layer(cls, config: qwen3_5.Qwen35Config) -> tuple[dict[str, Entry], str]:
        return _first_layer(qwen3_5.table(_alone(config)), f"{qwen3_5.MTP}layers.0."), qwen3_5.MTP

    def normed(self, x: Float[Array, "b t h"], weight: nnx.Param) -> Float[Array, "b t h"]:
        """See `MtpHead`; `weight` is an offset from 1."""
        return offset_norm(x, weight[...], self.config.model.rms_norm_eps)


# Family -> its head.
HEADS: dict[type[ModelConfig], type[MtpHead]] = {
    qwen2.MimoConfig: MimoMtp,
    deepseek_v3.DeepseekV3Config: DeepseekMtp,
    glm4_moe.Glm4MoeConfig: GlmMtp,
    **dict.fromkeys((deepseek_v32.DeepseekV32Config, deepseek_v32.GlmMoeDsaConfig), DeepseekV32Mtp),
    **dict.fromkeys((qwen3_5.Qwen35Config, qwen3_5.Qwen35MoeConfig, qwen3_5.Qwen3NextConfig), Qwen35Mtp),
}


def _alone(config: qwen3_5.Qwen35Config) -> qwen3_5.Qwen35Config:
    return dataclasses.replace(config, num_hidden_layers=1, layer_types=(qwen3_5.FULL,))


def _first_layer(table: Mapping[str, Entry], prefix: str) -> dict[str, Entry]:
    """Takes the entries of a target's first layer as `MtpHead.block`'s, with another prefix of their tensors."""

    def moved(entry: Entry) -> Entry:
        tensors = {name.replace("model.layers.0.", prefix, 1): shape for name, shape in entry.tensors.items()}
        return dataclasses.replace(entry, tensors=tensors, other=entry.other and moved(entry.other))

    layer = {path: moved(entry) for path, entry in table.items() if path.startswith("blocks/0/")}
    return {path.removeprefix("blocks/0/"): entry for path, entry in layer.items()}
