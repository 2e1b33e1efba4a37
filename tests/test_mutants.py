"""The table of mutants fits the code as it is: CI draws three of them, so a stale row would fail a later commit."""

import argparse
import ast
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tools"))
import mutants

ROOT = mutants.ROOT


def functions(path):
    return {x.name for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.FunctionDef)}


@pytest.mark.parametrize("mutant", mutants.read(mutants.TABLE), ids=lambda mutant: mutant.name)
def test_a_mutant_s_line_and_its_test_are_there(mutant, collected):
    mutants.mutate(ROOT, mutant)
    path, *names = mutant.test.split("[")[0].split("::")
    assert (ROOT / path).is_file()
    assert set(names) <= functions(ROOT / path)
    cases = {case for case in collected if case.startswith(f"{path}::")}
    if cases and mutant.test.endswith("]"):
        assert mutant.test in cases


def test_shares_are_the_whole_once(monkeypatch, capsys):
    """Every mutant is in one of the shares, and in no other."""
    monkeypatch.setattr(mutants, "check", lambda folder, mutant, sound: "")
    monkeypatch.setattr(mutants, "copy", lambda folder: None)
    monkeypatch.setattr(mutants, "run_sound", lambda folder, tests: dict.fromkeys(tests))
    shown = []
    for share in ("1/3", "2/3", "3/3"):
        monkeypatch.setattr(sys, "argv", ["mutants.py", "--share", share])
        with pytest.raises(SystemExit) as ended:
            mutants.main()
        assert not ended.value.code
        shown += [line.split()[1] for line in capsys.readouterr().out.splitlines() if "caught by" in line]
    assert sorted(shown) == sorted(mutant.name for mutant in mutants.read(mutants.TABLE))


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "1/0", "a/b"])
def test_a_share_is_a_part_of_a_whole(text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"got '{text}', expected I/N"):
        mutants.read_share(text)


@pytest.mark.slow
def test_a_whole_file_a_test_and_one_case_of_it_are_told_apart(tmp_path):
    folder = tmp_path / "0"
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_one.py").write_text(
        "import pytest\n"
        "def test_sound(): pass\n"
        "@pytest.mark.parametrize('x', [0, 1])\n"
        "def test_in_part(x): assert x\n"
        "def test_skipped(): pytest.skip()\n"
    )
    (folder / "test_two.py").write_text("def test_sound(): pass\n")
    one = ["test_sound", "test_in_part", "test_in_part[0]", "test_in_part[1]", "test_skipped"]
    sound = mutants.run_sound(folder, ["test_one.py", *(f"test_one.py::{name}" for name in one), "test_two.py"])
    assert [test for test, found in sound.items() if not found.problem] == [
        "test_one.py::test_sound",
        "test_one.py::test_in_part[1]",
        "test_two.py",
    ]
    assert "not run" in sound["test_one.py::test_skipped"].problem
