"""Objects of a bucket, written in the place of one generation; leases, renewed while held; logs, sealed meanwhile."""

import time

import emulator
import pytest

from eagle3_jax.runs import disk
from eagle3_jax.runs.bucket import leases, objects


@pytest.fixture
def folder(monkeypatch):
    """A run's folder in a bucket."""
    monkeypatch.setenv(leases.LEASE_SECONDS, "3")
    return disk.path_of(f"{emulator.new_bucket()}/run")


def test_ranges(folder):
    with disk.atomic(folder / "x") as temporary:
        temporary.write_bytes(bytes(range(256)))
    assert objects.read(folder / "x", 3, 7) == bytes(range(3, 7))
    with disk.open_binary(folder / "x") as stream:
        stream.seek(250)
        assert stream.read() == bytes(range(250, 256))


def test_two_writers_of_one_object(folder):
    """The one that began earlier and ends later does not undo the other's work."""
    with (
        pytest.raises(objects.Conflict, match=r"run/x: another writer was first"),
        disk.atomic(folder / "x") as temporary,
    ):
        temporary.write_text("slow")
        disk.write_json(folder / "x", {"fast": 1})
    assert disk.read_json(folder / "x") == {"fast": 1}


@pytest.mark.parametrize("kind", ["bytes", "file"])
def test_an_upload_whose_answer_was_lost_knows_its_own_object(folder, tmp_path, kind):
    """Asked again, it meets the generation that it wrote itself; other content is another writer's."""

    def put(content: bytes) -> int:
        (tmp_path / "x").write_bytes(content)
        return objects.put(folder / "x", content if kind == "bytes" else tmp_path / "x", objects.ABSENT)

    assert put(b"one shard") == put(b"one shard") == objects.generation(folder / "x")
    with pytest.raises(objects.Conflict, match=r"run/x: another writer was first"):
        put(b"two shard")
    assert objects.read(folder / "x") == b"one shard"


def test_a_lease_is_renewed_and_its_loss_ends_the_run(folder, monkeypatch):
    lost = []
    monkeypatch.setattr(leases, "_end", lost.append)
    lease = folder.parent / ".run.lock"
    with disk.lock(folder):
        first = objects.generation(lease)
        until = time.monotonic() + 20
        while objects.generation(lease) == first and time.monotonic() < until:
            time.sleep(0.1)
        objects.put(lease, b'{"owner": "a thief"}', objects.generation(lease))
        while not lost and time.monotonic() < until:
            time.sleep(0.1)
    assert lost == [f"{lease}: the lease was taken by a thief, this run ends"]
    assert leases.holder(folder) == "a thief"  # which keeps it


def test_a_renewal_whose_answer_was_lost_is_no_loss(folder, monkeypatch):
    lost, put, failed = [], objects.put, []

    def deaf(path, content, expected, **options):
        found = put(path, content, expected, **options)
        if b'"renewal": 1}' in content and not failed:
            failed.append(path)
            raise objects.BucketError("no answer")
        return found

    monkeypatch.setattr(objects, "put", deaf)
    monkeypatch.setattr(leases, "_end", lost.append)
    lease = folder.parent / ".run.lock"
    with disk.lock(folder):
        until = time.monotonic() + 20
        while b'"renewal": 4}' not in objects.read(lease) and time.monotonic() < until:
            time.sleep(0.1)
    assert failed and not lost and leases.holder(folder) == ""


def test_a_log_is_sealed_while_it_is_written(folder, monkeypatch):
    monkeypatch.setattr(objects, "SEGMENT_SECONDS", 0.2)
    with disk.Log(folder / "log") as log:
        log.append("early")
        until = time.monotonic() + 20
        while disk.read_log(folder / "log") != ["early"] and time.monotonic() < until:
            time.sleep(0.1)
        assert disk.read_log(folder / "log") == ["early"]
        log.append("late")
    assert disk.read_log(folder / "log") == ["early", "late"]
