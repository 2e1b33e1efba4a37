"""Weights in memory as a target: a pytree with the names of Hugging Face, Tunix, MaxText, or this package.

Names are those of Tunix's `models/{llama3,qwen2,qwen3}/params.py` and of MaxText's module `param_mapping`, August 2026.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.mesh import shardings
from eagle3_jax.models.checkpoint.load import WeightsError, abstract_model, parameter_path
from eagle3_jax.models.checkpoint.table import tensor_problems
from eagle3_jax.models.families import family_of
from eagle3_jax.models.layers import SHARDING_RULES
from eagle3_jax.models.target import TargetModel
from eagle3_jax.models.target_config import ModelConfig

# (Hugging Face, Tunix, MaxText): each name with its axes. V vocabulary, D hidden size, N heads, K KV heads, H head
# size, F intermediate size. "#" is the layer. In MaxText all layers may be stacked, on the second axis.
_NAMES = [
    [tuple(entry.split()) for entry in row]
    for row in (
        ("model.embed_tokens.weight VD", "embedder/input_embedding VD", "token_embedder/embedding VD"),
        ("model.norm.weight D", "final_norm/w D", "decoder/decoder_norm/scale D"),
        ("lm_head.weight VD", "lm_head/w DV", "decoder/logits_dense/kernel DV"),
        *(
            (f"model.layers.#.{ours}", f"layers/#/{tunix}", f"decoder/layers_#/{maxtext}")
            for ours, tunix, maxtext in (
                ("input_layernorm.weight D", "input_layernorm/w D", "pre_self_attention_layer_norm/scale D"),
                (
                    "post_attention_layernorm.weight D",
                    "post_attention_layernorm/w D",
                    "post_self_attention_layer_norm/scale D",
                ),
                ("self_attn.q_proj.weight NHD", "attn/q_proj/w DNH", "self_attention/query/kernel DNH"),
                ("self_attn.k_proj.weight KHD", "attn/k_proj/w DKH", "self_attention/key/kernel DKH"),
                ("self_attn.v_proj.weight KHD", "attn/v_proj/w DKH", "self_attention/value/kernel DKH"),
                ("self_attn.o_proj.weight DNH", "attn/o_proj/w NHD", "self_attention/out/kernel NHD"),
                ("self_attn.q_proj.bias NH", "attn/q_bias NH", "self_attention/query/bias NH"),
                ("self_attn.k_proj.bias KH", "attn/k_bias KH", "self_attention/key/bias KH"),
                ("self_attn.v_proj.bias KH", "attn/v_bias KH", "self_attention/value/bias KH"),
                ("self_attn.q_norm.weight H", "attn/q_norm/w H", "self_attention/query_norm/scale H"),
                ("self_attn.k_norm.weight H", "attn/k_norm/w H", "self_attention/key_norm/scale H"),
                ("mlp.gate_proj.weight FD", "mlp/gate_proj/kernel DF", "mlp/wi_0/kernel DF"),
                ("mlp.up_proj.weight FD", "mlp/up_proj/kernel DF", "mlp/wi_1/kernel DF"),
                ("mlp.down_proj.weight DF", "mlp/down_proj/kernel FD", "mlp/wo/kernel FD"),
            )
        ),
    )
]
_TUNIX, _MAXTEXT = 1, 2
_STACKED = "decoder/layers/"


class _Source(NamedTuple):
    """A tensor's name and expected shape in the pytree, and what makes the tensor of the array there."""

    name: str
    shape: tuple[int, ...]
    take: Callable[[Any], Any] = lambda x: x


