"""Breaks the code on purpose, one line at a time, and sees that the test which guards that line fails.

    .venv/bin/python tools/mutants.py                        # all of tools/mutants.toml
    .venv/bin/python tools/mutants.py --share 1/4            # every fourth, from the first on: for four machines
    .venv/bin/python tools/mutants.py --sample 8 --seed 3    # some of them
    .venv/bin/python tools/mutants.py --name scratch-slots   # one

First all their tests run once, without a mutant. Then each mutant is applied to a temporary copy of the files that git
knows, two at a time; it must be caught by its own test. Ends with status 1 where one survives, its pattern is not there
exactly once, or its test fails anyway.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import os
import pathlib
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from xml.etree import ElementTree

HUNG = -1
ROOT = pathlib.Path(__file__).parents[1]
TABLE = ROOT / "tools/mutants.toml"
WORKERS = 2
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


def cache_of(folder: pathlib.Path) -> pathlib.Path:
    """JAX's compilation cache for what runs in this copy."""
    return folder.with_suffix(".cache")


def run_tests(folder: pathlib.Path, tests: Sequence[str], *more: str, timeout: float | None = None) -> tuple[int, str]:
    """Runs tests of the copy; pytest's exit status (1: one failed) and what it printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *more, *tests]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    # Most of what a test compiles is the same without its mutant.
    environment["JAX_COMPILATION_CACHE_DIR"] = str(cache_of(folder))
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
            # Half a file there would fail the next test with a warning, and its mutant would count as caught.
            shutil.rmtree(cache_of(folder), ignore_errors=True)
    return process.returncode, output


@dataclasses.dataclass(frozen=True)
class Sound:
    """How a test ended without any mutant: what it printed where it did not pass, and the seconds that it took."""

    problem: str
    seconds: float


def run_sound(folder: pathlib.Path, tests: Sequence[str]) -> dict[str, Sound]:
    """Runs every test once, all of them together, and says of each how it ended."""
    report = folder.parent / "sound.xml"
    named = ["-n", str(WORKERS), "--dist", "worksteal", f"--junitxml={report}", "-o", "junit_family=xunit1"]
    status, output = run_tests(folder, tests, *named)
    ended: dict[str, list[ElementTree.Element]] = collections.defaultdict(list)
    for case in ElementTree.parse(report).getroot().iter("testcase") if report.exists() else ():
        file, name = case.get("file", ""), case.get("name", "")
        for test in {file, f"{file}::{name}", f"{file}::{name.partition('[')[0]}"}:
            ended[test].append(case)
    found = {}
    for test in tests:
        problem = "" if any(not len(case) for case in ended[test]) else f"not run, status {status}\n{output[-2000:]}"
        problem = next(
            (part.text or "" for case in ended[test] for part in case if part.tag in ("failure", "error")), problem
        )
        found[test] = Sound(problem, sum(float(case.get("time") or 0) for case in ended[test]))
    return found


def check(folder: pathlib.Path, mutant: Mutant, sound: Sound) -> str:
    """What is wrong with a mutant, in one sentence; empty where its test, and nothing else, catches it."""
    if sound.problem:
        return f"{mutant.test} without the mutant: {sound.problem[-2000:]}"
    try:
        text = mutate(folder, mutant)
    except ValueError as error:
        return str(error)
    path = folder / mutant.file
    original = path.read_text()
    path.write_text(text)
    try:
        status, output = run_tests(folder, [mutant.test], "-x", timeout=120 + _SLOWER * sound.seconds)
    finally:
        path.write_text(original)
    if status == 0:
        return f"survived {mutant.test}"
    return "" if status in (1, HUNG) else f"{mutant.test}: status {status}, expected a failing test\n{output[-2000:]}"


def check_all(mutants: Sequence[Mutant]) -> int:
    """Says of each mutant what became of it. Returns how many were not caught."""
    wrong, copies = 0, queue.SimpleQueue[pathlib.Path]()
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folders = [pathlib.Path(name) / str(worker) for worker in range(WORKERS)]
        for folder in folders:
            copy(folder)
            copies.put(folder)
        start = time.monotonic()
        tests = sorted({mutant.test for mutant in mutants})
        sound = run_sound(folders[0], tests)
        for folder in folders[1:]:
            if cache_of(folders[0]).exists():
                shutil.copytree(cache_of(folders[0]), cache_of(folder))
        print(f"{len(tests)} tests without a mutant: {time.monotonic() - start:.0f} s", flush=True)

        def judge(mutant: Mutant) -> tuple[str, float]:
            folder, start = copies.get(), time.monotonic()
            try:
                return check(folder, mutant, sound[mutant.test]), time.monotonic() - start
            finally:
                copies.put(folder)

        with concurrent.futures.ThreadPoolExecutor(WORKERS) as threads:
            for number, (mutant, (problem, seconds)) in enumerate(
                zip(mutants, threads.map(judge, mutants), strict=True), start=1
            ):
                wrong += bool(problem)
                verdict = problem or f"caught by {mutant.test}"
                print(f"{number}/{len(mutants)} {mutant.name} ({seconds:.0f} s): {verdict}", flush=True)
    print(f"{len(mutants) - wrong} of {len(mutants)} caught")
    return wrong


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
    sys.exit(check_all(mutants) > 0)


if __name__ == "__main__":
    main()
