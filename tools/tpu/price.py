"""Prices a compiled program on TPU chips, in seconds, from its optimised HLO.

Everything is a floor of its own, one after the other; nothing here was measured on a TPU:
- An operation takes the longest of: its products' operations (a multiply-add is two; float32 at the highest precision
  is six passes) over the chip's peak; bytes that it reads and writes in HBM over the bandwidth; and 2,000 cycles, the
  least that XLA's own estimates give a fusion. Scalars take no time.
- Of an operand that is sliced, the slice counts; of an array that is updated in place, the update. What was copied to
  VMEM is read by the operation that uses it. A Pallas kernel's own products are not in the HLO, and not counted.
- Copies between memories and other asynchronous work of one chip run beside the rest.
- A collective among n devices is a ring over their links: what a device sends over the link's bandwidth, plus a
  microsecond a hop for the way across the group. An all-gather sends (n - 1) / n of its result, a reduce-scatter of
  its operand, an all-reduce twice that; an all-to-all n / 4 of its operand; a permutation its operand in one direction.
  Groups whose neighbours are several links apart share the links' bandwidth. Slices have no links between their ends.
  What the compiler scheduled between the start and the end of an asynchronous one runs meanwhile.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from tpu.hlo import COLLECTIVE, Collective, Operation, Program, arrays, bytes_of, collectives, root_of, shape_of
from tpu.topology import HOP, Chip

_LEAST_CYCLES = 2000
_LAYER = "_decoder_layer"  # the traced function of a layer of the target, for every family
_PASSES = {"highest": 6, "high": 3}
# No time: names of others' results, and copies, whose readers pay for them.
_FREE = re.compile(
    r"parameter|constant|get-tuple-element|tuple|bitcast|after-all|partition-id|replica-id|opt-barrier|domain|"
    r"add-dependency|(copy|slice|async|all-reduce|all-gather|collective-permute|send|recv)-(start|done|update)"
)
_NO_KERNEL = re.compile(r'custom_call_target="(ConcatBitcast|AllocateBuffer|Sharding|AssumeGatherIndicesInBound)"')


@dataclasses.dataclass
class Price:
    """Seconds of a device: matrix products, all else on it (kernels included), and collectives; how many of these are
    in straight code, and how many in loops."""

    products: float = 0.0
    passes: float = 0.0
    collectives: float = 0.0
    straight: float = 0.0
    looped: float = 0.0

    @property
    def total(self) -> float:
        return self.products + self.passes + self.collectives


def price(program: Program, mesh: Any, chip: Chip, *, layers: float = 1.0, **how: Any) -> Price:
    """Prices a program that was compiled for a mesh, or one pass through its loop (`how`: see `hlo.Program.executed`).

    Each of its layers stands for as many of the target's as `layers` says.
    """
    paid, alone = Price(), dict[Operation, float]()
    for operation, times, _, aside in program.executed(**how):
        if aside or _FREE.fullmatch(operation.kind) or _NO_KERNEL.search(operation.rest):
            continue
        parts = [*operation.inner()]
        scalar = operation.kind not in ("custom-call", "fusion") and math.prod(shape_of(operation.type)) <= 1
        if scalar or any(COLLECTIVE.fullmatch(part.kind) for part in parts):
            continue
        operations = sum(map(_operations, parts))
        read = sum(_taken(operation, n) for n, operand in enumerate(operation.operands) if _in_hbm(operand))
        least = _LEAST_CYCLES / (chip.gigahertz * 1e9)
        alone[operation] = seconds = max(least, chip.seconds(read + _written(operation), operations))
        seconds *= times * (layers if _LAYER in operation.where else 1.0)
        if operations or "dot_general" in operation.where:  # of one row: a sum of products for XLA
            paid.products += seconds
        else:
            paid.passes += seconds
    places = [device.coords for device in mesh.devices.flat]
    for x in collectives(program, dict(mesh.shape), **how):
        count, hidden = x.times * (layers if _LAYER in x.where else 1.0), sum(alone.get(y, 0.0) for y in x.beside)
        paid.collectives += count * max(0.0, travel(x, places, chip) - hidden)
        paid.looped += count * x.in_loop
        paid.straight += count * (not x.in_loop)
    return paid


def travel(collective: Collective, places: Sequence[Sequence[int]], chip: Chip) -> float:
    """Returns the seconds that a collective takes once. Args: places: coordinates of each partition's chip."""

    def distance(place: Sequence[int], other: Sequence[int]) -> int:  # in links
        return sum(abs(a - b) for a, b in zip(place, other, strict=True))

    group = [places[partition] for partition in collective.group]
    count, link, size = len(group), chip.link * 1e9, collective.bytes
    across = max(1, max(distance(a, b) for a, b in itertools.combinations(group, 2)))
    if collective.kind == "collective-permute":
        return across * (HOP + size / (link / 2))
    around = sum(distance(a, b) for a, b in zip(group, group[1:] + group[:1], strict=True))
    twice = 2 if collective.kind == "all-reduce" else 1
    sent = count / 4 if collective.kind == "all-to-all" else twice * (count - 1) / count
    return across * HOP * twice + sent * size * max(1.0, around / count) / link


