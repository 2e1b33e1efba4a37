"""Which tensors of a checkpoint make a parameter, how, and how the parameter is taken apart again.

Names and shapes are those on disk: Hugging Face's, projections [out, in], as torch keeps them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Entry:
    """How one parameter is made.

    Attributes:
        tensors: name -> expected shape.
        part: an index of the parameter (a slice a dimension) and those tensors, in order -> that part of it. Of a
            tensor it reads no more than that takes; it may be an array or a safetensors slice.
        split: the inverse of `whole`: the parameter -> its tensors, in order.
        dimensions: of the parameter. dtypes: of the tensors, in safetensors' words.
    """

    tensors: dict[str, tuple[int, ...]]
    part: Callable[..., np.ndarray]
    split: Callable[[np.ndarray], tuple[np.ndarray, ...]]
    dimensions: int = 2
    dtypes: tuple[str, ...] = ("F64", "F32", "F16", "BF16")

    def whole(self, *tensors: np.ndarray) -> np.ndarray:
        """The parameter, of its tensors, in order."""
        return self.part((slice(None),) * self.dimensions, *tensors)


def plain(name: str, *shape: int) -> Entry:
    """The tensor as it is."""
    return Entry({name: shape}, lambda index, x: x[index], lambda x: (x,), len(shape))


def kernel(name: str, *shape: int) -> Entry:
    """A projection: [out, in] there, [in, out] here."""
    return Entry({name: shape}, lambda index, x: x[index[::-1]].T, lambda x: (x.T,))


def stacked(names: Sequence[str], *shape: int) -> Entry:
    """Projections of the same shape, [out, in] each there, [count, in, out] here."""

    def part(index: tuple[slice, slice, slice], *tensors: Any) -> np.ndarray:
        return np.stack([x[index[:0:-1]].T for x in tensors[index[0]]])

    return Entry(dict.fromkeys(names, shape), part, lambda x: tuple(matrix.T for matrix in x), 3)


def qkv(config: Any, attention: str, columns: int) -> Entry:
    """Queries [heads * d, in], keys and values [kv_heads * d, in] -> [in, kv_heads * (group + 2) * d], a KV head's
    queries, key and value side by side.

    Args:
        config: has `num_attention_heads`, `num_key_value_heads` and `head_dim`.
        attention: what the three names begin with. columns: the size `in`.
    """
    kv_heads, d = config.num_key_value_heads, config.head_dim
    group = config.num_attention_heads // kv_heads
    width = (group + 2) * d

    def part(index: tuple[slice, slice], q: Any, k: Any, v: Any) -> np.ndarray:
        rows, columns = index
        start, stop, _ = columns.indices(kv_heads * width)
        first, end = start // width, -(-stop // width)  # a part may begin and end inside a head

        def heads(x: Any, per_head: int) -> np.ndarray:
            held = x[first * per_head * d : end * per_head * d, rows]
            return held.reshape(end - first, per_head, d, held.shape[-1])

        fused = np.concatenate([heads(q, group), heads(k, 1), heads(v, 1)], axis=1)
        return fused.reshape(-1, fused.shape[-1])[start - first * width : stop - first * width].T

    def split(x: np.ndarray) -> tuple[np.ndarray, ...]:
        heads = x.T.reshape(kv_heads, group + 2, d, x.shape[0])
        return tuple(part.reshape(-1, x.shape[0]) for part in (heads[:, :-2], heads[:, -2], heads[:, -1]))

    rows = {"q": kv_heads * group * d, "k": kv_heads * d, "v": kv_heads * d}
    return Entry({f"{attention}.{name}_proj.weight": (size, columns) for name, size in rows.items()}, part, split)


def qkv_bias(config: Any, attention: str) -> Entry:
    """Biases of queries, keys and values, in the order of the columns of `qkv`; for its arguments see there."""
    kv_heads, d = config.num_key_value_heads, config.head_dim
    group = config.num_attention_heads // kv_heads

    def part(index: tuple[slice], q: Any, k: Any, v: Any) -> np.ndarray:
        heads = [np.asarray(x[:]).reshape(kv_heads, -1, d) for x in (q, k, v)]  # small: read whole
        return np.concatenate(heads, axis=1).reshape(-1)[index]

    def split(x: np.ndarray) -> tuple[np.ndarray, ...]:
        heads = x.reshape(kv_heads, group + 2, d)
        return heads[:, :-2].reshape(-1), heads[:, -2].reshape(-1), heads[:, -1].reshape(-1)

    sizes = {"q": kv_heads * group * d, "k": kv_heads * d, "v": kv_heads * d}
    return Entry({f"{attention}.{name}_proj.bias": (size,) for name, size in sizes.items()}, part, split, 1)
