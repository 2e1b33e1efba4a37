"""Feeds batches to the devices: one process reads each row and sends it once, and the chips gather it.

Rows that are split along their length are cut into pieces on the way. A group of the mesh's rows that shares them (see
`Split`) stands for a row of the mesh then.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eagle3_jax.data.loader import Row
from eagle3_jax.mesh import batch_sharding, put, replicated
from eagle3_jax.sequence import WHOLE, Split


class Feed:
    """Rows of batches for a mesh whose rows lie within processes or over whole processes.

    The processes of a mesh row share its part of a batch: each reads whole rows, evenly over a batch or, where a batch
    has too few, over several batches. Each chip is sent a slice of the tokens; the chips gather the rows. A batch has a
    multiple of the data axis's rows, or of the groups of a split, which cuts the rows into pieces.
    """

    def __init__(self, mesh: Mesh, batch_size: int, split: Split = WHOLE) -> None:
        grid = mesh.devices if split.pieces == 1 else mesh.devices.reshape(split.groups, -1)
        data, chips = grid.shape
        hosts = list(dict.fromkeys(device.process_index for device in grid[0]))
        self._split = split
        self._mesh, self._batch_size, self._each, self._hosts = mesh, batch_size, batch_size // data, len(hosts)
        self._slots = -(-self._each // self._hosts)
        self._even = self._slots * self._hosts == self._each
        places = grid.reshape(data, self._hosts, chips // self._hosts)
        self._chips = Mesh(places, ("data", "host", "chip"), axis_types=mesh.axis_types[:1] * 3)
        # (row of the mesh, place among its processes) of this process.
        me = jax.process_index()
        self._own = [at for at in np.ndindex(data, self._hosts) if places[*at, 0].process_index == me]
        self._sent: Any = None

    def rows(self, number: int) -> list[int]:
        """Returns the rows of a batch that this process reads, in the order of `place`; -1 is an empty slot."""
        return [
            row * self._each + place if (place := self._place(number, host, slot)) >= 0 else -1
            for row, host in self._own
            for slot in range(self._slots)
        ]

    def _place(self, number: int, host: int, slot: int) -> int:
        """Returns the row, among those of a mesh row, that a process has in a slot; -1: none."""
        if self._even:
            return host * self._slots + slot
        place = slot * self._hosts + (host - number * self._each) % self._hosts
        return place if place < self._each else -1

    def place(self, part: Row, number: int) -> dict[str, jax.Array]:
        """Puts a batch on the devices, rows over the data axis, or their pieces.

        `part`: [rows, T, ...] of each field, the rows of `rows(number)` in order. The arrays may be overwritten once
        the next batch was placed.
        """
        before, self._sent = self._sent, {name: self._send(x) for name, x in part.items()}
        jax.block_until_ready(before)
        if self._chips.devices[0].size == 1:
            return self._sent
        order = None
        if not self._even:
            places = [self._place(number, host, slot) for host in range(self._hosts) for slot in range(self._slots)]
            order = np.argsort(np.array(places) % (self._each + 1))[: self._each].astype(np.int32)  # -1 comes last
            order = put(order, replicated(self._mesh))
        return _gather(self._sent, order, batch_sharding(self._mesh), self._split)

    def _send(self, part: np.ndarray) -> jax.Array:
        """Sends a field in pieces: [data, hosts, slots, T, ...], or [B, T, ...] where a mesh row is a chip."""
        slots = self._slots
        if self._chips.devices.flat[0].platform == "cpu":
            part = part.copy()  # an array on a CPU shares its source's memory
        if self._chips.devices[0].size == 1:
            where, shape = batch_sharding(self._mesh), (self._batch_size, *part.shape[1:])

            def rows_at(index: Any) -> np.ndarray:
                row = index[0].indices(self._batch_size)[0] // self._each
                return part[self._own.index((row, 0)) * slots :][:slots]

            return jax.make_array_from_callback(shape, where, rows_at)
        chips = self._chips.shape["chip"]
        spec = PartitionSpec("data", "host", None, "chip" if part.shape[1] % chips == 0 else None)
        shape = (*self._chips.devices.shape[:2], slots, *part.shape[1:])

        def piece_at(index: Any) -> np.ndarray:
            at = self._own.index(tuple(axis.indices(size)[0] for axis, size in zip(index[:2], shape, strict=False)))
            return part[at * slots :][:slots, index[3]][None, None]

        return jax.make_array_from_callback(shape, NamedSharding(self._chips, spec), piece_at)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _gather(
    pieces: dict[str, jax.Array], order: jax.Array | None, where: NamedSharding, split: Split
) -> dict[str, jax.Array]:
    """Gathers the rows of a batch from the slots of all processes, in order or in the given order of slots."""

    def whole(x: jax.Array) -> jax.Array:
        data, hosts, slots, *rest = x.shape
        x = x.reshape(data, hosts * slots, *rest)
        x = x if order is None else x[:, order]
        return jax.lax.with_sharding_constraint(split.cut(x.reshape(-1, *rest)), where)

    return jax.tree.map(whole, pieces)
