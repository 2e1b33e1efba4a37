"""Products of bfloat16 rows with panels on Intel's matrix units (AMX_BF16, since Sapphire Rapids).

A tile is a register of 16 rows of 64 bytes. One instruction adds the product of 16 rows of x, 32 numbers each, with 32
rows of a panel, 16 columns each, to 16 x 16 sums in float32: 16 times what a vector instruction does. A panel of pairs
(`linear_cpu.pack`) has the layout that it asks for. (Intel's Software Developer's Manual, volume 1, chapter 18.)
"""

from __future__ import annotations

import ctypes
import functools
import platform

from llvmlite import ir

from eagle3_jax.kernels.cpu import compiler
from eagle3_jax.kernels.cpu.ir import F32, I8, I16, I32, I64, POINTER, VOID, Code, Value, define

ROWS = 16  # of a tile; those of x are padded to whole ones
MOST = 32  # rows of x that are multiplied at once
DEPTH = 32  # numbers of a row, to which k is padded
WIDTH = 32  # columns of a panel: two tiles
_SUMS, _X, _PANEL = (0, 1, 2, 3), (4, 5), (6, 7)  # the eight tiles: 2 x 2 of sums, of two by two others
_TILE = 64  # bytes of a tile's row, and its 16 columns of float32
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # Linux on x86-64: the kernel lends tiles on request


@functools.cache
def available() -> bool:
    """Whether this machine has tiles for bfloat16, and Linux lets this process use them."""
    if platform.system() != "Linux" or not compiler.has_features("amx-tile", "amx-bf16", "avx512f"):
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


def configure(code: Code) -> None:
    """All tiles of this thread have 16 rows of 64 bytes, until `release`."""
    layout = code.variable(I64, count=8)
    for place in range(8):
        code.b.store(code.int(1 if place == 0 else 0), code.at(layout, place, I64))  # palette 1
    for tile in range(8):
        code.b.store(ir.Constant(I16, _TILE), code.at(layout, 16 + 2 * tile, I8))
        code.b.store(ir.Constant(I8, ROWS), code.at(layout, 48 + tile, I8))
    _step(code, "ldtilecfg ($0)", layout)


def release(code: Code) -> None:
    _step(code, "tilerelease")


def write_block(module: ir.Module, name: str, rows: int) -> ir.Function:
    """The function (panel, x, y, k / 2, stride): y[r, :] = sum over i of x[r, i] * panel[i, :].

    Args:
        rows: 16 or 32. k is a multiple of 32, a row of y has `stride` columns.
    """
    tiles = rows // ROWS
    code = define(module, name, [POINTER] * 3 + [I64, I64])
    code.function.linkage = "internal"
    panel, x, y, pairs, stride = code.function.args
    of_x, of_panel, of_y = code.mul(pairs, 4), code.int(4 * WIDTH), code.mul(stride, 4)  # bytes from row to row
    sums = [(row, column, _SUMS[2 * row + column]) for row in range(tiles) for column in range(2)]
    for *_, total in sums:
        _step(code, f"tilezero %tmm{total}")
    with code.loop(0, pairs, ROWS) as i:
        for column, tile in enumerate(_PANEL):
            place = code.at(panel, code.add(code.mul(i, WIDTH), column * ROWS), I32)
            _step(code, f"tileloadd ($0,$1), %tmm{tile}", place, of_panel)
        for row, tile in enumerate(_X[:tiles]):
            place = code.at(x, code.add(code.mul(pairs, row * ROWS), i), I32)
            _step(code, f"tileloadd ($0,$1), %tmm{tile}", place, of_x)
        for row, column, total in sums:
            _step(code, f"tdpbf16ps %tmm{_PANEL[column]}, %tmm{_X[row]}, %tmm{total}")
    for row, column, total in sums:
        place = code.at(y, code.add(code.mul(stride, row * ROWS), column * ROWS), F32)
        _step(code, f"tilestored %tmm{total}, ($0,$1)", place, of_y)
    code.b.ret_void()
    code.finish()
    return code.function


def _step(code: Code, text: str, *operands: Value) -> None:
    """One instruction; they stay in order, among loads and stores too."""
    constraints = ",".join(["r"] * len(operands) + ["~{memory}"])
    kind = ir.FunctionType(VOID, [operand.type for operand in operands])
    code.b.call(ir.InlineAsm(kind, text, constraints, side_effect=True), operands)
