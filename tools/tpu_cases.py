"""The cases of tools/tpu_profile.py: sizes of each program, and the least bytes and operations of its work.

A case is data; its fields become columns of the JSON rows. tools/tpu_kernels.py makes this package's programs of the
cases, tools/tpu_peers.py other projects' programs for the same work.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

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
class Case(abc.ABC):
    """One program.

    Attributes:
        kernel: its name. method: the count of cycles, see tools/tpu_profile.py.
        floor_bytes: least bytes to move between HBM and the chip.
        operations: multiplications and additions of its matrix products. sizes: as printed.
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


@dataclasses.dataclass(frozen=True)
class Attention(Case):
    """`nodes` new tokens of each sequence over `keys` slots, their own included.

    Attributes:
        page: slots of a page, for the peers; this package's kernel uses the engine's.
    """

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
        return f"{self.batch} x {self.nodes} nodes, {self.query_heads}/{self.kv_heads}"

    @property
    def rows(self) -> int:
        """Rows of a KV head's matrix, with query heads and nodes folded as in this package."""
        return self.query_heads // self.kv_heads * self.nodes


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


@dataclasses.dataclass(frozen=True)
class GroupedProduct(Case):
    """`rows` rows times a matrix whose columns have a scale, and 4 bits an offset too, for each `group` values."""

    rows: int = 16
    inputs: int = 4096
    outputs: int = 14336
    group: int = 32
    bits: int = 4
    dtype: str = "bfloat16"

    @property
    def floor_bytes(self) -> int:
        scales = 4 * (2 if self.bits == 4 else 1) * self.inputs // self.group
        return self.outputs * (self.inputs * self.bits // 8 + scales + 4 * self.rows) + 2 * self.rows * self.inputs

    @property
    def operations(self) -> int:
        return 2 * self.rows * self.inputs * self.outputs

    @property
    def sizes(self) -> str:
        return f"{self.rows} x {self.inputs} x {self.outputs}, {self.bits} bits"


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

    @property
    def floor_bytes(self) -> int:
        """Counts keys and queries once; backward also gradients (step 0's in float32) and two numbers per row."""
        tokens, one = self.length * self.head_dim, 2
        queries, keys = self.query_heads * tokens * one, 2 * self.steps * self.kv_heads * tokens * one
        if not self.backward:
            return 2 * queries + keys
        return 3 * queries + 2 * keys + 2 * self.kv_heads * tokens * (4 - one) + 8 * self.query_heads * self.length

    @property
    def operations(self) -> int:
        """Counts two products forward (scores, values) and five backward, over the causal half."""
        return (5 if self.backward else 2) * self.query_heads * self.length**2 * self.head_dim

    @property
    def sizes(self) -> str:
        return f"{self.length} tokens, {self.query_heads}/{self.kv_heads}"


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

    @property
    def floor_bytes(self) -> int:
        """Counts one read and one write of each moved row."""
        return 2 * 2 * self.layers * self.batch * (self.nodes - 1) * self.kv_heads * self.head_dim * 2

    @property
    def operations(self) -> int:
        return 0

    @property
    def sizes(self) -> str:
        return f"{self.nodes} nodes, {self.layers} layers"
