"""A GGUF file as a container of a checkpoint's tensors, under Hugging Face's names; its blocks are read where they lie.

Beside it stand config.json and the tokenizer of the model that it was made from: a GGUF file says less than these do.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from gguf import GGUFReader
from safetensors import SafetensorError

from eagle3_jax.models.checkpoint import gguf_blocks
from eagle3_jax.models.checkpoint.gguf_blocks import KINDS, BlockKind, Parts
from eagle3_jax.models.checkpoint.table import DTYPES, FLOATS, Entry, Packed
from eagle3_jax.runs import disk

GGUF = ".gguf"
_BLOCK_NAMES = {
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
# Architectures, and whether llama.cpp interleaves the rows of their queries and keys.
_INTERLEAVED = {"llama": True, "qwen2": False, "qwen3": False}
_NOT_WEIGHTS = ("rope_freqs.weight",)  # config.json's rope_scaling says the same


def hf_name(name: str) -> str:
    """Returns Hugging Face's name of a tensor. Raises ValueError: unknown."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    _, layer, part = stem.split(".", 2) if stem.startswith("blk.") else ("", "", stem)
    if part not in _BLOCK_NAMES:
        raise ValueError(f"tensor {name}: unknown, expected one of {sorted([*_TOP_NAMES, *_BLOCK_NAMES])}")
    return f"model.layers.{layer}.{_BLOCK_NAMES[part]}.{kind}"


def open_gguf(path: disk.Path) -> GgufTensors:
    """Opens a local file for `keys` and `get_slice`. Raises SafetensorError, as `ranges.open_tensors` does."""
    if disk.is_remote(path):
        raise SafetensorError("a GGUF file in a bucket is not read; copy it to a local folder")
    status = path.stat()
    return _opened(str(path), status.st_size, status.st_mtime_ns)


@functools.lru_cache(4)
def _opened(path: str, size: int, changed: int) -> GgufTensors:  # a header with its tokens takes seconds
    return GgufTensors(path)


