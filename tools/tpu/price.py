"""Prices a compiled program on TPU chips, in seconds, from its optimised HLO.

Everything is a floor of its own, one after the other; nothing here was measured on a TPU:

- An operation takes the longest of three times. Operations of its products (a multiply-add is two; float32 at the
  highest precision is six passes) over the chip's peak. Bytes that it reads and writes in HBM over the bandwidth. And
  2,000 cycles, the least that XLA's own estimates give a fusion. Scalars take no time.
- Of an operand that is sliced, the slice counts; of an array that is updated in place, the update. What stays in VMEM
  takes no time, but what was copied there beforehand is read by the operation that uses it.
- A Pallas kernel reads its operands and writes its results once. Its own products are not in the HLO, and not counted.
- Copies between memories and other asynchronous work of one chip run beside the rest.
- A collective among n devices is a ring over their links: what a device sends over the link's bandwidth, plus a
  microsecond a hop for the way across the group. An all-gather sends (n - 1) / n of its result, a reduce-scatter of
  its operand, an all-reduce twice that; an all-to-all n / 4 of its operand; a permutation its operand in one direction.
  Groups whose neighbours are several links apart share the links, and have as much less bandwidth. Slices have no links
  between their ends. What the compiler scheduled between the start and the end of an asynchronous one runs meanwhile.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from tpu.hlo import (
    Collective,
    Executed,
    Operation,
    Program,
    arrays,
    bytes_of,
    collectives,
    is_collective,
    root_of,
    shape_of,
)
from tpu.topology import HOP, Chip

_LEAST_CYCLES = 2000
_LAYER = "_decoder_layer"  # the traced function of a layer of the target, for every family
_PASSES = {"highest": 6, "high": 3}
# No time: names of others' results, and copies, whose readers pay for them.
_FREE = re.compile(
    r"parameter|constant|get-tuple-element|tuple|bitcast|after-all|partition-id|replica-id|opt-barrier|domain|"
    r"(copy|slice|async|all-reduce|all-gather|collective-permute|send|recv)-(start|done|update)|"
    r"(add-dependency)"
)
_NO_KERNEL = re.compile(r'custom_call_target="(ConcatBitcast|AllocateBuffer|Sharding|AssumeGatherIndicesInBound)"')
_SLICES = ("dynamic-slice", "slice", "gather")
_VIEWS = ("bitcast", "reshape", "copy", "convert", "transpose")


@dataclasses.dataclass
class Price:
    """Seconds of a device.

    Attributes:
        products: matrix products. passes: all else on the device, kernels included. collectives: between devices.
        straight, looped: how many collectives run in straight code, and how many in loops.
    """

    products: float = 0.0
    passes: float = 0.0
    collectives: float = 0.0
    straight: float = 0.0
    looped: float = 0.0

    @property
    def total(self) -> float:
        return self.products + self.passes + self.collectives


def price(program: Program, mesh: Any, chip: Chip, *, layers: float = 1.0, **how: Any) -> Price:
    """Prices a program, or one pass through its loop.

    Args:
        mesh: the `jax.sharding.Mesh` that it was compiled for.
        layers: how many of the target's layers each compiled one stands for.
        how: see `hlo.Program.executed`.
    """
    paid, memory = Price(), _Memory(program)
    alone: dict[tuple[str, str], float] = {}  # (computation, operation) -> its seconds
    for executed in program.executed(**how):
        if executed.aside or _free(program, executed):
            continue
        operation, name = executed.operation, executed.computation
        operations = sum(_operations(program, *pair) for pair in program.inner(name, operation))
        alone[name, operation.name] = seconds = max(
            operations / (chip.teraflops * 1e12),
            memory.bytes(name, operation) / (chip.gigabytes * 1e9),
            _LEAST_CYCLES / (chip.gigahertz * 1e9),
        )
        seconds *= executed.times * (layers if _LAYER in operation.where else 1.0)
        if operations or "dot_general" in operation.where:  # of one row: a sum of products for XLA
            paid.products += seconds
        else:
            paid.passes += seconds
    places = places_of(mesh)
    for x in collectives(program, dict(mesh.shape), **how):
        count, (computation, names) = x.times * (layers if _LAYER in x.where else 1.0), x.beside
        hidden = sum(alone.get((computation, name), 0.0) for name in names)
        paid.collectives += count * max(0.0, travel(x, places, chip) - hidden)
        paid.looped += count * x.in_loop
        paid.straight += count * (not x.in_loop)
    return paid


def _free(program: Program, executed: Executed) -> bool:
    """Whether an operation takes no time: its readers pay for it, it is a scalar, or it is a collective."""
    operation = executed.operation
    if _FREE.fullmatch(operation.kind) or _NO_KERNEL.search(operation.rest) or is_collective(program, executed):
        return True
    return operation.kind not in ("custom-call", "fusion") and math.prod(shape_of(operation.type)) <= 1


def places_of(mesh: Any) -> list[tuple[int, ...]]:
    """Lists the coordinates of the mesh's devices; the last one is a chip's core."""
    return [(*device.coords, getattr(device, "core_on_chip", 0)) for device in mesh.devices.flat]


def travel(collective: Collective, places: Sequence[tuple[int, ...]], chip: Chip) -> float:
    """Returns the seconds that a collective takes once.

    Args:
        places: see `places_of`.
    """
    group = [places[partition] for partition in collective.group]
    count, link, size = len(group), chip.link * 1e9, collective.bytes
    across = max(1, max(_distance(a, b) for a, b in itertools.combinations(group, 2)))
    if collective.kind == "collective-permute":
        return across * (HOP + size / (link / 2))
    around = sum(_distance(a, b) for a, b in zip(group, group[1:] + group[:1], strict=True))
    sent = {"all-reduce": 2 * (count - 1) / count, "all-to-all": count / 4}.get(collective.kind, (count - 1) / count)
    twice = 2 if collective.kind == "all-reduce" else 1
    return across * HOP * twice + sent * size * max(1.0, around / count) / link


def _distance(place: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Counts the links between two chips."""
    return sum(abs(a - b) for a, b in zip(place[:-1], other[:-1], strict=True))


