"""Checkpoints with Orbax: head and optimizer, each readable without the other."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, UInt32
from orbax.checkpoint import v1 as ocp

from eagle3_jax.mesh import put, replicated
from eagle3_jax.runs import disk
from eagle3_jax.training.state import TrainState

_PARTS: Final = ("head", "optimizer")


class CheckpointError(ValueError):
    """A missing or damaged checkpoint, or one of another shape; the message names its folder."""


class Checkpoints(contextlib.AbstractContextManager["Checkpoints"]):
    """The checkpoints of one run, a context manager. All that it does raises CheckpointError.

    The `keep` newest stay, beside the best one; files of a killed save are removed. None reads only, beside a training
    that may be saving. Raises AddressError: a folder to write that Orbax could not read back.
    """

    def __init__(self, folder: str | disk.Path, keep: int | None = None) -> None:
        self.folder = disk.system_path(folder) or disk.path_of(folder)
        policies = ocp.training.preservation_policies
        policy: Any = None
        if keep is not None:
            disk.check_address("folder of checkpoints", self.folder, asks=False)
            best = policies.BestN(get_metric_fn=lambda x: x["tau"], n=1, keep_checkpoints_without_metrics=False)
            policy = policies.AnyPreservationPolicy([policies.LatestN(keep), best])
        self._writing: int | None = None  # step whose checkpoint may be incomplete
        _shorten_orbax_logs()
        with self._orderly(self.folder):
            self._checkpointer = ocp.training.Checkpointer(
                str(self.folder), preservation_policy=policy, cleanup_tmp_directories=keep is not None
            )

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        found = self._checkpointer.latest
        return None if found is None else found.step

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and acceptance length of the checkpoint with the largest one in the engine; None if never measured."""
        found: Any = self._checkpointer.checkpoints
        measured = [(checkpoint.metrics["tau"], checkpoint.step) for checkpoint in found if checkpoint.metrics]
        if not measured:
            return None
        tau, step = max(measured)
        return step, tau

    def save(
        self, state: TrainState, tau: float | None = None, token_ids: Int32[np.ndarray, " dv"] | None = None
    ) -> None:
        """Begins to write a checkpoint of the state's step, atomically; a second one of the same step is skipped.

        Waits for the one before, whose errors it raises, and returns once the arrays are in host memory. `tau` is its
        acceptance length in the engine, `token_ids` its draft vocabulary, where that changes as the head learns.
        """
        self.wait_until_finished()
        step = int(state.step)
        if step != self.latest:
            parts: dict[str, Any] = {"head": _flat(state.head), "optimizer": _flat(state.opt_state)}
            if strange := [leaf for part in parts.values() for leaf, finite in _finite(part).items() if not finite]:
                where = self.folder / str(step)
                raise CheckpointError(f"{where}: not written: NaN or infinity in {', '.join(strange)}")
            for name in _PARTS:
                parts[f"{name}_checksums"] = _checksums(parts[name])
            if token_ids is not None:
                parts["vocabulary"] = {"token_ids": np.asarray(token_ids, np.int32)}
            if jax.default_backend() == "cpu":
                parts = _copied(parts)  # on CPUs host memory is the arrays' own, which the next step overwrites
            metrics: Any = None if tau is None else {"tau": tau}
            with self._orderly(self.folder / str(step), "not written"):
                self._checkpointer.save_checkpointables_async(step, parts, force=True, metrics=metrics)
            self._writing = step

    def wait_until_finished(self) -> None:
        """Waits until the checkpoint that was begun last is complete, and looks whether all of it is there."""
        if self._writing is not None:
            step, self._writing = self._writing, None
            with self._orderly(self.folder / str(step), "not written"):
                self._checkpointer.wait()
                held = self._checkpointer.checkpointables_metadata(step).metadata
                if missing := [name for name in _PARTS if held.get(name) is None]:
                    raise RuntimeError(f"{', '.join(missing)}: not found when read back")

    def restore(self, state: TrainState) -> TrainState:
        """Reads the newest checkpoint, placed as `state` is, whatever mesh it was saved from."""
        abstract = {"head": _abstract(state.head), "optimizer": _abstract(state.opt_state)}
        step, found = self._load(abstract)
        head = _unflat(state.head, found["head"])
        opt_state = _unflat(state.opt_state, found["optimizer"])
        at = put(np.asarray(step, np.int32), state.step.sharding)
        return TrainState(at, head, opt_state)

    def head_checksums(self, step: int) -> dict[str, int]:
        """Reads the checksums of the leaves of a step's head, which tell heads apart without reading them."""
        return {leaf: int(x) for leaf, x in self._read(step, "head_checksums").items()}

    def token_ids(self, step: int) -> Int32[np.ndarray, " dv"] | None:
        """Reads the draft vocabulary of a step; None where the whole run has one."""
        return self._read(step, "vocabulary").get("token_ids")

    def _read(self, step: int, part: str) -> dict[str, np.ndarray]:
        """Reads a small part of a step; nothing where the step has no such part."""
        everywhere = replicated(jax.sharding.Mesh(jax.devices(), "all"))  # processes can only read together
        with self._orderly(self.folder / str(step)):
            held = self._checkpointer.checkpointables_metadata(step).metadata.get(part)
            if held is None:
                return {}
            like = {leaf: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere) for leaf, x in held.items()}
            found = self._checkpointer.load_checkpointables(step, {part: like})[part]
        return {leaf: np.asarray(jax.device_get(x)) for leaf, x in found.items()}

    def _load(self, abstract: dict[str, Any], step: int | None = None) -> tuple[int, dict[str, Any]]:
        self.wait_until_finished()
        step = self.latest if step is None else step
        if step is None:
            raise CheckpointError(f"{self.folder}: no checkpoint, expected the output of `python -m eagle3_jax.train`")
        folder = self.folder / str(step)
        checked = [name for name in abstract if name in _PARTS]
        for name in checked:
            abstract = abstract | {f"{name}_checksums": {leaf: _scalar(x) for leaf, x in abstract[name].items()}}
        with self._orderly(folder):
            self._check_shapes(step, {name: abstract[name] for name in checked})
            found = self._checkpointer.load_checkpointables(step, abstract)
        for name in checked:
            expected, got = jax.device_get((found[f"{name}_checksums"], _checksums(found[name])))
            if altered := [leaf for leaf in got if got[leaf] != expected[leaf]]:
                problem = f"{name}: {', '.join(altered)}: altered since it was written; remove it"
                raise CheckpointError(f"{folder}: {problem}")
        return step, found

    def _check_shapes(self, step: int, parts: dict[str, dict[str, jax.ShapeDtypeStruct]]) -> None:
        """Checks shapes, since Orbax would pad and cut."""
        held, where = self._checkpointer.checkpointables_metadata(step).metadata, self.folder / str(step)
        for part, expected in parts.items():
            if held.get(part) is None:
                raise CheckpointError(f"{where}: {part}: damaged or unreadable, remove it")
            found = {name: tuple(leaf.shape) for name, leaf in held[part].items()}
            for name in sorted(expected.keys() | found.keys()):
                wanted = tuple(expected[name].shape) if name in expected else None
                if found.get(name) != wanted:
                    raise CheckpointError(f"{where}: {part}: {name}: got shape {found.get(name)}, expected {wanted}")

    @staticmethod
    @contextlib.contextmanager
    def _orderly(folder: disk.Path, what: str = "damaged or unreadable, remove it") -> Iterator[None]:
        """Turns errors of Orbax, TensorStore and JAX into one sentence that names the folder."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise CheckpointError(f"{folder}: {what} ({reason})") from error

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # The checkpointer raises a save's error once more when it is closed.
        with contextlib.nullcontext() if kind is None else contextlib.suppress(Exception):
            try:
                self.wait_until_finished()
            finally:
                self._checkpointer.close()


def _shorten_orbax_logs() -> None:
    """Cuts tracebacks of Orbax's threads and tasks, whose errors its checkpointer raises again, for good."""
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    logging.getLogger("absl").addFilter(_without_orbax_traceback)
    hook = threading.excepthook
    if hook.__module__ == __name__:
        return

    def others(args: Any) -> None:
        if not type(args.thread).__module__.startswith("orbax."):
            hook(args)

    threading.excepthook = others


