"""The table of mutants fits the code as it is: CI draws three of them, so a stale row would fail a later commit."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tools"))
import mutants


@pytest.mark.slow
@pytest.mark.parametrize("mutant", mutants.read(mutants.TABLE), ids=lambda mutant: mutant.guarantee)
def test_a_mutant_s_code_and_its_test_are_there(mutant, collected):
    mutants.mutate(mutants.ROOT, mutant)
    test = mutants.locate(mutants.ROOT, mutant.test)
    cases = {case for case in collected if case.startswith(f"{test.split('::')[0]}::")}
    if cases and test.endswith("]"):
        assert test in cases
