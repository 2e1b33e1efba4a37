"""The table of mutants fits the code as it is: CI draws three of them, so a stale row would fail a later commit."""

import argparse
import dataclasses
import pathlib
import re
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tools"))
import mutants

ROOT = mutants.ROOT


@pytest.mark.slow
@pytest.mark.parametrize("mutant", mutants.read(mutants.TABLE), ids=lambda mutant: mutant.name)
def test_a_mutant_s_code_and_its_test_are_there(mutant, collected):
    mutants.mutate(ROOT, mutant)
    test = mutants.locate(ROOT, mutant.test)
    cases = {case for case in collected if case.startswith(f"{test.split('::')[0]}::")}
    if cases and test.endswith("]"):
        assert test in cases


MUTANT = mutants.Mutant("a", "", "Pool.release", "free.append(page)", "free.pop()", "test_pool")
SOURCE = """\
class Pool:
    def release(self, pages):  # één
        for page in pages:
            {}

    def take(self):
        free.append(page)
"""


def package(root, sources):
    """A package of such files."""
    for file, text in sources.items():
        path = root / mutants.PACKAGE / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize("file", ["pool.py", "deep/down/pages.py"])
@pytest.mark.parametrize(
    "code", ["free.append(page)", "free.append(\n    page,  # a comment\n)", "é = free . append(page)"]
)
def test_neither_a_file_that_moves_nor_another_format_matters(tmp_path, file, code):
    source = SOURCE.format(code)
    root = package(tmp_path, {file: source, "other.py": "def release(page):\n    free.append(page)\n"})
    path, text = mutants.mutate(root, MUTANT)
    assert path == root / mutants.PACKAGE / file
    assert text == source.replace(code[code.index("free") :], "(free.pop())", 1)


@pytest.mark.parametrize("code", ["free.append(page + 1)", "free.append(page); free.append(page)"])
def test_code_that_is_not_there_once_is_an_error(tmp_path, code):
    root, times = package(tmp_path, {"pool.py": SOURCE.format(code)}), code.count("(page)")
    expected = rf"a: Pool.release \(in eagle3_jax/pool.py\): got {times} times 'free.append\(page\)', expected once"
    with pytest.raises(ValueError, match=expected):
        mutants.mutate(root, MUTANT)


def test_of_functions_of_one_name_the_code_decides(tmp_path):
    one, other = SOURCE.format("free.append(page)"), SOURCE.format("pass")
    root = package(tmp_path, {"one.py": one, "other.py": other})
    assert mutants.mutate(root, MUTANT)[0].stem == "one"
    package(tmp_path, {"other.py": one})
    with pytest.raises(ValueError, match=r"\(in eagle3_jax/one.py, eagle3_jax/other.py\): got 2 times"):
        mutants.mutate(root, MUTANT)


@pytest.mark.parametrize(
    ("old", "new", "code", "expected"),
    [
        ("a * b", "a + b", "return a * b * c", "return (a + b) * c"),
        ("held.acquire()", "pass", "held.acquire()", "pass"),
        ("return a", "return b", "return a", "return b"),
        ("a * b", "pass", "return a * b", None),
    ],
)
def test_what_takes_the_place_is_whole(tmp_path, old, new, code, expected):
    root = package(tmp_path, {"one.py": f"def f():\n    {code}\n"})
    mutant = dataclasses.replace(MUTANT, function="f", old=old, new=new)
    if expected is None:
        with pytest.raises(ValueError, match="a: got 'pass', expected Python in the place of"):
            mutants.mutate(root, mutant)
    else:
        assert mutants.mutate(root, mutant)[1] == f"def f():\n    {expected}\n"


def test_a_test_is_found_by_its_name(tmp_path):
    for name in ("test_one.py", "deep/test_two.py"):
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / name).write_text("def test_both(): pass\n")
    (tmp_path / "tests/deep/test_two.py").write_text("def test_both(): pass\ndef test_in_two(x): pass\n")
    assert mutants.locate(tmp_path, "test_in_two[a::b]") == "tests/deep/test_two.py::test_in_two[a::b]"
    assert mutants.locate(tmp_path, "test_two.py::test_both") == "tests/deep/test_two.py::test_both"
    for test, files in (("test_both", "tests/deep/test_two.py, tests/test_one.py"), ("test_none[a]", "no file")):
        with pytest.raises(ValueError, match=f"got it in {files}, expected one file"):
            mutants.locate(tmp_path, test)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([MUTANT, MUTANT], "Cannot declare ('a',) twice"),
        ([dataclasses.replace(MUTANT, new="free.append( page )")], "a changes nothing"),
        ([dataclasses.replace(MUTANT, old="if x:")], "got 'if x:', expected one expression or statement"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(tmp_path, rows, message):
    written = [f'[{x.name}]\nguarantee = ""\ncode = {[x.function, x.old, x.new]}\ntest = "{x.test}"\n' for x in rows]
    (tmp_path / "table.toml").write_text("".join(written))
    with pytest.raises(ValueError, match=re.escape(message)):
        mutants.read(tmp_path / "table.toml")


@pytest.mark.slow
def test_shares_are_the_whole_once(monkeypatch, capsys):
    """Every mutant is in one of the shares, and in no other."""
    monkeypatch.setattr(mutants, "check", lambda *_: "")
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
