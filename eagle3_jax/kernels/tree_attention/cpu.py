"""Tree attention on CPUs: all cores read the slots in use, page by page, once for a few rows.

The new entries of all sequences are written first. A chunk of the work is then a few queries of one KV head of one
sequence, which attend with an online softmax (FlashAttention's). Scores and sums are float32.

What a query sees decides its result, to the bit: a node of a tree has that of the same tokens in a row. Slots that it
does not see lie between those that it does, so the block where the tail begins, and the tail, are first gathered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from llvmlite import ir

from eagle3_jax.kernels.cpu import compiler, handler
from eagle3_jax.kernels.cpu.handler import Buffer
from eagle3_jax.kernels.cpu.ir import ELEMENTS, F32, I32, I64, POINTER, Code, Value, constant, vector
from eagle3_jax.kernels.tree_attention.xla import Operands

_WIDTH = 16  # floats of a vector
_ROWS = 4  # rows attended together
_BLOCK = 128  # slots per step of the online softmax
_LEAST = -1e30


def attend_cpu(o: Operands) -> tuple[Float[Array, "b t n d"], Array, Array | None]:
    """See `tree_attention`; caches have the queries' dtype, and neither `first` nor `sinks` is read."""
    queries, new_keys, new_values, keys, values, lengths, tail_mask, page_table, *_ = o
    if page_table is None:
        page_table = jnp.arange(len(queries), dtype=jnp.int32)[:, None]
    dtype, d = queries.dtype.name, queries.shape[3]
    room = 0 if tail_mask is None else -(-tail_mask.shape[2] // _BLOCK) * _BLOCK
    new, (old, structure) = jax.tree.leaves((new_keys, new_values)), jax.tree.flatten((keys, values))
    caches = len(old)
    name = f"eagle3_jax_tree_attention_{dtype}_{d}_{room}_{caches}"
    compiler.kernel(name, write_attention, dtype, d, room, caches)
    mask = jnp.zeros((1, 1, 1), bool) if tail_mask is None else tail_mask
    results = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (queries, *old))
    call = jax.ffi.ffi_call(name, results, input_output_aliases={1 + caches + i: 1 + i for i in range(caches)})
    attended, *kept = call(queries, *new, *old, lengths, mask, page_table)
    return attended, *jax.tree.unflatten(structure, kept)


def supports(dtype: Any, cache_dtype: Any, head_dim: int) -> bool:
    return dtype == cache_dtype and jnp.dtype(dtype).name in ELEMENTS and head_dim % _WIDTH == 0


