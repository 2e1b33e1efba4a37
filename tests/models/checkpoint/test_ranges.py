"""Files of tensors, local and in a bucket: read where they are indexed, as safetensors reads them."""

import shutil

import emulator
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from eagle3_jax.models.checkpoint import ranges
from eagle3_jax.models.checkpoint.fetch import TargetError, fetch, load_target
from eagle3_jax.runs import disk
from eagle3_jax.runs.bucket import objects
from eagle3_jax.runs.bucket.store import Bucket

INDICES = (
    (slice(None), slice(None)),
    (slice(1, 3), slice(None)),
    (slice(2, 5), slice(1, 3)),
    (slice(None), slice(4, 6)),
    (slice(5, 5), slice(None)),
    (slice(0, 6, 2), slice(None)),
    (slice(None, None), slice(None, None, 3)),
)


def upload(local, address):
    """A local folder's files, by way of `disk.atomic`."""
    for file in local.iterdir():
        with disk.atomic(disk.path_of(f"{address}/{file.name}")) as temporary:
            shutil.copy(file, temporary)


@pytest.fixture
def files(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.normal(size=(6, 9)).astype(np.float32),
        "b": rng.normal(size=(6, 9)).astype(ml_dtypes.bfloat16),
        "c": rng.integers(0, 9, 7),
    }
    local = tmp_path / "model.safetensors"
    save_file(tensors, local, metadata={"format": "pt"})
    address = emulator.new_bucket()
    upload(tmp_path, address)
    return local, disk.path_of(f"{address}/model.safetensors")


def test_slices_are_those_of_safetensors(files):
    with safe_open(files[0], framework="numpy") as expected:
        wanted = {name: expected.get_tensor(name) for name in expected.keys()}
    for path in files:
        found, tensor = ranges.open_tensors(path)
        assert {name: (x.dtype, x.shape) for name, x in found.items()} == {
            "a": ("F32", (6, 9)),
            "b": ("BF16", (6, 9)),
            "c": ("I64", (7,)),
        }
        for name in ("a", "b"):
            for index in INDICES:
                np.testing.assert_array_equal(tensor(name)[index], wanted[name][index])
        np.testing.assert_array_equal(tensor("c")[2:4], wanted["c"][2:4])


def test_only_the_rows_asked_for_are_read(files, monkeypatch):
    found = ranges.open_tensors(files[1])[1]("a")
    asked, read = [], objects.read
    counted = staticmethod(lambda path, start, stop: asked.append(stop - start) or read(path, start, stop))
    monkeypatch.setattr(Bucket, "read_range", counted)
    assert found[2:4].shape == (2, 9) and found[2:4, 1:].shape == (2, 8)
    assert asked == [2 * 9 * 4]  # and once


@pytest.mark.parametrize(
    "content", [b"", b"\x01", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0[]", b"\x02\0\0\0\0\0\0\0{", b"\x02\0\0\0\0\0\0\0{}x"]
)
def test_another_file_is_refused(content, tmp_path):
    for path in (tmp_path / "x.safetensors", disk.path_of(f"{emulator.new_bucket()}/x.safetensors")):
        with disk.atomic(path) as temporary:
            temporary.write_bytes(content)
        with pytest.raises(SafetensorError):
            ranges.open_tensors(path)


@pytest.mark.slow
def test_a_target_in_a_bucket_is_the_local_one(tmp_path):
    local = tiny.write_target(tmp_path / "target")
    address = f"{emulator.new_bucket()}/models/target"
    upload(local, address)
    expected, found = load_target(local), load_target(address)
    assert found.identity == expected.identity | {"name": address}
    assert found.tokenizer("apple bird") == expected.tokenizer("apple bird")
    for one, other in zip(tiny.jax.tree.leaves(found.model), tiny.jax.tree.leaves(expected.model), strict=True):
        assert jnp.array_equal(one, other)


def test_an_address_without_a_model_is_refused():
    with pytest.raises(TargetError, match=r"target.name: got 'gs://[^']*/none', no such folder in the bucket"):
        fetch(f"{emulator.new_bucket()}/none")
