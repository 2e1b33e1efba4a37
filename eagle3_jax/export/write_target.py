"""Writes a loaded target as a Hugging Face folder, which transformers, SGLang and vLLM read, or as llama.cpp's file.

Engines need the folder for a target without safetensors (dequantised GGUF), or in another dtype than the hub's, and
llama.cpp the file to compute with the same numbers as this package.
"""

from __future__ import annotations

import json
import pathlib

import jax
import numpy as np
from gguf import GGUFWriter

from eagle3_jax.formats.llama_cpp.tokenizer import add_tokenizer
from eagle3_jax.formats.llama_cpp.writer import add_keys, add_scaling, finish
from eagle3_jax.mesh import parameter_path
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.models.checkpoint.gguf_file import INTERLEAVED, SIZES, gguf_name, interleaved
from eagle3_jax.models.checkpoint.load import INDEX, save_tensors
from eagle3_jax.models.families import family_of
from eagle3_jax.models.layers import YarnScaling
from eagle3_jax.models.quantisation import is_quantised
from eagle3_jax.models.target import TargetModel
from eagle3_jax.runs import disk

SHARD_BYTES = 5 * 10**9  # the hub's limit for one file
_GGUF = ("llama", "qwen2", "qwen3")  # architectures that are written for llama.cpp


def write_target(target: Target, folder: str | disk.Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes weights, architecture, tokenizer, template in the target's dtype. Raises FileExistsError, ValueError."""
    folder = disk.path_of(folder)
    if folder.exists():
        raise FileExistsError(f"{folder}: exists already, expected a new folder: remove it, or name another one")
    _check_floats(target)
    config = target.model.config.to_hf() | {"torch_dtype": str(target.model.embed.dtype)}
    with disk.atomic(folder) as partial:
        partial.mkdir(parents=True)
        _write_weights(target.model, partial, shard_bytes)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        tokens = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
        (partial / "generation_config.json").write_text(json.dumps(tokens, indent=2) + "\n")
        target.tokenizer.save_pretrained(partial)


def write_gguf(target: Target, path: pathlib.Path) -> None:
    """Writes float32 weights, architecture and tokenizer as llama.cpp's file. Raises ValueError: it cannot hold it."""
    _check_floats(target)
    c = target.model.config
    architecture, scaling = c.model_type, c.rope_scaling
    if architecture not in _GGUF:
        raise ValueError(f"target.name: got a {architecture}, expected one of {', '.join(_GGUF)} for llama.cpp")
    if scaling is not None and (architecture != "llama" or isinstance(scaling, YarnScaling)):
        raise ValueError(f"rope_scaling: got {scaling}, expected none for llama.cpp, or Llama 3's for a llama")
    file = GGUFWriter(path, architecture)
    add_keys(file, architecture, {ours: getattr(c, name) for ours, name in SIZES.items()}, c.head_dim)
    add_tokenizer(file, disk.local(target.folder, without=".safetensors"), c.vocab_size)
    add_scaling(file, c)
    if window := getattr(c, "sliding_window", None):
        raise ValueError(f"sliding_window: got {window}, expected none: llama.cpp reads no {architecture}'s")
    heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads} if architecture in INTERLEAVED else {}
    leaves = {parameter_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(target.model)}
    for name, entry in family_of(c).table(c).items():
        for tensor, x in zip(entry.tensors, entry.split(np.asarray(leaves[name], np.float32)), strict=True):
            count = heads.get(tensor.split(".")[-2])
            rows = np.argsort(interleaved(len(x), count)) if count else slice(None)
            file.add_tensor(gguf_name(tensor), np.ascontiguousarray(x[rows]))
    finish(file)


def _check_floats(target: Target) -> None:
    if any(map(is_quantised, jax.tree.leaves(target.model, is_leaf=is_quantised))):
        raise ValueError("target.weights: got quantised matrices, expected None: a target is written as it was read")
    if jax.process_count() > 1:
        raise ValueError(f"a target is written by one process, got {jax.process_count()}")


def _write_weights(model: TargetModel, folder: pathlib.Path, shard_bytes: int) -> None:
    """Writes one file, or several with an index; the host's memory holds one of them at a time."""
    leaves = {parameter_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(model)}
    table = family_of(model.config).table(model.config)
    files: list[list[str]] = [[]]
    for name in table:
        if files[-1] and sum(leaves[other].nbytes for other in files[-1]) + leaves[name].nbytes > shard_bytes:
            files.append([])
        files[-1].append(name)
    weight_map = {}
    for i, names in enumerate(files, start=1):
        file = "model.safetensors" if len(files) == 1 else f"model-{i:05}-of-{len(files):05}.safetensors"
        tensors = {}
        for name in names:
            parts = table[name].split(np.asarray(leaves[name]))
            tensors |= {tensor: np.ascontiguousarray(x) for tensor, x in zip(table[name].tensors, parts, strict=True)}
        save_tensors(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    if len(files) > 1:
        size = sum(leaf.nbytes for leaf in leaves.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