def write_attention(module: ir.Module, name: str, dtype: str, d: int, room: int, caches: int = 2) -> None:
    """Writes the kernel; a tail under a mask has at most `room` slots, 0 is a causal tail.

    With one of `caches`, not two, the keys are the values too.
    """
    masked, held = room > 0, _BLOCK + room  # slots of the block where the tail begins, and the tail's
    element, vectors, size_of = ELEMENTS[dtype], d // _WIDTH, 4 if dtype == "float32" else 2
    kind = vector(_WIDTH)

    def page_of(code: Code, values: Sequence[Value], cache: Value, b: Value, head: Value, number: Value) -> Value:
        """Returns a head's entries in a page of a sequence; indices out of range are clipped, as in JAX."""
        table, heads, pages, size, columns = values[7], *values[11:15]
        column = code.add(code.mul(b, columns), code.least(number, code.sub(columns, 1)))
        page = code.clipped(code.index(table, column), pages)
        return code.at(cache, code.mul(code.add(code.mul(page, heads), head), code.mul(size, d)), element)

    def plan(code: Code, operands: Sequence[Buffer], results: Sequence[Buffer]) -> tuple[list[Value], Value]:
        (queries, *new), (attended, *kept) = operands[: 1 + caches], results
        keys, lengths, mask, table = operands[1 + caches], *operands[-3:]
        buffers = queries, new[0], new[-1], kept[0], kept[-1], lengths, mask, table, attended
        values = [x.data for x in buffers]
        t, n, heads, size = queries.size(1), queries.size(2), keys.size(1), keys.size(2)
        tail = mask.size(2) if masked else t
        values += [t, n, heads, keys.size(0), size, table.size(1), tail]
        with code.loop(0, queries.size(0)) as b:
            end = code.add(code.index(values[5], b), tail)
            with code.loop(0, heads) as head, code.loop(0, t) as i:  # the new entries are the last of the tail
                place = code.add(code.sub(end, t), i)
                number, inside = code.div(place, size), code.mul(code.rem(place, size), d)
                new = code.mul(code.add(code.mul(code.add(code.mul(b, heads), head), t), i), d)
                for cache, entries in zip(values[3 : 3 + caches], values[1 : 1 + caches], strict=True):
                    to = code.at(page_of(code, values, cache, b, head, number), inside, element)
                    code.copy(to, code.at(entries, new, element), d * size_of)
        blocks = code.div(code.add(code.mul(t, code.div(n, heads)), _ROWS - 1), _ROWS)
        return [*values, blocks], code.mul(code.mul(queries.size(0), heads), blocks)

    def body(code: Code, values: Sequence[Value], chunk: Value) -> None:
        queries, _, _, keys, cache_values, lengths, mask, _, attended, t, n, heads, _, size, _, tail, blocks = values
        of_head, first = code.div(chunk, blocks), code.mul(code.rem(chunk, blocks), _ROWS)
        b, head = code.div(of_head, heads), code.rem(of_head, heads)
        group = code.div(n, heads)
        length = code.index(lengths, b)
        end = code.add(length, tail)

        rows = code.mul(t, group)
        scores = code.variable(F32, count=_ROWS * _BLOCK)
        sums = [[code.variable(kind) for _ in range(vectors)] for _ in range(_ROWS)]
        best = [code.variable(F32) for _ in range(_ROWS)]
        total = [code.variable(F32) for _ in range(_ROWS)]
        if masked:
            kept, places = code.variable(F32, count=_ROWS * held), code.variable(POINTER, count=_ROWS * held)
            filled = [code.variable(I64) for _ in range(_ROWS)]
            inside_page = code.mul(code.div(code.rem(length, size), _BLOCK), _BLOCK)
            own = code.add(code.mul(code.div(length, size), size), inside_page)
        scale = constant(d**-0.5)
        # Rows beyond the last repeat it; its result is then written more than once.
        at_row = [code.least(code.add(first, r), code.sub(rows, 1)) for r in range(_ROWS)]
        token = [code.div(row, group) for row in at_row]
        offset = [
            code.mul(
                code.add(
                    code.mul(code.add(code.mul(b, t), token[r]), n),
                    code.add(code.mul(head, group), code.rem(at_row[r], group)),
                ),
                d,
            )
            for r in range(_ROWS)
        ]
        query = [_vectors(code, code.at(queries, of_row, element), vectors, element) for of_row in offset]
        for r in range(_ROWS):
            code.b.store(constant(_LEAST), best[r])
            code.b.store(constant(0.0), total[r])
            for v in range(vectors):
                code.b.store(constant(0.0, _WIDTH), sums[r][v])

        def block_of(page: Value, inside: Value) -> list[Value]:
            return [
                code.at(page_of(code, values, x, b, head, page), code.mul(inside, d), element)
                for x in (keys, cache_values)
            ]

        # In a causal tail the last of these rows sees the most.
        seen = own if masked else code.add(length, code.add(token[-1], 1))
        with _blocks(code, 0, seen, size) as (page, inside, start, count):
            block = block_of(page, inside)
            _scores(code, count, block[0], query, scores, scale, element)
            if not masked:
                _mask(code, count, start, length, token, scores)
            for r in range(_ROWS):
                _softmax(code, count, code.at(scores, r * _BLOCK, F32), best[r], total[r], sums[r])
            with code.loop(0, count) as j:
                value = _vectors(code, code.at(block[1], code.mul(j, d), element), vectors, element)
                for r in range(_ROWS):
                    weight = code.load(code.at(scores, code.add(j, r * _BLOCK), F32), F32)
                    weight = code.broadcast(weight, _WIDTH)
                    for v in range(vectors):
                        code.b.store(code.fma(weight, value[v], code.load(sums[r][v], kind)), sums[r][v])
        if masked:
            for r in range(_ROWS):
                code.b.store(code.integer(0), filled[r])
            with _blocks(code, own, end, size) as (page, inside, start, count):
                block = block_of(page, inside)
                _scores(code, count, block[0], query, scores, scale, element)
                with code.loop(0, count) as j:
                    place, index = code.at(block[1], code.mul(j, d), element), code.sub(code.add(start, j), length)
                    for r in range(_ROWS):
                        at = code.add(code.mul(code.add(code.mul(b, t), token[r]), tail), code.most(index, 0))
                        visible = code.b.or_(code.flag(mask, at), code.less(index, 0))
                        last = code.load(filled[r], I64)
                        score = code.load(code.at(scores, code.add(j, r * _BLOCK), F32), F32)
                        code.b.store(score, code.at(kept, code.add(last, r * held), F32))
                        code.b.store(place, code.at(places, code.add(last, r * held), POINTER))
                        code.b.store(code.add(last, code.b.zext(visible, I64)), filled[r])
            for r in range(_ROWS):
                rank = code.add(own, code.load(filled[r], I64))
                with _blocks(code, own, rank, size) as (_, _, start, count):
                    base, of_block = code.add(code.sub(start, own), r * held), code.at(scores, r * _BLOCK, F32)
                    with code.loop(0, count) as j:
                        score = code.load(code.at(kept, code.add(base, j), F32), F32)
                        code.b.store(score, code.at(of_block, j, F32))
                    _fill(code, count, of_block)
                    _softmax(code, count, of_block, best[r], total[r], sums[r])
                    with code.loop(0, count) as j:
                        place = code.load(code.at(places, code.add(base, j), POINTER), POINTER)
                        weight = code.broadcast(code.load(code.at(of_block, j, F32), F32), _WIDTH)
                        for v, value in enumerate(_vectors(code, place, vectors, element)):
                            code.b.store(code.fma(weight, value, code.load(sums[r][v], kind)), sums[r][v])
        for r in range(_ROWS):
            share = code.broadcast(code.b.fdiv(constant(1.0), code.load(total[r], F32)), _WIDTH)
            for v in range(vectors):
                result = code.b.fmul(code.load(sums[r][v], kind), share)
                code.store_floats(result, code.at(attended, code.add(offset[r], v * _WIDTH), element), element)

    handler.write_kernel(module, name, 4 + 2 * caches, 1 + caches, plan, body)


