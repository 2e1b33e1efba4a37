"""Checkpoints: kept to the last, read beside a save, refused by name when damaged or of another shape."""

import asyncio
import logging
import pathlib
import subprocess
import sys
import time
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


def test_what_an_orbax_thread_raised_is_one_line(tmp_path, caplog):
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
    heard = [(record.message, record.exc_info is not None) for record in caplog.records]
    assert heard == [("a thread ended", False), ("a line", False), ("a loader ended", True)]
    logging.getLogger("asyncio").error("Task exception was never retrieved")
    assert len(caplog.messages) == 3


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


@pytest.mark.long
def test_training_waits_for_a_tenth_of_a_slow_save_at_most(tmp_path, monkeypatch):
    """To a store that takes 20 MB/s. The state is overwritten meanwhile; what is written is not.

    The state has 192 MiB, as a small model's head and moments have; Orbax's own 0.3 seconds count in smaller ones.
    """
    write, size, rate = serialization.async_serialize_from_host, 48 * 2**20, float("inf")

    async def throttled(slices, *arguments, **named):
        await asyncio.sleep(sum(x.data().nbytes for x in slices.replica_slices) / rate)
        return await write(slices, *arguments, **named)

    monkeypatch.setattr(serialization, "async_serialize_from_host", throttled)
    head, shares = DraftHead(head_config(), rngs=nnx.Rngs(0)), []
    overwrite = jax.jit(lambda x: -x, donate_argnums=0)
    values = jnp.arange(size, dtype=jnp.float32)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step in range(1, 5):  # the first compiles; of the others the best, since other work takes turns
            state = TrainState(jnp.array(step, jnp.int32), head, {"moment": values})
            begun = time.monotonic()
            checkpoints.save(state)
            blocked = time.monotonic() - begun
            values = overwrite(values)
            checkpoints.wait_until_finished()
            whole = time.monotonic() - begun
            if step > 1:
                assert whole > 4 * size / rate
                shares.append(blocked / whole)
                if shares[-1] <= 0.1:
                    break
            rate = 20e6
        assert min(shares) <= 0.1, shares
        like = TrainState(jnp.array(0, jnp.int32), head, {"moment": values})
        restored = checkpoints.restore(like)
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


@pytest.mark.parametrize("name", ["run [x]", "run\\1", "run*", "run?"])
def test_a_folder_whose_checkpoints_could_not_be_read_is_refused(tmp_path, name):
    with pytest.raises(AddressError, match=r"folder of checkpoints: got .*, expected a path without"):
        save(tmp_path / name, 3)


def test_odd_names_of_folders_hold_checkpoints(tmp_path):
    folder = tmp_path / "a #%20{b}]'\"\u00fc\u6771&;:=+~!"
    save(folder, 3)
    load_head(folder, shapes())
