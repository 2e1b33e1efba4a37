"""Lists the test files that a change can reach, by imports: `tools/test.sh fast` runs them.

    .venv/bin/python tools/affected.py            # what differs from the branch main; on main, its last commit
    .venv/bin/python tools/affected.py v0.1.0     # what differs from another commit

A change reaches a test file by what it and its conftests import, at any remove, by the verbs that it starts, and by the
files that it names. What all tests stand on, such as pyproject.toml, reaches all of them.
"""

from __future__ import annotations

import ast
import functools
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = "eagle3_jax"
FOR_ALL = re.compile(r"pyproject\.toml|requirements/|tests/(conftest|array_annotations|compilation_cache|started/)")


def changed(base: str | None) -> list[str]:
    """Names the files that differ from a commit, also those that git does not know yet."""

    def git(*words: str) -> list[str]:
        return subprocess.run(["git", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.split()

    named = git("diff", "--name-only", base or "main") or (git("diff", "--name-only", "HEAD~1") if base is None else [])
    return [*named, *git("ls-files", "--others", "--exclude-standard")]


class Checkout:
    """The Python files of a checkout, by the names that they are imported by, and the tests above them."""

    def __init__(self, root: pathlib.Path) -> None:
        self._root = root
        self.tests = sorted((root / "tests").rglob("test_*.py"))
        scripts = [path for part in ("examples", "tools", "tests") for path in (root / part).rglob("*.py")]
        self._files = {path.stem: path for path in scripts}
        for start, part in ((root / "tools", "."), (root, PACKAGE)):
            for path in (start / part).rglob("*.py"):
                name = ".".join(path.relative_to(start).with_suffix("").parts)
                self._files[name.removesuffix(".__init__")] = path
        self._verbs = {path.parent.name: path for path in (root / PACKAGE).glob("*/__main__.py")}

    def reached(self, names: Iterable[str]) -> list[str]:
        """Lists the test files that a change of these files reaches; names are relative to the checkout."""
        names = list(names)
        every = any(map(FOR_ALL.match, names))
        found = [test for test in self.tests if every or any(self._reaches(name, test) for name in names)]
        return [test.relative_to(self._root).as_posix() for test in found]

    def _reaches(self, name: str, test: pathlib.Path) -> bool:
        path, below = self._root / name, self._below(test)
        if path.suffix == ".py":
            return path in below
        if name.startswith(f"{PACKAGE}/"):  # data beside a module
            return any(path.parent == file.parent for file in below)
        # Read by its name, or with all of its folder.
        words = [path.name, *(folder for folder in ("docs", "configs", "notebooks") if name.startswith(f"{folder}/"))]
        readers = [file for file in below if file.name.startswith("test_") or file.is_relative_to(self._root / "tools")]
        return any(word in file.read_text() for file in readers for word in words)

    @functools.cache  # noqa: B019
    def _below(self, test: pathlib.Path) -> frozenset[pathlib.Path]:
        """Returns a test file and all files below it."""
        folders = [folder for folder in test.parents if self._root / "tests" in folder.parents]
        waiting, found = [test, *(folder / "conftest.py" for folder in folders)], set()
        while waiting:
            if (path := waiting.pop()) not in found and path.exists():
                found.add(path)
                waiting += self._named(path)
        return frozenset(found)

    @functools.cache  # noqa: B019
    def _named(self, path: pathlib.Path) -> list[pathlib.Path]:
        """Returns the files that one imports; of a test, also those that it names and the verbs that it starts."""
        words, strings = set[str](), set[str]()
        text, is_test = path.read_text(), path.name.startswith(("test_", "conftest"))
        lazy = path == self._root / PACKAGE / "__init__.py"  # public names have their modules as strings
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                words |= {alias.name for alias in node.names if is_test or alias.name != PACKAGE}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                words |= {name if name in self._files else node.module for name in names}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and (is_test or lazy):
                strings.add(node.value)
                words |= set(re.findall(rf"{PACKAGE}(?:\.\w+)+", node.value))
                words |= {pathlib.PurePath(tool).stem for tool in re.findall(r"tools/[\w/]+\.py", node.value)}
        words |= strings if "import_module" in text else set()
        verbs = self._verbs if "whole_run" in text else strings if re.search("run_verb|verb_in", text) else ()
        found = [self._files[word] for word in words if word in self._files]
        return found + [self._verbs[verb] for verb in verbs if is_test and verb in self._verbs]


if __name__ == "__main__":
    for file in Checkout(ROOT).reached(changed(*sys.argv[1:2] or [None])):
        print(file)