@contextlib.contextmanager
def _blocks(code: Code, first: Any, last: Value, size: Value) -> Iterator[tuple[Value, Value, Value, Value]]:
    """Writes a loop over the blocks of slots `first`, where one begins, to `last`; none crosses a page.

    Yields the page, the block's place inside, its first slot, and the number of its slots.
    """
    pages = code.div(code.add(last, code.sub(size, 1)), size)
    with code.loop(code.div(code.integer(first), size), pages) as page:
        begins = code.mul(page, size)
        least, most = code.most(code.sub(first, begins), 0), code.least(size, code.sub(last, begins))
        with code.loop(least, most, _BLOCK) as inside:
            yield page, inside, code.add(begins, inside), code.least(code.sub(most, inside), _BLOCK)


def _vectors(code: Code, place: Value, count: int, element: ir.Type) -> list[Value]:
    """Loads `count` vectors as floats."""
    return [code.load_floats(code.at(place, v * _WIDTH, element), _WIDTH, element) for v in range(count)]


def _scores(code, count, keys, query, scores, scale, element) -> None:
    """Writes scores[r, j] = query[r] . keys[j] * scale; _LEAST fills the last vector."""
    d = len(query[0]) * _WIDTH
    with code.loop(0, count, _WIDTH) as j:
        # Of each row the sums of 1, 2, 4 and 8 keys that wait for as many more.
        waiting: list[list[Value]] = [[] for _ in query]
        for i in range(_WIDTH):
            of_key = code.at(keys, code.mul(code.least(code.add(j, i), code.sub(count, 1)), d), element)
            key = _vectors(code, of_key, len(query[0]), element)
            for row, sums in zip(query, waiting, strict=True):
                product = code.b.fmul(row[0], key[0])
                for one, other in zip(row[1:], key[1:], strict=True):
                    product = code.fma(one, other, product)
                keys_before = i
                while keys_before % 2:
                    product = code.pair_sums(sums.pop(), product)
                    keys_before //= 2
                sums.append(product)
        for r, (total,) in enumerate(waiting):
            of_row = code.at(scores, code.add(j, r * _BLOCK), F32)
            code.b.store(code.b.fmul(total, code.broadcast(scale, _WIDTH)), of_row, align=4)
    for r in range(len(query)):
        _fill(code, count, code.at(scores, r * _BLOCK, F32))


