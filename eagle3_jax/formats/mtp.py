"""Draft heads inside a target's checkpoint: its multi-token prediction layers (MTP; NEXTN in SGLang).

A trained layer is written alone, under its names in the target's checkpoint and with the target's config.json. SGLang
(`--speculative-algorithm NEXTN --speculative-draft-model-path`; models/mimo_mtp.py, deepseek_nextn.py) and vLLM (method
"mtp" with `model`; config/speculative.py, models/deepseek_mtp.py) read such a folder beside the target. They share the
target's embeddings and LM head with the layer (`set_embed_and_head`; v1/spec_decode/llm_base_proposer.py).
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle3_jax.formats import fields, files
from eagle3_jax.formats.stored import DraftFormatError
from eagle3_jax.kernels.linear.layouts import dense
from eagle3_jax.mesh import parameter_path
from eagle3_jax.models.checkpoint.fetch import Target, read_config
from eagle3_jax.models.checkpoint.load import WeightsError, locate, misfits, reader
from eagle3_jax.models.checkpoint.table import Entry
from eagle3_jax.models.drafts import deepseek_mtp, mimo_mtp
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.drafts.mtp import MtpHead
from eagle3_jax.models.families.deepseek_v3 import DeepseekV3Config
from eagle3_jax.models.families.mimo import MimoConfig
from eagle3_jax.models.shapes import shapes_of
from eagle3_jax.models.target import ModelConfig
from eagle3_jax.runs import disk

MTP: Final = "mtp"
# Family -> its head, and the function that maps each parameter path of the head to tensors of the checkpoint.
_LAYERS: dict[type[ModelConfig], tuple[type[MtpHead], Callable[[Any], dict[str, Entry]]]] = {
    MimoConfig: (mimo_mtp.MimoMtp, mimo_mtp.table),
    DeepseekV3Config: (deepseek_mtp.DeepseekMtp, deepseek_mtp.table),
}
# Form -> why its engine cannot run a family's layer as it is trained here.
_REFUSED: dict[tuple[type[ModelConfig], str], str] = {
    (MimoConfig, "vllm"): "vLLM feeds MiMo's layer the state before the final norm",
}
_FORMS = ("sglang", "vllm")


def head_of(shape: ModelConfig, field: str = "draft") -> type[MtpHead]:
    """Returns the class of a target's MTP layer. Raises ValueError, by `field`, for a family without one."""
    if type(shape) not in _LAYERS:
        raise ValueError(f"{field}: got 'mtp', expected a head's folder: {shape.architecture} has no such layer")
    return _LAYERS[type(shape)][0]


def abstract(shape: ModelConfig, dtype: Any, field: str = "draft") -> MtpHead:
    """Makes the abstract head (shapes only) of a target. Raises ValueError, by `field`, for a family without one."""
    head = head_of(shape, field)
    return shapes_of(lambda rngs: head(shape, dtype=dtype, rngs=rngs))


def load(target: Target, dtype: Any, folder: disk.Path | None = None) -> Draft:
    """Loads the first MTP layer, with the target's embeddings and LM head.

    Args:
        folder: of a layer by itself, see `write`; None is the target's own.

    Raises:
        ValueError: the target's family has none. WeightsError: missing or wrongly shaped tensors.
        DraftFormatError: the layer of another architecture.
    """
    shape, rows = target.model.config, dense(target.model.output_rows)
    head = abstract(shape, dtype)
    assert isinstance(rows, jax.Array), "the target is loaded, and not packed yet"
    source = shape if folder is None else _shape_of(folder, shape)
    layer = _read(folder or target.folder, source, _without_rows(head))
    layer = jax.tree.map(jnp.asarray, layer)
    layer.lm_head = nnx.Param(rows.astype(dtype))
    return Draft(layer, jnp.arange(shape.vocab_size, dtype=jnp.int32))


