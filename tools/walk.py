"""Walks through README.md as a newcomer does: an empty clone, an empty cache, its lines in their order.

    .venv/bin/python tools/walk.py             # half an hour on two cores; needs a package index
    .venv/bin/python tools/walk.py --keep DIR  # walks in this new folder, and leaves it

Each line must succeed, print something every 20 seconds (pip is its own affair), and show no traceback. A server's line
starts it, the next line asks it, Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parents[1]
SILENCE = 20.0  # seconds
NEVER = "Traceback (most recent call last)"
_STDIN = {"chat": "What is a program?\nAnd a function?\n"}  # to what reads lines
_LATER = r"tools/quickstart\.sh"  # takes 20 minutes; test_readme.py runs a short one
_STARTED = 900.0  # seconds


class Stumble(Exception):
    """A line that failed, was silent, or showed what a newcomer must not see."""


class Step:
    """A command that runs as in a newcomer's shell, without a terminal; `silence`: most seconds without output."""

    def __init__(self, words: Sequence[str], folder: pathlib.Path, *, stdin: str = "", silence: float | None = SILENCE):
        ours = ("PYTHONPATH", "XLA_FLAGS", "JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR", "TF_CPP_MIN_LOG_LEVEL", "VENV")
        environment = {name: value for name, value in os.environ.items() if name not in ours}
        environment |= {"EAGLE3_JAX_CACHE": str(folder / "cache"), "PYTHONUNBUFFERED": "1"}
        self._output, output = os.pipe()
        given = tempfile.TemporaryFile()
        given.write(stdin.encode())
        given.seek(0)
        with given, open(output, "wb") as end:
            pipes = {"stdin": given, "stdout": end, "stderr": end}
            self.process = subprocess.Popen(words, cwd=folder, env=environment, **pipes)
        self.line, self.silence = words[-1], silence

    def finish(self) -> str:
        """Waits for the end, and returns the output. Raises Stumble."""
        output, problem, piece = b"", "", b"-"
        while piece and not problem:
            if select.select([self._output], [], [], self.silence)[0]:
                output += (piece := os.read(self._output, 1 << 16))  # a bar or a stream has no end of line
            else:
                problem = f"silent for {self.silence:.0f} s after"
                self.process.kill()
        os.close(self._output)
        ended, text = self.process.wait(), output.decode(errors="replace")
        problem = problem or (f"shows {NEVER!r}" if NEVER in text else f"status {ended}, expected 0" if ended else "")
        if problem:
            raise Stumble(f"{self.line}: {problem}\n{text[-3000:]}")
        return text


def blocks(text: str) -> list[tuple[str, str]]:
    """Returns README's code in its order: ("shell", a line) or ("python", a block)."""
    found: list[tuple[str, str]] = []
    code = r"^```python\n(.*?)^```|(?<=\n\n)((?:    [^\n]*\n)+)"
    for python, shell in re.findall(code, text, re.MULTILINE | re.DOTALL):
        if python:
            found.append(("python", python))
        elif " -> " not in shell and not re.match(r" *\w+/\n", shell):  # a diagram, the code map
            lines = shell.replace("\\\n", " ").splitlines()
            found += [("shell", line.strip()) for line in lines if not re.search(_LATER, line)]
    return found


def serve(line: str, curl: str, folder: pathlib.Path) -> None:
    """Starts the server, asks it, and ends it by Ctrl-C."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    server = Step(["bash", "-c", f"exec {line} --port {port}"], folder)
    try:
        health = ["curl", "--fail", "--silent", "--max-time", "5", f"http://127.0.0.1:{port}/health"]
        end = time.monotonic() + _STARTED
        while subprocess.run(health, stdout=subprocess.DEVNULL).returncode:
            if time.monotonic() > end or server.process.poll() is not None:
                raise Stumble(f"{line}: does not answer\n{server.finish()}")
            time.sleep(1)
        answer = Step(["bash", "-c", curl.replace(":8000", f":{port}")], folder).finish()
        if '"finish_reason"' not in answer or len(answer) > 2000:
            raise Stumble(f"{curl}: not an answer on a screen\n{answer}")
    finally:
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGINT)
    server.silence = None  # it answers what was begun
    server.finish()


def walk(folder: pathlib.Path) -> None:
    """Walks in a new folder. Raises Stumble."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    begin, steps = time.monotonic(), blocks((folder / "README.md").read_text())
    while steps:
        kind, code = steps.pop(0)
        print(f"{time.monotonic() - begin:6.0f} s  {code.splitlines()[0]}", flush=True)
        if kind == "python":
            Step([".venv/bin/python", "-c", code], folder).finish()
        elif "eagle3_jax.serve " in code:
            serve(code, steps.pop(0)[1], folder)
        else:
            stdin = next((text for word, text in _STDIN.items() if code.endswith(f" {word}")), "")
            alone = "pip install" in code or "-m venv" in code
            Step(["bash", "-c", code], folder, stdin=stdin, silence=None if alone else SILENCE).finish()
    print(f"{time.monotonic() - begin:6.0f} s  done", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keep", metavar="DIR", type=pathlib.Path, help="walk in this new folder, and leave it")
    kept = parser.parse_args().keep
    try:
        with tempfile.TemporaryDirectory() as scratch:
            walk(kept or pathlib.Path(scratch) / "clone")
    except Stumble as stumble:
        sys.exit(str(stumble))


if __name__ == "__main__":
    main()
