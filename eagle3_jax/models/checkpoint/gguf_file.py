"""A GGUF file as a container of a checkpoint's tensors, under Hugging Face's names; its blocks are read where they lie.

Beside it stand config.json and the tokenizer of the model that it was made from; for a file alone see `gguf`.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGUFReader
from safetensors import SafetensorError

from eagle3_jax.models.checkpoint import gguf_blocks
from eagle3_jax.models.checkpoint.gguf_blocks import BLOCK_KINDS, BlockKind, Parts
from eagle3_jax.models.checkpoint.table import DTYPES, FLOATS, Described, Entry, Packed
from eagle3_jax.runs import disk

GGUF = ".gguf"
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# Names that are not Llama's; those of one architecture alone are read so there.
_MORE_NAMES = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_NAMES_OF = {
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "hunyuan-dense": {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
}
# Architectures, and the class that `gguf` reads them as. A file does not tell a Mistral from a Llama.
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral3": "Ministral3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitehybrid": "GraniteMoeHybridForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "hunyuan-dense": "HunYuanDenseV1ForCausalLM",
}
# Key, without the architecture -> config.json's.
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
# Those whose rows of queries and keys llama.cpp's converter interleaves (its conversion/*.py: the subclasses of
# LlamaModel). ERNIE's RoPE rotates neighbours on both sides.
INTERLEAVED = ("llama", "mistral3", "smollm3", "granite", "granitehybrid")
# config.json's rope_scaling says the same
_NOT_WEIGHTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def hf_name(name: str, architecture: str = "llama") -> str:
    """Returns Hugging Face's name of a tensor. Raises ValueError: unknown."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    _, layer, part = stem.split(".", 2) if stem.startswith("blk.") else ("", "", stem)
    names = BLOCK_NAMES | _MORE_NAMES | _NAMES_OF.get(architecture, {})
    if part not in names:
        raise ValueError(f"tensor {name}: unknown, expected one of {sorted([*_TOP_NAMES, *names])}")
    return f"model.layers.{layer}.{names[part]}.{kind}"


def gguf_name(name: str) -> str:
    """Returns a tensor's name in a GGUF file of a Llama or Qwen, the inverse of `hf_name`."""
    stem, _, kind = name.rpartition(".")
    ours = {part: name for name, part in (_TOP_NAMES | BLOCK_NAMES).items()}
    if stem in ours:
        return f"{ours[stem]}.{kind}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{ours[part]}.{kind}"


def header(path: pathlib.Path) -> GGUFReader:
    """Reads a local file's header; with tokens it takes seconds. Raises ValueError: truncated, or another file."""
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"{path}: truncated, or not a GGUF file ({error})") from error


def open_gguf(path: disk.Path) -> tuple[dict[str, Described], Callable[[str], Any]]:
    """Opens a local file, see `ranges.open_tensors`. Raises SafetensorError."""
    if (local := disk.system_path(path)) is None:
        raise SafetensorError("a GGUF file in a bucket is not read; copy it to a local folder")
    status = local.stat()
    return _opened(local, status.st_size, status.st_mtime_ns)


@functools.lru_cache(4)
def _opened(path: pathlib.Path, size: int, changed: int) -> tuple[dict[str, Described], Callable[[str], Any]]:
    try:
        reader = header(path)
    except ValueError as error:
        raise SafetensorError(str(error)) from error

    def field(name: str) -> Any:
        found = reader.get_field(name)
        return None if found is None else found.contents()

    architecture = field("general.architecture")
    if architecture not in CLASSES:
        among = " or ".join(map(repr, CLASSES))
        raise SafetensorError(f"general.architecture: got {architecture!r}, expected {among}")
    heads = {"q": field(f"{architecture}.attention.head_count")}
    heads["k"] = field(f"{architecture}.attention.head_count_kv") or heads["q"]
    if not all(isinstance(count, int) for count in heads.values()):
        raise SafetensorError(f"{architecture}.attention.head_count: got {heads['q']!r}, expected a number")
    found: dict[str, GgufTensor] = {}
    for tensor in reader.tensors:
        if tensor.name in _NOT_WEIGHTS:
            continue
        try:
            name = hf_name(tensor.name, architecture)
        except ValueError as error:
            raise SafetensorError(str(error)) from error
        shape = tuple(int(size) for size in reversed(tensor.shape))
        which = [which for which in heads if f".attn_{which}." in tensor.name]
        rows = interleaved(shape[0], heads[which[0]]) if which and architecture in INTERLEAVED else None
        row = int(tensor.n_bytes) // shape[0]
        found[name] = GgufTensor(name, tensor.tensor_type.name, shape, str(path), int(tensor.data_offset), row, rows)
    return {name: Described(x.dtype, x.shape) for name, x in found.items()}, found.__getitem__


