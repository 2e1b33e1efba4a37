"""The functions of `disk`, on a local folder and in a bucket alike."""

import hashlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import emulator
import pytest

from eagle3_jax.runs import disk, manifest
from eagle3_jax.runs.bucket import leases
from eagle3_jax.runs.bucket.store import Bucket
from eagle3_jax.runs.store import Store

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(params=["local", "bucket"])
def folder(request, tmp_path, monkeypatch):
    """A run's folder in each store."""
    monkeypatch.setenv(leases.LEASE_SECONDS, "3")
    place = tmp_path if request.param == "local" else disk.path_of(emulator.new_bucket())
    return place / "a %20{b}'\u00fc\u6771&" / "run"


def test_what_is_written_is_there(folder):
    path = folder / "a.json"
    assert not path.exists()
    disk.write_sealed(path, {"a": [1, 2]})
    disk.write_sealed(path, {"a": [1, 3]})
    with pytest.raises(TypeError):
        disk.write_json(path, {"a": object()})
    assert disk.read_sealed(path) == {"a": [1, 3]}
    assert path.exists() and path.read_bytes() == disk.read_bytes(path)
    assert disk.size(path) == len(disk.read_bytes(path))
    assert [found.name for found in folder.glob("*.json")] == ["a.json"]
    with disk.atomic(folder / "lines.jsonl") as temporary:
        temporary.write_text('{"a": 1}\n{"b": 2}\n')
    assert list(disk.read_jsonl(folder / "lines.jsonl")) == [{"a": 1}, {"b": 2}]
    assert disk.digest(folder / "lines.jsonl") == hashlib.sha256(b'{"a": 1}\n{"b": 2}\n').hexdigest()
    with pytest.raises(FileNotFoundError):
        disk.read_json(folder / "none.json")


def test_a_failed_write_leaves_nothing(folder):
    with pytest.raises(KeyError), disk.atomic(folder / "x") as temporary:
        temporary.mkdir()
        (temporary / "weights").write_bytes(b"half")
        raise KeyError
    assert not list(folder.glob("*"))


def test_a_folder_is_whole_where_its_manifest_is(folder):
    assert not disk.is_whole(folder / "export")
    with disk.atomic(folder / "export") as temporary:
        temporary.mkdir()
        (temporary / "zzz").write_text("later in the alphabet")
        (temporary / manifest.NAME).write_text("{}")
    assert disk.is_whole(folder / "export")
    assert (disk.local(folder / "export") / "zzz").read_text() == "later in the alphabet"


def test_an_outbox_stores_what_lies_in_it(folder):
    place, store = disk.outbox(folder / "curves")
    place.mkdir(parents=True, exist_ok=True)
    for content in ("1", "12"):  # of a file that grows
        (place / "events").write_text(content)
        store()
        assert disk.read_bytes(folder / "curves/events") == content.encode()


def test_a_bucket_answers_all_that_a_store_is_asked():
    assert {name for name in vars(Store) if not name.startswith("_")} <= set(vars(Bucket))


def test_logs(folder):
    path = folder / "train.0.jsonl.partial"
    assert disk.read_log(path) == []
    for values in (1, 2), ({"text": "één\u2028"}, [3]):
        with disk.Log(path) as log:
            for value in values:
                log.append(value)
    assert disk.read_log(path) == [1, 2, {"text": "één\u2028"}, [3]]
    assert [found.name for found in folder.glob("train.*.jsonl.partial")] == [path.name]
    with disk.open_log(path) as lines:
        first = lines.readline()
    disk.rewrite_log(path, first)
    with disk.Log(path) as log:
        log.append(5)
    with disk.open_log(path) as lines:
        whole = lines.read()
    disk.rewrite_log(path, whole)
    assert disk.read_log(path) == [1, 5]
    disk.remove(path)
    assert not path.exists() and disk.read_log(path) == []


HOLDER = """
import sys, time
from eagle3_jax.runs import disk
folder = disk.path_of(sys.argv[1])
with disk.lock(folder):
    with disk.atomic(folder / "shard") as shard:
        shard.write_text("half")
        print("held", flush=True)
        time.sleep(120)
"""


def _hold(folder):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


@pytest.mark.slow
def test_a_lock_keeps_others_out_until_its_holder_dies(folder):
    process = _hold(folder)
    local = disk.system_path(folder) is not None
    try:
        for _ in range(2):
            with (
                pytest.raises(disk.LockError, match=rf"run: in use by process {process.pid} on host"),
                disk.lock(folder),
            ):
                pass
        assert len(list(folder.glob(".shard.*"))) == local  # the living owner's
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    start = time.monotonic()
    with disk.lock(folder):
        assert not list(folder.glob("*"))
    assert time.monotonic() - start < 10
    start = time.monotonic()
    with disk.lock(folder):  # one that was given back is free at once
        pass
    assert time.monotonic() - start < 2


def test_a_local_folder_needs_no_client():
    code = (
        "import sys; from eagle3_jax.runs import disk, manifest; disk.path_of('x').exists(); "
        "assert not {'tensorstore', 'etils', 'fsspec', 'google'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=os.environ | {"PYTHONPATH": str(ROOT)})
