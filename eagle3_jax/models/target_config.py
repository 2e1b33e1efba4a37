"""The shape of a target, read from a Hugging Face config.json and written as one; and its aux layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from eagle3_jax.models.checkpoint.quantised import Scales, read_scales
from eagle3_jax.models.layers import Scaling
from eagle3_jax.models.rope import SCALINGS, THETA, Scalings, read_partial, read_rope, write_rope

LATER = {"later": True}  # of a field that no identity has while it has its default: older versions know none


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a target, with Hugging Face's field names; each family has its own class.

    Attributes:
        aux_layers: boundaries whose residual stream is returned; ascending, distinct, in [0, num_hidden_layers]. Empty
            if nothing reads them, or if the default rule collides (see `without_aux_layers`).
        scales: how the checkpoint's quantised matrices are scaled; no part of the architecture.
    """

    # Set by each family: the name in `architectures`, `model_type`, fields of config.json that are not read (field ->
    # the one supported value), defaults of fields that config.json leaves out, kinds of RoPE scaling, whether
    # `num_key_value_heads` and `head_dim` describe a cache of latent vectors instead of heads, whether layers keep a
    # state for each sequence, and the share of a head that RoPE rotates where config.json leaves it out (None: all of
    # it, and another share is refused; see `PartialRotaryConfig`).
    architecture: ClassVar[str]
    model_type: ClassVar[str]
    supported: ClassVar[dict[str, Any]]
    defaults: ClassVar[dict[str, Any]] = {}
    scalings: ClassVar[Scalings] = SCALINGS
    latent_cache: ClassVar[bool] = False
    recurrent: ClassVar[bool] = False
    rotary_share: ClassVar[float | None] = None
    packings: ClassVar[tuple[str, ...]] = ()  # methods of quantization that the family's own table reads

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    aux_layers: tuple[int, ...]
    bos_token_id: int | None = None
    rope_scaling: Scaling | None = None
    scales: Scales | None = dataclasses.field(default=None, compare=False)

    @classmethod
    def from_hf(cls, values: dict[str, Any], aux_layers: tuple[int, ...] | None = None) -> ModelConfig:
        """Reads a Hugging Face config.json (transformers 4 and 5 spellings). Raises ValueError with every problem."""
        problems = [
            f"{field}: got {values[field]!r}, expected {expected!r}"
            for field, expected in cls.supported.items()
            if values.get(field, expected) != expected
        ]
        declared, values = values, cls.defaults | values
        required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        problems += [f"{field}: missing" for field in required if field not in values]
        default = cls.defaults.get("rope_theta", THETA)
        theta, scaling = read_rope(declared, problems, cls.scalings, default, partial=cls.rotary_share is not None)
        own = cls.own(values, problems)
        scales = read_scales(values, problems, cls.packings)
        if problems:
            raise ValueError("unsupported target config:\n  " + "\n  ".join(problems))
        heads, layers = values["num_attention_heads"], values["num_hidden_layers"]
        eos = values.get("eos_token_id")
        return cls(
            **{name: values[name] for name in required},
            num_key_value_heads=values.get("num_key_value_heads") or heads,
            head_dim=values.get("head_dim") or values["hidden_size"] // heads,
            rms_norm_eps=values.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            tie_word_embeddings=values.get("tie_word_embeddings", False),
            max_position_embeddings=values.get("max_position_embeddings", 2048),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
            aux_layers=check_aux_layers(aux_layers, layers),
            bos_token_id=values.get("bos_token_id"),
            rope_scaling=scaling,
            scales=scales,
            **own,
        )

    @classmethod
    def own(cls, values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
        """Reads the family's own fields. Appends to `problems`; the values are then undefined."""
        return {}

    @property
    def logit_cap(self) -> float | None:
        """What no logit exceeds, see `capped`; None: there is no such bound."""
        return getattr(self, "final_logit_softcapping", None)

    @property
    def rope_dim(self) -> int:
        """Dimensions of a head that RoPE rotates."""
        return self.head_dim

    def chooser(self, layer: int) -> int:
        """Returns the layer whose indexer chooses what a layer attends to; the layer itself where there is none."""
        return layer

    def index_width(self, layer: int) -> int:
        """Returns the width of the keys that a layer's own indexer caches; 0 is none."""
        return 0

    def to_hf(self) -> dict[str, Any]:
        """Writes what `from_hf` reads, in both of transformers' spellings; without aux layers."""
        same = [field.name for field in dataclasses.fields(self) if field.name not in _SPELT_OTHERWISE]
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **self.supported,
            **{name: getattr(self, name) for name in same},
            **write_rope(self.rope_theta, self.rope_scaling),
            "eos_token_id": list(self.eos_token_ids) or None,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartialRotaryConfig(ModelConfig):
    """Shape of a target whose RoPE may rotate the first part of each head only, the share `partial_rotary_factor`."""

    partial_rotary_factor: float = 1.0

    @classmethod
    def own(cls, values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
        share = cls.rotary_share
        return {} if share is None else {"partial_rotary_factor": read_partial(values, problems, share)}

    @property
    def rope_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    def to_hf(self) -> dict[str, Any]:
        """See `ModelConfig`; the share is written into RoPE's section, as transformers 5 does."""
        values = super().to_hf()
        share = values.pop("partial_rotary_factor")
        if self.rotary_share is not None:
            values["rope_parameters"]["partial_rotary_factor"] = share
        return values


LOCAL, FULL = "sliding_attention", "full_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowConfig(ModelConfig):
    """Shape of a target whose layers may see a window only, of which older versions knew none.

    Attributes:
        sliding_window: positions that a local layer attends to, its own included.
        local_layers: the layers that see a window.
    """

    sliding_window: int | None = dataclasses.field(default=None, metadata=LATER)
    local_layers: tuple[int, ...] = dataclasses.field(default=(), metadata=LATER)

    @classmethod
    def own(cls, values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
        """See `ModelConfig`; windows as Qwen 2 has them, in the layers from `max_window_layers` on."""
        window = values.get("sliding_window", 4096) if values.get("use_sliding_window") else None
        first = values.get("max_window_layers", 28)
        local = local_layers(values, problems, window, lambda layer: layer >= first)
        return {"sliding_window": window if local else None, "local_layers": local}

    def to_hf(self) -> dict[str, Any]:
        values = super().to_hf() | {"use_sliding_window": self.sliding_window is not None}
        local, window = values.pop("local_layers"), values.pop("sliding_window")
        kinds = layer_types(self.num_hidden_layers, local)
        return values if window is None else values | {"sliding_window": window, "layer_types": kinds}


def local_layers(
    values: dict[str, Any], problems: list[str], window: int | None, local: Callable[[int], bool]
) -> tuple[int, ...]:
    """Reads which layers see a window only. Appends to `problems`; the layers are then undefined.

    Args:
        window: its size; without one no layer may.
        local: tells it of a layer where `layer_types` is left out.
    """
    layers = range(values.get("num_hidden_layers", 0))
    kinds = values.get("layer_types") or [LOCAL if window and local(i) else FULL for i in layers]
    if len(kinds) != len(layers) or not set(kinds) <= {LOCAL, FULL} or (LOCAL in kinds and not window):
        expected = f"{LOCAL!r} (with a sliding_window) or {FULL!r} for each of {len(layers)} layers"
        problems.append(f"layer_types: got {kinds!r}, expected {expected}")
    return tuple(i for i, kind in enumerate(kinds) if kind == LOCAL)


def layer_types(layers: int, local: tuple[int, ...]) -> list[str]:
    """Writes what `local_layers` reads."""
    return [LOCAL if i in local else FULL for i in range(layers)]


_SPELT_OTHERWISE = ("rope_theta", "rope_scaling", "eos_token_ids", "aux_layers", "scales")


def default_aux_layers(layers: int) -> tuple[int, int, int]:
    """Returns the boundaries that engines use by default; on shallow targets they collide."""
    return 2, layers // 2, layers - 3


def final_boundary(layers: int) -> int:
    """Returns the boundary after the final norm, one more than the last layer's; heads other than EAGLE-3's read it."""
    return layers + 1


def check_aux_layers(aux_layers: tuple[int, ...] | None, layers: int) -> tuple[int, ...]:
    """Returns the given boundaries, or the default; () if the default collides. Raises ValueError."""
    chosen = default_aux_layers(layers) if aux_layers is None else tuple(aux_layers)
    if not chosen or list(chosen) != sorted(set(chosen)) or chosen[0] < 0 or chosen[-1] > layers:
        if aux_layers is None:  # decoding without a head reads none
            return ()
        raise ValueError(f"target.aux_layers: got {chosen}, expected ascending, distinct, within 0..{layers}")
    return chosen


def without_aux_layers(target: ModelConfig) -> str:
    """Returns the error for uses of aux layers on a target without them."""
    layers = target.num_hidden_layers
    return (
        f"target.aux_layers: got none, expected boundaries within 0..{layers}: the default rule, "
        f"{default_aux_layers(layers)}, collides on shallow targets, name them"
    )
