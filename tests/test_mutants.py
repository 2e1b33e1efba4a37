"""The table of mutants fits the code as it is: CI draws three of them, so a stale row would fail a later commit."""

import ast
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tools"))
import mutants

ROOT = mutants.ROOT
pytestmark = pytest.mark.any_jax


def functions(path):
    return {x.name for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.FunctionDef)}


@pytest.mark.parametrize("mutant", mutants.read(mutants.TABLE), ids=lambda mutant: mutant.name)
def test_a_mutant_s_line_and_its_test_are_there(mutant):
    mutants.mutate(ROOT, mutant)
    path, *names = mutant.test.split("[")[0].split("::")
    assert (ROOT / path).is_file()
    assert set(names) <= functions(ROOT / path)
