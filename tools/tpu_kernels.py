"""The programs that tools/tpu_profile.py measures: the package's kernels, and others that do the same work.

A family of programs is a frozen dataclass derived from `Case`: its fields are the sizes, which become columns of the
JSON rows. `CASES` lists what is measured.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

Program = tuple[Callable[..., Any], list[tuple[tuple[int, ...], Any]]]  # a function; shape and dtype of its arguments


@dataclasses.dataclass(frozen=True)
class Case(abc.ABC):
    """One program.

    Attributes:
        kernel: its name. floor_bytes: that it must move between HBM and the chip, at the least.
        operations: multiplications and additions of its matrix products. sizes: as they are printed.
    """

    kernel: str

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

    def program(self) -> Program:
        return ATTENTION[self.kernel](self)

    @property
    def rows(self) -> int:
        """Of the matrix of a KV head, query heads and nodes folded as ours has them."""
        return self.query_heads // self.kv_heads * self.nodes


def _tree(case: Attention) -> Program:
    return _ours(case, causal=False)


def _causal(case: Attention) -> Program:
    return _ours(case, causal=True)


def _ours(case: Attention, *, causal: bool) -> Program:
    """The kernel itself, on queries that are folded already, with the lengths baked in."""
    import jax.numpy as jnp

    from eagle3_jax.kernels import tree_attention, tree_attention_tpu

    c, page = case, 256
    cache = (c.batch * c.keys // page, c.kv_heads, page, c.head_dim)
    shape = tree_attention.plan(
        (c.batch, c.nodes, c.query_heads, c.head_dim),
        cache,
        (jnp.dtype(c.dtype), jnp.dtype(c.dtype)),
        tail=c.nodes,
        pages=c.keys // page,
        length=c.keys - c.nodes,
    )
    shapes = [
        ((c.batch, c.kv_heads, shape.group * shape.nodes, c.head_dim), c.dtype),
        (cache, c.dtype),
        (cache, c.dtype),
        ((c.batch, shape.pages), "int32"),
        ((c.batch,), "int32"),
    ]
    if not causal:
        shapes.append(((c.batch, shape.nodes, shape.words), "int32"))

    def attend(q: Any, k: Any, v: Any, table: Any, lengths: Any, *bits: Any) -> Any:
        return tree_attention_tpu.attend(shape, q, k, v, table, lengths, *bits, vmem_limit=tree_attention.VMEM_LIMIT)

    return attend, shapes


def _flash(case: Attention) -> Program:
    """JAX's own kernel on folded rows, the tree as a bias."""
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    c = case
    sizes = flash.BlockSizes(block_q=min(c.rows, 256), block_k_major=1024, block_k=1024, block_b=1)
    q, kv = (c.batch, c.kv_heads, c.rows, c.head_dim), (c.batch, c.kv_heads, c.keys, c.head_dim)

    def attend(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return flash.flash_attention(q, k, v, bias, sm_scale=c.head_dim**-0.5, block_sizes=sizes)

    return attend, [(q, c.dtype), (kv, c.dtype), (kv, c.dtype), ((c.batch, c.kv_heads, c.rows, c.keys), "float32")]


def _xla(case: Attention) -> Program:
    """Plain operations on folded rows, under a mask of every slot."""
    import jax
    import jax.numpy as jnp

    c = case
    q, kv = (c.batch, c.kv_heads, c.rows, c.head_dim), (c.batch, c.kv_heads, c.keys, c.head_dim)

    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        scores = jnp.einsum("bkrd,bksd->bkrs", q, k, preferred_element_type=jnp.float32) * c.head_dim**-0.5
        weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30), axis=-1)
        return jnp.einsum("bkrs,bksd->bkrd", weights.astype(v.dtype), v)

    return attend, [(q, c.dtype), (kv, c.dtype), (kv, c.dtype), ((c.batch, c.rows, c.keys), "bool")]


ATTENTION: dict[str, Callable[[Attention], Program]] = {
    "tree_attention": _tree,
    "tree_attention causal": _causal,
    "jax flash_attention, dense bias": _flash,
    "xla, dense mask": _xla,
}

CASES: list[Case] = [
    Attention("tree_attention"),
    Attention("tree_attention causal"),
    Attention("tree_attention", nodes=16),
    Attention("tree_attention causal", nodes=1),
    Attention("tree_attention", query_heads=8, kv_heads=1),  # 70B over 8 chips
    Attention("jax flash_attention, dense bias"),
    Attention("xla, dense mask"),
]
