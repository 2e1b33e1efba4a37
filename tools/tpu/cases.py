"""The package's Pallas kernels at the sizes of real targets: the program of each, and the least work that it does.

`tools/tpu_kernels.py` counts the cycles of their programs, `tools/tpu_first_run.py` runs them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.decoding.engine import PAGE_SIZE
from eagle3_jax.kernels import dispatch
from eagle3_jax.kernels.cache.api import commit
from eagle3_jax.kernels.contraction import contract
from eagle3_jax.kernels.gated_delta import api as gated_delta
from eagle3_jax.kernels.gated_delta.solve import CHUNK, Tokens
from eagle3_jax.kernels.linear.layouts import Quantised
from eagle3_jax.kernels.linear.quantised import product
from eagle3_jax.kernels.tree_attention.api import tree_attention
from eagle3_jax.kernels.tree_attention.plan import plan
from eagle3_jax.kernels.ttt_attention.api import ttt_attention
from eagle3_jax.kernels.ttt_attention.tpu import plan as ttt_plan
from eagle3_jax.kernels.vocabulary.api import vocabulary_top_k

STATIC_PROFILE = "static profile"
PRODUCTS = "bundles x trips, matrix products"
LOOPS = "bundles x trips, loops"


@dataclasses.dataclass(frozen=True)
class Case:
    """One program: columns of the JSON rows; the least bytes between HBM and the chip; operations; sizes for a table.

    Attributes:
        function: calls the kernel as the engine or the trainer does, with its `implementation` and `interpret`.
        arguments: shape and dtype of each; `values` of those that are no random numbers of this `scale`.
        method: that counts its cycles, see tools/tpu_kernels.py.
        trips: part of a custom call's name -> trip counts, under the chip's mesh: with PRODUCTS one for each stretch of
            code with matrix products, with LOOPS one for each loop, in order.
        donated: indices of the arguments that are written in place.
    """

    fields: dict[str, Any]
    floor_bytes: int
    operations: int
    sizes: str
    function: Callable[..., Any]
    arguments: Sequence[tuple[tuple[int, ...], Any]]
    values: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    scale: float = 1.0
    method: str = STATIC_PROFILE
    trips: Callable[[], dict[str, list[int]]] = dict
    donated: tuple[int, ...] = ()


def attention(
    kernel: str, *, nodes=64, query_heads=32, kv_heads=8, batch=4, head_dim=128, keys=4096, dtype="bfloat16"
) -> Case:
    """`nodes` new tokens of each full sequence over `keys` slots of pages, their own included."""
    fields, pages = dict(locals()), keys // PAGE_SIZE
    queries, new = ((batch, nodes, heads, head_dim) for heads in (query_heads, kv_heads))
    cache = _pages(batch, keys, kv_heads, head_dim)
    floats = [(shape, dtype) for shape in (queries, new, new, cache, cache)]
    arguments = [((batch, pages), "int32"), *floats, ((batch,), "int32")]
    arguments += [((batch, nodes, nodes), "bool")] * (not kernel.endswith("causal"))
    # A node sees itself and some before it.
    mask = np.tril(np.random.default_rng(0).integers(0, 2, (nodes, nodes))) + np.eye(nodes) > 0
    values = {0: np.arange(batch * pages).reshape(batch, pages), 6: np.full(batch, keys - nodes)}

    def attend(table: Any, *rest: Any, **how: Any) -> Any:
        return tree_attention(*rest, page_table=table, **how)

    def trips() -> dict[str, list[int]]:
        # Blocks of the prefix and blocks with the tail have separate code. The cores of a device share the sequences,
        # or the KV heads of each sequence, which have equally many blocks.
        cores, shape = dispatch.cores(), plan(queries, cache, (jnp.dtype(dtype),) * 2, tail=nodes, pages=pages)
        _, blocks, _, bare = shape.blocks(keys - nodes, 0, 0)
        tiles = (batch if batch % cores else batch // cores) * shape.tiles
        return {"tree_attention.": [tiles * bare, tiles * (blocks - bare)]}

    read, sizes = 2 * batch * kv_heads * keys * head_dim, f"{batch} x {nodes} nodes, {query_heads}/{kv_heads}"
    own, how = 2 * math.prod(queries), {"method": PRODUCTS, "trips": trips, "donated": (4, 5)}
    values[7] = np.broadcast_to(mask, (batch, nodes, nodes))
    return Case(fields, 2 * (read + own), 2 * own * keys, sizes, attend, arguments, values, **how)


def top_k(kernel: str, *, queries=4, k=4, hidden=4096, vocabulary=32000, dtype="bfloat16") -> Case:
    """The k most probable of a draft vocabulary for each of `queries` states, log-probabilities included."""
    fields, moved = dict(locals()), 2 * (vocabulary + queries) * hidden + 8 * queries * k
    arguments = [((queries, hidden), dtype), ((vocabulary, hidden), dtype)]
    choose, sizes = functools.partial(vocabulary_top_k, k=k), f"{queries} x {hidden}, k {k}"
    return Case(fields, moved, 2 * queries * hidden * vocabulary, sizes, choose, arguments, scale=0.02)


def grouped_product(kernel: str, *, rows=16, inputs=4096, outputs=14336, group=32, bits=4, dtype="bfloat16") -> Case:
    """`rows` rows times a matrix whose columns have a scale, and 4 bits an offset too, for each `group` values."""
    fields, scales = dict(locals()), 2 if bits == 4 else 1
    parts = [((inputs, outputs), f"int{bits}"), *[((inputs // group, outputs), "float32")] * scales]

    def multiply(x: Any, values: Any, scale: Any, offset: Any = None, **how: Any) -> Any:
        matrix = Quantised(values, scale, offset, jnp.dtype(dtype))
        return product(x, matrix, functools.partial(contract, "mk,kn->mn"), **how).astype(x.dtype)

    moved = outputs * (inputs * bits // 8 + 4 * scales * inputs // group + 4 * rows) + 2 * rows * inputs
    work, sizes = 2 * rows * inputs * outputs, f"{rows} x {inputs} x {outputs}, {bits} bits"
    return Case(fields, moved, work, sizes, multiply, [((rows, inputs), dtype), *parts], scale=0.02)


def training_time_test(
    kernel: str, *, length=2560, steps=7, query_heads=32, kv_heads=8, head_dim=128, dtype="bfloat16"
) -> Case:
    """Attention of step 7 of the training-time test over one document: two products forward, five backward.

    Least are keys and queries once; backward also gradients (step 0's in float32) and two numbers per row.
    """
    fields, backward = dict(locals()), kernel.endswith("backward")
    queries, keys = (1, length, query_heads, head_dim), (steps, 1, length, kv_heads, head_dim)
    arguments = [*((shape, dtype) for shape in (queries, keys, keys)), ((1, length), "int32"), ((), "int32")]

    def gradients(q: Any, k: Any, v: Any, segments: Any, newest: Any, cotangent: Any, **how: Any) -> Any:
        return jax.vjp(lambda q, k, v: ttt_attention(q, k, v, segments, newest, **how), q, k, v)[1](cotangent)

    def trips() -> dict[str, list[int]]:
        # One document: every chunk lies inside it; chunks below the diagonal need no mask, the others do.
        shape = ttt_plan(queries, keys, jnp.dtype(dtype))
        bare = sum((tile * shape.tile + 1) // shape.chunk for tile in range(shape.tiles))
        seen = sum(math.ceil((tile + 1) * shape.tile / shape.chunk) for tile in range(shape.tiles))
        name = "ttt_attention_backward" if backward else "ttt_attention."
        return {name: [kv_heads * trips for trips in (shape.tiles, 0, bare, seen - bare)]}

    of_queries, of_keys = 2 * math.prod(queries), 2 * length * kv_heads * head_dim
    moved = 2 * of_queries + 2 * steps * of_keys
    if backward:
        arguments.append((queries, dtype))
        moved += of_queries + 2 * (steps + 1) * of_keys + 8 * query_heads * length
    work = (5 if backward else 2) * query_heads * length**2 * head_dim
    sizes, values = f"{length} tokens, {query_heads}/{kv_heads}", {3: np.ones((1, length)), 4: steps - 1}
    function, how = gradients if backward else ttt_attention, {"method": LOOPS, "trips": trips}
    return Case(fields, moved, work, sizes, function, arguments, values, **how)


def moved_rows(
    kernel: str, *, nodes=8, batch=4, layers=32, kv_heads=8, head_dim=128, slots=1024, length=508, dtype="bfloat16"
) -> Case:
    """Moves every other of 2 * `nodes` new slots to the front, in keys and values of all layers; over two tiles."""
    fields, caches = dict(locals()), [(_pages(batch, slots, kv_heads, head_dim), dtype)] * 2 * layers
    # Loops: sequences; copies of each row's tile and of the two destination tiles, and waits for both; rows (all
    # count), and the caches within each; the two copies back, and waits for them.
    loops = [batch * trips for trips in (1, nodes, 2, nodes, 2, nodes, (nodes - 1) * len(caches), 2, 2)]
    pages = batch, slots // PAGE_SIZE

    def move(lengths: Any, path: Any, table: Any, *caches: Any, **how: Any) -> Any:
        return commit(caches, lengths, path, page_table=table, **how)

    arguments = [((batch,), "int32"), ((batch, nodes), "int32"), (pages, "int32"), *caches]
    values = {0: np.full(batch, length), 1: np.broadcast_to(2 * np.arange(nodes), (batch, nodes))}
    values[2] = np.arange(math.prod(pages)).reshape(pages)
    moved, sizes = 2 * 2 * layers * batch * (nodes - 1) * kv_heads * head_dim * 2, f"{nodes} nodes, {layers} layers"
    how = {"method": LOOPS, "trips": lambda: {"commit.": loops}, "donated": tuple(range(3, len(arguments)))}
    return Case(fields, moved, 0, sizes, move, arguments, values, **how)


def delta(kernel: str, *, tokens=16, batch=1, key_heads=16, value_heads=32, head_dim=128) -> Case:
    """The gated delta rule over a tree's nodes or a prompt's tokens; its states are read, and a prompt's written.

    Least are queries, keys, values and outputs once, and a tree's updates.
    """
    fields, prompt = dict(locals()), kernel.endswith("prompt")
    b, t, n, d = batch, tokens, value_heads, head_dim
    shapes = [*[(b, t, key_heads, d)] * 2, (b, t, n, d), *[(b, t, n)] * 2, (b, n, d, d)]
    arguments = [*((shape, "float32") for shape in shapes), ((b, t) if prompt else (b, t, t), "bool")]
    sees = np.zeros((b, t)) if prompt else np.tril(np.ones((b, t, t)))

    def read(*x: Any, **how: Any) -> Any:
        more = [jnp.ones(b, bool)] if prompt else []
        return (gated_delta.chain if prompt else gated_delta.tree)(Tokens(*x[:5]), x[5], None, x[6], *more, **how)

    rows, states = 2 * key_heads + (2 if prompt else 3) * n, (2 if prompt else 1) * n * d
    heads = key_heads * 4 * min(t, CHUNK) + n * ((6 if prompt else 4) * d + 3 * min(t, CHUNK))
    values, sizes = {3: -np.ones((b, t, n)), 4: np.full((b, t, n), 0.5), 6: sees}, f"{b} x {t}, {key_heads}/{n}"
    return Case(fields, 4 * b * d * (t * rows + states), b * t * d * heads, sizes, read, arguments, values)


def _pages(batch: int, slots: int, kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """Returns the shape of an engine's cache for as many slots of each sequence."""
    return batch * slots // PAGE_SIZE + 1, kv_heads, PAGE_SIZE, head_dim


_of = functools.partial
CASES: list[functools.partial[Case]] = [
    _of(attention, "tree_attention"),
    _of(attention, "tree_attention causal"),
    _of(attention, "tree_attention", nodes=16),
    _of(attention, "tree_attention causal", nodes=1),
    _of(attention, "tree_attention", batch=1),
    _of(attention, "tree_attention", query_heads=8, kv_heads=1),  # 70B over 8 chips
    *(_of(top_k, "vocabulary_top_k", queries=queries, k=k) for queries, k in ((4, 1), (4, 4), (32, 8))),
    _of(top_k, "vocabulary_top_k", hidden=8192, vocabulary=4000),  # 70B over 8 chips
    *(_of(grouped_product, "grouped_product", rows=rows) for rows in (4, 16, 64, 512)),
    _of(grouped_product, "grouped_product", inputs=14336, outputs=4096),
    _of(grouped_product, "grouped_product", bits=8),
    _of(training_time_test, "ttt_attention"),
    _of(training_time_test, "ttt_attention backward"),
    _of(moved_rows, "commit"),
    *(_of(delta, "gated_delta tree", tokens=tokens) for tokens in (16, 64)),
    _of(delta, "gated_delta prompt", tokens=64),
]
