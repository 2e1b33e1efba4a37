"""The first thing that a newcomer sees: the same answer twice, and which of its tokens were drafted."""

import pathlib
import re
import sys

import pytest
import tiny

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tools"))
import hello

from eagle3_jax.acceptance import AcceptanceCounts
from eagle3_jax.config import TargetConfig
from eagle3_jax.models.checkpoint.fetch import load_target

TOKENIZER = tiny.make_tokenizer()


def streamed(ids: list[int], rounds: int, accepted: int, drafted: int, seconds: float) -> hello.Streamed:
    return hello.Streamed(ids, AcceptanceCounts(rounds, [accepted]), drafted, seconds)


def test_the_table_adds_up():
    plain, fast = streamed([1] * 40, 39, 0, 0, 2.0), streamed([1] * 40, 19, 21, 20, 1.0)
    other = streamed([2] * 10, 9, 0, 0, 0.5)
    rows = [line.split() for line in hello.table([("a", plain, fast), ("b", other, other)]).splitlines()[2:]]
    assert rows[0] == ["a", "20.0", "40.0", "2.00x", "2.11", "50%", "yes"]
    assert rows[1] == ["b", "20.0", "20.0", "1.00x", "1.00", "0%", "yes"]
    assert rows[2] == ["all", "20.0", "33.3", "1.67x", "1.75", "40%", "yes"]
    assert " NO" in hello.table([("a", plain, streamed([1] * 39, 19, 21, 20, 1.0))])


@pytest.mark.slow
def test_answers_are_streamed_twice_and_compared(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hello, "MAX_TOKENS", 24)
    monkeypatch.setattr(hello, "TURNS", 2)
    monkeypatch.setattr(hello, "PROMPTS", {name: hello.PROMPTS[name] for name in ("list", "chat")})
    warm_up, stream, order = hello.Engine.warm_up, hello.stream, []

    def note(engine, *rest, **options):
        order.append(engine.draft is None and len(engine.tiers.tiers) == 1)
        return stream(engine, *rest, **options)

    monkeypatch.setattr(hello, "stream", note)

    def warm_up_and_draft(engine, **options):  # a model this small gains nothing: it would not
        warm_up(engine, **options)
        engine.tiers.pinned = engine.tiers.default

    monkeypatch.setattr(hello.Engine, "warm_up", warm_up_and_draft)
    folder = tiny.write_target(tmp_path)
    hello.run(load_target(TargetConfig(name=str(folder), aux_layers=(1, 2, 3))), "lookup", colours=False)
    printed = capsys.readouterr().out
    answers = re.findall(r"-- without drafts\n(.*?)\n\n-- with drafts[^\n]*\n(.*?)\n\n", printed, re.DOTALL)
    assert len(answers) == len(hello.PROMPTS)
    assert order == [True, False, False, True] * len(hello.PROMPTS), "turns"
    for plain, marked in answers:
        assert re.sub(r"[][]", "", marked) == re.sub(r"[][]", "", plain)
    assert any("[" in marked and "]" in marked for _, marked in answers)
    end = printed.splitlines().index(f"Medians of {hello.TURNS} turns.")
    rows = [line.split() for line in printed.splitlines()[end - len(hello.PROMPTS) - 1 : end]]
    assert [row[0] for row in rows] == [*hello.PROMPTS, "all"]
    assert all(row[-1] == "yes" for row in rows)


def test_a_tpu_that_jax_does_not_see_is_refused(monkeypatch):
    assert hello.where() == hello.machine.hardware()["cpu"]
    monkeypatch.setattr(hello.machine, "has_tpu", lambda: True)
    with pytest.raises(ValueError, match="got a CPU, expected this machine's TPU"):
        hello.where()
