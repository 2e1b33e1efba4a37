"""One token of softmax(logits / T) a row, for a CPU: two reads of the logits, and nothing of their size is written.

As `decoding.sampling` draws by two random numbers: a block of the vocabulary, then a token in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32
from llvmlite import ir

from eagle3_jax.kernels.cpu import compiler, handler
from eagle3_jax.kernels.cpu.handler import Buffer
from eagle3_jax.kernels.cpu.ir import F32, I32, I64, Code, Value, constant, vector

_WIDTH = 16
_CHUNKS = 4  # for each thread, see `linear_cpu`


def block_width(size: int) -> int:
    """Of a block of a vocabulary: as many numbers as there are blocks."""
    return math.isqrt(size)


def draw(
    logits: Float32[Array, "b v"], temperature: Float[Array, " b"], coins: Float32[Array, "b 2"]
) -> Int32[Array, " b"]:
    """The argmax where the temperature is 0. The logits are finite.

    Args:
        coins: uniform in [0, 1): for the block, and for the token in it.
    """
    size = logits.shape[1]
    name = compiler.kernel(f"eagle3_jax_draw_{size}", write_draw, size)
    result = jax.ShapeDtypeStruct(logits.shape[:1], jnp.int32)
    return jax.ffi.ffi_call(name, result)(logits, temperature.astype(jnp.float32), coins)


def write_draw(module: ir.Module, name: str, size: int) -> None:
    """The kernel (logits [b, size], temperature [b], coins [b, 2]) -> int32 [b]; a chunk is a few rows."""
    chunks, block = _CHUNKS * compiler.threads(), block_width(size)
    blocks = -(-size // block)

    def plan(code: Code, operands: Sequence[Buffer], results: Sequence[Buffer]) -> tuple[list[Value], Value]:
        rows = operands[0].size(0)
        return [*(operand.data for operand in operands), results[0].data, rows], code.least(chunks, rows)

    def body(code: Code, values: Sequence[Value], chunk: Value) -> None:
        logits, temperatures, coins, chosen, rows = values
        total = code.least(chunks, rows)
        first = code.div(code.mul(chunk, rows), total)
        last = code.div(code.mul(code.add(chunk, 1), rows), total)
        sums = code.variable(F32, count=blocks)
        weights = code.variable(F32, count=-(-block // _WIDTH) * _WIDTH)
        with code.loop(first, last) as row:
            of_row = code.at(logits, code.mul(row, size), F32)
            answer = code.at(chosen, row, I32)
            best = _greatest(code, of_row, size)
            temperature = code.load(code.at(temperatures, row, F32), F32)
            cold = code.b.fcmp_ordered("==", temperature, constant(0.0))
            with code.b.if_else(cold) as (then, otherwise):
                with then:
                    code.b.store(code.b.trunc(_first_equal(code, of_row, best, size), I32), answer)
                with otherwise:
                    coin = [code.load(code.at(coins, code.add(code.mul(row, 2), i), F32), F32) for i in range(2)]
                    part = _weigh(code, of_row, best, temperature)
                    with code.loop(0, blocks) as number:
                        place = code.mul(number, block)
                        count = code.least(block, code.sub(size, place))
                        code.b.store(part(place, count, None), code.at(sums, number, F32))
                    number = _invert(code, sums, code.int(blocks), coin[0])
                    place = code.mul(number, block)
                    count = code.least(block, code.sub(size, place))
                    part(place, count, weights)
                    token = code.add(place, _invert(code, weights, count, coin[1]))
                    code.b.store(code.b.trunc(token, I32), answer)

    handler.write_kernel(module, name, 3, 1, plan, body)


def _masked(code: Code, place: Value, left: Value, otherwise: float) -> Value:
    """Up to `_WIDTH` floats; `otherwise` behind the last that is left."""
    kind, lanes = vector(_WIDTH), ir.VectorType(I64, _WIDTH)
    mask = code.b.icmp_signed("<", ir.Constant(lanes, list(range(_WIDTH))), code.broadcast(left, _WIDTH))
    return code.call("llvm.masked.load.v16f32.p0", kind, place, ir.Constant(I32, 4), mask, constant(otherwise, _WIDTH))


def _greatest(code: Code, row: Value, size: int) -> Value:
    kind = vector(_WIDTH)
    best = code.variable(kind, constant(-math.inf, _WIDTH))
    with code.loop(0, size, _WIDTH) as i:
        part = _masked(code, code.at(row, i, F32), code.sub(size, i), -math.inf)
        code.b.store(code.call("llvm.maxnum.v16f32", kind, part, code.load(best, kind)), best)
    return code.greatest(code.load(best, kind))


def _first_equal(code: Code, row: Value, value: Value, size: int) -> Value:
    """The first place of `value`; it is there."""
    found = code.variable(I64, code.int(size - 1))
    with code.loop(0, size) as i:
        back = code.sub(size - 1, i)  # from the end: the last that is found is the first
        same = code.b.fcmp_ordered("==", code.load(code.at(row, back, F32), F32), value)
        code.b.store(code.b.select(same, back, code.load(found, I64)), found)
    return code.load(found, I64)


def _weigh(code: Code, row: Value, best: Value, temperature: Value) -> Callable[[Value, Value, Value | None], Value]:
    """(first, count, where) -> the sum of exp((logit - best) / T) of so many tokens; each is stored if `where` is."""
    kind = vector(_WIDTH)
    top, degrees = (code.broadcast(value, _WIDTH) for value in (best, temperature))

    def part(first: Value, count: Value, where: Value | None) -> Value:
        total = code.variable(kind)
        code.b.store(constant(0.0, _WIDTH), total)
        with code.loop(0, count, _WIDTH) as i:
            left = code.sub(count, i)
            found = _masked(code, code.at(row, code.add(first, i), F32), left, -math.inf)
            shifted = code.b.fdiv(code.b.fsub(found, top), degrees)
            # Beyond exp's range it would be its end's: a weight of 0 is never drawn.
            weight = code.b.select(
                code.b.fcmp_ordered(">", shifted, constant(-87.0, _WIDTH)),
                code.exp(shifted),
                constant(0.0, _WIDTH),
            )
            code.b.store(code.b.fadd(code.load(total, kind), weight), total)
            if where is not None:
                code.b.store(weight, code.at(where, i, F32), align=4)
        return code.total(code.load(total, kind))

    return part


def _invert(code: Code, weights: Value, count: Value, coin: Value) -> Value:
    """The first entry at which the running sum exceeds coin * total, else the last that has weight, else the first."""
    zero = constant(0.0)
    running, found, last = code.variable(F32), code.variable(I64), code.variable(I64)
    code.b.store(zero, running)
    with code.loop(0, count) as i:
        code.b.store(code.b.fadd(code.load(running, F32), code.load(code.at(weights, i, F32), F32)), running)
    limit = code.b.fmul(coin, code.load(running, F32))
    code.b.store(zero, running)
    code.b.store(code.int(-1), found)
    code.b.store(code.int(0), last)
    with code.loop(0, count) as i:
        weight = code.load(code.at(weights, i, F32), F32)
        code.b.store(code.b.fadd(code.load(running, F32), weight), running)
        counts = code.b.fcmp_ordered(">", weight, zero)
        exceeds = code.b.and_(counts, code.b.fcmp_ordered(">", code.load(running, F32), limit))
        new = code.b.and_(exceeds, code.less(code.load(found, I64), 0))
        code.b.store(code.b.select(new, i, code.load(found, I64)), found)
        code.b.store(code.b.select(counts, i, code.load(last, I64)), last)
    none = code.less(code.load(found, I64), 0)
    return code.b.select(none, code.load(last, I64), code.load(found, I64))