def target_of(weights: Any, config: ModelConfig, dtype: Any, mesh: jax.sharding.Mesh | None = None) -> TargetModel:
    """Makes a target of weights in memory, by one program on the devices, into new arrays of `dtype`.

    Args:
        weights: a `TargetModel` of this config, or a pytree of float arrays: a dict from Hugging Face's names to
            tensors (any family); the parameters of a Tunix or MaxText model (Llama, Qwen 2 and 3), layers stacked or
            not. They lie on the mesh's devices or on the host.
        mesh: shards the target; None is the default device.

    Raises WeightsError: every missing, surplus and wrongly shaped array, and those that are no floats or not finite.
    """
    leaves = jax.tree_util.tree_leaves_with_path(weights)
    found = {jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value"): x for path, x in leaves}
    sources = _sources(found, config)
    problems = tensor_problems(found, {source.name: source.shape for source in sources.values()})
    if not problems and {"lm_head.weight", "model.embed_tokens.weight"} <= found.keys() and config.tie_word_embeddings:
        if not (found["lm_head.weight"] == found["model.embed_tokens.weight"]).all():
            problems = ["lm_head.weight: got other values than model.embed_tokens.weight, expected equal ones or none"]
    if not problems:
        arrays = {name: x for name, x in found.items() if not isinstance(x, np.ndarray)}
        finite = jax.device_get([_finite(x) for x in arrays.values()])
        problems = [f"{name}: got NaN or infinity" for name, held in zip(arrays, finite, strict=True) if not held]
    if problems:
        raise WeightsError(f"weights do not fit ({len(problems)} problems):\n  " + "\n  ".join(sorted(problems)))
    return _program(config, jnp.dtype(dtype), mesh)(found)


@functools.lru_cache(maxsize=8)
def _program(config: ModelConfig, dtype: Any, mesh: jax.sharding.Mesh | None) -> Callable[[Any], TargetModel]:
    """Returns the program from arrays by name to the target; kept, so that a later call compiles nothing."""
    abstract, table = abstract_model(config, dtype), family_of(config).table(config)

    def build(found: Mapping[str, Any]) -> TargetModel:
        sources = _sources(found, config)

        def fill(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            if (name := parameter_path(path)) in sources:
                return found[name].astype(leaf.dtype)
            tensors = (sources[x].take(found[sources[x].name]) for x in table[name].tensors)
            return table[name].whole(*tensors).astype(leaf.dtype)

        return jax.tree_util.tree_map_with_path(fill, abstract)

    placement = None if mesh is None else shardings(abstract, mesh, SHARDING_RULES)
    return jax.jit(build, out_shardings=placement)


_finite = jax.jit(lambda x: jnp.isfinite(x).all())


def _sources(found: Mapping[str, Any], config: ModelConfig) -> dict[str, _Source]:
    """Finds out whose names these are. Returns the source of each parameter, or of each tensor of the family's table.

    Raises WeightsError for names that nobody has, or another engine's of a family that is not translated.
    """
    if "embed" in found:
        leaves = jax.tree_util.tree_leaves_with_path(abstract_model(config, jnp.dtype(jnp.float32)))
        return {(name := parameter_path(path)): _Source(name, leaf.shape) for path, leaf in leaves}
    table = {name: shape for entry in family_of(config).table(config).values() for name, shape in entry.tensors.items()}
    if found.keys() & table.keys():
        sources = {name: _Source(name, shape) for name, shape in table.items()}
        if config.tie_word_embeddings and "lm_head.weight" in found:  # written twice, as `state_dict` does
            sources["lm_head.weight"] = _Source("lm_head.weight", table["model.embed_tokens.weight"])
        return sources
    for engine in (_TUNIX, _MAXTEXT):
        embedding, _ = _NAMES[0][engine]
        if (held := next((name for name in found if name.endswith(embedding)), None)) is not None:
            prefix = held.removesuffix(embedding)
            return {name: _source(name, shape, engine, prefix, found, config) for name, shape in table.items()}
    expected = "names of Hugging Face, Tunix, MaxText, or of this package's TargetModel"
    raise WeightsError(f"weights: got {', '.join(sorted(found)[:3])} ..., expected {expected}")


def _source(
    name: str, shape: tuple[int, ...], engine: int, prefix: str, found: Mapping[str, Any], config: ModelConfig
) -> _Source:
    """Translates one of Hugging Face's names into Tunix's or MaxText's."""
    layer = next(iter(re.findall(r"\.layers\.(\d+)\.", name)), "")
    row = next((row for row in _NAMES if row[0][0].replace("#", layer) == name), None)
    if row is None:
        raise WeightsError(f"weights: got names of {('', 'Tunix', 'MaxText')[engine]}, which has none for {name}")
    (_, ours), (theirs, axes) = row[0], row[engine]
    c = config
    sizes = dict(V=c.vocab_size, D=c.hidden_size, N=c.num_attention_heads, K=c.num_key_value_heads)
    sizes |= dict(H=c.head_dim, F=c.intermediate_size)
    there = tuple(sizes[axis] for axis in axes)
    stacked = engine == _MAXTEXT and layer and any(key.startswith(prefix + _STACKED) for key in found)
    own = prefix + (theirs.replace("layers_#", "layers") if stacked else theirs.replace("#", layer))
    expected = (*there[:1], c.num_hidden_layers, *there[1:]) if stacked else there
    if own in found and math.prod(found[own].shape) == math.prod(there) and len(axes) == 2 and "H" in axes:
        expected = found[own].shape  # a bias, by head or flat
    # MaxText's Llama has RoPE on neighbours, and 1 / sqrt(head size) in its queries.
    rotated = engine == _MAXTEXT and c.architecture == "LlamaForCausalLM" and re.search("[qk]_proj", name)

    def take(x: Any) -> Any:
        if stacked:
            x = x[:, int(layer)]
        x = x.reshape(there)
        if rotated:
            x = x.reshape(*there[:-1], -1, 2).swapaxes(-1, -2).reshape(there)
            if "q_proj" in name:
                x = (x * np.float32(c.head_dim**0.5)).astype(x.dtype)
        return x.transpose([axes.index(axis) for axis in ours]).reshape(shape)

    return _Source(own, expected, take)
