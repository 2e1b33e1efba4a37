"""Draft heads inside a target's checkpoint: its multi-token prediction layers (MTP; NEXTN in SGLang).

A trained layer is written alone, under its names in the target's checkpoint and with the target's config.json. SGLang
(`--speculative-algorithm NEXTN --speculative-draft-model-path`; models/mimo_mtp.py, deepseek_nextn.py) and vLLM (method
"mtp" with `model`; config/speculative.py, models/deepseek_mtp.py) read such a folder beside the target. They share the
target's embeddings and LM head with the layer (`set_embed_and_head`; v1/spec_decode/llm_base_proposer.py).
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.formats import engines, fields, files
from eagle3_jax.formats.compatibility import SILENT, Engines
from eagle3_jax.formats.files import DraftFormatError
from eagle3_jax.formats.kinds import DraftKind, Path, StoredHead
from eagle3_jax.formats.stored import filled, to_tensors
from eagle3_jax.kernels.linear.layouts import dense
from eagle3_jax.mesh import parameter_path
from eagle3_jax.models.checkpoint.fetch import Target, read_config
from eagle3_jax.models.checkpoint.load import WeightsError, locate, misfits, reader, spelt
from eagle3_jax.models.checkpoint.table import Entry
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.drafts.mtp import HEADS, MtpHead
from eagle3_jax.models.families.deepseek_v3 import DeepseekV3Config
from eagle3_jax.models.families.qwen2 import MimoConfig
from eagle3_jax.models.shapes import shapes_of
from eagle3_jax.models.target_config import ModelConfig
from eagle3_jax.runs import disk

_ROWS = dict(zip(HEADS, engines.MTP_ROWS, strict=False))


def _used(head: StoredHead, form: str) -> Iterator[tuple[str, str]]:
    mimo = isinstance(head.config, MimoConfig)
    why = "vLLM feeds MiMo's layer the state before the final norm" if mimo else ""
    yield _ROWS.get(type(head.config), engines.MTP_ROWS[-1]), why


ENGINES = Engines(
    {"SGLang": "0.5.23", "vLLM": "0.32.0", **engines.VERSIONS},
    {row: ("0.5.23", SILENT if row == _ROWS[MimoConfig] else "0.32.0") for row in engines.MTP_ROWS},
    {"sglang": ("SGLang", engines.SGLANG_JAX), "vllm": ("vLLM", engines.TPU_INFERENCE)},
    _used,
    columns=engines.MTP,
)


def head_of(shape: ModelConfig, field: str = "draft") -> type[MtpHead]:
    """Returns the class of a target's MTP layer. Raises ValueError, by `field`, for a family without one."""
    if type(shape) not in HEADS:
        raise ValueError(f"{field}: got 'mtp', expected a head's folder: {shape.architecture} has no such layer")
    return HEADS[type(shape)]


def abstract(shape: ModelConfig, dtype: Any, field: str = "draft") -> MtpHead:
    """Makes the abstract head (shapes only) of a target. Raises ValueError, by `field`, for a family without one."""
    head = head_of(shape, field)
    return shapes_of(lambda rngs: head(shape, dtype=dtype, rngs=rngs))


def _tensors(folder: disk.Path, shape: ModelConfig) -> tuple[dict[str, Entry], dict[str, Any]]:
    """Opens a layer's tensors, which are read when they are indexed; with their table. Raises WeightsError."""
    found = locate(folder)
    table = spelt(head_of(shape).table(shape), {name: name for name in found})
    if problems := misfits(table, found):
        raise WeightsError(f"{folder}: no MTP layer to draft with ('mtp'):\n  " + "\n  ".join(problems))
    tensor = reader(found)
    return table, {name: tensor(name) for entry in table.values() for name in entry.tensors}


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
    own: dict[str, Any] = {"fp8": False} if isinstance(shape, DeepseekV3Config) else {}
    return dataclasses.replace(shape, scales=None, **own)


class MtpKind(DraftKind):
    """See `DraftKind`. A layer has the names of its target's checkpoint, unquantised, without the LM head."""

    def load(self, folder: pathlib.Path | None, target: Target, dtype: Any, token_map: Path | None = None) -> Draft:
        """See `DraftKind`: the first layer, with the target's embeddings and LM head.

        Raises ValueError: the target's family has none. WeightsError: missing or wrongly shaped tensors.
        DraftFormatError: the layer of another architecture.
        """
        shape, rows = target.model.config, dense(target.model.output_rows)
        network, source = head_of(shape), shape if folder is None else _shape_of(folder, shape)
        table, tensors = _tensors(folder or target.folder, source)
        assert isinstance(rows, jax.Array), "the target is loaded, and not packed yet"
        head = filled(network, shape, jnp.dtype(dtype), table, tensors, rows)
        return Draft(head, jnp.arange(shape.vocab_size, dtype=jnp.int32))

    def stored(self, draft: Draft, target: ModelConfig, dtype: str, name: str | None) -> StoredHead:
        """See `DraftKind`; biases of a router stay float32."""
        shape, problems = _unquantised(target), []
        leaves = jax.tree_util.tree_leaves_with_path(abstract(target, jnp.dtype(dtype)))
        wanted = {parameter_path(path): leaf.dtype for path, leaf in leaves}
        head = jax.tree.map(lambda leaf: leaf, draft.head)
        if hasattr(head, "lm_head"):  # the target's
            del head.lm_head
        tensors = to_tensors(head, head_of(shape).table(shape), wanted.__getitem__, problems)
        ids = np.asarray(draft.token_ids, np.int64)
        return StoredHead(self, shape, tensors, ids, problems=tuple(problems))

    def write(self, folder: pathlib.Path, head: StoredHead, form: str) -> None:
        """See `DraftKind`; `form` is the engine that reads it, "sglang" or "vllm"."""
        shape, dtype = head.config, next(iter(head.tensors.values())).dtype
        refused = {name: ENGINES.cannot_run(readers[0], head, name) for name, readers in ENGINES.readers.items()}
        able = [name for name, problems in refused.items() if not problems]
        if form not in able:
            why = refused[form][0] if form in refused else "the form has no MTP layers"
            raise DraftFormatError(f"export.format: got {form!r}, expected {' or '.join(map(repr, able))}: {why}")
        if head.problems:
            raise DraftFormatError("this layer cannot be saved:\n  " + "\n  ".join(head.problems))
        counts = dict.fromkeys(head_of(shape).counted_by, 1)
        files.write(folder, shape.to_hf() | counts | {"torch_dtype": str(dtype)}, head.tensors)
        tensors, _ = files.read_tensors(folder, str)
        found = StoredHead(self, _shape_of(folder, shape), tensors, head.token_ids)
        if not found.same(dataclasses.replace(head, config=found.config)):
            raise DraftFormatError(f"{folder}: the layer does not read back the same; is the disk full?")

    def served_by(self, head: StoredHead, form: str) -> str:
        return ENGINES.served_by(head, form)


MTP = MtpKind(
    name="mtp",
    label="MTP",
    network=MtpHead,
    method="mtp",
    algorithm="NEXTN",
    # A whole model of this name is recognised first.
    is_mine=lambda folder, values: (
        fields.architecture(values) in {shape.architecture for shape in HEADS} and "draft_vocab_size" not in values
    ),
    shape=lambda draft, target: abstract(target, jnp.float32, "draft.kind").config,
    needs_weights=True,
)
