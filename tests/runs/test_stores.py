"""The functions of `disk`, on a local folder and in a bucket alike."""

import http.server
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import emulator
import pytest

from eagle3_jax.runs import bucket, disk, manifest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(params=["local", "bucket"])
def folder(request, tmp_path, monkeypatch):
    """A run's folder in each store."""
    monkeypatch.setenv(bucket.LEASE_SECONDS, "3")
    return tmp_path / "run" if request.param == "local" else disk.path_of(f"{emulator.new_bucket()}/run")


@pytest.fixture
def remote(monkeypatch):
    """A run's folder in a bucket."""
    monkeypatch.setenv(bucket.LEASE_SECONDS, "3")
    return disk.path_of(f"{emulator.new_bucket()}/run")


def test_what_is_written_is_there(folder):
    disk.make_folder(folder)
    path = folder / "a.json"
    assert not path.exists()
    disk.write_sealed(path, {"a": [1, 2]})
    disk.write_sealed(path, {"a": [1, 3]})
    assert disk.read_sealed(path) == {"a": [1, 3]}
    assert path.exists() and path.read_bytes() == disk.read_bytes(path)
    assert disk.size(path) == len(disk.read_bytes(path))
    assert [found.name for found in folder.glob("*.json")] == ["a.json"]
    with disk.atomic(folder / "lines.jsonl") as temporary:
        temporary.write_text('{"a": 1}\n{"b": 2}\n')
    assert list(disk.read_jsonl(folder / "lines.jsonl")) == [{"a": 1}, {"b": 2}]
    assert len(disk.digest(folder / "lines.jsonl")) == 64
    with pytest.raises(FileNotFoundError):
        disk.read_json(folder / "none.json")


def test_a_failed_write_leaves_nothing(folder):
    disk.make_folder(folder)
    with pytest.raises(KeyError), disk.atomic(folder / "x") as temporary:
        temporary.write_bytes(b"half")
        raise KeyError
    assert not list(folder.glob("*"))


def test_a_folder_is_whole_where_its_manifest_is(folder):
    disk.make_folder(folder)
    assert not disk.is_whole(folder / "export")
    with disk.atomic(folder / "export") as temporary:
        temporary.mkdir()
        (temporary / "zzz").write_text("later in the alphabet")
        (temporary / manifest.NAME).write_text("{}")
    assert disk.is_whole(folder / "export")
    assert (disk.local(folder / "export") / "zzz").read_text() == "later in the alphabet"


def test_ranges(remote):
    with disk.atomic(remote / "x") as temporary:
        temporary.write_bytes(bytes(range(256)))
    assert bucket.read(remote / "x", 3, 7) == bytes(range(3, 7))
    with disk.open_binary(remote / "x") as stream:
        stream.seek(250)
        assert stream.read() == bytes(range(250, 256))


def test_two_writers_of_one_object(remote):
    """The one that began earlier and ends later does not undo the other's work."""
    with (
        pytest.raises(bucket.Conflict, match=r"run/x: another writer was first"),
        disk.atomic(remote / "x") as temporary,
    ):
        temporary.write_text("slow")
        disk.write_json(remote / "x", {"fast": 1})
    assert disk.read_json(remote / "x") == {"fast": 1}


def test_logs(folder):
    disk.make_folder(folder)
    path = folder / "train.0.jsonl.partial"
    assert disk.read_log(path) == []
    for values in (1, 2), ({"text": "één\u2028"}, [3]):
        with disk.Log(path) as log:
            for value in values:
                log.append(value)
    assert disk.read_log(path) == [1, 2, {"text": "één\u2028"}, [3]]
    assert [found.name for found in folder.glob("train.*.jsonl.partial")] == [path.name]
    disk.rewrite_log(path, disk.log_lines(path)[:1])
    with disk.Log(path) as log:
        log.append(5)
    disk.rewrite_log(path, disk.log_lines(path))
    assert disk.read_log(path) == [1, 5]
    disk.remove_log(path)
    assert not path.exists() and disk.read_log(path) == []


def test_a_log_is_sealed_while_it_is_written(remote, monkeypatch):
    monkeypatch.setattr(bucket, "SEGMENT_SECONDS", 0.2)
    with disk.Log(remote / "log") as log:
        log.append("early")
        until = time.monotonic() + 20
        while disk.read_log(remote / "log") != ["early"] and time.monotonic() < until:
            time.sleep(0.1)
        assert disk.read_log(remote / "log") == ["early"]
        log.append("late")
    assert disk.read_log(remote / "log") == ["early", "late"]


def test_a_claim(folder):
    with manifest.claim(folder, {"verb": "x"}) as finished:
        assert not finished
        manifest.finish(folder, rows=3)
    with manifest.claim(folder, {"verb": "x"}) as finished:
        assert finished
    assert manifest.read(folder, "x")["results"] == {"rows": 3}
    with pytest.raises(manifest.ManifestError, match="made from something else"), manifest.claim(folder, {"verb": "y"}):
        pass