def _fill(code, count, scores) -> None:
    """Writes _LEAST behind the scores of a row, up to the end of a vector."""
    padded = code.mul(code.div(code.add(count, _WIDTH - 1), _WIDTH), _WIDTH)
    with code.loop(count, padded) as j:
        code.b.store(constant(_LEAST), code.at(scores, j, F32))


def _mask(code, count, start, length, token, scores) -> None:
    """Writes _LEAST where a row does not see a slot of the causal tail."""
    with code.loop(code.most(code.sub(length, start), 0), count) as j:
        index = code.sub(code.add(start, j), length)
        for r, of_row in enumerate(token):
            with code.when(code.less(of_row, index)):
                code.b.store(constant(_LEAST), code.at(scores, code.add(j, r * _BLOCK), F32))


def _softmax(code, count, scores, best, total, sums) -> None:
    """Turns scores into weights, and rescales the sums to the new maximum."""
    kind = vector(_WIDTH)
    most = code.variable(kind)
    code.b.store(constant(_LEAST, _WIDTH), most)
    with code.loop(0, count, _WIDTH) as j:
        here = code.load(code.at(scores, j, F32), kind, align=4)
        code.b.store(code.call(f"llvm.maxnum.v{_WIDTH}f32", kind, code.load(most, kind), here), most)
    old = code.load(best, F32)
    new = code.call("llvm.maxnum.f32", F32, old, code.greatest(code.load(most, kind)))
    code.b.store(new, best)
    shrink = code.exp(code.broadcast(code.b.fsub(old, new), _WIDTH))
    gained = code.variable(kind)
    code.b.store(constant(0.0, _WIDTH), gained)
    base = code.broadcast(new, _WIDTH)
    with code.loop(0, count, _WIDTH) as j:
        place = code.at(scores, j, F32)
        here = code.load(place, kind, align=4)
        # A hidden slot has weight 0, even if all slots so far are hidden; NaN stays NaN.
        weight = code.b.select(
            code.b.fcmp_unordered(">", here, constant(_LEAST / 2, _WIDTH)),
            code.exp(code.b.fsub(here, base)),
            constant(0.0, _WIDTH),
        )
        code.b.store(weight, place, align=4)
        code.b.store(code.b.fadd(code.load(gained, kind), weight), gained)
    one = code.b.extract_element(shrink, ir.Constant(I32, 0))
    code.b.store(code.fma(code.load(total, F32), one, code.total(code.load(gained, kind))), total)
    for place in sums:
        code.b.store(code.b.fmul(code.load(place, kind), shrink), place)