def is_layer(folder: pathlib.Path) -> bool:
    """Tells whether a folder that is no whole model holds an MTP layer, by the target's name in its config.json."""
    if not (folder / files.CONFIG).exists():
        return False
    values = files.read_config(folder)
    known = {shape.architecture for shape in _LAYERS}
    return fields.architecture(values) in known and "draft_vocab_size" not in values


def write(folder: pathlib.Path, head: MtpHead, target: ModelConfig, dtype: str, form: str) -> None:
    """Writes a layer to `folder`, unquantised, reads it back and compares every bit.

    Args:
        head: with or without `lm_head`, which is not written.
        dtype: dtype of the weights, "float32" or "bfloat16"; biases of a router are float32.
        form: the engine that reads it, "sglang" or "vllm".

    Raises:
        DraftFormatError: the engine could not run it, or it does not read back the same.
    """
    able = [name for name in _FORMS if (type(target), name) not in _REFUSED]
    if form not in able:
        why = _REFUSED.get((type(target), form), "the form has no MTP layers")
        raise DraftFormatError(f"export.format: got {form!r}, expected {' or '.join(map(repr, able))}: {why}")
    shape = _unquantised(target)
    like = _without_rows(abstract(target, jnp.dtype(dtype)))
    cast = jax.tree.map(lambda x, wanted: np.asarray(x).astype(wanted.dtype), _without_rows(head), like)
    entries, tensors = _LAYERS[type(shape)][1](shape), {}
    for path, value in jax.tree_util.tree_leaves_with_path(cast):
        entry = entries[parameter_path(path)]
        tensors |= dict(zip(entry.tensors, map(np.ascontiguousarray, entry.split(value)), strict=True))
    values = shape.to_hf() | {"num_nextn_predict_layers": 1, "torch_dtype": dtype}
    files.write(folder, values, tensors)
    found = jax.tree.leaves(_read(folder, _shape_of(folder, target), like))
    if not all(a.tobytes() == b.tobytes() for a, b in zip(found, jax.tree.leaves(cast), strict=True)):
        raise DraftFormatError(f"{folder}: the layer does not read back the same; is the disk full?")


def _read(folder: disk.Path, shape: ModelConfig, like: MtpHead) -> MtpHead:
    """Reads a layer's parameters, numpy arrays in the dtypes of `like`. Raises WeightsError."""
    table, found = _LAYERS[type(shape)][1](shape), locate(folder)
    if problems := misfits(table, found):
        raise WeightsError(f"{folder}: no MTP layer to draft with ('mtp'):\n  " + "\n  ".join(problems))
    tensor = reader(found)

    def read(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        entry = table[parameter_path(path)]
        value = entry.part((slice(None),) * entry.dimensions, *map(tensor, entry.tensors))  # of slices, read lazily
        return np.ascontiguousarray(value).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(read, like)


def _shape_of(folder: disk.Path, target: ModelConfig) -> ModelConfig:
    """Reads the config.json of a layer by itself. Raises DraftFormatError for another one than the target's."""
    shape = read_config(folder, target.aux_layers)
    got, expected = (vars(_unquantised(x)) for x in (shape, target))
    if type(shape) is not type(target):
        got, expected = {"architectures": shape.architecture}, {"architectures": target.architecture}
    names = [name for name in expected if got[name] != expected[name] and name != "num_nextn_predict_layers"]
    if names:
        problems = [f"{name}: got {got[name]!r}, expected {expected[name]!r}" for name in names]
        raise DraftFormatError(f"{folder}: the MTP layer of another target:\n  " + "\n  ".join(problems))
    return shape


def _unquantised(shape: ModelConfig) -> ModelConfig:
    return dataclasses.replace(shape, fp8=False) if isinstance(shape, DeepseekV3Config) else shape


def _without_rows(head: MtpHead) -> MtpHead:
    """Copies a head without its LM head."""
    layer = jax.tree.map(lambda x: x, head)
    if hasattr(layer, "lm_head"):
        del layer.lm_head
    return layer
