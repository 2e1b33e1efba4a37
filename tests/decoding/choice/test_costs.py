"""Costs of rounds: kept by machine and models, measured again where what was kept is of no use."""

import threading
import time

import pytest

from eagle3_jax.decoding.choice import costs
from eagle3_jax.decoding.choice.costs import Costs

KEY = {"hardware": {"cpu": "a"}, "tiers": ["vanilla", "chain 3"]}
FIRST = Costs({"vanilla": 0.25, "chain 3": 0.5}, 0.125)
SECOND = Costs({"vanilla": 1.0, "chain 3": 2.0}, 3.0)


def never() -> Costs:
    raise AssertionError("measured again")


def test_they_are_measured_once_for_a_key(tmp_path):
    folder = tmp_path / "new" / "folder"
    assert costs.kept_or_measured(folder, KEY, lambda: FIRST) == FIRST
    assert costs.kept_or_measured(folder, KEY, never) == FIRST
    other = {**KEY, "hardware": {"cpu": "b"}}
    assert costs.kept_or_measured(folder, other, lambda: SECOND) == SECOND
    assert costs.kept_or_measured(folder, KEY, never) == FIRST
    assert costs.kept_or_measured(None, KEY, lambda: SECOND) == SECOND


def test_of_two_replicas_at_once_one_measures_and_the_other_finds_it_kept(tmp_path):
    begun = threading.Event()

    def slowly() -> Costs:
        begun.set()
        time.sleep(0.05)
        return FIRST

    thread = threading.Thread(target=costs.kept_or_measured, args=(tmp_path, KEY, slowly))
    thread.start()
    assert begun.wait(30)
    assert costs.kept_or_measured(tmp_path, KEY, never) == FIRST
    thread.join()


@pytest.mark.parametrize(
    "damage",
    [
        *("", "{", "[]", '{"of": {}, "costs": {}}'),
        *('{"costs": {"rounds": {"vanilla": 1}, "waking": 0}}', '{"costs": {"rounds": null, "waking": 0}}'),
    ],
)
def test_what_is_damaged_is_measured_again(tmp_path, damage):
    costs.kept_or_measured(tmp_path, KEY, lambda: FIRST)
    (file,) = tmp_path.iterdir()
    file.write_text(damage)
    assert costs.kept_or_measured(tmp_path, KEY, lambda: SECOND) == SECOND
    assert costs.kept_or_measured(tmp_path, KEY, never) == SECOND


def test_a_folder_that_cannot_be_written_costs_the_next_start_alone(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "programs"
    with pytest.warns(UserWarning, match=rf"{folder}: Not a directory, so the next start measures again"):
        assert costs.kept_or_measured(folder, KEY, lambda: FIRST) == FIRST
