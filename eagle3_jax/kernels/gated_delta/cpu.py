"""The gated delta rule on CPUs: token by token, a value head's state in the core's own cache, its slot in place.

A token reads its parent's state twice: once for the update, and once for the state behind it and the output. `fold`
does the second again, so that a committed state is to the bit the one that the walk left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from llvmlite import ir

from eagle3_jax.kernels.cpu import compiler, handler
from eagle3_jax.kernels.cpu.handler import Buffer
from eagle3_jax.kernels.cpu.ir import F32, I1, I8, POINTER, VOID, Code, Value, constant, vector
from eagle3_jax.kernels.gated_delta.solve import Tokens

_WIDTH = 16  # floats of a vector
_WIDEST = 256  # d_v, whose vectors are all held at once


def supports(value_dim: int) -> bool:
    return value_dim % _WIDTH == 0 and value_dim <= _WIDEST


def chain(
    tokens: Tokens,
    states: Float[Array, "s n d_k d_v"],
    slots: Int[Array, " b"] | None,
    begins: Bool[Array, "b t"],
    kept: Bool[Array, " b"],
    follows: Bool[Array, " b"],
) -> tuple[Float[Array, "b t n d_v"], Float[Array, "s n d_k d_v"]]:
    """See `api.chain`; states are written in place."""
    call = _call("chain", _write_chain, states, {5: 1}, tokens.values, states)
    return call(*tokens, states, _slots(states, slots), begins, kept, follows)


def tree(
    tokens: Tokens, states: Float[Array, "s n d_k d_v"], slots: Int[Array, " b"] | None, parents: Int[Array, "b t"]
) -> tuple[Float[Array, "b t n d_v"], Float[Array, "b t n d_v"]]:
    """See `api.tree`; a node's parent is an index plus one, 0 is the committed state."""
    of = jnp.arange(1, parents.shape[1] + 1, dtype=jnp.int32)
    has_child = (parents[:, None] == of[None, :, None]).any(axis=-1)
    return _call("tree", _write_tree, states, {}, tokens.values, tokens.values)(
        *tokens, states, _slots(states, slots), parents, has_child
    )


def fold(
    states: Float[Array, "s n d_k d_v"],
    slots: Int[Array, " b"] | None,
    keys: Float[Array, "b p k d_k"],
    updates: Float[Array, "b p n d_v"],
    decays: Float[Array, "b p n"],
    counts: Int[Array, " b"],
) -> Float[Array, "s n d_k d_v"]:
    """See `api.fold`; states are written in place."""
    call = _call("fold", _write_fold, states, {0: 0}, states)
    return call(states, _slots(states, slots), keys, updates, decays, counts)[0]


def _slots(states: Array, slots: Int[Array, " b"] | None) -> Int[Array, " b"]:
    return jnp.arange(len(states), dtype=jnp.int32) if slots is None else slots


def _call(kind: str, write: Any, states: Array, aliases: dict[int, int], *results: Array) -> Any:
    key_dim, value_dim = states.shape[2:]
    name = compiler.kernel(f"eagle3_jax_gated_delta_{kind}_{key_dim}_{value_dim}", write, key_dim, value_dim)
    return jax.ffi.ffi_call(
        name, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results), input_output_aliases=aliases
    )


