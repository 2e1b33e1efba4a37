"""Checkpoints: kept to the last, read beside a save, refused by name when damaged or of another shape."""

import asyncio
import pathlib
import subprocess
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx
from orbax.checkpoint._src.serialization import serialization

from eagle3_jax.config import DraftConfig
from eagle3_jax.models.drafts.eagle3 import DraftHead, DraftHeadConfig
from eagle3_jax.runs.disk import AddressError
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


@pytest.mark.slow
def test_only_the_newest_stay_and_a_second_save_of_a_step_is_left_out(tmp_path):
    save(tmp_path, 1, 2, 3, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest == 3


@pytest.mark.parametrize("change", [{"vocab_size": 9}, {"fc_norm": True}])
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


@pytest.mark.slow
def test_training_goes_on_while_a_save_is_written(tmp_path, monkeypatch):
    """The state is overwritten meanwhile; what is written is not."""
    write, goes_on = serialization.async_serialize_from_host, threading.Event()

    async def waits(*arguments, **named):
        while not goes_on.is_set():
            await asyncio.sleep(0.01)
        return await write(*arguments, **named)

    monkeypatch.setattr(serialization, "async_serialize_from_host", waits)
    head, values = DraftHead(head_config(), rngs=nnx.Rngs(0)), jnp.arange(1 << 16, dtype=jnp.float32)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(TrainState(jnp.array(1, jnp.int32), head, {"moment": values}))
        values = jax.jit(lambda x: -x, donate_argnums=0)(values)
        goes_on.set()
        restored = checkpoints.restore(TrainState(jnp.array(0, jnp.int32), head, {"moment": values}))
    np.testing.assert_array_equal(restored.opt_state["moment"], -values)


def test_a_state_with_a_nan_is_not_written(tmp_path):
    head = DraftHead(head_config(), rngs=nnx.Rngs(0))
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        state = TrainState(jnp.array(1, jnp.int32), head, {"moment": jnp.array([1.0, jnp.nan])})
        with pytest.raises(CheckpointError, match="1: not written: NaN or infinity in moment"):
            checkpoints.save(state)
        assert checkpoints.latest is None


def test_a_save_that_failed_is_told_by_the_next_wait(tmp_path, monkeypatch, caplog):
    """And by what Orbax logs."""

    async def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(serialization, "async_serialize_from_host", full)
    head = DraftHead(head_config(), rngs=nnx.Rngs(0))
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        with pytest.raises(CheckpointError, match=r"1: not written \(.*No space left"):
            checkpoints.save(TrainState(jnp.array(1, jnp.int32), head, {"moment": jnp.ones(3)}))
            checkpoints.wait_until_finished()
    heard = [record for record in caplog.records if record.name == "absl"]
    assert heard and not any(record.exc_info for record in heard)


_MERGES_NOTHING = """
import pathlib, sys
from orbax.checkpoint._src.serialization import ocdbt_utils

sys.path.append(sys.argv[1])

async def merges_nothing(*_, **__):
    pass

ocdbt_utils.merge_ocdbt_per_process_files = merges_nothing
from test_checkpoint import save
save(pathlib.Path(sys.argv[2]), 3)
"""


@pytest.mark.slow
def test_a_save_that_cannot_be_read_back_is_none(tmp_path):
    """Orbax merges no process's files into the folder: it finds no arrays there, says so in its log, and goes on.

    In a process of its own: TensorStore's failed reads report to an event loop of Orbax that is closed by then.
    """
    command = [sys.executable, "-c", _MERGES_NOTHING, str(pathlib.Path(__file__).parent), str(tmp_path)]
    ended = subprocess.run(command, env=tiny.environment(), capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 1
    assert f"CheckpointError: {tmp_path / '3'}: not written (head, optimizer: not found when read back)" in ended.stderr


@pytest.mark.parametrize("name", ["run [x]", "run\\1"])
def test_a_folder_whose_checkpoints_could_not_be_read_is_refused(tmp_path, name):
    with pytest.raises(AddressError, match=r"folder of checkpoints: got .*, expected a path without"):
        save(tmp_path / name, 3)


def test_odd_names_of_folders_hold_checkpoints(tmp_path):
    folder = tmp_path / "a #%20{b}]'\"\u00fc\u6771&;:=+~!"
    save(folder, 3)
    load_head(folder, shapes())
