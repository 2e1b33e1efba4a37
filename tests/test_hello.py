"""The first thing that a newcomer sees: the same answer twice, and which of its tokens were drafted."""

import dataclasses
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


def test_the_table_adds_up(monkeypatch):
    monkeypatch.setattr(hello, "PROMPTS", ("a", "b"))
    plain = [streamed([1] * 40, 39, 0, 0, 2.0), streamed([2] * 10, 9, 0, 0, 0.5)]
    fast = [streamed([1] * 40, 19, 21, 20, 1.0), streamed([2] * 10, 9, 0, 0, 0.5)]
    slow = [dataclasses.replace(x, seconds=9.0) for x in fast]
    turns = {hello.PLAIN: [plain], "chain 3": [slow, fast, fast]}
    *rows, last = hello.table({"4 bits": turns, "float32": {hello.PLAIN: [plain]}}).splitlines()[2:]
    assert [re.split(r"\s{2,}", row.strip()) for row in rows] == [
        ["4 bits", "without drafts", "20.0", "1.00x", "1.00", "0%"],
        ["4 bits", "chain 3", "33.3", "1.67x", "1.75", "40%"],
        ["float32", "without drafts", "20.0", "1.00x", "1.00", "0%"],
    ]
    assert last.startswith("Fastest here: 4 bits, chain 3.")
    turns["chain 3"][1] = [fast[0], streamed([2] * 9 + [3], 9, 0, 0, 0.5)]
    with pytest.raises(ValueError, match="4 bits, chain 3, 'b': got another answer"):
        hello.table({"4 bits": turns})


@pytest.mark.slow
def test_answers_are_streamed_in_every_way_and_compared(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hello, "MAX_TOKENS", 24)
    monkeypatch.setattr(hello, "SECONDS", 1.0)
    monkeypatch.setattr(hello, "PROMPTS", hello.PROMPTS[:4])
    folder = tiny.write_target(tmp_path)
    turns = hello.run(load_target(TargetConfig(name=str(folder), aux_layers=(1, 2, 3))), "lookup", colours=False)
    answers = re.findall(
        r"-- without drafts\n(.*?)\n\n-- with drafts[^\n]*\n(.*?)\n(?=\n|$)", capsys.readouterr().out, re.S
    )
    assert len(answers) == hello.SHOWN
    for plain, marked in answers:
        assert re.sub(r"[][]", "", marked) == re.sub(r"[][]", "", plain)
    assert any("[" in marked and "]" in marked for _, marked in answers)
    assert list(turns) == [hello.PLAIN, "lookup 8", hello.CHOSEN]
    assert len({len(of_way) for of_way in turns.values()}) == 1, "as many turns of each"
    assert all(answer.drafted == 0 for turn in turns[hello.PLAIN] for answer in turn)
    assert any(answer.drafted for turn in turns["lookup 8"] for answer in turn)
    hello.table({"float32": turns})


def test_a_tpu_that_jax_does_not_see_is_refused(monkeypatch):
    assert hello.where() == hello.machine.hardware()["cpu"]
    monkeypatch.setattr(hello.machine, "has_tpu", lambda: True)
    with pytest.raises(ValueError, match="got a CPU, expected this machine's TPU"):
        hello.where()
