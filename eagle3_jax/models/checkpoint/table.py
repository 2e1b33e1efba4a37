"""Entries of weight tables: the checkpoint tensors of one parameter, how to combine them, to split it, to check them.

Names and shapes are those on disk: Hugging Face's, projections [out, in], as in torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

# Names of dtypes in safetensors files, and of GGUF's floats.
DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "BOOL": np.bool_,
} | {f"{letter}{bits}": np.dtype(f"{letter.lower()}{bits // 8}") for letter in "IU" for bits in (8, 16, 32, 64)}
FLOATS = ("F64", "F32", "F16", "BF16")
Shapes = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Packed:
    """A parameter [..., in, out] as `Quantised` holds it; see there.

    Attributes:
        group: consecutive inputs that share a scale in the checkpoint; None: all of them.
        values: (an index of the parameter, the tensors) -> that part of the values.
        scale: (inputs that share a scale in memory, a divisor of `group`; an index of the scale; the tensors) -> that
            part of the scale, float32. offset: the same; None: there are none.
    """

    group: int | None
    values: Callable[..., np.ndarray]
    scale: Callable[..., np.ndarray]
    offset: Callable[..., np.ndarray] | None = None


@dataclasses.dataclass(frozen=True)
class Entry:
    """The tensors of one parameter.

    Attributes:
        tensors: name -> expected shape.
        part: (an index of the parameter, one slice per dimension; the tensors, in order) -> that part of the parameter.
            Tensors are numpy's or JAX's arrays, or safetensors slices; only the needed part is read.
        split: the inverse of `whole`: the parameter -> its tensors, in order.
        dimensions: number of the parameter's dimensions.
        dtypes: dtypes of the tensors, in safetensors' names.
        packed: the parameter in the checkpoint's own few bits; None if the checkpoint holds floats.
        other: how other checkpoints spell the parameter, for reading.
        kept: whether the parameter keeps the checkpoint's dtype, for tables of which single rows are read.
    """

    tensors: dict[str, tuple[int, ...]]
    part: Callable[..., Any]
    split: Callable[[np.ndarray], tuple[np.ndarray, ...]]
    dimensions: int = 2
    dtypes: tuple[str, ...] = FLOATS
    packed: Packed | None = None
    other: Entry | None = None
    kept: bool = False

    def whole(self, *tensors: Any) -> Any:
        """Combines the tensors, in order, into the parameter."""
        return self.part((slice(None),) * self.dimensions, *tensors)


def plain(name: str, *shape: int) -> Entry:
    """Takes a tensor unchanged."""
    return Entry({name: shape}, lambda index, x: x[index], lambda x: (x,), len(shape))


def kernel(name: str, *shape: int) -> Entry:
    """Transposes a projection: [out, in] on disk, [in, out] in memory."""
    return Entry({name: shape}, lambda index, x: x[index[::-1]].T, lambda x: (x.T,))


def grouped(
    blocks: Mapping[str, Sequence[int]], groups: int, columns: int, shape: tuple[int, ...] | None = None
) -> Entry:
    """Fuses projections to [in, out], all rows of a group side by side, so that a mesh splits groups.

    Args:
        blocks: the tensors, and the rows of a group in each of the blocks that lie one behind the other in it.
        columns: the size `in`.
        shape: of a row on disk; None is (`columns`,).
    """
    widths = [size for sizes in blocks.values() for size in sizes]
    shape = shape or (columns,)

    def part(index: tuple[slice, slice], *tensors: Any) -> Any:  # read whole
        found = []
        for x, sizes in zip(tensors, blocks.values(), strict=True):
            rows, start = x[(slice(None),) * (1 + len(shape))], 0
            for size in sizes:
                found.append(rows[start : start + groups * size].reshape(groups, size, -1))  # or scales of columns
                start += groups * size
        fused = functions_of(found[0]).concatenate(found, axis=1)
        return fused.reshape(-1, fused.shape[-1])[index[::-1]].T

    def split(x: np.ndarray) -> tuple[np.ndarray, ...]:
        rows = iter(np.split(x.T.reshape(groups, -1, columns), np.cumsum(widths)[:-1], axis=1))
        behind = [np.concatenate([next(rows).reshape(-1, *shape) for _ in sizes]) for sizes in blocks.values()]
        return tuple(behind)

    return Entry({name: (groups * sum(sizes), *shape) for name, sizes in blocks.items()}, part, split)


def taps(name: str, sizes: Sequence[int], groups: int, width: int) -> Entry:
    """Takes a convolution's kernel for each channel: [out, 1, width] on disk, [width, out] in memory; see `grouped`."""
    return grouped({name: sizes}, groups, width, (1, width))


