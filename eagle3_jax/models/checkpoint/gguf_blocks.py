"""Blocks of GGUF files (llama.cpp's ggml-quants.h): values of a few bits, and a scale for each 32 or 16 of them.

A value stands for `value * scale`, plus an offset in some kinds. Values of 4 bits are centred to -8 to 7, others lie in
int8. The scales of K-quants are products of two numbers of their block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # values int8, scales and offsets float32; rows are blocks
_SUPER = 256  # values of a K-quant's block
_PAIRS, _HALVES, _BITS = (np.arange(0, 8, step, dtype=np.uint8)[:, None] for step in (2, 4, 1))  # shifts within a byte


@dataclasses.dataclass(frozen=True)
class BlockKind:
    """How a kind of block holds its values.

    Attributes:
        size: values of a block, consecutive inputs of one output.
        bytes: of a block.
        group: values that share a scale.
        bits: that hold a value here, 4 or 8.
        offsets: whether they have offsets.
        parts: blocks uint8 [n, bytes] -> values int8 [n, size], scales and offsets [n, size / group].
    """

    size: int
    bytes: int
    group: int
    bits: int
    offsets: bool
    parts: Callable[[np.ndarray], Parts]

    def read(self, rows: np.ndarray) -> Parts:
        """Splits rows of blocks, uint8 [rows, bytes], into values [rows, k], scales and offsets [rows, k / group]."""
        with np.errstate(invalid="ignore"):  # a damaged block's infinity; the reader names its tensor
            found = self.parts(np.ascontiguousarray(rows).reshape(-1, self.bytes))
        values, scale, offset = (None if x is None else x.reshape(len(rows), -1) for x in found)
        assert values is not None and scale is not None
        return values, scale, offset


def multiplied_out(values: np.ndarray, scale: np.ndarray, offset: np.ndarray | None) -> np.ndarray:
    """Computes the numbers that values stand for, float32 [rows, k]."""
    group = values.shape[1] // scale.shape[1]
    floats = values.astype(np.float32) * np.repeat(scale, group, axis=1)
    return floats if offset is None else floats + np.repeat(offset, group, axis=1)


def _half(blocks: np.ndarray, place: int) -> np.ndarray:
    """Reads a float16 of each block, as float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, place : place + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Splits bytes [n, b] into their lower halves, then their upper ones, [n, 2 b]."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _signed(values: np.ndarray, middle: int) -> np.ndarray:
    return values.astype(np.int8) - np.int8(middle)


def _q4_0(blocks: np.ndarray) -> Parts:
    return _signed(_nibbles(blocks[:, 2:]), 8), _half(blocks, 0), None


def _q4_1(blocks: np.ndarray) -> Parts:
    scale = _half(blocks, 0)
    return _signed(_nibbles(blocks[:, 4:]), 8), scale, _half(blocks, 2) + 8 * scale


def _fifth_bits(packed: np.ndarray) -> np.ndarray:
    """Spreads 32 bits of each block, [n, 4] bytes, to values 0 and 16."""
    return np.unpackbits(packed, axis=1, bitorder="little") << 4


def _q5_0(blocks: np.ndarray) -> Parts:
    return _signed(_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), 16), _half(blocks, 0), None


def _q5_1(blocks: np.ndarray) -> Parts:
    scale = _half(blocks, 0)
    return _signed(_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), 16), scale, _half(blocks, 2) + 16 * scale


def _q8_0(blocks: np.ndarray) -> Parts:
    return blocks[:, 2:].view(np.int8), _half(blocks, 0), None


def _q2_k(blocks: np.ndarray) -> Parts:
    both, packed = blocks[:, :16], blocks[:, 16:80].reshape(-1, 2, 1, 32)
    values = (packed >> _PAIRS) & 3  # [n, half, shift, 32]
    scale, least = _half(blocks, 80) * (both & 15), -_half(blocks, 82) * (both >> 4)
    return values.reshape(-1, _SUPER).astype(np.int8), scale, least


def _q3_k(blocks: np.ndarray) -> Parts:
    high, packed, scales = blocks[:, :32], blocks[:, 32:96].reshape(-1, 2, 1, 32), blocks[:, 96:108]
    values = (packed >> _PAIRS) & 3
    third = (high[:, None] >> _BITS) & 1  # [n, 8, 32]
    values = values.reshape(-1, _SUPER) | third.reshape(-1, _SUPER) << 2
    low, two = _nibbles(scales[:, :8]), (scales[:, None, 8:] >> _PAIRS) & 3
    scale = _signed(low | two.reshape(-1, 16) << 4, 32)
    return _signed(values, 4), _half(blocks, 108) * scale, None


def _scales_of_eight(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unpacks eight scales and eight offsets of 6 bits from 12 bytes."""
    first, second, mixed = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate([first & 63, mixed & 15 | first >> 6 << 4], axis=1)
    least = np.concatenate([second & 63, mixed >> 4 | second >> 6 << 4], axis=1)
    return scale, least


def _pairs(packed: np.ndarray) -> np.ndarray:
    """Splits 128 bytes into eight groups of 32: lower halves and upper ones of 32 bytes in turns."""
    return np.stack([packed.reshape(-1, 4, 32) & 15, packed.reshape(-1, 4, 32) >> 4], axis=2).reshape(-1, _SUPER)


def _k_offsets(blocks: np.ndarray, middle: int) -> tuple[np.ndarray, np.ndarray]:
    scale, least = _scales_of_eight(blocks[:, 4:16])
    scale = _half(blocks, 0) * scale
    return scale, middle * scale - _half(blocks, 2) * least


def _q4_k(blocks: np.ndarray) -> Parts:
    return _signed(_pairs(blocks[:, 16:]), 8), *_k_offsets(blocks, 8)


def _q5_k(blocks: np.ndarray) -> Parts:
    fifth = (blocks[:, None, 16:48] >> _BITS) & 1  # [n, 8, 32]
    values = _pairs(blocks[:, 48:]) | fifth.reshape(-1, _SUPER) << 4
    return _signed(values, 16), *_k_offsets(blocks, 16)


def _q6_k(blocks: np.ndarray) -> Parts:
    low = blocks[:, :128].reshape(-1, 2, 1, 64) >> _HALVES & 15  # [n, half, nibble, 64]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> _PAIRS & 3  # [n, half, pair, 32]
    values = low.reshape(-1, _SUPER) | high.reshape(-1, _SUPER) << 4
    return _signed(values, 32), _half(blocks, 208) * blocks[:, 192:208].view(np.int8), None


BLOCK_KINDS = {
    "Q4_0": BlockKind(32, 18, 32, 4, False, _q4_0),
    "Q4_1": BlockKind(32, 20, 32, 4, True, _q4_1),
    "Q5_0": BlockKind(32, 22, 32, 8, False, _q5_0),
    "Q5_1": BlockKind(32, 24, 32, 8, True, _q5_1),
    "Q8_0": BlockKind(32, 34, 32, 8, False, _q8_0),
    "Q2_K": BlockKind(_SUPER, 84, 16, 8, True, _q2_k),
    "Q3_K": BlockKind(_SUPER, 110, 16, 8, False, _q3_k),
    "Q4_K": BlockKind(_SUPER, 144, 32, 4, True, _q4_k),
    "Q5_K": BlockKind(_SUPER, 176, 32, 8, True, _q5_k),
    "Q6_K": BlockKind(_SUPER, 210, 16, 8, False, _q6_k),
}