class GgufTensors:
    """An open file."""

    def __init__(self, path: str) -> None:
        try:
            reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError) as error:
            raise SafetensorError(f"not a GGUF file ({error})") from error

        def field(name: str) -> Any:
            found = reader.get_field(name)
            return None if found is None else found.contents()

        name = field("general.architecture")
        if name not in _INTERLEAVED:
            among = " or ".join(map(repr, _INTERLEAVED))
            raise SafetensorError(f"general.architecture: got {name!r}, expected {among}")
        heads = {"q": field(f"{name}.attention.head_count")}
        heads["k"] = field(f"{name}.attention.head_count_kv") or heads["q"]
        if not all(isinstance(count, int) for count in heads.values()):
            raise SafetensorError(f"{name}.attention.head_count: got {heads['q']!r}, expected a number")
        self._tensors: dict[str, GgufTensor] = {}
        for tensor in reader.tensors:
            if tensor.name in _NOT_WEIGHTS:
                continue
            try:
                known = hf_name(tensor.name)
            except ValueError as error:
                raise SafetensorError(str(error)) from error
            shape = tuple(int(size) for size in reversed(tensor.shape))
            which = [which for which in heads if f".attn_{which}." in tensor.name]
            rows = _interleaved(shape[0], heads[which[0]]) if which and _INTERLEAVED[name] else None
            self._tensors[known] = GgufTensor(known, tensor.tensor_type.name, shape, tensor.data, rows)

    def keys(self) -> Iterator[str]:
        return iter(self._tensors)

    def get_slice(self, name: str) -> GgufTensor:
        return self._tensors[name]

    def __enter__(self) -> GgufTensors:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def _interleaved(rows: int, heads: int) -> np.ndarray:
    """Returns the place in the file of each row of queries or keys, whose rotated halves the file interleaves."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


class GgufTensor:
    """A tensor, read when it is indexed; of blocks, the numbers that they stand for.

    Attributes:
        kind: how its blocks hold their values; None: the tensor holds floats.
    """

    def __init__(
        self, name: str, dtype: str, shape: tuple[int, ...], data: np.ndarray, rows: np.ndarray | None
    ) -> None:
        self.name, self.kind = name, KINDS.get(dtype)
        self._dtype, self._shape, self._data, self._rows = dtype, shape, data, rows

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        return self._dtype

    def __getitem__(self, index: slice | tuple[slice, ...]) -> np.ndarray:
        rows, *others = index if isinstance(index, tuple) else (index,)
        if self.kind is not None:
            found = gguf_blocks.multiplied_out(*self.parts(rows))
        else:
            data = self._data.view(DTYPES[self._dtype]).reshape(self._shape)
            found = data[rows if self._rows is None else self._rows[rows]]
        return found[(slice(None), *others)]

    def parts(self, rows: slice) -> Parts:
        """Reads values, scales and offsets of some rows. Raises ValueError: scales that are not finite."""
        return _parts(self, *rows.indices(self._shape[0]))

    def read(self, rows: slice) -> Parts:
        """See `parts`, which reads no rows twice in turn."""
        assert self.kind is not None
        data = self._data.reshape(self._shape[0], -1)
        found = self.kind.read(data[rows] if self._rows is None else data[self._rows[rows]])
        if not all(np.isfinite(x).all() for x in found[1:] if x is not None):
            raise ValueError(f"{self.name}: got NaN or infinity, expected finite scales of its blocks")
        return found


@functools.lru_cache(3)  # queries, keys and values are one parameter; all tensors would be the model once more
def _parts(tensor: GgufTensor, start: int, stop: int, step: int) -> Parts:
    return tensor.read(slice(start, stop, step))


class _Part:
    """Values, scales or offsets of a tensor of blocks as an array, read when it is indexed."""

    def __init__(self, tensor: GgufTensor, which: int, group: int = 0) -> None:
        self._tensor, self._which, self._group = tensor, which, group

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        rows, columns = index
        _, scale, _ = parts = self._tensor.parts(rows)
        found = parts[self._which]
        found = np.zeros_like(scale) if found is None else found
        if self._group:
            kind = self._tensor.kind
            assert kind is not None
            found = np.repeat(found, kind.group // self._group, axis=1)
        return found[:, columns]


def with_blocks(table: Mapping[str, Entry], stored: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Entry]:
    """Has entries take the tensors that the file holds in blocks.

    Tensors of different kinds that are one parameter get what holds all of them: 8 bits, the smaller group, offsets.

    Args:
        stored: dtype and shape of each tensor in the file, by name.
    """

    def taken(entry: Entry) -> Entry:
        kinds = [KINDS.get(stored[name][0]) if name in stored else None for name in entry.tensors]
        if not any(kinds):
            return entry
        whole = [kind for kind in kinds if kind is not None]
        packed = _packed(entry, whole) if len(whole) == len(kinds) and entry.dimensions > 1 else None
        return Entry(entry.tensors, entry.part, entry.split, entry.dimensions, (*FLOATS, *KINDS), packed)

    return {path: taken(entry) for path, entry in table.items()}


def _packed(entry: Entry, kinds: list[BlockKind]) -> Packed:
    bits = max(kind.bits for kind in kinds)

    def values(index: tuple[slice, ...], *tensors: Any) -> np.ndarray:
        found = entry.part(index, *(_Part(tensor, 0) for tensor in tensors))
        return gguf_blocks.four_bits(found) if bits == 4 else found

    def spread(which: int, group: int, index: tuple[slice, ...], *tensors: Any) -> np.ndarray:
        return entry.part(index, *(_Part(tensor, which, group) for tensor in tensors))

    offset = functools.partial(spread, 2) if any(kind.offsets for kind in kinds) else None
    return Packed(min(kind.group for kind in kinds), values, functools.partial(spread, 1), offset)
