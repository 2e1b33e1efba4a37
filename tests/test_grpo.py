"""The example of reinforcement learning, on a target of words."""

import pathlib
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
import grpo

from eagle3_jax.config import DraftConfig, TargetConfig, TrainConfig
from eagle3_jax.models.checkpoint.fetch import load_target
from eagle3_jax.models.drafts.eagle3 import DraftHeadConfig
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.training.kinds.eagle3 import Eagle3

WANTED = set(tiny.WORDS[::2])


def question(rng: np.random.Generator) -> tuple[str, str]:
    return " ".join(rng.choice(tiny.WORDS, 4)), ""


def reward(answer: str, _: str) -> float:
    words = answer.split()
    return sum(word in WANTED for word in words) / max(len(words), 1)


@pytest.mark.long
def test_the_reward_rises_and_the_head_follows(tmp_path, capsys):
    target = load_target(TargetConfig(name=str(tiny.write_target(tmp_path)), aux_layers=(1, 2, 3)))
    ids = jnp.asarray(sorted(target.tokenizer.convert_tokens_to_ids([f"Ġ{word}" for word in tiny.WORDS])), jnp.int32)
    draft = DraftConfig(vocab_size=len(ids), intermediate_size=64)
    shape = DraftHeadConfig.for_target(draft, target.model.config)
    head = Draft(Eagle3(shape, TrainConfig()).new(0, target.model.output_rows[ids]), ids)
    settings = grpo.Settings(
        steps=12, questions=4, answers=4, max_tokens=16, learning_rate=1e-2, head_rate=1e-2, length=64, every=11
    )
    rows = grpo.train(target, head, settings, question, reward)
    rewards = [row["reward"] for row in rows]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.15, rewards
    # The engine's log-probabilities are those of the pass that learns from them, at every policy.
    assert max(row["mismatch"] for row in rows) < 1e-5
    assert rows[0]["tau"] == rows[0]["frozen_tau"]
    assert rows[-1]["tau"] >= rows[-1]["frozen_tau"] and rows[-1]["tau"] > rows[0]["tau"]
    assert capsys.readouterr().out.count("reward") == 12
