"""The quickstart's work follows the machine: what fits, or the least that shows something, and in a rerun the same."""

import dataclasses
import json
import operator
import pathlib
import sys
from typing import Any

import hypothesis
import pytest
import tiny
from hypothesis import strategies

from eagle3_jax.config import RunConfig, run_file

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tools"))
import quickstart_size
from quickstart_size import Rates

CONFIG = run_file.load(pathlib.Path(__file__).parents[1] / "configs/quickstart.yaml")
FAST = Rates(reading=2000.0, answering=900.0, step=0.3)
MACHINES = strategies.builds(
    Rates,
    reading=strategies.floats(1, 1e5),
    answering=strategies.floats(1, 1e5),
    step=strategies.floats(1e-3, 100),
)


def slower(rates: Rates, times: float) -> Rates:
    return Rates(rates.reading / times, rates.answering / times, rates.step * times)


def work(config: RunConfig) -> tuple[object, object, object]:
    sources: Any = config.prepare.sources
    packaged, written = sources
    return packaged.limit, written.count, config.evaluate.limit


def test_a_fast_machine_does_all_of_it_and_a_slow_one_the_least():
    assert quickstart_size.choose(FAST, spent=60) == 100
    assert quickstart_size.choose(slower(FAST, 50), spent=60) == quickstart_size.LEAST
    assert work(quickstart_size.cut(CONFIG, 100)) == (520, 60, 15) == work(CONFIG)
    assert work(quickstart_size.cut(CONFIG, quickstart_size.LEAST)) == (52, 6, 6)


@hypothesis.given(MACHINES, strategies.floats(0, 3600))
def test_what_is_chosen_fits_or_is_the_least(rates, spent):
    percent = quickstart_size.choose(rates, spent)
    assert 10 <= percent <= 100
    if percent > 10:  # the rest of the 20 minutes is reserve
        assert spent + quickstart_size.seconds(percent, rates) <= 18 * 60


def test_the_choice_is_kept_for_a_rerun(tmp_path, monkeypatch):
    config, written = tmp_path / "quickstart.yaml", tmp_path / "run/config.yaml"
    config.write_text(json.dumps(run_file.to_dict(dataclasses.replace(CONFIG, run_dir=str(tmp_path / "run")))))
    monkeypatch.setattr(quickstart_size, "measure", lambda config: slower(FAST, 3.5))
    first = quickstart_size.prepare(config, spent=60)
    chosen: Any = run_file.load(written)
    assert 52 < (count := chosen.prepare.sources[0].limit) < 520
    assert f"{round(count / 5.2)} % of the prompts" in first
    # Nothing but the number of prompts is another one.
    both = (run_file.to_dict(x) | {"prepare": None, "evaluate": None} for x in (chosen, run_file.load(config)))
    assert operator.eq(*both)
    monkeypatch.setattr(quickstart_size, "measure", lambda config: pytest.fail("measured again"))
    written.unlink()
    assert "as chosen before" in quickstart_size.prepare(config, spent=5000)
    assert run_file.load(written) == chosen


@pytest.mark.long
def test_the_machine_is_measured_by_the_project_s_own_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {"batch_size": 4, "max_length": 128, "max_tokens": 8, "temperature": 0.5}
    run = run_file.load(tiny.write_run(tmp_path, regenerate=sizes, train={"batch_size": 1, "row_length": 128}))
    rates = quickstart_size.measure(run)
    assert min(rates) > 0
    assert rates.step < 60
