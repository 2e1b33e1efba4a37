"""Writes a head as a GGUF file."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants

from eagle3_jax.formats.llama_cpp import names, reader
from eagle3_jax.formats.llama_cpp.tokenizer import add_tokenizer
from eagle3_jax.formats.tensors import AUX_LAYERS, Tensors
from eagle3_jax.models.checkpoint.gguf_file import interleaved
from eagle3_jax.models.drafts.dflash import SLIDING
from eagle3_jax.models.layers import rope_frequencies
from eagle3_jax.models.target_config import default_aux_layers

_FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_BLOCK = 32  # values that share a scale in Q8_0 and Q4_0
_KEPT = ("rope_scaling", "bos_token_id", "eos_token_id", "num_target_layers")


def write(
    path: pathlib.Path,
    values: dict[str, Any],
    config: Any,
    tensors: Tensors,
    token_ids: np.ndarray,
    *,
    blocks: str | None,
    target: pathlib.Path,
    depth: int,
) -> Tensors:
    """Writes a head, and returns its tensors as the file holds them.

    Vectors are float32. Matrices keep their dtype, or are `blocks` (q8_0, q4_0) where 32 divides their rows' length.

    Args:
        values: the head's config.json in vLLM's form. config: the same as its network's.
        target: folder of the target's tokenizer. depth: the target's layers.

    Raises:
        TargetError: the tokenizer cannot be written. OSError.
    """
    c, values = config, {**values, **values.get("dflash_config", {})}
    in_blocks, markov = "block_size" in values, "markov_rank" in values
    architecture = names.DFLASH if in_blocks else names.EAGLE3
    default = {AUX_LAYERS: None} if c.aux_layers is None else {}
    spoilt = [name for name, x in values.items() if isinstance(x, float) and x != float(np.float32(x))]
    own = {name: values[name] for name in (*_KEPT, *spoilt) if values.get(name) is not None} | default
    fields: dict[str, Any] = {ours: values.get(name) for ours, name in names.keys(architecture).items()}
    fields |= {"target_layers": list(c.aux_layers or default_aux_layers(depth))}
    if in_blocks:
        fields |= {"attention.causal": c.causal(0), "sample_from_anchor": markov}
        fields |= {"has_confidence_head": c.confidence} if markov else {}
        if SLIDING in c.layer_types:
            fields["attention.sliding_window_pattern"] = [kind == SLIDING for kind in c.layer_types]
    else:
        fields |= {"target_hidden_size": c.target_hidden_size}
    file = GGUFWriter(path, architecture)
    add_keys(file, architecture, fields, c.head_dim)
    file.add_string(reader.CONFIG, json.dumps(own))
    add_tokenizer(file, target, c.vocab_size)
    if in_blocks:
        file.add_uint32(names.MASK, c.mask_token_id)
    spelled = {name: ours for ours, name in names.tensors(architecture, values["num_hidden_layers"]).items()}
    held = {}
    for name, tensor in tensors.items():
        data, kind = _encoded(tensor, blocks)
        held[name] = reader.decoded(data, kind)
        if heads := names.interleaved_by(architecture, name):
            data = data[np.argsort(interleaved(len(data), getattr(c, heads)))]
        file.add_tensor(spelled[name], data, raw_dtype=kind)
    if c.draft_vocab_size < c.vocab_size:
        file.add_tensor(names.D2T, token_ids.astype(np.int64))
    add_scaling(file, c)
    finish(file)
    return held


def add_keys(file: GGUFWriter, architecture: str, fields: dict[str, Any], head_dim: int) -> None:
    """Adds the keys of an architecture, without its name, that have a value, and those of one size of heads."""
    for key, value in (fields | dict.fromkeys(("attention.value_length", "rope.dimension_count"), head_dim)).items():
        if isinstance(value, list):
            file.add_array(f"{architecture}.{key}", value)
        elif value is not None:
            add: Any = {bool: file.add_bool, int: file.add_uint32, float: file.add_float32}[type(value)]
            add(f"{architecture}.{key}", value)


def add_scaling(file: GGUFWriter, config: Any) -> None:
    """Adds what divides the frequencies of scaled RoPE."""
    if (c := config).rope_scaling is not None:
        plain, scaled = (rope_frequencies(c.head_dim, c.rope_theta, scaling) for scaling in (None, c.rope_scaling))
        file.add_tensor(reader.FREQUENCIES, np.asarray(plain / scaled, np.float32))


def finish(file: GGUFWriter) -> None:
    """Writes what was added."""
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def _encoded(tensor: np.ndarray, blocks: str | None) -> tuple[np.ndarray, GGMLQuantizationType]:
    matrix = tensor.ndim == 2 and len(tensor) > 1
    kind = _FLOATS[str(tensor.dtype)] if matrix else "F32"
    if matrix and blocks and tensor.shape[1] % _BLOCK == 0:
        kind = blocks.upper()
    found = GGMLQuantizationType[kind]
    return quants.quantize(np.asarray(tensor, np.float32), found), found
