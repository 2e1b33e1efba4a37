"""Drafts on a quantised target: the tokens of vanilla decoding on it."""

import numpy as np
import pytest
import tiny

from eagle3_jax.config import DraftTree, TargetConfig
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.params import SamplingParams

CHAIN = DraftTree(num_steps=4, topk=1, num_draft_tokens=5, lookup_tokens=0)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_drafts_change_no_token(tmp_path, weights):
    folder = tiny.write_target(tmp_path)
    prompts = np.random.default_rng(0).integers(3, tiny.CONFIG["vocab_size"], (3, 20)).tolist()
    asked = SamplingParams(max_tokens=40, ignore_eos=True)

    def answers(draft, tree, weights):
        target = TargetConfig(name=str(folder), weights=weights, quantise_vocabulary=weights == "int4")
        engine = Engine.load(target, draft, tree, batch_size=2, max_length=96)
        found = engine.generate([prompt + prompt for prompt in prompts], asked)
        return [out.token_ids for out in found], sum(out.stats.rounds for out in found)

    plain, rounds = answers(None, "auto", weights)
    tokens, fewer = answers("lookup", DraftTree(num_steps=4, num_draft_tokens=5, lookup_tokens=4), weights)
    assert tokens == plain
    assert fewer < rounds
    assert answers(None, "auto", None)[0] != plain, "another model"
