"""Reads a compiled program's HLO text: the operations that run, how often, and what travels between devices.

A loop's operations run as often as its counter says, which its condition compares with a constant; once where the
number is not in the program. Of a conditional one branch runs. An asynchronous operation counts where it starts.
Partitions are numbered in the order of the mesh's devices: replica groups name axes whatever the devices' places are.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_OPERATION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.+?) ([a-z][a-z0-9\-]*)\((.*)", re.MULTILINE)
_ARRAY = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\](?:\{[^}]*?(?:S\((\d+)\))?\})?")
COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|(?:ragged-)?all-to-all|collective-(?:permute|broadcast))(?:-start)?"
)


@dataclasses.dataclass(eq=False, repr=False)
class Operation:
    """One line of a computation: its result's type as HLO writes it, all behind its kind as `rest`; its operands in the
    same computation, and its readers, each with the number of the operand that it is there."""

    program: Program
    computation: str
    root: bool
    name: str
    type: str
    kind: str
    rest: str
    operands: list[Operation] = dataclasses.field(default_factory=list)
    readers: list[tuple[Operation, int]] = dataclasses.field(default_factory=list)

    def called(self, attribute: str = "calls|to_apply") -> list[Operation]:
        """Returns the computation that the attribute names. Raises ValueError: none does."""
        if (found := re.search(rf"\b(?:{attribute})=%?([\w.\-]+)", self.rest)) is None:
            raise ValueError(f"{self.name}: got no attribute {attribute}, expected one: {self.rest[:200]}")
        return self.program.computations[found[1]]

    def inner(self) -> Iterator[Operation]:
        """Yields the operation and all of its fusion."""
        yield self
        for part in self.called() if self.kind == "fusion" else ():
            yield from part.inner()

    @property
    def where(self) -> str:
        """The traced operation that it comes from; empty where the compiler made it."""
        return self.rest.partition('op_name="')[2].partition('"')[0]

    @property
    def constant(self) -> int | None:
        """The integer that it stands for, through copies."""
        if self.kind in ("copy", "bitcast", "convert"):
            return self.operands[0].constant
        found = re.match(r"(-?\d+)\)", self.rest)
        return int(found[1]) if found and self.kind == "constant" else None

    @property
    def trips(self) -> int:
        """How often a loop runs; 1 where the program does not say it."""
        body, compared = self.called("body"), root_of(self.called("condition"))
        counter, *ends = compared.operands
        index, (last, *_) = re.search(r"index=(\d+)", counter.rest), [*[end.constant for end in ends], None]
        if compared.kind == "fusion":  # of the comparison alone
            compared = root_of(compared.called())
        if compared.kind != "compare" or "direction=LT" not in compared.rest or last is None or index is None:
            return 1
        first, place = self.operands[0], int(index[1])
        start = first.operands[place].constant if first.kind == "tuple" else None
        steps = [x.constant for x in root_of(body).operands[place].operands]
        return -(-(last - (start or 0)) // next((x for x in steps if x is not None), 1)) or 1


class Executed(NamedTuple):
    """An operation that runs `times`; `aside`: beside others, as a copy or work of another core."""

    operation: Operation
    times: int
    in_loop: bool
    aside: bool


@dataclasses.dataclass(frozen=True)
class Collective:
    """Something that travels between devices.

    Attributes:
        bytes: of the whole array on a device, once: what an all-gather makes, what the others take.
        axes: the mesh's axes along which it travels. group: the partitions of one group; a permutation's first pair.
        beside: the operations that run while it travels.
    """

    kind: str
    bytes: int
    axes: tuple[str, ...]
    group: tuple[int, ...]
    times: int = 1
    in_loop: bool = False
    where: str = ""
    beside: tuple[Operation, ...] = dataclasses.field(default=(), repr=False)


class Program:
    """The computations of an optimised program, by name. Raises ValueError: the text has no entry."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Operation]] = {}
        entries = []
        for entry, name, body in _COMPUTATION.findall(text):
            lines = [Operation(self, name, bool(root), *rest) for root, *rest in _OPERATION.findall(body)]
            self.computations[name], named = lines, {line.name: line for line in lines}
            for line in lines:
                operands = line.rest.split("), ", 1)[0] if line.kind not in ("parameter", "constant") else ""
                line.operands = [named[x] for x in re.findall(r"%([\w.\-]+)", operands) if x in named]
                for number, operand in enumerate(line.operands):
                    operand.readers.append((line, number))
            entries += [lines] if entry else []
        if len(entries) != 1:
            raise ValueError(f"HLO: got {len(entries)} entries, expected the text of one program: {text[:100]!r}")
        (self.entry,) = entries

    def executed(self, *, one_pass: bool = False, branch: Callable[..., Any] = max) -> list[Executed]:
        """Lists the operations that run, fusions whole; `one_pass`: through the entry's longest loop alone, as a round.

        A conditional runs its branch of most operations, or with `branch=min` of fewest.
        """

        def run(lines: list[Operation], times: int = 1, in_loop: bool = False, aside: bool = False) -> list[Executed]:
            found = []
            for operation in lines:
                if operation.kind == "while":
                    found += run(operation.called("body"), times * operation.trips, True, aside)
                elif operation.kind == "conditional":
                    listed = re.search(r"branch_computations=\{([^}]*)\}", operation.rest)
                    sides = (operation.called(f"{side}_computation") for side in ("true", "false"))
                    parts = map(self.computations.__getitem__, re.findall(r"[\w.\-]+", listed[1])) if listed else sides
                    found += branch((run(part, times, in_loop, aside) for part in parts), key=len)
                elif operation.kind in ("call", "async-start"):
                    found += run(operation.called(), times, in_loop, aside or operation.kind == "async-start")
                else:
                    found.append(Executed(operation, times, in_loop, aside))
            return found

        if not one_pass:
            return run(self.entry)
        return max((run(loop.called("body")) for loop in self.entry if loop.kind == "while"), key=len)


