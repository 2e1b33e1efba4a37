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
_OPERATION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.+?) ([a-z][a-z0-9\-]*)\((.*)")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\](?:\{[^}]*?(?:S\((\d+)\))?\})?")
_COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|(?:ragged-)?all-to-all|collective-(?:permute|broadcast))(?:-start)?"
)


class Operation(NamedTuple):
    """One line of a computation.

    Attributes:
        type: its result, as HLO writes it. operands: names, in the same computation.
        rest: all behind the operation's name: operands and attributes.
    """

    name: str
    kind: str
    type: str
    operands: tuple[str, ...]
    rest: str
    root: bool

    def called(self, attribute: str = "calls|to_apply") -> str:
        """Returns the computation that the attribute names. Raises ValueError: none does."""
        if (found := re.search(rf"\b(?:{attribute})=%?([\w.\-]+)", self.rest)) is None:
            raise ValueError(f"{self.name}: got no attribute {attribute}, expected one: {self.rest[:200]}")
        return found[1]

    @property
    def where(self) -> str:
        """The traced operation that it comes from; empty where the compiler made it."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""


class Executed(NamedTuple):
    """An operation that runs `times`; `aside`: beside others, as a copy or work of another core."""

    operation: Operation
    computation: str
    times: int
    in_loop: bool
    aside: bool


@dataclasses.dataclass(frozen=True)
class Collective:
    """Something that travels between devices.

    Attributes:
        kind: all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute.
        bytes: of the whole array on a device, once: what an all-gather makes, what the others take.
        axes: the mesh's axes along which it travels. group: the partitions of one group; a permutation's first pair.
        beside: the operations that run while it travels, by name, and the computation that holds them.
    """

    kind: str
    bytes: int
    axes: tuple[str, ...]
    group: tuple[int, ...]
    times: int = 1
    in_loop: bool = False
    where: str = ""
    beside: tuple[str, tuple[str, ...]] = ("", ())


class Program:
    """The computations of an optimised program, by name. Raises ValueError: the text has no entry."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, dict[str, Operation]] = {}
        entries = []
        for entry, name, body in _COMPUTATION.findall(text):
            lines = [_operation(*found.groups()) for found in map(_OPERATION.match, body.split("\n")) if found]
            self.computations[name] = {line.name: line for line in lines}
            entries += [name] if entry else []
        if len(entries) != 1:
            raise ValueError(f"HLO: got {len(entries)} entries, expected the text of one program: {text[:100]!r}")
        (self.entry,) = entries

    def executed(self, *, one_pass: bool = False, branch: Callable[..., Any] = max) -> list[Executed]:
        """Lists the operations that run, fusions whole.

        Args:
            one_pass: those of one pass through the entry's longest loop alone, such as a round of decoding.
            branch: max or min: whether a conditional runs its branch of most or of fewest operations.
        """

        def run(name: str, times: int = 1, in_loop: bool = False, aside: bool = False) -> list[Executed]:
            found = []
            for operation in self.computations[name].values():
                if operation.kind == "while":
                    found += run(operation.called("body"), times * (self._trips(name, operation) or 1), True, aside)
                elif operation.kind == "conditional":
                    found += branch((run(part, times, in_loop, aside) for part in _branches(operation)), key=len)
                elif operation.kind in ("call", "async-start"):
                    found += run(operation.called(), times, in_loop, aside or operation.kind == "async-start")
                else:
                    found.append(Executed(operation, name, times, in_loop, aside))
            return found

        if not one_pass:
            return run(self.entry)
        loops = [x for x in self.computations[self.entry].values() if x.kind == "while"]
        return max((run(loop.called("body")) for loop in loops), key=len)

    def inner(self, computation: str, operation: Operation) -> Iterator[tuple[str, Operation]]:
        """Yields an operation and all of its fusion, with their computations."""
        yield computation, operation
        if operation.kind == "fusion":
            called = operation.called()
            for part in self.computations[called].values():
                yield from self.inner(called, part)

    def until_done(self, computation: str, start: Operation) -> tuple[str, ...]:
        """Names what the schedule has between an asynchronous operation's start and its end."""
        behind = itertools.dropwhile(lambda x: x is not start, self.computations[computation].values())
        beside = itertools.takewhile(lambda x: start.name not in x.operands, itertools.islice(behind, 1, None))
        return tuple(x.name for x in beside) if start.kind.endswith("-start") else ()

    def _trips(self, computation: str, loop: Operation) -> int | None:
        """Returns how often a loop of the computation runs; None where the program does not say it."""
        condition, body = (self.computations[loop.called(name)] for name in ("condition", "body"))
        compared = root_of(condition)
        counter, end = ([*compared.operands, "", ""])[:2]
        last, index = _constant(condition, end), re.search(r"index=(\d+)", getattr(condition.get(counter), "rest", ""))
        if compared.kind == "fusion":  # of the comparison alone
            compared = root_of(self.computations[compared.called()])
        if compared.kind != "compare" or "direction=LT" not in compared.rest or last is None or index is None:
            return None
        before, place = self.computations[computation], int(index[1])
        first, stepped = before.get(loop.operands[0]), body.get(root_of(body).operands[place])
        start = _constant(before, first.operands[place]) if first and first.kind == "tuple" else None
        steps = [_constant(body, name) for name in stepped.operands] if stepped else []
        return -(-(last - (start or 0)) // next((x for x in steps if x is not None), 1))


def collectives(program: Program | str, mesh_shape: Mapping[str, int], **how: Any) -> list[Collective]:
    """Lists what travels between devices, in the order of the program.

    Args:
        program: or its text.
        mesh_shape: axis -> size, in the mesh's order: `dict(mesh.shape)`.
        how: see `Program.executed`.

    Raises:
        ValueError: replica groups of another mesh, or in an unknown form.
    """
    program = Program(program) if isinstance(program, str) else program
    found = []
    for executed in program.executed(**how):
        for name, operation in program.inner(executed.computation, executed.operation):
            if (kind := _COLLECTIVE.fullmatch(operation.kind)) is None:
                continue
            groups = _groups(operation, math.prod(mesh_shape.values()))
            if not (axes := _axes(groups, mesh_shape)):
                continue  # each device alone
            size = sum(bytes_of(program.computations[name][x].type) for x in operation.operands)
            group = tuple(map(int, max(groups, key=lambda group: len(set(group)))))
            sort = "reduce-scatter" if name.startswith("all-reduce-scatter") else kind[1]
            size *= len(group) if sort == "all-gather" else 1
            beside = name, program.until_done(name, operation)
            found.append(Collective(sort, size, axes, group, executed.times, executed.in_loop, operation.where, beside))
    return found


def is_collective(program: Program, executed: Executed) -> bool:
    inner = program.inner(executed.computation, executed.operation)
    return any(_COLLECTIVE.fullmatch(part.kind) for _, part in inner)


def arrays(type_: str) -> list[tuple[int, int]]:
    """Lists a type's arrays: bytes without padding, and memory space (0: HBM, 1: VMEM)."""
    found = []
    for name, width, shape, space in _ARRAY.findall(type_):
        bits = (8 if name == "pred" else int(width)) * math.prod(shape_of(shape))
        found.append((-(-bits // 8), int(space or 0)))
    return found


def bytes_of(type_: str) -> int:
    return sum(size for size, _ in arrays(type_))


def shape_of(text: str) -> tuple[int, ...]:
    """Reads the first dimensions in a text: "f32[8,128]{1,0}", or "8,128"."""
    text = text.partition("[")[2].partition("]")[0] if "[" in text else text
    return tuple(map(int, filter(None, text.split(","))))


def root_of(computation: Mapping[str, Operation]) -> Operation:
    return next(operation for operation in computation.values() if operation.root)


def _operation(root: str | None, name: str, type_: str, kind: str, rest: str) -> Operation:
    operands = () if kind in ("parameter", "constant") else re.findall(r"%([\w.\-]+)", rest.split("), ", 1)[0])
    return Operation(name, kind, type_, tuple(operands), rest, bool(root))


def _constant(computation: Mapping[str, Operation], name: str) -> int | None:
    """Returns the integer that a name stands for, through copies."""
    operation = computation.get(name)
    while operation is not None and operation.kind in ("copy", "bitcast", "convert"):
        operation = computation.get(operation.operands[0])
    found = re.match(r"(-?\d+)\)", operation.rest) if operation is not None and operation.kind == "constant" else None
    return int(found[1]) if found else None


def _branches(conditional: Operation) -> list[str]:
    if found := re.search(r"branch_computations=\{([^}]*)\}", conditional.rest):
        return re.findall(r"[\w.\-]+", found[1])
    return [conditional.called(f"{side}_computation") for side in ("true", "false")]


def _groups(operation: Operation, count: int) -> np.ndarray | list[tuple[int, ...]]:
    """Returns the groups of partitions among which something travels; a permutation's pairs."""
    if found := re.search(r"(?:source_target_pairs|replica_groups)=(\{(?:\{[\d,]*\},?)*\})", operation.rest):
        groups = [tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", found[1])]
        return groups or [tuple(range(count))]
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", operation.rest):
        return _iota(found[3]).reshape(int(found[1]), int(found[2]))
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}", operation.rest):
        shape = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
        ids = np.arange(count) if not found[2] else _iota(found[2]) if found[2][0] == "[" else _numbers(found[2])
        # Of an axis, or of the part 'axis':(low)size: all places whose coordinate of stride `low` moves.
        used = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", found[3])
        parts: list[tuple[int, bool]] = []  # sizes of axes and their parts, and whether these are grouped
        for axis, size in shape.items():
            spans = [(int(low or 1), int(low or 1) * int(n or size)) for x, low, n in used if x == axis]
            cuts = sorted({1, size} | {cut for span in spans for cut in span})
            for low, high in itertools.pairwise(cuts):
                parts.append((high // low, any(begin <= low < end for begin, end in spans)))
        order = sorted(range(len(parts)), key=lambda place: parts[place][1])
        grid = ids.reshape([size for size, _ in parts]).transpose(order)
        return grid.reshape(-1, math.prod(size for size, grouped in parts if grouped))
    raise ValueError(f"{operation.name}: got no known form of replica groups: {operation.rest[:300]}")


def _numbers(text: str) -> np.ndarray:
    return np.array(re.findall(r"\d+", text), int)


def _iota(text: str) -> np.ndarray:
    """Reads "[4,2]T(1,0)": numbers in a shape, transposed."""
    shape, _, order = text.partition("T")
    grid = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return grid.transpose(_numbers(order)) if order else grid


def _axes(groups: Any, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes along which any two partitions of a group differ."""
    sizes, highest = tuple(mesh_shape.values()), max(map(max, groups))
    if highest >= math.prod(sizes):
        raise ValueError(f"mesh_shape: got {dict(mesh_shape)}, expected one of more than {highest} devices")
    places = [np.array(np.unravel_index(np.array(group), sizes)) for group in groups]
    moved = np.any([(place != place[:, :1]).any(axis=1) for place in places], axis=0)
    return tuple(axis for axis, moves in zip(mesh_shape, moved, strict=True) if moves)
