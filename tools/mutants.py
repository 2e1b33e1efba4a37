"""Mutation testing: breaks one expression at a time and checks that the test of the broken guarantee fails.

    .venv/bin/python tools/mutants.py                        # all of tools/mutants.toml
    .venv/bin/python tools/mutants.py --sample 3 --seed 3    # some of them
    .venv/bin/python tools/mutants.py --name "page is lost"  # those whose guarantee has these words

A mutant names a function, not a file, and its code is compared as syntax, so moves and reformatting need no edit. All
tests run once without mutants; then each mutant's own test must fail on a copy of the tracked files. The exit status is
1 where one does not, or a mutant does not fit the code.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import dataclasses
import functools
import itertools
import os
import pathlib
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

HUNG = -1
ROOT = pathlib.Path(__file__).parents[1]
TABLE = ROOT / "tools/mutants.toml"
PACKAGE, TESTS = "eagle3_jax", "tests"
WORKERS = 2
SECONDS = 600  # for one test; a hang counts as caught
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One wrong expression or statement of a function, by its name within its module such as `grow.children`.

    The test that must fail may have a case in brackets, and its file (`test_file.py::test_name`) if several have the
    name. It is never one marked `long`.
    """

    guarantee: str
    test: str
    function: str
    old: str
    new: str


def read(path: pathlib.Path) -> list[Mutant]:
    """Reads the table. Raises ValueError: a mutant that changes nothing."""
    table = tomllib.loads(path.read_text())
    mutants = [Mutant(guarantee, test, *code) for guarantee, row in table.items() for test, code in row.items()]
    for mutant in mutants:
        if ast.dump(_parsed(mutant.old)) == ast.dump(_parsed(mutant.new)):
            raise ValueError(f"{path}: {mutant.old!r} of {mutant.function} changes nothing")
    return mutants


def mutate(root: pathlib.Path, mutant: Mutant) -> tuple[pathlib.Path, str]:
    """Applies a mutant: returns the file and its new text. Raises ValueError: not one place, or not Python then."""
    old, new = _parsed(mutant.old), mutant.new
    wanted, functions = ast.dump(old), list(_functions(root, mutant.function))
    nodes = [(path, node) for path, function in functions for node in ast.walk(function) if type(node) is type(old)]
    found: list[tuple[pathlib.Path, Any]] = [(path, node) for path, node in nodes if ast.dump(node) == wanted]
    if len(found) != 1:
        files = ", ".join(sorted({str(path.relative_to(root)) for path, _ in functions})) or "no file"
        raise ValueError(f"{mutant.function} (in {files}): got {len(found)} times {mutant.old!r}, expected once")
    ((path, node),) = found
    if isinstance(old, ast.expr) and isinstance(_parsed(new), ast.expr):
        new = f"({new})"  # safe in any context
    source = path.read_bytes()  # columns are bytes
    starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
    text = (source[:begin] + new.encode() + source[end:]).decode()
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"got {mutant.new!r}, expected Python in the place of {mutant.old!r}") from error
    return path, text


def _functions(root: pathlib.Path, name: str) -> Iterator[tuple[pathlib.Path, ast.AST]]:
    """Yields the functions and classes of the package with this name within their module."""

    def inside(node: ast.AST, names: list[str]) -> Iterator[ast.AST]:
        if not names:
            yield node
        for child in ast.iter_child_nodes(node) if names else ():
            if not isinstance(child, _DEFINITIONS) or child.name == names[0]:
                yield from inside(child, names[isinstance(child, _DEFINITIONS) :])

    names = name.split(".")
    for path in sorted((root / PACKAGE).rglob("*.py")):
        if names[-1] in (text := path.read_text()):
            yield from ((path, node) for node in inside(_tree(text), names))


@functools.cache
def _tree(text: str) -> ast.Module:
    return ast.parse(text)


def _parsed(code: str) -> ast.expr | ast.stmt:
    """Parses one statement, or one expression. Raises ValueError: neither."""
    try:
        (statement,) = ast.parse(code).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"got {code!r}, expected one expression or statement") from error
    return statement.value if isinstance(statement, ast.Expr) else statement


