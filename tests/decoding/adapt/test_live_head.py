"""A head that learns while it serves: the same tokens, a longer acceptance, and whatever goes wrong ends in a rollback."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_engine import CHAIN, Tokenizer, make

from eagle3_jax.config import AdaptConfig
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.params import SamplingParams

PARAMS = SamplingParams(max_tokens=40)
PROMPTS = [[1 + i % 20, 2 + i % 3, 5] for i in range(24)]
ADAPT = AdaptConfig(
    share=0.95, ring_tokens=512, row_length=64, batch_size=2, ttt_steps=2, learning_rate=3e-3, judge_every=4
)


def live(toy, adapt=ADAPT, draft=None, **kwargs) -> Engine:
    kwargs = {"batch_size": 2, "max_length": 128, "page_size": 16, **kwargs}
    return Engine(toy.target, Tokenizer(), draft or toy.plain, CHAIN, adapt=adapt, **kwargs)


def tau(outputs) -> float:
    rounds = sum(output.stats.rounds for output in outputs)
    return 1 + sum(sum(output.stats.accepted_per_position) for output in outputs) / rounds


@pytest.mark.slow
def test_the_head_learns_and_the_tokens_stay_the_target_s(toy):
    engine = live(toy)
    expected = [output.token_ids for output in make(toy, None, page_size=16).generate(PROMPTS, PARAMS)]
    before = engine.generate(PROMPTS, PARAMS)
    programs = engine.stats().programs
    for _ in range(6):
        outputs = engine.generate(PROMPTS, PARAMS)
        assert [output.token_ids for output in outputs] == expected
    stats = engine.stats().adapt
    print(stats, tau(before), tau(outputs))
    assert stats is not None
    assert tau(outputs) > tau(before) + 0.3
    assert stats.heads > 0 and stats.tau_after > 1.3
    assert engine.stats().programs == programs
