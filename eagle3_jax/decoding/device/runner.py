"""The model runner: an engine's models and state on the device, and the calls of its programs."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from eagle3_jax.decoding.device import programs
from eagle3_jax.decoding.device.calls import Call, Models
from eagle3_jax.decoding.device.memory import empty_state
from eagle3_jax.decoding.device.shapes import Sizes
from eagle3_jax.decoding.rounds.observed import Observed
from eagle3_jax.decoding.rounds.state import State
from eagle3_jax.decoding.tier import Tier
from eagle3_jax.kernels.linear.quantised import Quantization
from eagle3_jax.mesh import mesh_of, mesh_set, put, replicated, shardings
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.inference_layout import Product, for_inference, padded, weights_beside
from eagle3_jax.models.layers import SHARDING_RULES
from eagle3_jax.models.quantisation import few_bits
from eagle3_jax.models.target import TargetModel
from eagle3_jax.runs import machine
from eagle3_jax.runs.progress import told

_SILENCE = contextlib.nullcontext()
T = TypeVar("T")


@runtime_checkable
class Runner(Protocol):
    """What a scheduler runs programs on: a `ModelRunner`, or a row of a mesh that spans hosts (`hosts`)."""

    target: TargetModel
    draft: Draft | None
    sizes: Sizes
    widths: list[int]
    prefill_shapes: list[tuple[int, int]]
    dispatches: int
    compiled: int

    @property
    def lockstep(self) -> bool: ...
    @property
    def observed(self) -> Observed | None: ...
    def run(self, call: Call) -> Any: ...
    def replace_draft(self, draft: Draft, /) -> None: ...
    def replace_target(self, target: TargetModel, /) -> None: ...
    def reset(self) -> None: ...


class ModelRunner:
    """Runs the programs on the target's devices: `mesh`, None is one device.

    `target` and `draft` are packed on a single CPU device. `few_bits`: those of the target, see `quantised_as`.
    `padding`: numbers of rows for products of few rows, see `layouts.Padded`; empty until they are measured. `widths`:
    rows of the decode programs in use, the whole batch until narrower ones are compiled. `prefill_shapes`: (rows,
    tokens of each) of the prefill programs in use, all until a warm-up begins. `dispatches`, `compiled`: numbers of
    calls given to the device, and of programs compiled.
    """

    def __init__(
        self,
        target: TargetModel,
        draft: Draft | None,
        tiers: Sequence[Tier],
        sizes: Sizes,
        kv_dtype: Any,
        draft_weights: Quantization | None = None,
    ) -> None:
        self.mesh = mesh_of(target.embed[...])
        if draft is not None and self.mesh is not None:
            draft = _spread(draft, self.mesh)
        self._draft_weights: Quantization | None = draft_weights or weights_beside(target)
        self.few_bits = few_bits(target)
        self._place = target.embed[...].sharding if self.mesh is None else None
        target, draft = self._committed(target), self._committed(draft)
        target, draft = for_inference(target), None if draft is None else for_inference(draft, self._draft_weights)
        self.target, self.draft, self.sizes = target, draft, sizes
        self.widths, self.prefill_shapes = [sizes.batch], sizes.prefill_shapes
        self.padding: dict[Product, tuple[int, ...]] = {}
        self.dispatches = self.compiled = 0
        self._models = Models.of(target, draft)
        self.tiers, self.kv_dtype = tuple(tiers), kv_dtype
        make = functools.partial(empty_state, sizes=sizes, tiers=self.tiers, kv_dtype=kv_dtype)
        self._empty_state = jax.jit(make, out_shardings=self._place)
        self._state: State | None = None
        self._ready: dict[tuple[Any, ...], Callable[..., Any]] = {}  # compiled ahead, by name and form
        self._called: set[tuple[Any, ...]] = set()  # those of others
        self._compiling: dict[tuple[Any, ...], threading.Lock] = {}
        self._example: State | None = None  # a state without its memory, for `compile`

    def replace_draft(self, draft: Draft) -> None:
        """Drafts with other weights of the same shapes, stored as those before, from now on. The state stays."""
        draft = self._committed(draft) if self.mesh is None else _spread(draft, self.mesh)
        draft = for_inference(draft, self._draft_weights)
        before, self.draft = self.draft, _as_before(self.draft, draft, rounds=True)
        self._replaced(before, self.draft)

    @property
    def observed(self) -> Observed | None:
        """What verification computed of each slot, with `Sizes.observed`; None before the first call."""
        return None if self._state is None else self._state.observed

    def packed_target(self, target: TargetModel) -> TargetModel:
        """Returns a target of the runner's shapes and kinds of weights, packed and placed as the runner's own.

        A matrix is stored in bfloat16 only where the one before was, and bfloat16 holds its numbers.
        """
        return _as_before(self.target, for_inference(self._committed(target)), rounds=False)

    def replace_target(self, target: TargetModel) -> None:
        """Verifies with this target, see `packed_target`, from the next call on. The state stays."""
        before, self.target = self.target, target
        self._replaced(before, target)

    def _committed(self, model: T) -> T:
        """Commits a model to the one device, as a trainer's are: each program would be compiled for both kinds."""
        return model if self._place is None else jax.device_put(model, self._place)

    def _replaced(self, before: Any, model: Any) -> None:
        """Takes a model in another's place. Programs compiled for other dtypes or panels are forgotten."""
        forms = [(jax.tree.structure(one), [leaf.dtype for leaf in jax.tree.leaves(one)]) for one in (before, model)]
        if forms[0] != forms[1]:
            self._ready, self._called = {}, set()
        self._pad()

    def pad(self, padding: dict[Product, tuple[int, ...]]) -> None:
        """Pads products of few rows, see `padding`. Forgets the state."""
        if padding != self.padding:
            self.padding, self._ready = padding, {}
        self._pad()
        self.reset()

    def _pad(self) -> None:
        draft = None if self.draft is None else padded(self.draft, self.padding)
        self._models = Models.of(padded(self.target, self.padding), draft)

    def run(self, call: Call) -> Any:
        """Runs a program on the state. Returns its report, not yet on the host; None where it has none."""
        program = self._ready.get(call.key)
        first = program is None and call.key not in self._called
        self._called.add(call.key)
        program = program or getattr(programs, call.name)
        with self._running() as state, told(f"compiling {call.name} (first call)") if first else _SILENCE:
            result = program(*self._arguments(call, state))
            self._state, report = result if isinstance(result, tuple) else (result, None)
        return report

    def begin(self) -> None:
        """Compiles the program that makes the state, and lets `compile` know its shapes. Forgets the state."""
        self.reset()
        with mesh_set(self.mesh):
            self._example = self._empty_state(self._models)
        for leaf in jax.tree.leaves(self._example):
            leaf.delete()  # its shape, dtype and sharding stay

    def compile(self, call: Call) -> None:
        """Compiles the program of a call, unless it is; from any thread, beside calls. Needs `begin`."""
        ready = self._ready  # `replace_target` may begin another meanwhile
        with self._compiling.setdefault(call.key, threading.Lock()):
            if call.key in ready:
                return
            before = programs.compiled()
            with mesh_set(self.mesh):
                arguments = self._arguments(call, self._example)
                ready[call.key] = _compiled(getattr(programs, call.name), arguments, self._example)
            self._count_compiled(before)

    def lend(self, work: Callable[[Models, State], tuple[State, T]]) -> T:
        """Lets `work` run programs of its own on the models and the state; returns its result beside the new state."""
        with self._running() as state:
            self._state, result = work(self._models, state)
        return result

    @property
    def lockstep(self) -> bool:
        """True if other processes hold devices of the mesh: they must make the same calls."""
        return self.mesh is not None and len({device.process_index for device in self.mesh.devices.flat}) > 1

    def use(self, widths: Iterable[int], prefill_shapes: Iterable[tuple[int, int]]) -> None:
        """Sets which decode and prefill programs are in use, from any thread: see `widths` and `prefill_shapes`."""
        self.widths, self.prefill_shapes = sorted(widths), list(prefill_shapes)

    @property
    def rests(self) -> bool:
        """True if the head rests in some tiers."""
        return self.draft is not None and not all(tier.head for tier in self.tiers)

    def finish(self, call: Call) -> None:
        """Runs a program, and waits until the device has finished all calls."""
        self.run(call)
        jax.block_until_ready(self._state)

    def reset(self) -> None:
        """Forgets the state; the next call begins with an empty one."""
        self._state = None

    @contextlib.contextmanager
    def _running(self) -> Iterator[State]:
        """Yields the state, for a program that donates it, under the target's mesh, over which kernels are split."""
        state, self._state = self._state, None
        with mesh_set(self.mesh):
            if state is None:
                state = self._empty_state(self._models)
            before = programs.compiled()
            yield state
        self.dispatches += 1
        self._count_compiled(before)

    def _count_compiled(self, before: int) -> None:
        if fresh := programs.compiled() - before:
            self.compiled += fresh
            machine.release_freed()

    def _arguments(self, call: Call, state: State | None) -> tuple[Any, ...]:
        """Puts what the host sends on all devices, behind the others; every process of the mesh sends the same."""
        place = jnp.asarray if self.mesh is None else functools.partial(put, sharding=replicated(self.mesh))
        of_models = () if call.name in programs.OF_STATE else (self._models,)
        return *of_models, state, jax.tree.map(place, call.sent)


