"""Checkpoints with Orbax: head, optimizer and data iterator, each readable without the others."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import numpy as np
from flax import nnx
from orbax.checkpoint import v1 as ocp

from eagle3_jax.models.draft import DraftHead, DraftHeadConfig
from eagle3_jax.training.state import TrainState


class CheckpointError(ValueError):
    """No checkpoint, or one of another shape."""


class Checkpoints:
    """The checkpoints of one run; the newest `keep` stay. Use as a context manager."""

    def __init__(self, folder: str | pathlib.Path, keep: int = 1) -> None:
        self.folder = pathlib.Path(folder).absolute()
        policy: Any = ocp.training.preservation_policies.LatestN(keep)
        self._checkpointer = ocp.training.Checkpointer(
            str(self.folder),
            preservation_policy=policy,
            cleanup_tmp_directories=True,
        )

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        found = self._checkpointer.latest
        return None if found is None else found.step

    def save(self, state: TrainState, iterator: Any) -> None:
        """Writes a checkpoint of the state's step, atomically. A second one of the same step is left out."""
        step = int(state.step)
        if step != self.latest:
            parts = {"head": _flat(state.head), "optimizer": _flat(state.opt_state), "data": iterator}
            self._checkpointer.save_checkpointables(step, parts, force=True)

    def restore(self, state: TrainState, iterator: Any) -> TrainState:
        """The newest checkpoint, placed as `state` is; the iterator is set to where it was.

        Raises:
            CheckpointError: no checkpoint.
        """
        abstract = {"head": _abstract(state.head), "optimizer": _abstract(state.opt_state), "data": iterator}
        step, found = self._load(abstract)
        head = _unflat(state.head, found["head"])
        opt_state = _unflat(state.opt_state, found["optimizer"])
        at = jax.device_put(np.asarray(step, np.int32), state.step.sharding)
        return TrainState(at, head, opt_state)

    def restore_head(self, like: Any) -> DraftHead:
        """The newest head alone; `like` is a head, or its shapes."""
        return _unflat(like, self._load({"head": _abstract(like)})[1]["head"])

    def _load(self, abstract: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        step = self.latest
        if step is None:
            raise CheckpointError(f"{self.folder}: no checkpoint, expected the output of `python -m eagle3_jax.train`")
        return step, self._checkpointer.load_checkpointables(step, abstract)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpointer.close()


def load_head(folder: str | pathlib.Path, config: DraftHeadConfig) -> DraftHead:
    """The newest head of a checkpoints folder, on the default device.

    Raises:
        CheckpointError: no checkpoint, or a head of another shape than `config` says.
    """
    shapes = jax.eval_shape(lambda: DraftHead(config, rngs=nnx.Rngs(0)))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), shapes)
    if not pathlib.Path(folder).is_dir():
        raise CheckpointError(f"{folder}: not found, expected the output of `python -m eagle3_jax.train`")
    with Checkpoints(folder) as checkpoints:
        return checkpoints.restore_head(like)


def _flat(tree: Any) -> dict[str, Any]:
    """Leaves by path: what lies on disk does not depend on the classes that held them."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _unflat(like: Any, leaves: dict[str, Any]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in _flat(like)])


def _abstract(tree: Any) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in _flat(tree).items()}
