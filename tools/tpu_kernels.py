"""The programs that tools/tpu_profile.py measures: the package's kernels, and others that do the same work.

A family of programs is a frozen dataclass derived from `Case`: its fields are the sizes, which become columns of the
JSON rows. `CASES` lists what is measured.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import tpu_peers
from tpu_peers import Program

STATIC_PROFILE = "static profile"
BUNDLES = "bundles x trips"


@dataclasses.dataclass(frozen=True)
class Case(abc.ABC):
    """One program.

    Attributes:
        kernel: its name. method: how its cycles are found, see tools/tpu_profile.py.
        floor_bytes: that it must move between HBM and the chip, at the least.
        operations: multiplications and additions of its matrix products. sizes: as they are printed.
    """

    kernel: str
    method: str = STATIC_PROFILE

    @property
    @abc.abstractmethod
    def floor_bytes(self) -> int: ...

    @property
    @abc.abstractmethod
    def operations(self) -> int: ...

    @property
    @abc.abstractmethod
    def sizes(self) -> str: ...

    @abc.abstractmethod
    def program(self) -> Program:
        """Called in the process that compiles, under the mesh of the chip."""


@dataclasses.dataclass(frozen=True)
class Attention(Case):
    """`nodes` new tokens of each sequence over `keys` slots, their own included."""

    nodes: int = 64
    query_heads: int = 32
    kv_heads: int = 8
    batch: int = 4
    head_dim: int = 128
    keys: int = 4096
    page: int = 256
    dtype: str = "bfloat16"

    @property
    def floor_bytes(self) -> int:
        cache = 2 * self.batch * self.kv_heads * self.keys * self.head_dim
        queries = 2 * self.batch * self.query_heads * self.nodes * self.head_dim
        return 2 * (cache + queries)

    @property
    def operations(self) -> int:
        return 4 * self.batch * self.query_heads * self.nodes * self.keys * self.head_dim

    @property
    def sizes(self) -> str:
        return f"{self.nodes} nodes, {self.query_heads}/{self.kv_heads}"

    @property
    def rows(self) -> int:
        """Of the matrix of a KV head, query heads and nodes folded as ours has them."""
        return self.query_heads // self.kv_heads * self.nodes

    @property
    def cache(self) -> tuple[int, ...]:
        """Shape of the keys and of the values, as ours has them."""
        return (self.batch * self.keys // self.page, self.kv_heads, self.page, self.head_dim)

    def plan(self) -> Any:
        """How our kernel cuts its work, with the lengths baked in."""
        import jax.numpy as jnp

        from eagle3_jax.kernels import tree_attention

        dtype = jnp.dtype(self.dtype)
        queries = (self.batch, self.nodes, self.query_heads, self.head_dim)
        pages, length = self.keys // self.page, self.keys - self.nodes
        return tree_attention.plan(queries, self.cache, (dtype, dtype), tail=self.nodes, pages=pages, length=length)

    def program(self) -> Program:
        return ATTENTION[self.kernel](self)


def _tree(case: Attention) -> Program:
    return _ours(case, causal=False)


def _causal(case: Attention) -> Program:
    return _ours(case, causal=True)


def _ours(case: Attention, *, causal: bool) -> Program:
    """The kernel itself, on queries that are folded already."""
    from eagle3_jax.kernels import tree_attention_tpu

    c, shape = case, case.plan()
    arguments = [
        ((c.batch, c.kv_heads, shape.group * shape.nodes, c.head_dim), c.dtype),
        (c.cache, c.dtype),
        (c.cache, c.dtype),
        ((c.batch, shape.pages), "int32"),
        ((c.batch,), "int32"),
    ]
    arguments += [((c.batch, c.kv_heads, shape.new_rows(c.dtype), c.head_dim), c.dtype)] * 2
    if not causal:
        arguments.append(((c.batch, shape.nodes, shape.words), "int32"))

    def attend(q: Any, k: Any, v: Any, table: Any, lengths: Any, new_k: Any, new_v: Any, bits: Any = None) -> Any:
        return tree_attention_tpu.attend(shape, q, k, v, table, lengths, bits, new=(new_k, new_v))

    # Blocks of the prefix have code of their own, and those that hold the tail, one for each tile of a sequence.
    # The cores of a device (v5p has two) share the sequences.
    tiles, steps = c.batch // tpu_peers.cores() * shape.nodes // shape.tile, -(-shape.pages // shape.step)
    return Program(attend, arguments, {"tree_attention": [tiles * (steps - 1), tiles]}, donated=(1, 2))


ATTENTION: dict[str, Callable[[Attention], Program]] = {
    "tree_attention": _tree,
    "tree_attention causal": _causal,
    "jax flash_attention, dense bias": tpu_peers.flash,
    "xla, dense mask": tpu_peers.xla,
    "jax paged_attention": tpu_peers.paged,
    "jax ragged_paged_attention": tpu_peers.ragged,
    "tpu-inference RPA v3": tpu_peers.ragged_v3,
}


@dataclasses.dataclass(frozen=True)
class TopK(Case):
    """The k most probable of a draft vocabulary for each of `queries` states, log-probabilities included."""

    queries: int = 4
    k: int = 4
    hidden: int = 4096
    vocabulary: int = 32000
    dtype: str = "bfloat16"

    @property
    def floor_bytes(self) -> int:
        return 2 * (self.vocabulary + self.queries) * self.hidden + 8 * self.queries * self.k

    @property
    def operations(self) -> int:
        return 2 * self.queries * self.hidden * self.vocabulary

    @property
    def sizes(self) -> str:
        return f"{self.queries} x {self.hidden}, k {self.k}"

    def program(self) -> Program:
        arguments = [((self.queries, self.hidden), self.dtype), ((self.vocabulary, self.hidden), self.dtype)]
        return Program(functools.partial(TOP_K[self.kernel], k=self.k), arguments)


def _vocabulary_top_k(x: Any, rows: Any, *, k: int) -> Any:
    from eagle3_jax.kernels.vocabulary import vocabulary_top_k

    return vocabulary_top_k(x, rows, k)


def _argmax(x: Any, rows: Any, *, k: int) -> Any:
    """Logits, and k passes over them."""
    from eagle3_jax.kernels.vocabulary import vocabulary_top_k

    return vocabulary_top_k(x, rows, k, implementation="xla")


def _lax_top_k(x: Any, rows: Any, *, k: int) -> Any:
    """Logits, and XLA's own top-k."""
    import jax
    import jax.numpy as jnp

    logits = jnp.einsum("mh,vh->mv", x, rows, preferred_element_type=jnp.float32)
    best, tokens = jax.lax.top_k(logits, k)
    return best - jax.nn.logsumexp(logits, axis=-1, keepdims=True), tokens


