"""What drafts gain and cost beside a long context of the real model."""

import pathlib
import random
import statistics
import time

import pytest

from eagle3_jax import Engine, SamplingParams
from eagle3_jax.config import TargetConfig
from eagle3_jax.decoding.tier import VANILLA

DOCS = pathlib.Path(__file__).parents[2] / "docs"
TOKENS, TURNS = 96, 2


@pytest.mark.long
def test_the_engine_s_choice_loses_at_no_length():
    engine = Engine.load(TargetConfig(name="smollm2-135m-instruct", weights="stored"), max_length=8192)
    engine.warm_up(greedy_alone=True, progress=False)
    assert engine.tokenizer is not None
    text = engine.tokenizer("\n\n".join(page.read_text() for page in sorted(DOCS.glob("*.md"))))["input_ids"]
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)

    def measure(prompt: list[int]) -> tuple[list[int], float]:
        """The tokens, and how many came a second behind the first ones."""
        ids, times = list[int](), list[tuple[int, float]]()
        for piece in engine.stream(prompt, params):
            ids += piece.token_ids
            times.append((len(ids), time.perf_counter()))
        (first, start), (last, end) = times[0], times[-1]
        return ids, (last - first) / (end - start)

    gains = {}
    for length in (256, 2048, 8000):
        speeds: dict = {None: [], VANILLA: []}
        for turn in range(-1, TURNS):
            for start in (0, 9000):
                answers = []
                for tier in random.Random(turn).sample(list(speeds), 2):
                    engine.tiers.pinned = tier
                    ids, speed = measure(text[start : start + length - TOKENS])
                    answers.append(ids)
                    if turn >= 0:  # before it the prompts' pages are made, and acceptance is learnt
                        speeds[tier].append(speed)
                assert answers[0] == answers[1]
        gains[length] = statistics.median(speeds[None]) / statistics.median(speeds[VANILLA])
    print(gains)
    assert min(gains.values()) >= 0.97, gains