HOLDER = """
import sys, time
from eagle3_jax.runs import disk
with disk.lock(disk.path_of(sys.argv[1])):
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


def test_a_lock_keeps_others_out_until_its_holder_dies(folder):
    process = _hold(folder)
    try:
        for _ in range(2):
            with (
                pytest.raises(disk.LockError, match=rf"run: in use by process {process.pid} on host"),
                disk.lock(folder),
            ):
                pass
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    start = time.monotonic()
    with disk.lock(folder):
        pass
    assert time.monotonic() - start < 10
    start = time.monotonic()
    with disk.lock(folder):  # one that was given back is free at once
        pass
    assert time.monotonic() - start < 2


def test_a_lease_is_renewed_and_its_loss_ends_the_run(remote, monkeypatch):
    lost = []
    monkeypatch.setattr(disk, "_end", lost.append)
    lease = remote.parent / ".run.lock"
    with disk.lock(remote):
        first = bucket.generation(lease)
        until = time.monotonic() + 20
        while bucket.generation(lease) == first and time.monotonic() < until:
            time.sleep(0.1)
        bucket.put(lease, b'{"owner": "a thief"}', bucket.generation(lease))
        while not lost and time.monotonic() < until:
            time.sleep(0.1)
    assert lost == [f"{lease}: the lease was taken by a thief, this run ends"]
    assert bucket.holder(lease) == "a thief"  # which keeps it


def test_a_renewal_whose_answer_was_lost_is_no_loss(remote, monkeypatch):
    lost, put, failed = [], bucket.put, []

    def deaf(path, content, expected, **options):
        found = put(path, content, expected, **options)
        if b'"renewal": 1}' in content and not failed:
            failed.append(path)
            raise bucket.BucketError("no answer")
        return found

    monkeypatch.setattr(bucket, "put", deaf)
    monkeypatch.setattr(disk, "_end", lost.append)
    lease = remote.parent / ".run.lock"
    with disk.lock(remote):
        until = time.monotonic() + 20
        while b'"renewal": 4}' not in bucket.read(lease) and time.monotonic() < until:
            time.sleep(0.1)
    assert failed and not lost and bucket.holder(lease) == ""


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("gs://no-such-bucket/run", "run_dir: got 'gs://no-such-bucket/run', expected a bucket that exists"),
        ("gs://", "run_dir: got 'gs://', expected gs://BUCKET/FOLDER"),
        ("gs://UPPER/run", "run_dir: got 'gs://UPPER/run', expected gs://BUCKET/FOLDER"),
    ],
)
def test_a_bad_address(address, message):
    emulator.start()
    with pytest.raises(disk.AddressError, match=message):
        disk.check_address("run_dir", address)


class _Forbids(http.server.BaseHTTPRequestHandler):
    """A bucket that may be read and not written."""

    def do_GET(self):
        self._answer(200, b'{"kind": "storage#objects", "items": []}' if "/o?" in self.path else b'{"name": "b"}')

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(403, b'{"error": {"code": 403, "message": "storage.objects.create denied"}}')

    def _answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_a_bucket_that_may_not_be_written():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Forbids) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        code = "from eagle3_jax.runs import disk; disk.check_address('run_dir', 'gs://bucket/run')"
        found = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env=os.environ | {"PYTHONPATH": str(ROOT), bucket.EMULATOR: f"http://127.0.0.1:{server.server_port}"},
        )
        server.shutdown()
    expected = "AddressError: run_dir: got 'gs://bucket/run', expected a bucket that may be written with EAGLE3_JAX_C"
    assert expected in found.stderr
    assert "storage.objects.create denied" in found.stderr


def test_credentials_are_the_users_own_and_no_network_is_asked(tmp_path):
    """Without an emulator and without a file of credentials: refused at once, by name."""
    code = "from eagle3_jax.runs import disk; disk.check_address('run_dir', 'gs://bucket/run')"
    environment = {
        name: value for name, value in os.environ.items() if "GOOGLE" not in name and name != bucket.EMULATOR
    }
    for kind, message in (
        ("user", f"{bucket.CREDENTIALS}: got user without a file of credentials"),
        ("everyone", f"{bucket.CREDENTIALS}: got 'everyone', expected one of user, machine, anonymous"),
    ):
        start = time.monotonic()
        found = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env=environment | {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), bucket.CREDENTIALS: kind},
        )
        assert message in found.stderr, found.stderr
        assert time.monotonic() - start < 20


def test_a_local_folder_needs_no_client():
    code = (
        "import sys; from eagle3_jax.runs import disk, manifest; disk.path_of('x').exists(); "
        "assert not {'tensorstore', 'etils', 'fsspec', 'google'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=os.environ | {"PYTHONPATH": str(ROOT)})
