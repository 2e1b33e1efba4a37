"""Addresses of buckets: refused before work begins, by what is wrong with bucket or credentials."""

import http.server
import os
import pathlib
import subprocess
import sys
import threading
import time

import emulator
import pytest

from eagle3_jax.runs import disk
from eagle3_jax.runs.bucket import clients

ROOT = pathlib.Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("gs://no-such-bucket/run", "run_dir: got 'gs://no-such-bucket/run', expected a bucket that exists"),
        ("gs://", "run_dir: got 'gs://', expected gs://BUCKET/FOLDER"),
        ("gs://bucket/run#1", r"run_dir: got gs://bucket/run#1, expected a path without #"),
        ("runs/a*?\\b", r"run_dir: got .*/runs/a\*\?\\b, expected a path without \* \? \\"),
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

    def log_message(self, *_):  # pyrefly: ignore
        pass


def checked(environment: dict[str, str]) -> str:
    """What a process of its own is told of a bucket."""
    code = "from eagle3_jax.runs import disk; disk.check_address('run_dir', 'gs://bucket/run')"
    environment = environment | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment).stderr


def test_a_bucket_that_may_not_be_written():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Forbids) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        printed = checked(os.environ | {clients.EMULATOR: f"http://127.0.0.1:{server.server_port}"})
        server.shutdown()
    expected = "AddressError: run_dir: got 'gs://bucket/run', expected a bucket that may be written with EAGLE3_JAX_C"
    assert expected in printed and "storage.objects.create denied" in printed


@pytest.mark.slow
def test_credentials_are_the_users_own_and_no_network_is_asked(tmp_path):
    """Without an emulator and without a file of credentials: refused at once, by name."""
    environment = {
        name: value for name, value in os.environ.items() if "GOOGLE" not in name and name != clients.EMULATOR
    }
    for kind, message in (
        ("user", f"{clients.CREDENTIALS}: got user without a file of credentials"),
        ("everyone", f"{clients.CREDENTIALS}: got 'everyone', expected one of user, machine, anonymous"),
    ):
        start = time.monotonic()
        assert message in checked(environment | {"HOME": str(tmp_path), clients.CREDENTIALS: kind})
        assert time.monotonic() - start < 20
