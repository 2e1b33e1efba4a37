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
    return sum(quickstart_size.seconds(work, rates, CONFIG).values()) / 60


def test_a_fast_machine_does_all_of_it_and_a_slow_one_the_least():
    assert quickstart_size.choose(FAST, CONFIG, spent=60) == WHOLE == Work(520, 60, 15)
    assert quickstart_size.choose(slower(FAST, 50), CONFIG, spent=60) == LEAST


@hypothesis.given(MACHINES, strategies.floats(0, 3600))
def test_what_is_chosen_fits_or_is_the_least(rates, spent):
    work = quickstart_size.choose(rates, CONFIG, spent)
    for chosen, least, most in zip(*map(dataclasses.astuple, (work, LEAST, WHOLE)), strict=True):
        assert least <= chosen <= most
    if work != LEAST:
        assert spent / 60 + minutes(work, rates) <= 18  # the rest of the 20 is reserve


@hypothesis.given(MACHINES, strategies.floats(0, 1200), strategies.floats(1, 4), strategies.floats(0, 600))
def test_a_slower_machine_or_a_later_start_never_means_more_work(rates, spent, times, later):
    most = dataclasses.astuple(quickstart_size.choose(rates, CONFIG, spent))
    for work in (
        quickstart_size.choose(slower(rates, times), CONFIG, spent),
        quickstart_size.choose(rates, CONFIG, spent + later),
    ):
        assert all(a <= b for a, b in zip(dataclasses.astuple(work), most, strict=True))


def test_each_part_of_the_work_goes_by_the_rate_that_it_needs():
    def parts(**change: float) -> dict[str, float]:
        return quickstart_size.seconds(WHOLE, dataclasses.replace(FAST, **change), CONFIG)

    base = parts()
    changed = {
        field: {name for name, taken in parts(**{field: 2 * getattr(FAST, field)}).items() if taken != base[name]}
        for field in ("reading", "answering", "step")
    }
    assert changed == {
        "reading": {"regenerate", "extract"},
        "answering": {"prepare", "regenerate", "evaluate"},
        "step": {"starting", "train"},
    }
    # 580 prompts of 95 tokens and their answers of 112, 8 % held out, 5 % padding, 6 epochs of 2 rows of 512 tokens.
    assert base["train"] == pytest.approx(580 * (95 + 112) * 0.92 * 1.05 * 6 / (2 * 512) * 0.3, rel=0.01)


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


def test_another_config_than_the_quickstart_s_is_refused(config, tmp_path, capsys):
    bad = tmp_path / "bad.yaml"
    bad.write_text(json.dumps(json.loads(config.read_text()) | {"prepare": {}}))
    with pytest.raises(SystemExit, match="expected the limits of the quickstart"):
        quickstart_size.main([str(bad)])
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_the_machine_is_measured_by_the_project_s_own_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {"batch_size": 4, "max_length": 128, "max_tokens": 8, "temperature": 0.5}
    run = run_file.load(tiny.write_run(tmp_path, regenerate=sizes, train={"batch_size": 1, "row_length": 128}))
    rates = quickstart_size.measure(run)
    assert min(dataclasses.astuple(rates)) > 0
    assert rates.step < 60
