"""Reads a compiled program's HLO text: the operations that run, how often, and what travels between devices.

A loop's operations run as often as the loop does: by `known_trip_count`, or by its counter and the constant that its
condition compares it with; once where the number is not in the program. Of a conditional one branch runs. An
asynchronous operation counts where it starts. Partitions are numbered in the order of the mesh's devices, so replica
groups name axes whatever the devices' places are.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import multiprocessing
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_OPERATION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.+?) ([a-z][a-z0-9\-]*)\((.*)")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\](?:\{[^}]*?(?:S\((\d+)\))?\})?")
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|(?:ragged-)?all-to-all|collective-(?:permute|broadcast))(?:-start)?"
)


@dataclasses.dataclass(frozen=True)
class Operation:
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


@dataclasses.dataclass(frozen=True)
class Executed:
    """An operation of a program's straight code or of a loop.

    Attributes:
        computation: the one that holds it. times: how often it runs. in_loop: whether any loop is around it.
        aside: whether it runs beside others: a copy, or work of another core.
    """

    operation: Operation
    computation: str
    times: int
    in_loop: bool
    aside: bool = False


@dataclasses.dataclass(frozen=True)
class Collective:
    """Something that travels between devices.

    Attributes:
        kind: all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute.
        bytes: of the whole array on a device, once: what an all-gather makes, what the others take.
        axes: the mesh's axes along which it travels. group: the partitions of one group; a permutation's first pair.
        beside: names of the operations that run while it travels, and the computation that holds them.
    """

    kind: str
    bytes: int
    axes: tuple[str, ...]
    group: tuple[int, ...]
    times: int
    in_loop: bool
    where: str
    beside: tuple[str, tuple[str, ...]] = dataclasses.field(default=("", ()), compare=False)


class Program:
    """The computations of an optimised program, by name.

    Raises:
        ValueError: the text has no entry.
    """

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
                    found += run(operation.called("body"), times * (self.trips(name, operation) or 1), True, aside)
                elif operation.kind == "conditional":
                    parts = [run(part, times, in_loop, aside) for part in _branches(operation)]
                    found += branch(parts, key=len)
                elif operation.kind in ("call", "async-start"):
                    found += run(operation.called(), times, in_loop, aside or operation.kind == "async-start")
                else:
                    found.append(Executed(operation, name, times, in_loop, aside))
            return found

        if one_pass:
            loops = [x for x in self.computations[self.entry].values() if x.kind == "while"]
            return max((run(loop.called("body")) for loop in loops), key=len)
        return run(self.entry)

    def inner(self, computation: str, operation: Operation) -> Iterator[tuple[str, Operation]]:
        """Yields an operation and all of its fusion, with their computations."""
        pairs = [(computation, operation)]
        while pairs:
            name, operation = pairs.pop()
            yield name, operation
            if operation.kind == "fusion":
                called = operation.called()
                pairs += [(called, part) for part in self.computations[called].values()]

    def until_done(self, computation: str, start: Operation) -> tuple[str, ...]:
        """Names what the schedule has between an asynchronous operation's start and its end."""
        if not start.kind.endswith("-start"):
            return ()
        behind = list(self.computations[computation].values())
        behind = behind[behind.index(start) + 1 :]
        return tuple(x.name for x in itertools.takewhile(lambda x: start.name not in x.operands, behind))

    def trips(self, computation: str, loop: Operation) -> int | None:
        """Returns how often a loop of the computation runs; None where the program does not say it."""
        if found := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest):
            return int(found[1])
        condition, body = (self.computations[loop.called(name)] for name in ("condition", "body"))
        compared = root_of(condition)
        ends = [self._constant(condition, name) for name in compared.operands]
        counters = [condition.get(name) for name in compared.operands]
        if compared.kind == "fusion":  # of the comparison alone
            compared = root_of(self.computations[compared.called()])
        if compared.kind != "compare" or "direction=LT" not in compared.rest or len(ends) != 2 or ends[1] is None:
            return None
        if counters[0] is None or not (at := re.search(r"index=(\d+)", counters[0].rest)):
            return None
        place, before = int(at[1]), self.computations[computation]
        first, stepped = before.get(loop.operands[0]), body.get(root_of(body).operands[place])
        start = self._constant(before, first.operands[place]) if first is not None and first.kind == "tuple" else None
        steps = [self._constant(body, name) for name in stepped.operands] if stepped is not None else []
        step = next((x for x in steps if x is not None), 1)
        return -(-(ends[1] - (start or 0)) // step)

    def _constant(self, computation: Mapping[str, Operation], name: str) -> int | None:
        """Returns the integer that a name stands for, through copies."""
        operation = computation.get(name)
        while operation is not None and operation.kind in ("copy", "bitcast", "convert"):
            operation = computation.get(operation.operands[0])
        if operation is None or operation.kind != "constant":
            return None
        found = re.match(r"(-?\d+)\)", operation.rest)
        return int(found[1]) if found else None


def collectives(
    program: Program | str,
    mesh_shape: Mapping[str, int],
    *,
    one_pass: bool = False,
    branch: Callable[..., Any] = max,
) -> list[Collective]:
    """Lists what travels between devices, in the order of the program.

    Args:
        program: or its text.
        mesh_shape: axis -> size, in the mesh's order: `dict(mesh.shape)`.
        one_pass: see `Program.executed`; so is `branch`.

    Raises:
        ValueError: replica groups of another mesh, or in an unknown form.
    """
    program = Program(program) if isinstance(program, str) else program
    found = []
    for executed in program.executed(one_pass=one_pass, branch=branch):
        for name, operation in program.inner(executed.computation, executed.operation):
            if (kind := COLLECTIVE.fullmatch(operation.kind)) is None:
                continue
            groups = _groups(operation, math.prod(mesh_shape.values()))
            if not (axes := _axes(groups, mesh_shape)):
                continue  # each device alone
            operands = (program.computations[name][x].type for x in operation.operands)
            size, group = sum(map(bytes_of, operands)), max(groups, key=lambda group: len(set(group)))
            sort = "reduce-scatter" if name.startswith("all-reduce-scatter") else kind[1]
            size *= len(group) if sort == "all-gather" else 1
            beside = name, program.until_done(name, operation)
            found.append(Collective(sort, size, axes, group, executed.times, executed.in_loop, operation.where, beside))
    return found


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


def optimised(lowered: Any) -> str:
    """Compiles a lowered program for a TPU, and returns its HLO text.

    `as_text` fails on operations that a newer libtpu made than JAX can read, so the compiler itself writes it.
    """
    with tempfile.TemporaryDirectory() as folder:
        lowered.compile(compiler_options=_written_to(folder))
        (file,) = pathlib.Path(folder).glob("*.after_codegen.txt")
        return file.read_text()


def optimised_alone(lower: Callable[[], Any]) -> str:
    """Returns a program's HLO text without making its machine code, which takes most of the time.

    Another process compiles it, and is ended once the text is written.

    Args:
        lower: makes the `jax.stages.Lowered`; a function of a module, or a `functools.partial` of one, with arguments
            that can be pickled.

    Raises:
        RuntimeError: it was not compiled; the reason stands on stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        process = multiprocessing.get_context("spawn").Process(target=_compile, args=(lower, folder), daemon=True)
        process.start()
        following = "_after_buffer_assignment"  # a second text, begun when the first is whole
        alive, found = True, []
        try:
            while alive and not found:
                process.join(0.2)
                alive, found = process.is_alive(), list(pathlib.Path(folder).glob(f"*{following}.txt"))
        finally:
            process.kill()
            process.join()
        if not found:
            raise RuntimeError(f"a program was not compiled: its process ended with status {process.exitcode}")
        return found[0].with_name(found[0].name.replace(following, "")).read_text()


def _compile(lower: Callable[[], Any], folder: str) -> None:
    lower().compile(compiler_options=_written_to(folder))


def _written_to(folder: str) -> dict[str, Any]:
    return {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}


def _operation(root: str | None, name: str, type_: str, kind: str, rest: str) -> Operation:
    operands = () if kind in ("parameter", "constant") else re.findall(r"%([\w.\-]+)", rest.split("), ", 1)[0])
    return Operation(name, kind, type_, tuple(operands), rest, bool(root))


def root_of(computation: Mapping[str, Operation]) -> Operation:
    return next(operation for operation in computation.values() if operation.root)


def _branches(conditional: Operation) -> list[str]:
    if found := re.search(r"branch_computations=\{([^}]*)\}", conditional.rest):
        return re.findall(r"[\w.\-]+", found[1])
    return [conditional.called(f"{side}_computation") for side in ("true", "false")]


def _groups(operation: Operation, count: int) -> list[tuple[int, ...]]:
    """Returns the groups of partitions among which something travels; a permutation's pairs."""
    listed = r"=(\{(?:\{[\d,]*\},?)*\})"
    if found := re.search("(?:source_target_pairs|replica_groups)" + listed, operation.rest):
        groups = [tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", found[1])]
        return groups or [tuple(range(count))]
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", operation.rest):
        return _rows(_iota(found[3]), int(found[2]))
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}", operation.rest):
        shape = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
        ids = np.arange(count) if not found[2] else _iota(found[2]) if found[2][0] == "[" else _numbers(found[2])
        parts: list[tuple[str, int]] = []  # axes and parts of axes, as dimensions of the mesh
        chosen: list[int] = []
        used = [(x, int(low or 1), int(n or shape[x] // int(low or 1))) for x, low, n in _AXIS.findall(found[3])]
        for axis, size in shape.items():
            cuts = sorted({1, size} | {cut for x, low, n in used if x == axis for cut in (low, low * n)})
            for low, high in itertools.pairwise(cuts):
                chosen += [len(parts)] * any(x == axis and begin <= low < begin * n for x, begin, n in used)
                parts.append((axis, high // low))
        others = [place for place in range(len(parts)) if place not in chosen]
        grid = ids.reshape([size for _, size in parts]).transpose(others + chosen)
        return _rows(grid, math.prod(parts[place][1] for place in chosen))
    raise ValueError(f"{operation.name}: got no known form of replica groups: {operation.rest[:300]}")


def _numbers(text: str) -> np.ndarray:
    return np.array(re.findall(r"\d+", text), int)


def _iota(text: str) -> np.ndarray:
    """Reads "[4,2]T(1,0)": numbers in a shape, transposed."""
    shape, _, order = text.partition("T")
    grid = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return grid.transpose(_numbers(order)) if order else grid


def _rows(grid: np.ndarray, size: int) -> list[tuple[int, ...]]:
    return [tuple(map(int, row)) for row in grid.reshape(-1, size)]


def _axes(groups: list[tuple[int, ...]], mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes along which any two partitions of a group differ."""
    sizes = tuple(mesh_shape.values())
    if max(map(max, groups)) >= math.prod(sizes):
        raise ValueError(
            f"mesh_shape: got {dict(mesh_shape)}, expected one of more than {max(map(max, groups))} devices"
        )
    places = [np.array(np.unravel_index(group, sizes)) for group in groups]
    moved = [(place != place[:, :1]).any(axis=1) for place in places]
    return tuple(axis for number, axis in enumerate(mesh_shape) if any(moves[number] for moves in moved))