def locate(root: pathlib.Path, test: str) -> str:
    """Finds the node id of a test, see `Mutant`. Raises ValueError: not in exactly one file."""
    named, bracket, case = test.partition("[")
    file, _, name = named.rpartition("::")
    found = []
    for path in sorted((root / TESTS).rglob(file or "test_*.py")):
        if any(isinstance(x, _DEFINITIONS) and x.name == name for x in _tree(path.read_text()).body):
            found.append(path.relative_to(root).as_posix())
    if len(found) != 1:
        files = ", ".join(found) or "no file"
        raise ValueError(f"{test}: got it in {files}, expected one file; 'test_file.py::{name}' says which")
    return f"{found[0]}::{name}{bracket}{case}"


def copy(folder: pathlib.Path) -> None:
    """Copies the tracked files from the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in listed.split("\0")[:-1]:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def run_tests(folder: pathlib.Path, tests: Sequence[str], *more: str, timeout: float | None = None) -> tuple[int, str]:
    """Runs tests of the copy except long ones. Returns pytest's exit status (1: a failure) and output."""
    options = ["-q", "-p", "no:cacheprovider", "--tb=short", "-m", "not long", *more]
    cache = folder.with_suffix(".cache")  # most compiled programs are the same without the mutant
    environment = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "JAX_COMPILATION_CACHE_DIR": str(cache)}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, "-m", "pytest", *options, *tests]
    process = subprocess.Popen(command, cwd=folder, env=os.environ | environment, start_new_session=True, **pipes)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        return HUNG, f"hung for {timeout:.0f} s"
    finally:
        if process.poll() is None:  # kills its children too
            os.killpg(process.pid, 9)
            process.communicate()
            # A torn cache file would fail the next test with a warning, and its mutant would count as caught.
            shutil.rmtree(cache, ignore_errors=True)
    return process.returncode, output


def check(folder: pathlib.Path, mutant: Mutant, test: str) -> str:
    """Checks one mutant. Returns the problem in one sentence; empty if its test catches it."""
    try:
        path, text = mutate(folder, mutant)
    except ValueError as error:
        return str(error)
    original = path.read_bytes()
    path.write_text(text)
    status, output = run_tests(folder, [test], "-x", timeout=SECONDS)
    path.write_bytes(original)
    if status == 0:
        return f"{mutant.old!r} -> {mutant.new!r} survived {test}"
    return "" if status in (1, HUNG) else f"{test}: status {status}, expected a failing test\n{output[-2000:]}"


def check_all(mutants: Sequence[Mutant]) -> int:
    """Checks all mutants and prints each verdict. Returns the number not caught. Raises SystemExit: a test fails."""
    begin, wrong, copies = time.monotonic(), 0, queue.SimpleQueue[pathlib.Path]()
    tests = [locate(ROOT, mutant.test) for mutant in mutants]
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        sound = pathlib.Path(name) / "sound"
        copy(sound)
        status, output = run_tests(sound, sorted(set(tests)), "-n", str(WORKERS), "--dist", "worksteal")
        if status:
            sys.exit(f"without a mutant: status {status}\n{output[-4000:]}")
        for worker in range(WORKERS):
            copies.put(folder := pathlib.Path(name) / str(worker))
            for kept in pathlib.Path(name).glob("sound*"):
                shutil.copytree(kept, folder.with_suffix(kept.suffix))
        print(f"{len(set(tests))} tests without a mutant: {time.monotonic() - begin:.0f} s", flush=True)

        def judge(mutant: Mutant, test: str) -> str:
            problem = check(folder := copies.get(), mutant, test)
            copies.put(folder)
            return problem

        with concurrent.futures.ThreadPoolExecutor(WORKERS) as threads:
            judged = zip(mutants, tests, threads.map(judge, mutants, tests), strict=True)
            for number, (mutant, test, problem) in enumerate(judged, start=1):
                wrong += bool(problem)
                print(f"{number}/{len(mutants)} {mutant.guarantee} {problem or f'Caught by {test}'}", flush=True)
    print(f"{len(mutants) - wrong} of {len(mutants)} caught in {time.monotonic() - begin:.0f} s")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, help="how many, drawn at random; all of them without it")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--name", help="only those whose guarantee has these words")
    arguments = parser.parse_args()
    mutants = [mutant for mutant in read(TABLE) if (arguments.name or "") in mutant.guarantee]
    if not mutants:
        parser.error(f"--name: got {arguments.name!r}, expected words of a guarantee of {TABLE.name}")
    if arguments.sample is not None:
        mutants = random.Random(arguments.seed).sample(mutants, min(arguments.sample, len(mutants)))
    sys.exit(check_all(mutants) > 0)


if __name__ == "__main__":
    main()
