"""Checkpoints: kept to the last, read beside a save, refused by name when damaged or of another shape."""

import logging
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from eagle3_jax.config import DraftConfig
from eagle3_jax.models.drafts.eagle3 import DraftHead, DraftHeadConfig
from eagle3_jax.training import checkpoint
from eagle3_jax.training.checkpoint import CheckpointError, Checkpoints, load_head
from eagle3_jax.training.state import TrainState


def head_config(**changes: Any) -> DraftHeadConfig:
    values: dict[str, Any] = {"vocab_size": 8} | changes
    return DraftHeadConfig.for_target(DraftConfig(**values), tiny.llama_config())


def shapes(**changes: Any) -> DraftHead:
    return nnx.eval_shape(lambda: DraftHead(head_config(**changes), rngs=nnx.Rngs(0)))


def save(folder, *steps: int, keep: int = 2) -> None:
    head = DraftHead(head_config(), rngs=nnx.Rngs(0))
    with Checkpoints(folder, keep=keep) as checkpoints:
        for step in steps:
            state = TrainState(jnp.array(step, jnp.int32), head, {"moment": jnp.arange(6.0).reshape(2, 3)})
            checkpoints.save(state)


def test_only_the_newest_stay_and_a_second_save_of_a_step_is_left_out(tmp_path):
    save(tmp_path, 1, 2, 3, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest == 3


@pytest.mark.parametrize("change", [{"vocab_size": 9}, {"intermediate_size": 20}, {"fc_norm": True}])
def test_a_head_of_another_shape_is_refused_by_name(tmp_path, change):
    save(tmp_path, 3)
    with pytest.raises(CheckpointError, match=r"3: head: [\w.]+: got shape (\(|None).*, expected \("):
        load_head(tmp_path, shapes(**change))


def test_who_reads_leaves_a_running_save_alone(tmp_path):
    """`export` may look while `train` saves: what that has written so far must stay."""
    save(tmp_path, 3)
    running = tmp_path / "4.orbax-checkpoint-tmp"
    running.mkdir()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest == 3
    assert running.exists()
    save(tmp_path, 5)
    assert not running.exists()


def test_what_an_orbax_thread_raised_is_not_said_twice(tmp_path, caplog):
    """Its thread may log so while the interpreter shuts down, behind the one sentence that the verb ends with."""
    save(tmp_path, 3)
    try:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")
    except RuntimeError:
        raised = sys.exc_info()
    for path, said, error in (
        ("/site-packages/orbax/checkpoint/_src/futures/future.py", "a thread ended", raised),
        ("/site-packages/orbax/checkpoint/_src/futures/future.py", "a line", None),
        ("/site-packages/grain/loader.py", "a loader ended", raised),
    ):
        logging.getLogger("absl").handle(logging.LogRecord("absl", logging.ERROR, path, 1, said, (), error))
    assert caplog.messages == ["a line", "a loader ended"]
    logging.getLogger("asyncio").error("Task exception was never retrieved")
    assert len(caplog.messages) == 2


def test_checksums_see_every_single_element_and_not_the_mesh():
    values = {"w": jax.random.normal(jax.random.key(0), (8, 6)), "step": jnp.arange(5), "b": jnp.ones(4, jnp.bfloat16)}
    whole = jax.device_get(checkpoint._checksums(values))
    for name, leaf in values.items():
        for index in np.ndindex(leaf.shape):
            changed = leaf.at[index].set(jnp.nextafter(leaf[index], jnp.inf) if name == "w" else leaf[index] + 1)
            assert checkpoint._checksums({name: changed})[name] != whole[name]
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    spread = jax.device_put(values["w"], jax.NamedSharding(mesh, jax.P("data", "model")))
    assert checkpoint._checksums({"w": spread})["w"] == whole["w"]


def test_an_altered_value_is_refused_by_name(tmp_path, monkeypatch):
    """Orbax's files do not say what a value was; the checksums beside it do."""
    checksums = checkpoint._checksums

    def before_it_was_altered(leaves):
        return {name: x + jnp.uint32(name.startswith("fc")) for name, x in checksums(leaves).items()}

    monkeypatch.setattr(checkpoint, "_checksums", before_it_was_altered)
    save(tmp_path, 3)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"3: head: fc\S*: altered since it was written"):
        load_head(tmp_path, shapes())
