"""Greedy decoding in bfloat16: where drafting changes a token, the two were a near-tie, and nothing else changes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from toy import following

from eagle3_jax.config import DraftConfig, DraftTree, TargetConfig, TrainConfig
from eagle3_jax.decoding.engine import Engine, SamplingParams
from eagle3_jax.decoding.measure.compare import Tally
from eagle3_jax.decoding.measure.near_tie import _in_float32, near_tie
from eagle3_jax.models.checkpoint.fetch import Target, load_target
from eagle3_jax.models.drafts.eagle3 import DraftHeadConfig
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.training.kinds.eagle3 import Eagle3

PROMPTS, MAX_TOKENS = 16, 24
# What is compared with vanilla decoding. Whether drafting rounds differently is up to the machine; activations in
# float32 always do.
OTHERS = {
    "chain": DraftTree(num_steps=3, topk=1, num_draft_tokens=4),
    "tree": DraftTree(num_steps=3, topk=4, num_draft_tokens=24),
    "float32": None,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """In bfloat16, and undecided: of most words there are twins in its LM head."""
    folder = tiny.write_target(tmp_path_factory.mktemp("target"))
    loaded = load_target(TargetConfig(name=str(folder), dtype="bfloat16", aux_layers=(1, 2, 3)))
    words = [loaded.tokenizer(" " + word)["input_ids"][0] for word in tiny.WORDS]
    rows = loaded.model.lm_head[...]
    noise = 1 + 0.004 * jax.random.normal(jax.random.key(0), (len(words) // 2, rows.shape[1]), rows.dtype)
    twins = rows[jnp.asarray(words[::2])] * noise
    loaded.model.lm_head[...] = rows.at[jnp.asarray(words[1::2])].set(twins)
    return loaded


@pytest.fixture(scope="module")
def draft(target: Target) -> Draft:
    config = DraftHeadConfig.for_target(DraftConfig(vocab_size=tiny.CONFIG["vocab_size"]), target.model.config)
    head = Eagle3(config, TrainConfig()).new(0, target.model.lm_head[...])
    return Draft(jax.tree.map(lambda x: x.astype(jnp.bfloat16), head), jnp.arange(config.draft_vocab_size))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["tree", *(pytest.param(name, marks=pytest.mark.long) for name in ("chain", "float32"))]
)
def test_every_first_divergence_is_a_near_tie(target, draft, name):
    rng = np.random.default_rng(5)
    words = [target.tokenizer(" " + word)["input_ids"][0] for word in tiny.WORDS]
    group = [{"id": str(i), "prompt": [1, *rng.choice(words, rng.integers(3, 12)).tolist()]} for i in range(PROMPTS)]
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    other = _in_float32(target.model) if name == "float32" else target.model
    plain, fast = (
        Engine(model, target.tokenizer, head, shape or "auto", batch_size=8, max_length=128).generate(
            [prompt["prompt"] for prompt in group], params
        )
        for model, head, shape in ((target.model, None, None), (other, draft if OTHERS[name] else None, OTHERS[name]))
    )
    tally = Tally()
    tally.add(group, (plain, 1.0), (fast, 1.0), lambda prefix, tokens: near_tie(target.model, prefix, tokens))
    report = tally.report(exact=True)
    assert report["mismatches"] == []
    assert report["ties"] or name != "float32"
    assert report["identical"] + len(report["ties"]) == PROMPTS
    for tie in report["ties"]:
        assert 0 <= tie["gap"] <= tie["bound"] < 0.5  # logits are around 10: rounding moves them by a few percent


@pytest.mark.slow
def test_a_token_that_is_no_tie_is_no_near_tie(target):
    """Any token but the best few is a mismatch; in float32 every token is that is not equally good."""
    prefix = [1, 270, 280]
    probable = near_tie_ranks(target, prefix)
    assert near_tie(target.model, prefix, (probable[0], probable[0])) is not None
    for token in probable[4:40:6]:
        assert near_tie(target.model, prefix, (probable[0], token)) is None
    exact = dataclasses.replace(target, model=jax.tree.map(lambda x: x.astype(jnp.float32), target.model))
    equal = near_tie(exact.model, prefix, (probable[0], probable[0]))
    assert equal is not None and equal.gap <= equal.bound < 1e-4
    assert near_tie(exact.model, prefix, (probable[0], probable[1])) is None


def near_tie_ranks(target: Target, prefix: list[int]) -> list[int]:
    """Tokens, the most probable first."""
    return np.argsort(-np.asarray(following(target.model, jnp.asarray([prefix]))[0, -1])).tolist()