class _Walk:
    """Places of a head's numbers in the operands, and the step from a state to the next.

    Every array of tokens is [b, t, heads, d]; `numbers` are (t, key heads, value heads).
    """

    def __init__(self, code: Code, key_dim: int, value_dim: int, numbers: Sequence[Value], head: Value) -> None:
        self.code, self.key_dim, self.value_dim, self.head = code, key_dim, value_dim, head
        self.t, self.key_heads, self.heads = numbers
        self.key_head = code.div(head, code.div(self.heads, self.key_heads))
        self.vectors = value_dim // _WIDTH

    def of(self, base: Value, b: Value, at: Value, *, keys: bool, size: int) -> Value:
        """Returns the place of the head's numbers of a token; of its key head where `keys`."""
        code = self.code
        token = code.add(code.mul(b, self.t), at)
        heads, head = (self.key_heads, self.key_head) if keys else (self.heads, self.head)
        return code.at(base, code.mul(code.add(code.mul(token, heads), head), size), F32)

    def state(self, states: Value, slot: Value) -> Value:
        code = self.code
        place = code.add(code.mul(slot, self.heads), self.head)
        return code.at(states, code.mul(place, self.key_dim * self.value_dim), F32)

    def row(self, state: Value, c: Value) -> list[Value]:
        """Returns the places of a row's vectors."""
        code = self.code
        return [code.at(state, code.add(code.mul(c, self.value_dim), v * _WIDTH), F32) for v in range(self.vectors)]

    def load(self, place: Value, v: int = 0) -> Value:
        return self.code.load_floats(self.code.at(place, v * _WIDTH, F32), _WIDTH, F32)

    def one(self, place: Value, index: Any = 0) -> Value:
        """Loads a number into all places of a vector."""
        code = self.code
        return code.broadcast(code.load(code.at(place, index, F32), F32), _WIDTH)

    def step(
        self, before: Value, after: Value | None, operands: Sequence[Value], b: Value, at: Value, *results: Value
    ) -> None:
        """Writes the state `after`, the output, and the update where `results` has a place for it."""
        code, kind = self.code, vector(_WIDTH)
        query, key = (self.of(x, b, at, keys=True, size=self.key_dim) for x in operands[:2])
        value = self.of(operands[2], b, at, keys=False, size=self.value_dim)
        decay, beta = (self.one(self.of(x, b, at, keys=False, size=1)) for x in operands[3:5])
        factor = code.exp(decay)
        sums = [code.variable(kind) for _ in range(self.vectors)]
        for place in sums:
            code.b.store(constant(0.0, _WIDTH), place)
        with code.loop(0, self.key_dim) as c:
            of_key = self.one(key, c)
            for place, x in zip(sums, self.row(before, c), strict=True):
                code.b.store(code.fma(of_key, self.load(x), code.load(place, kind)), place)
        updates = []
        for v, place in enumerate(sums):
            read = code.b.fmul(factor, code.load(place, kind))
            updates.append(code.b.fmul(beta, code.b.fsub(self.load(value, v), read)))
            code.b.store(constant(0.0, _WIDTH), place)
        with code.loop(0, self.key_dim) as c:
            of_key, of_query = self.one(key, c), self.one(query, c)
            places = self.row(before, c) if after is None else self.row(after, c)
            for v, (place, x) in enumerate(zip(sums, self.row(before, c), strict=True)):
                moved = code.fma(of_key, updates[v], code.b.fmul(factor, self.load(x)))
                if after is not None:
                    code.store_floats(moved, places[v], F32)
                code.b.store(code.fma(of_query, moved, code.load(place, kind)), place)
        found = [[code.load(place, kind) for place in sums], updates]
        for result, numbers in zip(results, found, strict=False):
            base = self.of(result, b, at, keys=False, size=self.value_dim)
            for v, number in enumerate(numbers):
                code.store_floats(number, code.at(base, v * _WIDTH, F32), F32)


def _inside(code: Code, index: Value, size: Value) -> Value:
    return code.b.icmp_unsigned("<", index, size)


def _write_chain(module: ir.Module, name: str, key_dim: int, value_dim: int) -> None:
    """Writes the kernel; a chunk is a value head, so that a row finds the state of the row before it."""
    size = key_dim * value_dim

    def plan(code: Code, operands: Sequence[Buffer], results: Sequence[Buffer]) -> tuple[list[Value], Value]:
        queries, values, states = operands[0], operands[2], operands[5]
        heads = values.size(2)
        sizes = [queries.size(1), queries.size(2), heads, queries.size(0), states.size(0)]
        return [x.data for x in (*operands, *results)] + sizes, heads

    def body(code: Code, values: Sequence[Value], head: Value) -> None:
        operands, (slots, begins, kept, follows, outputs, states) = values[:5], values[6:12]
        walk = _Walk(code, key_dim, value_dim, values[12:15], head)
        rows, count = values[15:]
        state = code.call("malloc", POINTER, code.integer(4 * size))
        with code.loop(0, rows) as b:
            with code.when(code.b.not_(code.flag(follows, b))):
                code.copy(state, walk.state(states, code.clipped(code.index(slots, b), count)), 4 * size)
            with code.loop(0, walk.t) as at:
                with code.when(code.flag(begins, code.add(code.mul(b, walk.t), at))):
                    zero = ir.Constant(I8, 0)
                    code.call("llvm.memset.p0.i64", VOID, state, zero, code.integer(4 * size), ir.Constant(I1, 0))
                walk.step(state, state, operands, b, at, outputs)
            slot = code.index(slots, b)
            with code.when(code.b.and_(code.flag(kept, b), _inside(code, slot, count))):
                code.copy(walk.state(states, slot), state, 4 * size)
        code.call("free", VOID, state)

    handler.write_kernel(module, name, 10, 2, plan, body)


