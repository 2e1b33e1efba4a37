"""Checkpoints that hold matrices in 8 bits beside tensors of scales: block FP8, and compressed-tensors' FP8 and int8.

Block FP8 (DeepSeek-V3, Qwen3-*-FP8): `weight_scale_inv`, a factor for each 128 x 128 weights. compressed-tensors
(llm-compressor; RedHatAI's FP8-dynamic and W8A8): `weight_scale`, a factor for each output channel, or one for all.
Scales of activations are not read: activations stay floats here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from eagle3_jax.models.checkpoint.table import FLOATS, Described, Entry, Packed

BLOCK = 128  # rows and columns of block FP8 that share a factor
_EIGHT_BITS = ("F8_E4M3", "I8")
_SUFFIXES = ("_scale", "_scale_inv", "_scales")
_NAN_EXPONENT = 255  # of MXFP4's scales, powers of two
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")


@dataclasses.dataclass(frozen=True)
class Scales:
    """How tensors with a suffix scale matrices: each row, or the whole matrix, or blocks of rows and columns."""

    suffix: str
    block: int | None = None

    def shapes(self, shape: tuple[int, ...], stored: tuple[int, ...] | None) -> tuple[int, ...]:
        """Returns the expected shape of a matrix's scales, given that in the file, if it is there."""
        rows, columns = shape
        if self.block is not None:
            return -(-rows // self.block), -(-columns // self.block)
        return stored if stored is not None and stored in ((), (1,), (rows,)) else (rows, 1)

    def by_rows(self, factors: Any, rows: int, columns: int, group: int) -> np.ndarray:
        """Spreads stored factors to float32 [rows, columns / group]."""
        factors = np.asarray(factors[...], np.float32)
        if self.block is None:
            return np.broadcast_to(factors.reshape(-1, 1), (rows, columns // group))
        factors = np.repeat(factors, self.block, axis=0)[:rows]
        return np.repeat(factors, self.block // group, axis=1)[:, : columns // group]


BLOCK_FP8 = Scales("_scale_inv", BLOCK)


def read_scales(values: Mapping[str, Any], problems: list[str], others: Collection[str] = ()) -> Scales | None:
    """Reads `quantization_config` of a config.json; None: no matrix has scales of these kinds.

    Appends to `problems` what is not read, by its name, unless the family's own table reads the method (`others`).
    """
    section = values.get("quantization_config")
    method = section.get("quant_method") if section else None
    if not section or method in others:
        return None
    if method == "fp8":
        block = section.get("weight_block_size")
        if block != [BLOCK, BLOCK]:
            problems.append(f"quantization_config.weight_block_size: got {block!r}, expected {[BLOCK, BLOCK]}")
        return BLOCK_FP8
    if method != "compressed-tensors":
        among = " or ".join(map(repr, ("fp8", "compressed-tensors", *others)))
        problems.append(
            f"quantization_config.quant_method: got {method!r}, expected {among}; else load floats by target.weights"
        )
        return None
    expected: list[tuple[str, Any, Any]] = [("format", section.get("format"), _FORMATS)]
    for name, group in (section.get("config_groups") or {}).items():
        own, place = group.get("weights") or {}, f"config_groups.{name}.weights"
        expected += [
            (f"{place}.num_bits", own.get("num_bits"), (8,)),
            (f"{place}.strategy", own.get("strategy"), ("tensor", "channel")),
            (f"{place}.symmetric", own.get("symmetric", True), (True,)),
        ]
    expected.append(("kv_cache_scheme", section.get("kv_cache_scheme"), (None,)))
    problems += [
        f"quantization_config.{field}: got {got!r}, expected {' or '.join(map(repr, among))}"
        for field, got, among in expected
        if got not in among
    ]
    return Scales("_scale")


def with_scales(entry: Entry, scales: Scales, stored: Mapping[str, Described]) -> Entry:
    """Turns an entry of matrices [out, in] into that of quantised ones, with the scales that `stored` files have."""
    tensors, dtypes = {}, set()
    for name, shape in entry.tensors.items():
        own = stored.get(f"{name}{scales.suffix}")
        tensors |= {name: shape, f"{name}{scales.suffix}": scales.shapes(shape, own.shape if own else None)}
        dtypes.add(stored[name].dtype if name in stored else _EIGHT_BITS[0])
    shapes = list(entry.tensors.values())
    columns = shapes[0][1]

    def part(index: tuple[slice, ...], *parts: Any) -> np.ndarray:
        pairs = zip(parts[::2], parts[1::2], strict=True)
        return entry.part(index, *(_Scaled(x, factors, scales) for x, factors in pairs))

    def scale(group: int, index: tuple[slice, ...], *parts: Any) -> np.ndarray:
        factors = zip(parts[1::2], shapes, strict=True)
        spread = (scales.by_rows(x, rows, columns, group) for x, (rows, columns) in factors)
        return entry.part(index, *spread)

    def split(_: np.ndarray) -> tuple[np.ndarray, ...]:
        raise ValueError("quantised weights are only read, not written; load an unquantised checkpoint")

    group = scales.block and math.gcd(scales.block, columns)
    packed = Packed(group, lambda index, *parts: entry.part(index, *parts[::2]), scale)
    return Entry(tensors, part, split, entry.dimensions, (*dtypes, *FLOATS), packed)


def with_stored_scales(table: dict[str, Entry], scales: Scales, stored: Mapping[str, Described]) -> dict[str, Entry]:
    """Gives scales to the entries whose tensors the files hold in 8 bits."""

    def is_quantised(entry: Entry) -> bool:
        dtypes = {stored[name].dtype for name, shape in entry.tensors.items() if name in stored and len(shape) == 2}
        return entry.packed is None and bool(dtypes & set(_EIGHT_BITS))

    return {path: with_scales(x, scales, stored) if is_quantised(x) else x for path, x in table.items()}


def scale_problems(table: Mapping[str, Entry], tensor: Callable[[str], Any]) -> list[str]:
    """Lists the tensors of scales that are not finite, by name; `tensor` opens one by its name."""
    problems = []
    for name in (name for entry in table.values() for name in entry.tensors if name.endswith(_SUFFIXES)):
        x = np.asarray(tensor(name)[...])
        finite = x != _NAN_EXPONENT if x.dtype == np.uint8 else np.isfinite(x.astype(np.float32))
        if not finite.all():
            problems.append(f"{name}: got NaN or infinity, expected finite scales")
    return problems


@dataclasses.dataclass(frozen=True)
class _Scaled:
    """A matrix in 8 bits, multiplied out where indexed."""

    numbers: Any
    factors: Any
    scales: Scales

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        numbers = self.numbers[index].astype(np.float32)
        factors = np.asarray(self.factors[...], np.float32)
        if self.scales.block is None:
            rows = factors.reshape(-1, 1)
            return numbers * (rows[index[0]] if len(rows) > 1 else rows)
        sizes = zip(self.numbers.shape, index, strict=True)
        blocks = (np.arange(size)[part] // self.scales.block for size, part in sizes)
        return numbers * factors[np.ix_(*blocks)]