def _as_before(before: Any, model: Any, *, rounds: bool) -> Any:
    """Places a model's leaves as those before; `rounds` to their dtypes, else keeps float32 where they had it."""

    def place(before: jax.Array, leaf: jax.Array) -> jax.Array:
        leaf = leaf.astype(before.dtype) if rounds or before.dtype == jnp.float32 else leaf
        return jax.device_put(leaf, before.sharding) if before.committed else leaf

    leaves, structure = jax.tree.flatten(model)
    return jax.tree.unflatten(structure, map(place, jax.tree.leaves(before), leaves))


def _compiled(program: Callable[..., Any], arguments: tuple[Any, ...], donated: State | None) -> Callable[..., Any]:
    """Compiles a program for these arguments, one of them donated, without a call; returns it."""
    leaves, structure = jax.tree.flatten(arguments)
    given = set(map(id, jax.tree.leaves(donated)))
    results: Any = None

    def flat(*leaves: Any) -> list[Any]:  # what describes a compiled program has other leaves than arrays
        nonlocal results
        function: Any = program
        found, results = jax.tree.flatten(function.__wrapped__(*jax.tree.unflatten(structure, leaves)))
        return found

    flat.__name__ = program.__name__
    places = [number for number, leaf in enumerate(leaves) if id(leaf) in given]
    compiled = jax.jit(flat, donate_argnums=places).lower(*leaves).compile()
    return lambda *arguments: jax.tree.unflatten(results, compiled(*jax.tree.leaves(arguments)))


def _spread(draft: Draft, mesh: Mesh) -> Draft:
    """Puts the draft on the target's devices; else each call would send it there."""

    def place(x: jax.Array, where: Any) -> jax.Array:
        if x.sharding.device_set == where.device_set:  # a live head's: nothing goes to the host
            return jax.device_put(x, where)
        return put(np.asarray(x), where)

    head = jax.tree.map(place, draft.head, shardings(draft.head, mesh, SHARDING_RULES))
    return Draft(head, place(draft.token_ids, replicated(mesh)))
