"""The programs that tools/tpu_profile.py measures: the package's kernels as the engine and the trainer call them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import tpu_peers
from tpu_cases import LOOPS, PRODUCTS, Attention, Call, Case, Commit, GroupedProduct, TopK, TrainingTimeTest


def program(case: Case, **how: Any) -> Call:
    """Makes a case's program, in the process that compiles, under the chip's mesh.

    Args:
        how: `implementation` and `interpret` of one of this package's kernels.
    """
    return PROGRAMS[case.kernel](case, **how)


def tree_attention(case: Attention, **how: Any) -> Call:
    """Counts tree attention over pages, with lengths known at run time; trips are for sequences of full length."""
    import jax.numpy as jnp

    from eagle3_jax.decoding.core import PAGE_SIZE
    from eagle3_jax.kernels import dispatch
    from eagle3_jax.kernels.tree_attention.api import tree_attention
    from eagle3_jax.kernels.tree_attention.plan import plan

    c, cores, dtype, pages = case, dispatch.cores(), jnp.dtype(case.dtype), case.keys // PAGE_SIZE
    queries, cache = (c.batch, c.nodes, c.query_heads, c.head_dim), _pages(c.batch * c.keys, c.kv_heads, c.head_dim)
    arguments: list[Any] = [
        ((c.batch, pages), "int32"),
        (queries, c.dtype),
        *[((c.batch, c.nodes, c.kv_heads, c.head_dim), c.dtype)] * 2,
        *[(cache, c.dtype)] * 2,
        ((c.batch,), "int32"),
    ]
    if not case.kernel.endswith("causal"):
        arguments.append(((c.batch, c.nodes, c.nodes), "bool"))

    # Blocks of the prefix and blocks with the tail have separate code. The cores of a device share the sequences, or
    # the KV heads of each sequence, which have equally many blocks.
    shape = plan(queries, cache, (dtype, dtype), tail=c.nodes, pages=pages)
    _, blocks, _, bare = shape.blocks(c.keys - c.nodes, 0, 0)
    tiles = c.batch * shape.tiles if c.batch % cores else c.batch // cores * shape.tiles
    trips = {"tree_attention.": [tiles * bare, tiles * (blocks - bare)]}
    attend = functools.partial(tree_attention, **how)
    return Call(lambda table, *rest: attend(*rest, page_table=table), arguments, trips, donated=(4, 5))


def _pages(tokens: int, kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """Returns the shape of an engine's cache."""
    from eagle3_jax.decoding.core import PAGE_SIZE

    return tokens // PAGE_SIZE + 1, kv_heads, PAGE_SIZE, head_dim


def vocabulary_top_k(case: TopK, **how: Any) -> Call:
    from eagle3_jax.kernels.vocabulary.api import vocabulary_top_k

    return _top_k(case, functools.partial(vocabulary_top_k, k=case.k, **how))


def lax_top_k(case: TopK) -> Call:
    """Logits, then XLA's own top-k."""
    import jax
    import jax.numpy as jnp

    def top_k(x: Any, rows: Any) -> Any:
        logits = jnp.einsum("mh,vh->mv", x, rows, preferred_element_type=jnp.float32)
        best, tokens = jax.lax.top_k(logits, case.k)
        return best - jax.nn.logsumexp(logits, axis=-1, keepdims=True), tokens

    return _top_k(case, top_k)


def _top_k(case: TopK, function: Any) -> Call:
    return Call(function, [((case.queries, case.hidden), case.dtype), ((case.vocabulary, case.hidden), case.dtype)])