def stacked(names: Sequence[str], *shape: int, fused: tuple[str, int, int] | None = None) -> Entry:
    """Stacks projections of one shape: [out, in] each on disk, [count, in, out] in memory.

    Args:
        fused: another spelling of checkpoints: one tensor [count, parts * out, in], which part of it, of how many.
    """

    def part(index: tuple[slice, slice, slice], *tensors: Any) -> Any:
        parts = [x[index[:0:-1]].T for x in tensors[index[0]]]
        return functions_of(parts[0]).stack(parts)

    def split(x: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(matrix.T for matrix in x)

    if fused is None:
        return Entry(dict.fromkeys(names, shape), part, split, 3)
    name, place, parts = fused

    def part_of_fused(index: tuple[slice, slice, slice], x: Any) -> Any:
        start, stop, _ = index[2].indices(shape[0])
        return x[index[0], place * shape[0] + start : place * shape[0] + stop, index[1]].swapaxes(1, 2)

    other = Entry({name: (len(names), parts * shape[0], shape[1])}, part_of_fused, split, 3)
    return Entry(dict.fromkeys(names, shape), part, split, 3, other=other)


def qkv(config: Any, attention: str, columns: int) -> Entry:
    """Fuses queries [heads * d, columns], keys and values [kv_heads * d, columns], whose names begin with `attention`.

    To [columns, kv_heads * (group + 2) * d]: a KV head's queries, key and value lie side by side.
    """
    kv_heads, d = config.num_key_value_heads, config.head_dim
    group = config.num_attention_heads // kv_heads
    width = (group + 2) * d

    def part(index: tuple[slice, slice], q: Any, k: Any, v: Any) -> Any:
        rows, columns = index
        start, stop, _ = columns.indices(kv_heads * width)
        first, end = start // width, -(-stop // width)  # a part may begin and end inside a head

        def heads(x: Any, per_head: int) -> Any:
            block = x[first * per_head * d : end * per_head * d, rows]
            return block.reshape(end - first, per_head, d, block.shape[-1])

        parts = [heads(q, group), heads(k, 1), heads(v, 1)]
        fused = functions_of(parts[0]).concatenate(parts, axis=1)
        return fused.reshape(-1, fused.shape[-1])[start - first * width : stop - first * width].T

    def split(x: np.ndarray) -> tuple[np.ndarray, ...]:
        heads = x.T.reshape(kv_heads, group + 2, d, x.shape[0])
        return tuple(part.reshape(-1, x.shape[0]) for part in (heads[:, :-2], heads[:, -2], heads[:, -1]))

    rows = {"q": kv_heads * group * d, "k": kv_heads * d, "v": kv_heads * d}
    return Entry({f"{attention}.{name}_proj.weight": (size, columns) for name, size in rows.items()}, part, split)


def swiglu(source: str, hidden: int, intermediate: int) -> dict[str, Entry]:
    """Maps the matrices of a `SwiGLU` to the projections whose names begin with `source`."""
    shapes = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}
    return {name: kernel(f"{source}.{name}_proj.weight", *shape) for name, shape in shapes.items()}


def llama_layer(config: Any, source: str, columns: int) -> dict[str, Entry]:
    """Maps the paths of a Llama layer behind its first norms, whose attention reads `columns` numbers."""
    c, h = config, config.hidden_size
    return {
        "attention/qkv": qkv(c, f"{source}.self_attn", columns),
        "attention/o": kernel(f"{source}.self_attn.o_proj.weight", h, c.num_attention_heads * c.head_dim),
        "post_norm": plain(f"{source}.post_attention_layernorm.weight", h),
        **{f"mlp/{name}": entry for name, entry in swiglu(f"{source}.mlp", h, c.intermediate_size).items()},
    }


def qkv_bias(config: Any, attention: str) -> Entry:
    """Fuses the biases of queries, keys and values in the column order of `qkv`; same arguments as there."""
    kv_heads, d = config.num_key_value_heads, config.head_dim
    group = config.num_attention_heads // kv_heads

    def part(index: tuple[slice], q: Any, k: Any, v: Any) -> Any:
        heads = [x[:].reshape(kv_heads, -1, d) for x in (q, k, v)]  # small: read whole
        return functions_of(heads[0]).concatenate(heads, axis=1).reshape(-1)[index]

    def split(x: np.ndarray) -> tuple[np.ndarray, ...]:
        heads = x.reshape(kv_heads, group + 2, d)
        return heads[:, :-2].reshape(-1), heads[:, -2].reshape(-1), heads[:, -1].reshape(-1)

    sizes = {"q": kv_heads * group * d, "k": kv_heads * d, "v": kv_heads * d}
    return Entry({f"{attention}.{name}_proj.bias": (size,) for name, size in sizes.items()}, part, split, 1)


def functions_of(array: Any) -> Any:
    """Returns the functions for an array: numpy, or jax.numpy."""
    return array.__array_namespace__()


class Described(NamedTuple):
    """A tensor that is not read yet; its dtype is one of safetensors' names."""

    dtype: str
    shape: tuple[int, ...]


def not_floats(name: str, dtype: Any) -> str | None:
    """Returns the dtype that was expected of a tensor; None if it is of floats, as it should be."""
    return None if jnp.issubdtype(dtype, np.floating) else "floating point"


def tensor_problems(
    found: Mapping[str, Any],
    expected: Shapes,
    optional: Shapes | None = None,
    other_dtype: Callable[[str, Any], str | None] = not_floats,
) -> list[str]:
    """Lists every tensor that is missing, surplus, of a wrong shape or dtype, or not finite, by name.

    `found` are arrays, or `Described` tensors; numpy's arrays alone are searched for NaN and infinity. The `expected`
    ones must be there, the `optional` ones may. `other_dtype`: see `not_floats`.
    """
    known = {**expected, **(optional or {})}
    problems = [f"missing tensor {name} {list(shape)}" for name, shape in expected.items() if name not in found]
    problems += [f"surplus tensor {name}" for name in sorted(found.keys() - known.keys())]
    for name, shape in known.items():
        if (tensor := found.get(name)) is None:
            continue
        if tuple(tensor.shape) != shape:
            problems.append(f"{name}: got shape {list(tensor.shape)}, expected {list(shape)}")
        elif wanted := other_dtype(name, tensor.dtype):
            problems.append(f"{name}: got dtype {tensor.dtype}, expected {wanted}")
        elif isinstance(tensor, np.ndarray) and tensor.dtype.kind not in "iub" and not np.isfinite(tensor).all():
            problems.append(f"{name}: got NaN or infinity, expected finite numbers")
    return problems
