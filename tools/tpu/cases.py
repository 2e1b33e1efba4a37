"""The package's Pallas kernels at the sizes of real targets: the program of each, and the least work that it does.

`tools/tpu_kernels.py` counts the cycles of their programs, `tools/tpu_first_run.py` runs them. A case is data; its
fields become columns of the JSON rows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from eagle3_jax.decoding.engine import PAGE_SIZE
from eagle3_jax.kernels import dispatch
from eagle3_jax.kernels.cache.api import commit
from eagle3_jax.kernels.contraction import contract
from eagle3_jax.kernels.gated_delta import api as gated_delta
from eagle3_jax.kernels.gated_delta.solve import CHUNK
from eagle3_jax.kernels.gated_delta.tokens import Tokens
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
class Call:
    """A function to compile, and its arguments.

    Attributes:
        arguments: shape and dtype of each.
        trips: part of a custom call's name -> trip counts, for the methods that count bundles. With PRODUCTS one for
            each stretch of code with matrix products, with LOOPS one for each loop, in their order.
        donated: indices of the arguments that are written in place.
    """

    function: Any
    arguments: Sequence[tuple[tuple[int, ...], Any]]
    trips: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    donated: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Case:
    """One program: its kernel, and the method that counts its cycles, see tools/tpu_kernels.py."""

    kernel: str
    method: str = STATIC_PROFILE

    floor_bytes = property(lambda self: self.least()[0])
    operations = property(lambda self: self.least()[1])
    sizes = property(lambda self: self.least()[2])

    def least(self) -> tuple[int, int, str]:
        """Counts the least bytes to move between HBM and the chip, and the operations of its products; its sizes."""
        raise NotImplementedError

    def call(self, **how: Any) -> Call:
        """Makes the program, as the engine or the trainer calls the kernel, under the chip's mesh.

        Args:
            how: `implementation` and `interpret` of the kernel.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Attention(Case):
    """`nodes` new tokens of each sequence over `keys` slots of pages, their own included."""

    nodes: int = 64
    query_heads: int = 32
    kv_heads: int = 8
    batch: int = 4
    head_dim: int = 128
    keys: int = 4096
    dtype: str = "bfloat16"

    def least(self) -> tuple[int, int, str]:
        cache = 2 * self.batch * self.kv_heads * self.keys * self.head_dim
        queries = 2 * self.batch * self.query_heads * self.nodes * self.head_dim
        sizes = f"{self.batch} x {self.nodes} nodes, {self.query_heads}/{self.kv_heads}"
        return 2 * (cache + queries), 2 * queries * self.keys, sizes

    def call(self, **how: Any) -> Call:
        """Lengths are known at run time; trips are for sequences of full length."""
        cores, dtype, pages = dispatch.cores(), jnp.dtype(self.dtype), self.keys // PAGE_SIZE
        queries = self.batch, self.nodes, self.query_heads, self.head_dim
        new, cache = (self.batch, self.nodes, self.kv_heads, self.head_dim), _pages(self, self.keys)
        arguments: list[Any] = [
            ((self.batch, pages), "int32"),
            (queries, self.dtype),
            *[(new, self.dtype)] * 2,
            *[(cache, self.dtype)] * 2,
            ((self.batch,), "int32"),
        ]
        if not self.kernel.endswith("causal"):
            arguments.append(((self.batch, self.nodes, self.nodes), "bool"))
        # Blocks of the prefix and blocks with the tail have separate code. The cores of a device share the sequences,
        # or the KV heads of each sequence, which have equally many blocks.
        shape = plan(queries, cache, (dtype, dtype), tail=self.nodes, pages=pages)
        _, blocks, _, bare = shape.blocks(self.keys - self.nodes, 0, 0)
        tiles = (self.batch if self.batch % cores else self.batch // cores) * shape.tiles
        trips = {"tree_attention.": [tiles * bare, tiles * (blocks - bare)]}
        attend = functools.partial(tree_attention, **how)
        return Call(lambda table, *rest: attend(*rest, page_table=table), arguments, trips, donated=(4, 5))


@dataclasses.dataclass(frozen=True)
class TopK(Case):
    """The k most probable of a draft vocabulary for each of `queries` states, log-probabilities included."""

    queries: int = 4
    k: int = 4
    hidden: int = 4096
    vocabulary: int = 32000
    dtype: str = "bfloat16"

    def least(self) -> tuple[int, int, str]:
        moved = 2 * (self.vocabulary + self.queries) * self.hidden + 8 * self.queries * self.k
        return moved, 2 * self.queries * self.hidden * self.vocabulary, f"{self.queries} x {self.hidden}, k {self.k}"

    def call(self, **how: Any) -> Call:
        arguments = [((self.queries, self.hidden), self.dtype), ((self.vocabulary, self.hidden), self.dtype)]
        return Call(functools.partial(vocabulary_top_k, k=self.k, **how), arguments)


@dataclasses.dataclass(frozen=True)
class GroupedProduct(Case):
    """`rows` rows times a matrix whose columns have a scale, and 4 bits an offset too, for each `group` values."""

    rows: int = 16
    inputs: int = 4096
    outputs: int = 14336
    group: int = 32
    bits: int = 4
    dtype: str = "bfloat16"

    def least(self) -> tuple[int, int, str]:
        scales = 4 * (2 if self.bits == 4 else 1) * self.inputs // self.group
        moved = self.outputs * (self.inputs * self.bits // 8 + scales + 4 * self.rows) + 2 * self.rows * self.inputs
        sizes = f"{self.rows} x {self.inputs} x {self.outputs}, {self.bits} bits"
        return moved, 2 * self.rows * self.inputs * self.outputs, sizes

    def call(self, **how: Any) -> Call:
        scales = ((self.inputs // self.group, self.outputs), "float32")
        parts = [((self.inputs, self.outputs), f"int{self.bits}"), *[scales] * (2 if self.bits == 4 else 1)]

        def multiply(x: Any, values: Any, scale: Any, offset: Any = None) -> Any:
            matrix = Quantised(values, scale, offset, jnp.dtype(self.dtype))
            return product(x, matrix, functools.partial(contract, "mk,kn->mn"), **how).astype(x.dtype)

        return Call(multiply, [((self.rows, self.inputs), self.dtype), *parts])


@dataclasses.dataclass(frozen=True)
class TrainingTimeTest(Case):
    """Attention of step 7 of the training-time test over one row with one document."""

    length: int = 2560
    steps: int = 7
    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"

    @property
    def backward(self) -> bool:
        return self.kernel.endswith("backward")

    def least(self) -> tuple[int, int, str]:
        """Counts keys and queries once; backward also gradients (step 0's in float32) and two numbers per row.

        Products: two forward (scores, values) and five backward, over the causal half.
        """
        tokens, one = self.length * self.head_dim, 2
        queries, keys = self.query_heads * tokens * one, 2 * self.steps * self.kv_heads * tokens * one
        moved = 2 * queries + keys
        if self.backward:
            moved += queries + keys + 2 * self.kv_heads * tokens * (4 - one) + 8 * self.query_heads * self.length
        operations = (5 if self.backward else 2) * self.query_heads * self.length**2 * self.head_dim
        return moved, operations, f"{self.length} tokens, {self.query_heads}/{self.kv_heads}"

    def call(self, **how: Any) -> Call:
        queries = 1, self.length, self.query_heads, self.head_dim
        keys = self.steps, 1, self.length, self.kv_heads, self.head_dim
        shape = ttt_plan(queries, keys, jnp.dtype(self.dtype))
        # One document: every chunk lies inside it; chunks below the diagonal need no mask, the others do.
        bare = sum((tile * shape.tile + 1) // shape.chunk for tile in range(shape.tiles))
        seen = sum(math.ceil((tile + 1) * shape.tile / shape.chunk) for tile in range(shape.tiles))
        loops = [self.kv_heads * trips for trips in (shape.tiles, 0, bare, seen - bare)]
        arguments: list[Any] = [(queries, self.dtype), *[(keys, self.dtype)] * 2]
        arguments += [((1, self.length), "int32"), ((), "int32")]
        attend = functools.partial(ttt_attention, **how)
        if not self.backward:
            return Call(attend, arguments, {"ttt_attention.": loops})

        def gradients(q: Any, k: Any, v: Any, segments: Any, newest: Any, cotangent: Any) -> Any:
            return jax.vjp(lambda q, k, v: attend(q, k, v, segments, newest), q, k, v)[1](cotangent)

        return Call(gradients, [*arguments, (queries, self.dtype)], {"ttt_attention_backward": loops})


@dataclasses.dataclass(frozen=True)
class Commit(Case):
    """Moves every other of 2 * `nodes` new slots to the front, in keys and values of all layers."""

    nodes: int = 8
    batch: int = 4
    layers: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    slots: int = 1024
    length: int = 508  # the path spans two tiles
    dtype: str = "bfloat16"

    def least(self) -> tuple[int, int, str]:
        """Counts one read and one write of each moved row."""
        moved = 2 * 2 * self.layers * self.batch * (self.nodes - 1) * self.kv_heads * self.head_dim * 2
        return moved, 0, f"{self.nodes} nodes, {self.layers} layers"

    def call(self, **how: Any) -> Call:
        """Work that depends on the path counts for each of its rows."""
        caches = [(_pages(self, self.slots), self.dtype)] * 2 * self.layers
        # Loops: sequences; copies of each row's tile and of the two destination tiles, and waits for both; rows, and
        # the caches within each; the two copies back, and waits for them.
        loops = [1, self.nodes, 2, self.nodes, 2, self.nodes, (self.nodes - 1) * len(caches), 2, 2]

        def move(lengths: Any, path: Any, table: Any, *caches: Any) -> Any:
            return commit(caches, lengths, path, page_table=table, **how)

        table = ((self.batch, self.slots // PAGE_SIZE), "int32")
        arguments: list[Any] = [((self.batch,), "int32"), ((self.batch, self.nodes), "int32"), table, *caches]
        trips = {"commit.": [self.batch * trips for trips in loops]}
        return Call(move, arguments, trips, donated=tuple(range(3, len(arguments))))


@dataclasses.dataclass(frozen=True)
class Delta(Case):
    """The gated delta rule over a tree's nodes or a prompt's tokens; its states are read, and a prompt's written."""

    tokens: int = 16
    batch: int = 1
    key_heads: int = 16
    value_heads: int = 32
    head_dim: int = 128

    @property
    def prompt(self) -> bool:
        return self.kernel.endswith("prompt")

    @property
    def floor_bytes(self) -> int:
        """Counts queries, keys, values and outputs once, a tree's updates too."""
        rows = 2 * self.key_heads + (2 if self.prompt else 3) * self.value_heads
        states = (2 if self.prompt else 1) * self.value_heads * self.head_dim
        return 4 * self.batch * self.head_dim * (self.tokens * rows + states)

    @property
    def operations(self) -> int:
        """Counts keys and queries with keys, with states and with updates; and a prompt's updates of states."""
        size = min(self.tokens, CHUNK)
        of_keys, of_values = 4 * size, (6 if self.prompt else 4) * self.head_dim + 3 * size
        heads = self.key_heads * of_keys + self.value_heads * of_values
        return self.batch * self.tokens * self.head_dim * heads

    @property
    def sizes(self) -> str:
        return f"{self.batch} x {self.tokens}, {self.key_heads}/{self.value_heads}"

    def call(self, **how: Any) -> Call:
        b, t, k, n, d = self.batch, self.tokens, self.key_heads, self.value_heads, self.head_dim
        shapes = [*[(b, t, k, d)] * 2, (b, t, n, d), *[(b, t, n)] * 2, (b, n, d, d)]
        sees = (b, t) if self.prompt else (b, t, t)
        arguments = [*((shape, "float32") for shape in shapes), (sees, "bool")]

        def read(*x: Any) -> Any:
            tokens, states, sees = Tokens(*x[:5]), x[5], x[6]
            if self.prompt:
                return gated_delta.chain(tokens, states, None, sees, jnp.ones(b, bool), **how)
            return gated_delta.tree(tokens, states, None, sees, **how)

        return Call(read, arguments)


def _pages(case: Attention | Commit, slots: int) -> tuple[int, ...]:
    """Returns the shape of an engine's cache for as many slots of each sequence."""
    return case.batch * slots // PAGE_SIZE + 1, case.kv_heads, PAGE_SIZE, case.head_dim


CASES: list[Case] = [
    Attention("tree_attention", PRODUCTS),
    Attention("tree_attention causal", PRODUCTS),
    Attention("tree_attention", PRODUCTS, nodes=16),
    Attention("tree_attention causal", PRODUCTS, nodes=1),
    Attention("tree_attention", PRODUCTS, batch=1),
    Attention("tree_attention", PRODUCTS, query_heads=8, kv_heads=1),  # 70B over 8 chips
    *(TopK("vocabulary_top_k", queries=queries, k=k) for queries, k in ((4, 1), (4, 4), (32, 8))),
    TopK("vocabulary_top_k", hidden=8192, vocabulary=4000),  # 70B over 8 chips
    *(GroupedProduct("grouped_product", rows=rows) for rows in (4, 16, 64, 512)),
    GroupedProduct("grouped_product", inputs=14336, outputs=4096),
    GroupedProduct("grouped_product", bits=8),
    TrainingTimeTest("ttt_attention", LOOPS),
    TrainingTimeTest("ttt_attention backward", LOOPS),
    Commit("commit", LOOPS),
    *(Delta("gated_delta tree", tokens=tokens) for tokens in (16, 64)),
    Delta("gated_delta prompt", tokens=64),
]
