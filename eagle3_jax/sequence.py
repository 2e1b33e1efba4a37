"""Sequence parallelism: rows of tokens split over the data axis of a mesh, for rows too long for one device.

A piece is an array's row like any other, so whatever computes row by row needs no change. What reads beyond its piece
asks a `Split`: for the tokens behind it, for the piece before it, or for the whole row.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import P
from jax.sharding import Mesh
from jaxtyping import Array, Int, Shaped

from eagle3_jax.mesh import constrain


@dataclasses.dataclass(frozen=True)
class Split:
    """How rows lie over the data axis; the default: each row is one piece.

    Shard i of a group has piece i of each of the group's rows.
    """

    groups: int = 1  # of neighbouring shards of the data axis; the rows are divided among them
    pieces: int = 1  # shards of a group, and pieces of a row

    def cut(self, rows: Shaped[Array, "b t ..."], beyond: int = 0) -> Shaped[Array, "p n ..."]:
        """Cuts rows into pieces, each with the `beyond` tokens behind it in its row; zeros follow the row's end."""
        parts = rows.reshape(len(rows), self.pieces, -1, *rows.shape[2:])
        following = jnp.concatenate([parts[:, 1:, :beyond], jnp.zeros_like(parts[:, :1, :beyond])], axis=1)
        parts = jnp.concatenate([parts, following], axis=2)
        parts = parts.reshape(self.groups, -1, *parts.shape[1:]).swapaxes(1, 2)
        return self._over_data(parts.reshape(-1, *parts.shape[3:]))

    def joined(self, pieces: Shaped[Array, "p n ..."]) -> Shaped[Array, "b t ..."]:
        """Joins pieces to rows on every device, for numbers of a token; the inverse of `cut`."""
        if self.pieces == 1:
            return pieces
        parts = self._apart(constrain(pieces, ((r"", P()),))).swapaxes(1, 2)
        return parts.reshape(-1, self.pieces * pieces.shape[1], *pieces.shape[2:])

    def before(self, pieces: Shaped[Array, "p ..."]) -> Shaped[Array, "p ..."]:
        """Gives each piece what the piece before it in its row has; zeros to the first one."""
        parts = self._apart(pieces)
        parts = jnp.concatenate([jnp.zeros_like(parts[:, :1]), parts[:, :-1]], axis=1)
        return self._over_data(parts.reshape(pieces.shape))

    def _over_data(self, pieces: Shaped[Array, "p ..."]) -> Shaped[Array, "p ..."]:
        return constrain(pieces, ((r"", P("data")),)) if self.pieces > 1 else pieces

    def _apart(self, pieces: Shaped[Array, "p ..."]) -> Shaped[Array, "groups pieces b ..."]:
        return pieces.reshape(self.groups, self.pieces, -1, *pieces.shape[1:])

    @classmethod
    def of(cls, mesh: Mesh, pieces: int) -> Split:
        """Splits rows into so many pieces over a mesh. Raises ValueError: they do not divide its data axis."""
        data = mesh.shape["data"]
        if data % pieces:
            raise ValueError(f"train.sequence: got {pieces}, expected a divisor of the mesh's data axis, {data}")
        return cls(data // pieces, pieces)

    # ------------------------------------------------------------------------ inside a `shard_map` over the data axis
    def gathered(self, own: Shaped[Array, "b n ..."]) -> Shaped[Array, "b t ..."]:
        """Gathers the whole rows of the device's pieces from its group."""
        shards = [[group * self.pieces + at for at in range(self.pieces)] for group in range(self.groups)]
        return jax.lax.all_gather(own, "data", axis=1, tiled=True, axis_index_groups=shards)

    def begin(self, size: int) -> Int[Array, ""]:
        """Returns the index in its row of the first token of the device's pieces, of `size` tokens each."""
        return jax.lax.axis_index("data") % self.pieces * size


WHOLE = Split()