def _write_tree(module: ir.Module, name: str, key_dim: int, value_dim: int) -> None:
    """Writes the kernel; a chunk is a value head of a sequence. A leaf's state is not written."""
    size = key_dim * value_dim

    def plan(code: Code, operands: Sequence[Buffer], results: Sequence[Buffer]) -> tuple[list[Value], Value]:
        queries, values, states = operands[0], operands[2], operands[5]
        heads = values.size(2)
        sizes = [queries.size(1), queries.size(2), heads, states.size(0)]
        return [x.data for x in (*operands, *results)] + sizes, code.mul(queries.size(0), heads)

    def body(code: Code, values: Sequence[Value], chunk: Value) -> None:
        operands, (states, slots, parents, has_child, *results) = values[:5], values[5:11]
        heads, count = values[13:]
        b = code.div(chunk, heads)
        walk = _Walk(code, key_dim, value_dim, values[11:14], code.rem(chunk, heads))
        committed = walk.state(states, code.clipped(code.index(slots, b), count))
        own = code.call("malloc", POINTER, code.mul(walk.t, 4 * size))
        with code.loop(0, walk.t) as at:
            node = code.add(code.mul(b, walk.t), at)
            parent = code.index(parents, node)
            of_parent = code.at(own, code.mul(code.sub(parent, 1), size), F32)
            before = code.b.select(code.b.icmp_signed("==", parent, code.integer(0)), committed, of_parent)
            with code.b.if_else(code.flag(has_child, node)) as (inner, leaf):
                with inner:
                    walk.step(before, code.at(own, code.mul(at, size), F32), operands, b, at, *results)
                with leaf:
                    walk.step(before, None, operands, b, at, *results)
        code.call("free", VOID, own)

    handler.write_kernel(module, name, 9, 2, plan, body)


def _write_fold(module: ir.Module, name: str, key_dim: int, value_dim: int) -> None:
    """Writes the kernel; a chunk is a value head of a sequence, whose rows are read and written once."""

    def plan(code: Code, operands: Sequence[Buffer], results: Sequence[Buffer]) -> tuple[list[Value], Value]:
        states, keys, updates = operands[0], operands[2], operands[3]
        heads = updates.size(2)
        sizes = [keys.size(1), keys.size(2), heads, states.size(0)]
        return [x.data for x in (*operands[1:], *results)] + sizes, code.mul(keys.size(0), heads)

    def body(code: Code, values: Sequence[Value], chunk: Value) -> None:
        slots, keys, updates, decays, counts, states = values[:6]
        heads, count = values[8:]
        b, kind = code.div(chunk, heads), vector(_WIDTH)
        walk = _Walk(code, key_dim, value_dim, values[6:9], code.rem(chunk, heads))
        slot, nodes = code.index(slots, b), code.index(counts, b)
        with code.when(code.b.and_(_inside(code, slot, count), code.less(0, nodes))):
            state = walk.state(states, slot)
            sums = [code.variable(kind) for _ in range(walk.vectors)]
            with code.loop(0, key_dim) as c:
                places = walk.row(state, c)
                for place, x in zip(sums, places, strict=True):
                    code.b.store(walk.load(x), place)
                with code.loop(0, nodes) as at:
                    factor = code.exp(walk.one(walk.of(decays, b, at, keys=False, size=1)))
                    of_key = walk.one(walk.of(keys, b, at, keys=True, size=key_dim), c)
                    update = walk.of(updates, b, at, keys=False, size=value_dim)
                    for v, place in enumerate(sums):
                        moved = code.b.fmul(factor, code.load(place, kind))
                        code.b.store(code.fma(of_key, walk.load(update, v), moved), place)
                for place, x in zip(sums, places, strict=True):
                    code.store_floats(code.load(place, kind), x, F32)

    handler.write_kernel(module, name, 6, 1, plan, body)
