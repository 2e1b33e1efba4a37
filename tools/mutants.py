"""Breaks the code on purpose, one line at a time, and sees that the test which guards that line fails.

    .venv/bin/python tools/mutants.py                        # all of tools/mutants.toml: 127 took an hour on 2 cores
    .venv/bin/python tools/mutants.py --share 1/4            # every fourth, from the first on: for four machines
    .venv/bin/python tools/mutants.py --sample 8 --seed 3    # some of them
    .venv/bin/python tools/mutants.py --name scratch-slots   # one

Each mutant is applied to a temporary copy of the files that git knows. It must be caught by its own test, which must
pass without it. Ends with status 1 where one survives, its pattern is not there exactly once, or its test fails anyway.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib

HUNG = -1
ROOT = pathlib.Path(__file__).parents[1]
TABLE = ROOT / "tools/mutants.toml"
TIMEOUT = 900  # seconds for a test without its mutant
_SLOWER = 4  # a mutant whose test takes so many times as long, and two minutes, hangs: that counts as caught


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One wrong line: in `file`, `old` becomes `new`; `test` (a pytest node id) must then fail."""

    name: str
    file: str
    old: str
    new: str
    test: str


def read(path: pathlib.Path) -> list[Mutant]:
    """The table. Raises ValueError for a name that is there twice or a mutant that changes nothing."""
    mutants = [Mutant(**row) for row in tomllib.loads(path.read_text())["mutant"]]
    for i, mutant in enumerate(mutants):
        if mutant.name in [other.name for other in mutants[:i]]:
            raise ValueError(f"{path}: {mutant.name} is there twice")
        if mutant.old == mutant.new:
            raise ValueError(f"{path}: {mutant.name} changes nothing")
    return mutants


def mutate(root: pathlib.Path, mutant: Mutant) -> str:
    """The file's text with the mutant in it. Raises ValueError where its pattern is not there exactly once."""
    path = root / mutant.file
    text = path.read_text() if path.is_file() else ""
    if (found := text.count(mutant.old)) != 1:
        raise ValueError(f"{mutant.name}: {mutant.file}: got {found} times {mutant.old!r}, expected once")
    return text.replace(mutant.old, mutant.new)


def read_share(text: str) -> tuple[int, int]:
    """The two numbers of "2/4". Raises ArgumentTypeError: no part of a whole."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected I/N with I from 1 to N")
    return int(match[1]), int(match[2])


def copy(folder: pathlib.Path) -> None:
    """Copies the files that git knows, as they are in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def run_test(folder: pathlib.Path, test: str, timeout: float) -> tuple[int, str]:
    """Runs one test in the copy; pytest's exit status (1: it failed) and what it printed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=short", test]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        return HUNG, f"hung for {timeout:.0f} s"
    finally:
        if process.poll() is None:  # its own children with it
            os.killpg(process.pid, 9)
            process.communicate()
    return process.returncode, output


def check(folder: pathlib.Path, mutant: Mutant, sound: dict[str, tuple[str, float]]) -> str:
    """What is wrong with a mutant, in one sentence; empty where its test, and nothing else, catches it.

    Args:
        sound: test -> what was wrong with it before any mutant, and the seconds it took; filled in here.
    """
    try:
        text = mutate(folder, mutant)
    except ValueError as error:
        return str(error)
    if mutant.test not in sound:
        start = time.monotonic()
        status, output = run_test(folder, mutant.test, TIMEOUT)
        problem = "" if status == 0 else f"status {status} without the mutant\n{output[-2000:]}"
        sound[mutant.test] = problem, time.monotonic() - start
    problem, seconds = sound[mutant.test]
    if problem:
        return f"{mutant.test}: {problem}"
    path = folder / mutant.file
    original = path.read_text()
    path.write_text(text)
    try:
        status, output = run_test(folder, mutant.test, 120 + _SLOWER * seconds)
    finally:
        path.write_text(original)
    if status == 0:
        return f"survived {mutant.test}"
    return "" if status in (1, HUNG) else f"{mutant.test}: status {status}, expected a failing test\n{output[-2000:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, help="how many, drawn at random; all of them without it")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--share", type=read_share, default=(1, 1), help="I/N: the I-th of N parts, from 1")
    parser.add_argument("--name", action="append", help="only this one; may be given several times")
    arguments = parser.parse_args()
    mutants = read(TABLE)
    if arguments.name:
        unknown = set(arguments.name) - {mutant.name for mutant in mutants}
        if unknown:
            parser.error(f"--name: got {', '.join(sorted(unknown))}, expected names of {TABLE.name}")
        mutants = [mutant for mutant in mutants if mutant.name in arguments.name]
    if arguments.sample is not None:
        mutants = random.Random(arguments.seed).sample(mutants, min(arguments.sample, len(mutants)))
    part, parts = arguments.share
    mutants = mutants[part - 1 :: parts]
    wrong = 0
    sound: dict[str, tuple[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = pathlib.Path(name)
        copy(folder)
        for number, mutant in enumerate(mutants, start=1):
            start = time.monotonic()
            problem = check(folder, mutant, sound)
            wrong += bool(problem)
            verdict = problem or f"caught by {mutant.test}"
            print(f"{number}/{len(mutants)} {mutant.name} ({time.monotonic() - start:.0f} s): {verdict}", flush=True)
    print(f"{len(mutants) - wrong} of {len(mutants)} caught")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
