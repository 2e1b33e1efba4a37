"""A stream of conversations: each turn follows its answer at once, the batch stays full, drafts change no answer."""

import collections
from collections.abc import Iterator
from typing import Any

import pytest
from toy import CHAIN, SMALL, Tokenizer, make

from eagle3_jax.config import DraftTree
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.decoding.request import Output


def params(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=9 + 5 * (seed % 3), temperature=1.0, seed=seed)


class Conversations:
    """Conversations of up to three turns, and what an engine does with them.

    Attributes:
        open: the most that had begun and not ended.
        order: (conversation, turn) of the answers, as they came.
    """

    def __init__(self, count: int) -> None:
        self.answers: dict[tuple[int, int], Output] = {}
        self.open, self.order, self._count = 0, list[tuple[int, int]](), count
        self._begun, self._ended = 0, 0

    def asked(self) -> Iterator[Any]:
        for number in range(self._count):
            self._begun += 1
            self.open = max(self.open, self._begun - self._ended)
            yield (number, 0), [1 + number % 7] * (18 + number), params(number)

    def on_output(self, name: tuple[int, int], output: Output) -> Any:
        number, turn = name
        self.answers[name] = output
        self.order.append(name)
        if turn == number % 3:
            self._ended += 1
            return None
        before = [self.answers[number, earlier].token_ids for earlier in range(turn + 1)]
        ids = [1 + number % 7] * (18 + number) + [token for answer in before for token in answer] + [3]
        return (number, turn + 1), ids, params(100 * turn + number)


@pytest.fixture(scope="module")
def vanilla(toy: Any) -> Engine:
    return make(toy, None)


@pytest.fixture(scope="module")
def answered(vanilla: Engine) -> Conversations:
    talks = Conversations(8)
    vanilla.converse(talks.asked(), talks.on_output)
    return talks


@pytest.mark.slow
def test_every_turn_is_answered_as_it_is_alone(vanilla, answered):
    assert sorted(answered.answers) == [(number, turn) for number in range(8) for turn in range(number % 3 + 1)]
    again = Conversations(8)
    waiting = collections.deque(again.asked())
    while waiting:
        name, prompt, one = waiting.popleft()
        (output,) = vanilla.generate([prompt], one)
        assert output.token_ids == answered.answers[name].token_ids
        if (following := again.on_output(name, output)) is not None:
            waiting.append(following)


def test_the_next_turn_comes_first_and_few_conversations_are_open(answered):
    assert answered.open == SMALL["batch_size"] + 1
    first_of_last = answered.order.index((7, 0))
    assert sum(answered.order.index((number, number % 3)) < first_of_last for number in range(7)) >= 5


def test_a_next_turn_reads_the_rest_alone(vanilla, answered):
    later = [output.stats.cached_tokens for (_, turn), output in answered.answers.items() if turn]
    assert all(cached >= 16 for cached in later)


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["head", pytest.param("lookup", marks=pytest.mark.long)])
def test_drafts_change_no_answer_of_a_seed(toy, answered, draft):
    """Though the engine takes one tier after the other: their drafts are the head's best, or copies."""
    trees = [CHAIN, DraftTree(num_steps=3, topk=3, num_draft_tokens=8, lookup_tokens=4)]
    head, tree = (toy.good, trees) if draft == "head" else (draft, "auto")
    engine = Engine(toy.target, Tokenizer(), head, tree, sample_drafts=False, **SMALL)
    number = 0

    def in_turn(*_: Any, **__: Any) -> Any:
        nonlocal number
        number += 1
        return engine.tiers.tiers[number % len(engine.tiers.tiers)]

    engine.tiers.choose = in_turn
    talks = Conversations(8)
    engine.converse(talks.asked(), talks.on_output)
    assert {name: output.token_ids for name, output in talks.answers.items()} == {
        name: output.token_ids for name, output in answered.answers.items()
    }
    assert sum(sum(output.stats.accepted_per_position) for output in talks.answers.values()) > 20


def test_what_raises_ends_all(vanilla):
    def full(name: Any, output: Output) -> Any:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        vanilla.converse(Conversations(8).asked(), full)
    assert (vanilla.stats().running, vanilla.stats().waiting) == (0, 0)
    with pytest.raises(ValueError, match="prompt: got 128 tokens"):
        vanilla.converse(iter([("too long", [1] * 128, params(1))]), lambda *_: None)