TOP_K: dict[str, Callable[..., Any]] = {
    "vocabulary_top_k": _vocabulary_top_k,
    "xla, logits and k argmax": _argmax,
    "xla, logits and top_k": _lax_top_k,
}


@dataclasses.dataclass(frozen=True)
class TrainingTimeTest(Case):
    """The attention of step 7 of the training-time test over one row, one document."""

    length: int = 2560  # of which the average tile sees a whole number of chunks
    steps: int = 7
    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"

    @property
    def backward(self) -> bool:
        return self.kernel.endswith("backward")

    @property
    def floor_bytes(self) -> int:
        """Keys and queries once, and backward their gradients (those of step 0 in float32) and two numbers a row."""
        tokens, one = self.length * self.head_dim, 2
        queries, keys = self.query_heads * tokens * one, 2 * self.steps * self.kv_heads * tokens * one
        if not self.backward:
            return 2 * queries + keys
        return 3 * queries + 2 * keys + 2 * self.kv_heads * tokens * (4 - one) + 8 * self.query_heads * self.length

    @property
    def operations(self) -> int:
        """Two products of scores and values forward, five backward, of the causal half."""
        return (5 if self.backward else 2) * self.query_heads * self.length**2 * self.head_dim

    @property
    def sizes(self) -> str:
        return f"{self.length} tokens, {self.query_heads}/{self.kv_heads}"

    def program(self) -> Program:
        import jax.numpy as jnp

        from eagle3_jax.kernels import ttt_attention, ttt_attention_tpu

        def plan(chunks: int) -> Any:
            queries = (1, self.length, self.query_heads, self.head_dim)
            keys = (self.steps, 1, self.length, self.kv_heads, self.head_dim)
            return ttt_attention.plan(queries, keys, jnp.dtype(self.dtype), chunks)

        s = plan((self.length // plan(0).chunk - 1) // 2)
        rows = (1, s.kv_heads, s.tiles, s.rows, s.head_dim)
        keys = (1, s.kv_heads, s.length, s.head_dim)
        later = (1, s.kv_heads, s.tiles, s.later * s.tile, s.head_dim)
        arguments = [(shape, self.dtype) for shape in (rows, keys, keys, later, later)]
        arguments += [((1, s.length), "int32"), ((), "int32")]
        if not self.backward:
            return Program(functools.partial(ttt_attention_tpu.forward, s), arguments)

        def gradients(*operands: Any) -> Any:
            *inputs, cotangents, normaliser, delta = operands
            return ttt_attention_tpu.backward(s, *inputs, cotangents=cotangents, normaliser=normaliser, delta=delta)

        return Program(gradients, [*arguments, (rows, self.dtype), *[(rows[:-1], "float32")] * 2])


@dataclasses.dataclass(frozen=True)
class Commit(Case):
    """Every other of 2 * `nodes` new slots goes to the front of them, in keys and values of all layers."""

    nodes: int = 8
    batch: int = 4
    layers: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    slots: int = 1024
    length: int = 508  # the path goes to two tiles
    dtype: str = "bfloat16"

    @property
    def floor_bytes(self) -> int:
        """Each row that moves comes and goes."""
        return 2 * 2 * self.layers * self.batch * (self.nodes - 1) * self.kv_heads * self.head_dim * 2

    @property
    def operations(self) -> int:
        return 0

    @property
    def sizes(self) -> str:
        return f"{self.nodes} nodes, {self.layers} layers"

    def program(self) -> Program:
        from eagle3_jax.kernels import commit

        def kernel(lengths: Any, path: Any, *caches: Any) -> Any:
            baked = self.length, list(range(0, 2 * self.nodes, 2))
            return commit._pallas(lengths, path, None, *caches, baked=baked)

        caches = [((self.batch, self.kv_heads, self.slots, self.head_dim), self.dtype)] * 2 * self.layers
        arguments = [((self.batch,), "int32"), ((self.batch, self.nodes), "int32"), *caches]
        return Program(kernel, arguments, donated=tuple(range(2, len(arguments))))


CASES: list[Case] = [
    Attention("tree_attention"),
    Attention("tree_attention causal"),
    Attention("tree_attention", nodes=16),
    Attention("tree_attention causal", nodes=1),
    Attention("tree_attention", query_heads=8, kv_heads=1),  # 70B over 8 chips
    Attention("jax flash_attention, dense bias"),
    Attention("xla, dense mask"),
    # Those that read their lengths at run time, and ours counted in the same way.
    Attention("tree_attention", BUNDLES),
    Attention("tree_attention causal", BUNDLES),
    Attention("jax ragged_paged_attention", BUNDLES),
    Attention("tpu-inference RPA v3", BUNDLES),
    Attention("tree_attention", BUNDLES, nodes=16),
    Attention("jax ragged_paged_attention", BUNDLES, nodes=16),
    Attention("tpu-inference RPA v3", BUNDLES, nodes=16),
    Attention("tree_attention causal", BUNDLES, nodes=1),
    Attention("jax paged_attention", BUNDLES, nodes=1),
    Attention("tpu-inference RPA v3", BUNDLES, nodes=1),
    *(TopK(kernel, queries=queries, k=k) for queries, k in ((4, 1), (4, 4), (32, 8)) for kernel in TOP_K),
    TopK("vocabulary_top_k", hidden=8192, vocabulary=4000),  # 70B over 8 chips
    Commit("commit"),
    TrainingTimeTest("ttt_attention"),
    TrainingTimeTest("ttt_attention backward"),
]