def _without_orbax_traceback(record: logging.LogRecord) -> bool:
    if "/orbax/" in record.pathname:
        record.exc_info = None
    return True


def load_head(folder: str | disk.Path, shapes: Any, step: int | None = None) -> Any:
    """Loads the head of a step of a checkpoints folder, or the newest, on the default device of each process.

    `shapes` are the head's (`TrainingKind.abstract`). Raises CheckpointError: no checkpoint, or a head of other shapes.
    """
    everywhere = replicated(jax.sharding.Mesh(jax.devices(), "all"))  # processes can only read together
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), shapes)
    if not disk.path_of(folder).is_dir():
        raise CheckpointError(f"{folder}: not found, expected the output of `python -m eagle3_jax.train`")
    with Checkpoints(folder) as checkpoints:
        _, found = checkpoints._load({"head": _abstract(like)}, step)
        return jax.tree.map(lambda x: x.addressable_data(0), _unflat(like, found["head"]))


def _flat(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _unflat(like: Any, leaves: dict[str, Any]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in _flat(like)])


@jax.jit
def _checksums(leaves: dict[str, Any]) -> dict[str, UInt32[Array, ""]]:
    """Sums each leaf's bits times odd numbers, modulo 2 ** 32: every change of a single element changes the sum."""

    def checksum(x: Array) -> Array:
        bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)
        place = jnp.zeros(x.shape, jnp.uint32)
        for axis, size in enumerate(x.shape):
            place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        return jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32)

    return jax.tree.map(checksum, leaves)


@jax.jit
def _finite(leaves: dict[str, Any]) -> dict[str, Array]:
    return jax.tree.map(lambda x: jnp.all(jnp.isfinite(x)), leaves)


@jax.jit
def _copied(leaves: dict[str, Any]) -> dict[str, Any]:
    return jax.tree.map(jnp.copy, leaves)


def _scalar(like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    where = like.sharding
    where = replicated(where.mesh) if isinstance(where, jax.sharding.NamedSharding) else where
    return jax.ShapeDtypeStruct((), np.uint32, sharding=where)


def _abstract(tree: Any) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in _flat(tree).items()}
