"""tools/states_tau.py: a head of each form of the states, from the conversations of a run."""

import sys

import pytest
import tiny

sys.path.insert(0, str(tiny.REPOSITORY / "tools"))

import states_tau


@pytest.mark.long
def test_both_forms_are_trained_and_compared(whole_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(whole_run.config.parent)
    given = ["--config", str(whole_run.config), "--made", str(whole_run.folder), "--folder", str(tmp_path / "states")]
    states_tau.main([*given, "--seeds", "1", "--steps", "6"])
    *heads, ratio = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in heads] == ["bfloat16, seed 0", "fp8, seed 0"]
    assert 0.8 < float(ratio.removeprefix("fp8 / bfloat16: ")) < 1.25