class _Memory:
    """What operations read and write in HBM, in bytes."""

    def __init__(self, program: Program) -> None:
        self._computations = program.computations
        self._readers = functools.cache(self._find_readers)
        self._parameters = functools.cache(self._find_parameters)

    def bytes(self, computation: str, operation: Operation) -> float:
        read = sum(
            self._taken(computation, operation, number)
            for number, name in enumerate(operation.operands)
            if self._in_hbm(computation, name)
        )
        return read + self._written(computation, operation)

    def _in_hbm(self, computation: str, name: str) -> bool:
        """Whether an array lies in HBM, or was copied from there for its reader."""
        operation = self._computations[computation].get(name)
        if operation is None or not any(space == 1 for _, space in arrays(operation.type)):
            return True
        if operation.kind in ("copy-done", "async-done"):
            return True
        followed = operation.kind == "bitcast" or "ConcatBitcast" in operation.rest
        return followed and any(self._in_hbm(computation, x) for x in operation.operands)

    def _taken(self, computation: str, operation: Operation, number: int) -> float:
        """Counts what an operation reads of an operand."""
        size = bytes_of(self._computations[computation][operation.operands[number]].type)
        if operation.kind in _SLICES and number == 0:
            return min(size, bytes_of(operation.type))
        if operation.kind == "dynamic-update-slice" and number == 0:
            return 0
        if operation.kind in _VIEWS and not operation.root:
            return size * self._share(computation, operation.name)
        if operation.kind == "fusion":
            called = operation.called()
            return size * self._share(called, self._parameters(called)[number])
        return size

    def _share(self, computation: str, name: str) -> float:
        """Returns the share of an array that its readers in a fusion read."""
        size = bytes_of(self._computations[computation][name].type)
        if not size or self._computations[computation][name].root:
            return 1
        readers = self._readers(computation)[name]
        return min(1, sum(self._taken(computation, reader, number) for reader, number in readers) / size)

    def _written(self, computation: str, operation: Operation) -> int:
        found = arrays(operation.type)
        results = [self._updated(computation, operation)] if len(found) == 1 else self._results(operation)
        if len(results) != len(found):
            results = [size for size, _ in found]
        aliased = re.search(r"output_to_operand_aliasing=\{((?:\{\d*\}: \(\d+, \{\}[^)]*\)(?:, )?)*)\}", operation.rest)
        if operation.kind == "custom-call" and aliased:  # a kernel's updates in place are small beside what it reads
            for number in re.findall(r"\{(\d*)\}: ", aliased[1]):
                results[int(number or 0)] = 0
        return sum(size for size, (_, space) in zip(results, found, strict=True) if space != 1)

    def _results(self, operation: Operation) -> list[int]:
        """Lists what a fusion of several results writes for each."""
        if operation.kind != "fusion":
            return []
        called = operation.called()
        root = root_of(self._computations[called])
        return [self._updated(called, self._computations[called][name]) for name in root.operands]

    def _updated(self, computation: str, operation: Operation) -> int:
        """Counts what an operation of one result writes: of an update in place, the update."""
        if operation.kind == "fusion":
            called = operation.called()
            return self._updated(called, root_of(self._computations[called]))
        if operation.kind == "dynamic-update-slice":
            return bytes_of(self._computations[computation][operation.operands[1]].type)
        if operation.kind == "bitcast":
            return self._updated(computation, self._computations[computation][operation.operands[0]])
        return bytes_of(operation.type)

    def _find_readers(self, computation: str) -> dict[str, list[tuple[Operation, int]]]:
        found = collections.defaultdict(list)
        for operation in self._computations[computation].values():
            for number, name in enumerate(operation.operands):
                found[name].append((operation, number))
        return found

    def _find_parameters(self, computation: str) -> dict[int, str]:
        operations = self._computations[computation].values()
        return {int(x.rest.partition(")")[0]): x.name for x in operations if x.kind == "parameter"}


