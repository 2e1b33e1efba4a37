"""Packs what the host passes to a program into one array, so that a dispatch makes one transfer."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from eagle3_jax.decoding.rounds.sampling import Rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """A program's arguments from the host: arrays of bool or of 32 bits, in any pytree.

    Attributes:
        bits: those of all arrays, one after the other.
        form: the pytree, and each array's shape and dtype.
    """

    bits: Int[Rows, " n"]
    form: tuple[Any, tuple[tuple[tuple[int, ...], np.dtype], ...]] = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, *arguments: Any) -> Packed:
        """Packs the arguments, on the host."""
        leaves, tree = jax.tree.flatten(arguments)
        each = [(np.int32(x) if x.dtype.kind == "b" else x.view(np.int32)).reshape(-1) for x in leaves]
        bits: Any = np.concatenate(each)
        return cls(bits, (tree, tuple((x.shape, x.dtype) for x in leaves)))

    def arguments(self) -> tuple[Any, ...]:
        """Unpacks them, in a program."""
        (tree, forms), start, leaves = self.form, 0, list[Array]()
        for shape, dtype in forms:
            part = self.bits[start : start + math.prod(shape)].reshape(shape)
            leaves.append(part != 0 if dtype.kind == "b" else jax.lax.bitcast_convert_type(part, dtype))
            start += math.prod(shape)
        return jax.tree.unflatten(tree, leaves)
