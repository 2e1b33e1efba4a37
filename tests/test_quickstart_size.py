"""The quickstart's work follows the machine: what fits, or the least that shows something, and in a rerun the same."""

import dataclasses
import json
import pathlib
import sys

import hypothesis
import pytest
import tiny
from hypothesis import strategies

from eagle3_jax.config import run_file

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tools"))
import quickstart_size
from quickstart_size import Rates, Work

CONFIG = run_file.load(pathlib.Path(__file__).parents[1] / "configs/quickstart.yaml")
WHOLE = quickstart_size.full(CONFIG)
LEAST = Work(52, 6, 6)
FAST = Rates(reading=2000.0, answering=900.0, step=0.3, prompt_tokens=95.0)
MACHINES = strategies.builds(
    Rates,
    reading=strategies.floats(1, 1e5),
    answering=strategies.floats(1, 1e5),
    step=strategies.floats(1e-3, 100),
    prompt_tokens=strategies.floats(10, 400),
)


def slower(rates: Rates, times: float) -> Rates:
    return Rates(rates.reading / times, rates.answering / times, rates.step * times, rates.prompt_tokens)


def minutes(work: Work, rates: Rates) -> float:
    return quickstart_size.seconds(work, rates, CONFIG) / 60


def test_a_fast_machine_does_all_of_it_and_a_slow_one_the_least():
    assert quickstart_size.choose(FAST, CONFIG, spent=60) == WHOLE == Work(520, 60, 15)
    assert quickstart_size.choose(slower(FAST, 50), CONFIG, spent=60) == LEAST


@hypothesis.given(MACHINES, strategies.floats(0, 3600))
def test_what_is_chosen_fits_or_is_the_least(rates, spent):
    work = quickstart_size.choose(rates, CONFIG, spent)
    for chosen, least, most in zip(work, LEAST, WHOLE, strict=True):
        assert least <= chosen <= most
    if work != LEAST:
        assert spent / 60 + minutes(work, rates) <= 18  # the rest of the 20 is reserve


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A YAML whose run lies in a folder of the test, on a machine that is measured as half as fast as is enough."""
    path = tmp_path / "quickstart.yaml"
    given = run_file.to_dict(dataclasses.replace(CONFIG, run_dir=str(tmp_path / "run")))
    path.write_text(json.dumps(given))
    monkeypatch.setattr(quickstart_size, "measure", lambda config: slower(FAST, 3.5))
    return path


def test_the_choice_is_kept_for_a_rerun(config, tmp_path, monkeypatch):
    first = quickstart_size.prepare(config, spent=60)
    chosen = run_file.load(tmp_path / "run/config.yaml")
    work = quickstart_size.full(chosen)
    assert LEAST.packaged < work.packaged < WHOLE.packaged
    assert "cut to the machine" in first and f"{work.packaged} of 520 packaged prompts" in first
    # Nothing but the number of prompts is another one.
    assert quickstart_size.cut(chosen, WHOLE) == run_file.load(config)
    monkeypatch.setattr(quickstart_size, "measure", lambda config: pytest.fail("measured again"))
    (tmp_path / "run/config.yaml").unlink()
    again = quickstart_size.prepare(config, spent=5000)
    assert run_file.load(tmp_path / "run/config.yaml") == chosen
    assert "as chosen before" in again and f"{work.packaged} of 520 packaged prompts" in again


@pytest.mark.long
def test_the_machine_is_measured_by_the_project_s_own_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {"batch_size": 4, "max_length": 128, "max_tokens": 8, "temperature": 0.5}
    run = run_file.load(tiny.write_run(tmp_path, regenerate=sizes, train={"batch_size": 1, "row_length": 128}))
    rates = quickstart_size.measure(run)
    assert min(rates) > 0
    assert rates.step < 60
