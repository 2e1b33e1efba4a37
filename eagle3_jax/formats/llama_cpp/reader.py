"""Reads a GGUF file as a folder is read: the values of its config.json, and its tensors under canonical names."""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, quants

from eagle3_jax.formats.llama_cpp import names
from eagle3_jax.formats.tensors import Tensors, vocabulary_tensors
from eagle3_jax.models.checkpoint.gguf_file import header, interleaved
from eagle3_jax.models.checkpoint.table import DTYPES

CONFIG = "eagle3_jax.config"  # JSON of what config.json says and the loader's own keys do not
FREQUENCIES = "rope_freqs.weight"


def config(path: pathlib.Path) -> dict[str, Any]:
    """Reads the values of config.json, in vLLM's form. Raises ValueError: not a GGUF file, or not of a head."""
    reader, architecture = _open(path)
    found = values(reader, architecture)
    own = reader.get_field(CONFIG)
    return found if own is None else {**found, **json.loads(own.contents())}


def tensors(path: pathlib.Path) -> tuple[Tensors, list[str]]:
    """Reads all tensors, blocks of few bits as float32; lists what cannot be read. Raises ValueError as `config`."""
    reader, architecture = _open(path)
    fields = config(path)
    found: Tensors = {}
    problems: list[str] = []
    spelled = names.tensors(architecture, fields.get("num_hidden_layers") or 1)
    for tensor in reader.tensors:
        if tensor.name == FREQUENCIES and fields.get("rope_scaling"):
            continue  # made of it
        name = spelled.get(tensor.name, tensor.name)
        held = decoded(tensor.data, tensor.tensor_type)
        by = names.interleaved_by(architecture, name)
        count = fields.get(by) if by else None
        if count and len(held) % (2 * count) == 0:  # else its shape is refused
            held = held[interleaved(len(held), count)]
        found[name] = held
    if names.D2T in found:
        ids, size = found.pop(names.D2T), fields.get("vocab_size") or 0
        if not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0 or ids.max() >= size:
            problems.append(f"{names.D2T}: got {ids.dtype} {ids.min()}..{ids.max()}, expected target ids below {size}")
        else:
            found |= vocabulary_tensors(ids.astype(np.int64), size) or {names.D2T: ids - np.arange(size)}
    return found, problems


def values(reader: GGUFReader, architecture: str) -> dict[str, Any]:
    """Reads what the loader's own keys, and shapes, say of config.json's values."""

    def key(name: str) -> Any:
        field = reader.get_field(name)
        return None if field is None else field.contents()

    found = {name: key(f"{architecture}.{ours}") for ours, name in names.keys(architecture).items()}
    found = {name: value for name, value in found.items() if value is not None}
    if (kind := key(f"{architecture}.rope.scaling.type")) not in (None, "none"):
        found["rope_scaling"] = {"rope_type": kind}  # refused by its kind or its missing fields
    held = {tensor.name: tuple(int(size) for size in reversed(tensor.shape)) for tensor in reader.tensors}
    tokens = reader.get_field(names.TOKENS)
    found["vocab_size"] = None if tokens is None else len(tokens.data)
    found["draft_vocab_size"] = held[names.D2T][0] if names.D2T in held else found["vocab_size"]
    if architecture == names.EAGLE3:
        return found | {"architectures": ["Eagle3LlamaForCausalLM"]}
    found["mask_token_id"] = key(names.MASK)
    found["is_causal"] = bool(found.get("is_causal"))
    count, sliding = found.get("num_hidden_layers") or 0, key(f"{architecture}.attention.sliding_window_pattern")
    sliding = sliding if isinstance(sliding, list) else [sliding or False] * count
    found["layer_types"] = [f"{'sliding' if one else 'full'}_attention" for one in sliding]
    if "markov_w1.weight" in held:
        head = {"markov_rank": held["markov_w1.weight"][-1], "sample_from_anchor": key("dflash.sample_from_anchor")}
        flags = ("enable_confidence_head", "confidence_head_with_markov")
        return found | head | dict.fromkeys(flags, "conf_proj.weight" in held) | {"architectures": ["Qwen3DSparkModel"]}
    return found | {"architectures": ["DFlash2DraftModel" if "selector_hidden.weight" in held else "DFlashDraftModel"]}


def decoded(data: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Returns a tensor's numbers: as they lie in the file, or what its blocks stand for, float32."""
    if (dtype := DTYPES.get(kind.name)) is None:
        return quants.dequantize(data, kind)
    return data.view(dtype)


def _open(path: pathlib.Path) -> tuple[GGUFReader, str]:
    status = path.stat()
    return _opened(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(2)
def _opened(path: pathlib.Path, size: int, changed: int) -> tuple[GGUFReader, str]:
    reader = header(path)
    field = reader.get_field("general.architecture")
    architecture = None if field is None else field.contents()
    if architecture not in (names.EAGLE3, names.DFLASH):
        expected = f"expected {names.EAGLE3!r} or {names.DFLASH!r}, those of heads"
        raise ValueError(f"{path}: general.architecture: got {architecture!r}, {expected}")
    return reader, architecture
