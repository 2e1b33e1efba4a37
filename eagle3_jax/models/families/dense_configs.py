"""Dense families that differ from Llama by a few facts, each a config class.

Sources: transformers' models/mistral, mixtral, ministral3, phi3, smollm3, olmo2, olmo3, granite, granitemoehybrid,
seed_oss, exaone4, ernie4_5 and hunyuan_v1_dense.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from eagle3_jax.models.families.dense import MULTIPLIERS, DenseConfig, GrowingYarnScaling
from eagle3_jax.models.layers import LongScaling
from eagle3_jax.models.rope import ALPHA, LONG, SCALINGS, Scalings
from eagle3_jax.models.target_config import FULL, LOCAL, ModelConfig


class MistralConfig(DenseConfig):
    """Mistral: Llama, whose layers may all be local."""

    architecture, model_type, windows = "MistralForCausalLM", "mistral", True
    defaults: ClassVar[dict[str, Any]] = {
        "sliding_window": 4096,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtralConfig(MistralConfig):
    """Mixtral: Mistral with experts in all layers, of `intermediate_size`."""

    architecture, model_type = "MixtralForCausalLM", "mixtral"
    experts, norm_topk_prob = ("w1", "w3", "w2"), True
    defaults = MistralConfig.defaults | {"sliding_window": None, "rms_norm_eps": 1e-5, "rope_theta": 1e6}

    num_experts: int
    num_experts_per_tok: int

    @classmethod
    def own(cls, values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
        found = {"num_experts": values.get("num_local_experts", 8), "num_experts_per_tok": 2}
        return super().own(values, problems) | found | {name: values[name] for name in found if name in values}

    @property
    def moe_intermediate_size(self) -> int:
        return self.intermediate_size

    def to_hf(self) -> dict[str, Any]:
        values = super().to_hf()
        return values | {"num_local_experts": values.pop("num_experts")}


class Ministral3Config(DenseConfig):
    """Ministral 3: Mistral with YaRN, and with queries that grow with their positions."""

    architecture, model_type, windows = "Ministral3ForCausalLM", "ministral3", True
    scalings: ClassVar[Scalings] = {"yarn": GrowingYarnScaling}
    defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    }

    @classmethod
    def from_hf(cls, values: dict[str, Any], aux_layers: tuple[int, ...] | None = None) -> ModelConfig:
        if not (values.get("rope_parameters") or values.get("rope_scaling")):
            yarn = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384}
            values = values | {"rope_scaling": yarn | {"attention_factor": 1.0, "llama_4_scaling_beta": 0.1}}
        return super().from_hf(values, aux_layers)


class Phi3Config(DenseConfig):
    """Phi-3, 3.5 and Phi-4-mini: LongRoPE, over a part of each head in Phi-4-mini, and fused projections."""

    architecture, model_type, windows = "Phi3ForCausalLM", "phi3", True
    rotary_share, scalings = 1.0, LONG
    fused_qkv, fused_mlp = True, ("mlp.gate_up_proj", "mlp.down_proj")
    defaults: ClassVar[dict[str, Any]] = {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }

    @classmethod
    def from_hf(cls, values: dict[str, Any], aux_layers: tuple[int, ...] | None = None) -> ModelConfig:
        """See `ModelConfig`; the first name of LongRoPE was "su", and config.json holds its two lengths."""
        whole = cls.defaults | values
        for key in ("rope_scaling", "rope_parameters"):
            section = values.get(key) or {}
            if section.get("rope_type", section.get("type")) in ("su", "yarn", "longrope"):
                lengths = {"original_max_position_embeddings": whole["original_max_position_embeddings"]} | section
                factor = whole["max_position_embeddings"] / lengths["original_max_position_embeddings"]
                values = values | {key: {"factor": factor} | lengths | {"rope_type": "longrope"}}
        config = super().from_hf(values, aux_layers)
        if isinstance(scaling := config.rope_scaling, LongScaling):
            lists = {name: len(getattr(scaling, name)) for name in ("short_factor", "long_factor")}
            if wrong := {name: size for name, size in lists.items() if size != config.rope_dim // 2}:
                raise ValueError(f"unsupported target config:\n  got {wrong}, expected {config.rope_dim // 2} numbers")
        return config


class SmolLM3Config(DenseConfig):
    """SmolLM3: every fourth layer has no RoPE."""

    architecture, model_type = "SmolLM3ForCausalLM", "smollm3"
    supported = DenseConfig.supported | {"mlp_bias": False, "use_sliding_window": False}
    defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
    }

    @classmethod
    def own(cls, values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
        layers, every = range(values.get("num_hidden_layers", 0)), values.get("no_rope_layer_interval", 4)
        turned = values.get("no_rope_layers") or [int((i + 1) % every != 0) for i in layers]  # 1: has RoPE
        if len(turned) != len(layers):
            problems.append(f"no_rope_layers: got {turned!r}, expected 0 or 1 for each of {len(layers)} layers")
        return super().own(values, problems) | {"nope_layers": tuple(i for i, has in enumerate(turned) if not has)}

    def to_hf(self) -> dict[str, Any]:
        turned = [int(i not in self.nope_layers) for i in range(self.num_hidden_layers)]
        return super().to_hf() | {"no_rope_layers": turned}


class Olmo2Config(DenseConfig):
    """OLMo 2: norms behind sublayers, and of queries and keys over all heads."""

    architecture, model_type = "Olmo2ForCausalLM", "olmo2"
    qk_norm, norms_behind = "all", True
    defaults: ClassVar[dict[str, Any]] = {"rms_norm_eps": 1e-5}


class Olmo3Config(Olmo2Config):
    """OLMo 3: OLMo 2 with local layers, whose RoPE is not scaled."""

    architecture, model_type, windows, full_every = "Olmo3ForCausalLM", "olmo3", True, 4
    scaled_locally = False
    defaults = Olmo2Config.defaults | {"sliding_window": 4096, "rope_theta": 5e5}

    @classmethod
    def from_hf(cls, values: dict[str, Any], aux_layers: tuple[int, ...] | None = None) -> ModelConfig:
        rope = values.get("rope_parameters") or {}
        if FULL in rope:  # spelling of transformers 5
            whole, local = rope[FULL], rope.get(LOCAL) or {}
            same = {"rope_type": "default", "rope_theta": whole.get("rope_theta", cls.defaults["rope_theta"])}
            if wrong := {name: x for name, x in local.items() if same.get(name, x) != x}:
                raise ValueError(f"unsupported target config:\n  rope_parameters.{LOCAL}: got {wrong}, expected {same}")
            values = values | {"rope_parameters": whole}
        return super().from_hf(values, aux_layers)

    def to_hf(self) -> dict[str, Any]:
        values = super().to_hf()
        local = {"rope_type": "default", "rope_theta": self.rope_theta}
        return values | {"rope_parameters": {FULL: values["rope_parameters"], LOCAL: local}}


class GraniteConfig(DenseConfig):
    """Granite 3: multipliers of embeddings, scores, what sublayers add, and logits."""

    architecture, model_type, multiplied = "GraniteForCausalLM", "granite", True
    supported = DenseConfig.supported | {"mlp_bias": False}

    @classmethod
    def own(cls, values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
        return super().own(values, problems) | {name: float(values.get(name, 1.0)) for name in MULTIPLIERS}


class GraniteHybridConfig(GraniteConfig):
    """Granite 4 without Mamba layers and experts; its MLP is the one that its mixtures share."""

    architecture, model_type = "GraniteMoeHybridForCausalLM", "granitemoehybrid"
    fused_mlp = "shared_mlp.input_linear", "shared_mlp.output_linear"
    supported = DenseConfig.supported | {"num_local_experts": 0}

    @classmethod
    def from_hf(cls, values: dict[str, Any], aux_layers: tuple[int, ...] | None = None) -> ModelConfig:
        return super().from_hf(values | {"intermediate_size": values.get("shared_intermediate_size", 1024)}, aux_layers)

    @classmethod
    def own(cls, values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
        found, kinds = super().own(values, problems), values.get("layer_types") or values.get("layers_block_type")
        if not kinds or set(kinds) - {"attention", FULL}:
            problems.append(f"layer_types: got {kinds!r}, expected 'attention' for each layer; Mamba is not computed")
        turned = values.get("position_embedding_type") == "rope"
        return found | {"nope_layers": () if turned else tuple(range(len(kinds or ())))}

    def to_hf(self) -> dict[str, Any]:
        return super().to_hf() | {
            "shared_intermediate_size": self.intermediate_size,
            "layer_types": [FULL] * self.num_hidden_layers,
            "position_embedding_type": None if self.nope_layers else "rope",
            "mamba_n_heads": 1,  # no layer has any, and transformers checks that they divide the width
        }


class SeedOssConfig(DenseConfig):
    """Seed-OSS: biases of queries, keys and values."""

    architecture, model_type = "SeedOssForCausalLM", "seed_oss"
    supported: ClassVar[dict[str, Any]] = {"hidden_act": "silu", "attention_out_bias": False, "mlp_bias": False}
    defaults: ClassVar[dict[str, Any]] = {
        "attention_bias": True,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
    }


class Exaone4Config(DenseConfig):
    """EXAONE 4: norms behind sublayers; beside local layers those that see the whole text have no RoPE."""

    architecture, model_type, windows, full_every = "Exaone4ForCausalLM", "exaone4", True, 4
    qk_norm, norms_behind = "heads", True
    defaults: ClassVar[dict[str, Any]] = {"sliding_window": 4096, "rms_norm_eps": 1e-5}

    @classmethod
    def own(cls, values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
        found, layers = super().own(values, problems), range(values.get("num_hidden_layers", 0))
        whole = tuple(i for i in layers if i not in found["local_layers"])
        return found | {"nope_layers": whole if found["sliding_window"] else ()}


class Ernie45Config(DenseConfig):
    """ERNIE 4.5, dense: RoPE rotates neighbours."""

    architecture, model_type, neighbours = "Ernie4_5ForCausalLM", "ernie4_5", True
    supported: ClassVar[dict[str, Any]] = {"hidden_act": "silu", "use_bias": False}
    defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
    }


class HunyuanConfig(DenseConfig):
    """Hunyuan, dense: norms of query and key heads behind RoPE, whose base `alpha` stretches."""

    architecture, model_type = "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense"
    qk_norm, qk_names, norm_behind_rope = "heads", ("query_layernorm", "key_layernorm"), True
    scalings = SCALINGS | ALPHA
    defaults: ClassVar[dict[str, Any]] = {"rms_norm_eps": 1e-5}


CONFIGS: tuple[type[DenseConfig], ...] = (
    MistralConfig,
    MixtralConfig,
    Ministral3Config,
    Phi3Config,
    SmolLM3Config,
    Olmo2Config,
    Olmo3Config,
    GraniteConfig,
    GraniteHybridConfig,
    SeedOssConfig,
    Exaone4Config,
    Ernie45Config,
    HunyuanConfig,
)