def collectives(program: Program | str, mesh_shape: Mapping[str, int], **how: Any) -> list[Collective]:
    """Lists what travels between devices, in the order of the program or its text (`how`: see `Program.executed`).

    `mesh_shape` is `dict(mesh.shape)`. Raises ValueError: replica groups of another mesh, or in an unknown form.
    """
    program = Program(program) if isinstance(program, str) else program
    found = []
    for executed in program.executed(**how):
        for operation in executed.operation.inner():
            if (kind := COLLECTIVE.fullmatch(operation.kind)) is None:
                continue
            groups = _groups(operation, math.prod(mesh_shape.values()))
            if not (axes := _axes(groups, mesh_shape)):
                continue  # each device alone
            size = sum(bytes_of(x.type) for x in operation.operands)
            group = tuple(map(int, max(groups, key=lambda group: len(set(group)))))
            sort = "reduce-scatter" if operation.computation.startswith("all-reduce-scatter") else kind[1]
            size *= len(group) if sort == "all-gather" else 1
            # What the schedule has between an asynchronous one's start and its end.
            lines = program.computations[operation.computation]
            behind = lines[lines.index(operation) + 1 :] if operation.kind.endswith("-start") else []
            ends = [number for number, x in enumerate(behind) if operation in x.operands]
            beside = tuple(behind[: min(ends, default=None)])
            found.append(Collective(sort, size, axes, group, *executed[1:3], operation.where, beside))
    return found


def arrays(type_: str) -> list[tuple[int, int]]:
    """Lists a type's arrays: bytes without padding, and memory space (0: HBM, 1: VMEM)."""
    found = []
    for width, shape, space in _ARRAY.findall(type_):  # a pred has no width, and 8 bits
        found.append((-(-int(width or 8) * math.prod(shape_of(shape)) // 8), int(space or 0)))
    return found


def bytes_of(type_: str) -> int:
    return sum(size for size, _ in arrays(type_))


def shape_of(text: str) -> tuple[int, ...]:
    """Reads the first dimensions in a text: "f32[8,128]{1,0}", or "8,128"."""
    text = text.partition("[")[2].partition("]")[0] if "[" in text else text
    return tuple(map(int, filter(None, text.split(","))))


def root_of(computation: list[Operation]) -> Operation:
    return next(operation for operation in computation if operation.root)


def _groups(operation: Operation, count: int) -> np.ndarray | list[tuple[int, ...]]:
    """Returns the groups of partitions among which something travels; a permutation's pairs."""
    if found := re.search(r"(?:source_target_pairs|replica_groups)=(\{(?:\{[\d,]*\},?)*\})", operation.rest):
        groups = [tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", found[1])]
        return groups or [tuple(range(count))]
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", operation.rest):
        return _ids(found[3]).reshape(int(found[1]), int(found[2]))
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}", operation.rest):
        # Of an axis, or of the part 'axis':(low)size: all places whose coordinate of stride `low` moves.
        used = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", found[3])
        parts: list[tuple[int, bool]] = []  # sizes of axes and their parts, and whether these are grouped
        for axis, size in re.findall(r"'([^']+)'=(\d+)", found[1]):
            spans = [(int(low or 1), int(low or 1) * int(n or size)) for x, low, n in used if x == axis]
            cuts = sorted({1, int(size)} | {cut for span in spans for cut in span})
            for low, high in itertools.pairwise(cuts):
                parts.append((high // low, any(begin <= low < end for begin, end in spans)))
        order = sorted(range(len(parts)), key=lambda place: parts[place][1])
        grid = _ids(found[2] or f"[{count}]").reshape([size for size, _ in parts]).transpose(order)
        return grid.reshape(-1, math.prod(size for size, grouped in parts if grouped))
    raise ValueError(f"{operation.name}: got no known form of replica groups: {operation.rest[:300]}")


def _ids(text: str) -> np.ndarray:
    """Reads "[4,2]T(1,0)", numbers in a shape, transposed; or a list of numbers."""
    shape, order = (list(map(int, re.findall(r"\d+", part))) for part in text.partition("T")[::2])
    if not text.startswith("["):
        return np.array(shape)
    return np.arange(math.prod(shape)).reshape(shape).transpose(order or None)


def _axes(groups: Any, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes along which any two partitions of a group differ."""
    sizes, highest = tuple(mesh_shape.values()), max(map(max, groups))
    if highest >= math.prod(sizes):
        raise ValueError(f"mesh_shape: got {dict(mesh_shape)}, expected one of more than {highest} devices")
    places = [np.array(np.unravel_index(np.array(group), sizes)) for group in groups]
    moved = np.any([(place != place[:, :1]).any(axis=1) for place in places], axis=0)
    return tuple(axis for axis, moves in zip(mesh_shape, moved, strict=True) if moves)
