"""Attention of a target to rows that are split along their length: each device gathers the keys of its rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jaxtyping import Array, Float, Int, Num

from eagle3_jax.kernels.gated_delta import api as gated_delta
from eagle3_jax.kernels.gated_delta.solve import Tokens
from eagle3_jax.kernels.tree_attention.api import tree_attention
from eagle3_jax.kernels.tree_attention.chosen import Index, attend_chosen, best_slots
from eagle3_jax.kernels.tree_attention.packed_heads import SLOTS, cache_rows, pack_heads
from eagle3_jax.models.cache import Pass
from eagle3_jax.models.recurrent import convolved
from eagle3_jax.sequence import Split


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SplitRows:
    """Stands for a layer's empty cache in a pass over pieces of rows; keeps nothing."""

    split: Split = dataclasses.field(metadata={"static": True})

    def append_and_attend(
        self,
        queries: Float[Array, "b t n d"],
        keys: Float[Array, "b t k d"],
        values: Float[Array, "b t k d"] | None,
        this: Pass,
        first: Int[Array, "b t"] | None = None,
        sinks: Float[Array, " n"] | None = None,
        chosen: Int[Array, "b t c"] | None = None,
    ) -> tuple[Float[Array, "b t n d"], SplitRows]:
        """Attends from each piece to its row up to the query: the tokens before the piece are its committed ones.

        `this` is of an empty cache and new tokens in order. `first`, `sinks`: see `tree_attention`;
        `chosen`: see `choose`.
        """
        given = {"first": first, "sinks": sinks, "chosen": chosen}
        given = {name: x for name, x in given.items() if x is not None}

        def local(queries: Array, keys: Array, values: Array | None, given: dict[str, Any]) -> Array:
            row_keys = _slots(self.split.gathered(keys))
            row_values = None if values is None else _slots(self.split.gathered(values))
            if chosen is not None:
                return attend_chosen(queries, row_keys, given["chosen"], None)
            before = jnp.broadcast_to(self.split.begin(queries.shape[1]), queries.shape[:1])
            return tree_attention(queries, keys, values, row_keys, row_values, before, **given)[0]

        pieces = P("data")
        specs = pieces, pieces, pieces, {name: P() if name == "sinks" else pieces for name in given}
        return _over_pieces(local, (queries, keys, values, given), specs), self

    def choose(self, new: Index, this: Pass, count: int) -> tuple[Int[Array, "b t c"] | None, SplitRows]:
        """See `KVCache.choose`; slots are those of whole rows."""

        def local(new: Index, starts: Array | None) -> Array:
            before = jnp.broadcast_to(self.split.begin(new.keys.shape[1]), new.keys.shape[:1])
            return best_slots(new, _slots(self.split.gathered(new.keys)), before, None, None, starts, count)

        few = new.keys.shape[1] * self.split.pieces <= count
        return None if few else _over_pieces(local, (new, this.starts), P("data")), self

    def convolve(
        self, inputs: Float[Array, "b t c"], kernel: Float[Array, "w c"], this: Pass
    ) -> tuple[Float[Array, "b t c"], SplitRows]:
        """See `ConvolutionCache`: the last inputs of the piece before are those before a piece."""
        before = self.split.before(inputs[:, inputs.shape[1] - len(kernel) + 1 :])
        return convolved(before, inputs, kernel, this.positions), self

    def advance(self, tokens: Tokens, this: Pass) -> tuple[Float[Array, "b t n d_v"], SplitRows]:
        """See `DeltaCache`: each device reads its rows from their beginning, and keeps its own piece's outputs."""

        def local(pieces: Tokens, positions: Array) -> Array:
            (b, size, n), d = pieces.betas.shape, (pieces.keys.shape[-1], pieces.values.shape[-1])
            row, positions = jax.tree.map(self.split.gathered, (pieces, positions))
            outputs, _ = gated_delta.chain(row, jnp.zeros((b, n, *d)), None, positions == 0, jnp.zeros(b, bool))
            return jax.lax.dynamic_slice_in_dim(outputs, self.split.begin(size), size, axis=1)

        return _over_pieces(local, (tokens, this.positions), P("data")), self


def _over_pieces(local: Callable[..., Any], operands: tuple[Any, ...], specs: Any) -> Any:
    return jax.shard_map(
        local,
        mesh=jax.sharding.get_abstract_mesh(),
        axis_names={"data"},
        in_specs=specs,
        out_specs=P("data"),
        check_vma=False,
    )(*operands)


def _slots(entries: Num[Array, "b t k d"]) -> Num[Array, "b rows slots width"]:
    """Places the entries of whole rows as a contiguous cache has them."""
    packed = pack_heads(entries.swapaxes(1, 2), *cache_rows(*entries.shape[2:]))
    return jnp.pad(packed, ((0, 0), (0, 0), (0, -packed.shape[2] % SLOTS), (0, 0)))