# ------------------------------------------------------------------------------------- bytes that are read and written
def _in_hbm(operation: Operation) -> bool:
    """Whether an array lies in HBM, or was copied from there for its reader."""
    if operation.kind in ("copy-done", "async-done") or not any(space == 1 for _, space in arrays(operation.type)):
        return True
    followed = operation.kind == "bitcast" or "ConcatBitcast" in operation.rest
    return followed and any(map(_in_hbm, operation.operands))


def _taken(operation: Operation, number: int) -> float:
    """Counts what an operation reads of an operand."""
    kind, size = operation.kind, bytes_of(operation.operands[number].type)
    if kind in ("dynamic-slice", "slice", "gather") and number == 0:
        return min(size, bytes_of(operation.type))
    if kind == "dynamic-update-slice" and number == 0:
        return 0
    if kind in ("bitcast", "reshape", "copy", "convert", "transpose") and not operation.root:
        return size * _share(operation)
    if kind == "fusion":
        inside = (x for x in operation.called() if x.kind == "parameter" and x.rest.startswith(f"{number})"))
        return size * _share(next(inside))
    return size


def _share(operation: Operation) -> float:
    """Returns the share of an array that its readers read."""
    size = bytes_of(operation.type)
    if not size or operation.root:
        return 1
    return min(1, sum(_taken(reader, number) for reader, number in operation.readers) / size)


def _written(operation: Operation) -> int:
    found = arrays(operation.type)
    results = [size for size, _ in found]
    if len(found) == 1:
        results = [_updated(operation)]
    elif operation.kind == "fusion" and len(root := root_of(operation.called()).operands) == len(found):
        results = [*map(_updated, root)]
    aliased = re.search(r"output_to_operand_aliasing=\{((?:\{\d*\}: \(\d+, \{\}[^)]*\)(?:, )?)*)\}", operation.rest)
    if operation.kind == "custom-call" and aliased:  # a kernel's updates in place are small beside what it reads
        for number in re.findall(r"\{(\d*)\}: ", aliased[1]):
            results[int(number or 0)] = 0
    return sum(size for size, (_, space) in zip(results, found, strict=True) if space != 1)


def _updated(operation: Operation) -> int:
    """Counts what an operation of one result writes: of an update in place, the update."""
    if operation.kind == "fusion":
        return _updated(root_of(operation.called()))
    if operation.kind == "bitcast":
        return _updated(operation.operands[0])
    return bytes_of((operation.operands[1] if operation.kind == "dynamic-update-slice" else operation).type)


def _operations(operation: Operation) -> int:
    """Counts the operations of a product."""
    if operation.kind not in ("dot", "convolution"):
        return 0
    types = [operand.type for operand in operation.operands[:2]]
    precision = re.search(r"operand_precision=\{(\w+)", operation.rest)
    passes = _PASSES.get(precision[1], 1) if precision and all(x.startswith("f32") for x in types) else 1
    left, right, made = map(shape_of, (*types, operation.type))
    if operation.kind == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", operation.rest)
        inner = math.prod(left[axis] for axis in shape_of(contracted[1] if contracted else ""))
        return 2 * passes * inner * math.prod(made)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", operation.rest)
    if labels is None:
        raise ValueError(f"{operation.name}: got no dim_labels, expected some: {operation.rest[:200]}")
    named = zip(labels.groups(), (left, right, made), strict=True)
    data, kernel, result = (dict(zip(*pair, strict=True)) for pair in named)
    window = re.search(r"window=\{([^}]*)\}", operation.rest)
    options = dict(part.split("=") for part in window[1].split()) if window else {}
    pairs = 1  # of an output and a kernel's place, whose input exists
    for number, axis in enumerate(sorted(data.keys() - {"b", "f"})):
        stride, spread, dilated, low = (
            int(options[name].split("x")[number].split("_")[0]) if name in options else default
            for name, default in (("stride", 1), ("rhs_dilate", 1), ("lhs_dilate", 1), ("pad", 0))
        )
        reached = np.arange(result[axis])[:, None] * stride + np.arange(kernel[axis]) * spread - low
        inside = (reached >= 0) & (reached <= (data[axis] - 1) * dilated) & (reached % dilated == 0)
        pairs *= int(inside.sum())
    return 2 * passes * pairs * result["b"] * kernel["i"] * kernel["o"]