def interleaved(rows: int, heads: int) -> np.ndarray:
    """Returns the place in the file of each row of queries or keys, whose rotated halves the file interleaves."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


@dataclasses.dataclass(frozen=True, eq=False)
class GgufTensor:
    """A tensor, read when it is indexed; of blocks, the numbers that they stand for.

    Attributes:
        path, begin, row: its file, and where it begins and the size of a row there, in bytes.
        rows: the place of each row in the file; None: as it is.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: str
    begin: int
    row: int
    rows: np.ndarray | None

    def _data(self, rows: slice) -> np.ndarray:
        """Maps the bytes of some rows, uint8 [rows, row]; what was read of a longer mapping would stay resident."""
        data = np.memmap(self.path, np.uint8, "r", self.begin, (self.shape[0], self.row))
        return data[rows if self.rows is None else self.rows[rows]]

    @property
    def kind(self) -> BlockKind | None:
        """How its blocks hold their values; None: the tensor holds floats."""
        return BLOCK_KINDS.get(self.dtype)

    def __getitem__(self, index: slice | tuple[slice, ...]) -> np.ndarray:
        rows, *others = index if isinstance(index, tuple) else (index,)
        if self.kind is not None:
            found = gguf_blocks.multiplied_out(*self.parts(rows))
        else:
            found = self._data(rows).view(DTYPES[self.dtype]).reshape(-1, *self.shape[1:])
        return found[(slice(None), *others)]

    def parts(self, rows: slice) -> Parts:
        """Reads values, scales and offsets of some rows. Raises ValueError: scales that are not finite."""
        return _parts(self, *rows.indices(self.shape[0]))


@functools.lru_cache(3)  # queries, keys and values are one parameter; all tensors would be the model once more
def _parts(tensor: GgufTensor, *indices: int) -> Parts:
    assert tensor.kind is not None
    found = tensor.kind.read(tensor._data(slice(*indices)))
    if not all(np.isfinite(x).all() for x in found[1:] if x is not None):
        raise ValueError(f"{tensor.name}: got NaN or infinity, expected finite scales of its blocks")
    return found


@dataclasses.dataclass(frozen=True)
class _Part:
    """Values, scales or offsets of a tensor of blocks as an array, read when it is indexed."""

    tensor: GgufTensor
    which: int
    repeats: int = 1

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        parts = self.tensor.parts(index[0])
        found = parts[self.which]
        found = np.zeros_like(parts[1]) if found is None else found
        return np.repeat(found, self.repeats, axis=1)[:, index[1]]


def with_blocks(table: Mapping[str, Entry], stored: Mapping[str, Described]) -> dict[str, Entry]:
    """Has entries take the tensors that the file holds in blocks.

    Tensors of different kinds that are one parameter get what holds all of them: 8 bits, the smaller group, offsets.
    """

    def taken(entry: Entry) -> Entry:
        kinds = [
            BLOCK_KINDS[stored[name].dtype]
            for name in entry.tensors
            if name in stored and stored[name].dtype in BLOCK_KINDS
        ]
        if not kinds:
            return entry
        packed = _packed(entry, kinds) if len(kinds) == len(entry.tensors) and entry.dimensions > 1 else None
        return dataclasses.replace(entry, dtypes=(*FLOATS, *BLOCK_KINDS), packed=packed)

    return {path: taken(entry) for path, entry in table.items()}


def _packed(entry: Entry, kinds: list[BlockKind]) -> Packed:
    def values(index: tuple[slice, ...], *tensors: Any) -> np.ndarray:
        found = entry.part(index, *(_Part(tensor, 0) for tensor in tensors))
        return found if any(kind.bits > 4 for kind in kinds) else found.astype(ml_dtypes.int4)

    def spread(which: int, group: int, index: tuple[slice, ...], *tensors: Any) -> np.ndarray:
        parts = (_Part(x, which, kind.group // group) for x, kind in zip(tensors, kinds, strict=True))
        return entry.part(index, *parts)

    offset = functools.partial(spread, 2) if any(kind.offsets for kind in kinds) else None
    return Packed(min(kind.group for kind in kinds), values, functools.partial(spread, 1), offset)