def _operations(program: Program, computation: str, operation: Operation) -> int:
    """Counts the operations of a product."""
    if operation.kind not in ("dot", "convolution"):
        return 0
    types = [program.computations[computation][name].type for name in operation.operands[:2]]
    precision = re.search(r"operand_precision=\{(\w+)", operation.rest)
    passes = _PASSES.get(precision[1], 1) if precision and all(x.startswith("f32") for x in types) else 1
    left, right = map(shape_of, types)
    if operation.kind == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", operation.rest)
        inner = math.prod(left[axis] for axis in shape_of(contracted[1] if contracted else ""))
        return 2 * passes * inner * math.prod(shape_of(operation.type))
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", operation.rest)
    if labels is None:
        raise ValueError(f"{operation.name}: got no dim_labels, expected some: {operation.rest[:200]}")
    sizes = [dict(zip(text, shape, strict=True)) for text, shape in zip(labels.groups(), (left, right), strict=False)]
    result = dict(zip(labels[3], shape_of(operation.type), strict=True))
    window = re.search(r"window=\{([^}]*)\}", operation.rest)
    options = dict(part.split("=") for part in window[1].split()) if window else {}
    pairs = 1  # of an output and a kernel's place, whose input exists
    for number, axis in enumerate(sorted(set(labels[1]) - {"b", "f"})):
        stride, spread, dilated, low = (
            int(options[name].split("x")[number].split("_")[0]) if name in options else default
            for name, default in (("stride", 1), ("rhs_dilate", 1), ("lhs_dilate", 1), ("pad", 0))
        )
        reached = np.arange(result[axis])[:, None] * stride + np.arange(sizes[1][axis]) * spread - low
        inside = (reached >= 0) & (reached <= (sizes[0][axis] - 1) * dilated) & (reached % dilated == 0)
        pairs *= int(inside.sum())
    return 2 * passes * pairs * result["b"] * sizes[1]["i"] * sizes[1]["o"]