def grouped_product(case: GroupedProduct, **how: Any) -> Call:
    import jax.numpy as jnp

    from eagle3_jax.kernels.contraction import contract
    from eagle3_jax.kernels.linear.layouts import Quantised
    from eagle3_jax.kernels.linear.quantised import product

    c, scales = case, ((case.inputs // case.group, case.outputs), "float32")
    parts = [((c.inputs, c.outputs), f"int{c.bits}"), scales, *([scales] if c.bits == 4 else [])]

    def multiply(x: Any, values: Any, scale: Any, offset: Any = None) -> Any:
        matrix = Quantised(values, scale, offset, jnp.dtype(c.dtype))
        return product(x, matrix, functools.partial(contract, "mk,kn->mn"), **how).astype(x.dtype)

    return Call(multiply, [((c.rows, c.inputs), c.dtype), *parts])


def ttt_attention(case: TrainingTimeTest, **how: Any) -> Call:
    import jax
    import jax.numpy as jnp

    from eagle3_jax.kernels.ttt_attention.api import ttt_attention
    from eagle3_jax.kernels.ttt_attention.tpu import plan

    c = case
    queries = (1, c.length, c.query_heads, c.head_dim)
    keys = (c.steps, 1, c.length, c.kv_heads, c.head_dim)
    shape = plan(queries, keys, jnp.dtype(c.dtype))
    # One document: every chunk lies inside it; chunks below the diagonal need no mask, the others do.
    bare = sum((tile * shape.tile + 1) // shape.chunk for tile in range(shape.tiles))
    seen = sum(math.ceil((tile + 1) * shape.tile / shape.chunk) for tile in range(shape.tiles))
    loops = [c.kv_heads * trips for trips in (shape.tiles, 0, bare, seen - bare)]
    arguments: list[Any] = [(queries, c.dtype), *[(keys, c.dtype)] * 2, ((1, c.length), "int32"), ((), "int32")]
    attend = functools.partial(ttt_attention, **how)
    if not c.backward:
        return Call(attend, arguments, {"ttt_attention.": loops})

    def gradients(q: Any, k: Any, v: Any, segments: Any, newest: Any, cotangent: Any) -> Any:
        return jax.vjp(lambda q, k, v: attend(q, k, v, segments, newest), q, k, v)[1](cotangent)

    return Call(gradients, [*arguments, (queries, c.dtype)], {"ttt_attention_backward": loops})


def commit(case: Commit, **how: Any) -> Call:
    """Counts the commit of a path; work that depends on the path counts for each of its rows."""
    from eagle3_jax.decoding.core import PAGE_SIZE
    from eagle3_jax.kernels.cache.api import commit

    c = case
    caches = [(_pages(c.batch * c.slots, c.kv_heads, c.head_dim), c.dtype)] * 2 * c.layers
    # Loops: sequences; copies of each row's tile and of the two destination tiles, and waits for both; rows, and the
    # caches within each; the two copies back, and waits for them.
    loops = [1, c.nodes, 2, c.nodes, 2, c.nodes, (c.nodes - 1) * len(caches), 2, 2]

    def move(lengths: Any, path: Any, table: Any, *caches: Any) -> Any:
        return commit(caches, lengths, path, page_table=table, **how)

    table = ((c.batch, c.slots // PAGE_SIZE), "int32")
    arguments: list[Any] = [((c.batch,), "int32"), ((c.batch, c.nodes), "int32"), table, *caches]
    trips = {"commit.": [c.batch * trips for trips in loops]}
    return Call(move, arguments, trips, donated=tuple(range(3, len(arguments))))


PROGRAMS: dict[str, Callable[..., Call]] = {
    "tree_attention": tree_attention,
    "tree_attention causal": tree_attention,
    "jax flash_attention, dense bias": tpu_peers.flash,
    "xla, dense mask": tpu_peers.xla,
    "jax paged_attention": tpu_peers.paged,
    "jax ragged_paged_attention": tpu_peers.ragged,
    "tpu-inference RPA v3": tpu_peers.ragged_v3,
    "vocabulary_top_k": vocabulary_top_k,
    "xla, logits and k argmax": functools.partial(vocabulary_top_k, implementation="xla"),
    "xla, logits and top_k": lax_top_k,
    "grouped_product": grouped_product,
    "ttt_attention": ttt_attention,
    "ttt_attention backward": ttt_attention,
    "commit": commit,
}

_TOP_K = [(4, 1), (4, 4), (32, 8)]
CASES: list[Case] = [
    Attention("tree_attention", PRODUCTS),
    Attention("tree_attention causal", PRODUCTS),
    Attention("tree_attention", PRODUCTS, nodes=16),
    Attention("tree_attention causal", PRODUCTS, nodes=1),
    Attention("tree_attention", PRODUCTS, batch=1),
    Attention("tree_attention", PRODUCTS, query_heads=8, kv_heads=1),  # 70B over 8 chips
    *(TopK("vocabulary_top_k", queries=queries, k=k) for queries, k in _TOP_K),
    TopK("vocabulary_top_k", hidden=8192, vocabulary=4000),  # 70B over 8 chips
    *(GroupedProduct("grouped_product", rows=rows) for rows in (4, 16, 64, 512)),
    GroupedProduct("grouped_product", inputs=14336, outputs=4096),
    GroupedProduct("grouped_product", bits=8),
    TrainingTimeTest("ttt_attention", LOOPS),
    TrainingTimeTest("ttt_attention backward", LOOPS),
    Commit("commit", LOOPS),
]
PEERS: list[Case] = [
    Attention("jax flash_attention, dense bias"),
    Attention("xla, dense mask"),
    Attention("jax ragged_paged_attention", PRODUCTS),
    Attention("tpu-inference RPA v3", PRODUCTS),
    Attention("jax ragged_paged_attention", PRODUCTS, nodes=16),
    Attention("tpu-inference RPA v3", PRODUCTS, nodes=16),
    Attention("jax paged_attention", PRODUCTS, nodes=1),
    Attention("tpu-inference RPA v3", PRODUCTS, nodes=1),
    *(
        TopK(kernel, queries=queries, k=k)
        for kernel in ("xla, logits and k argmax", "xla, logits and top_k")
        for queries, k in _TOP_K
    ),
]
