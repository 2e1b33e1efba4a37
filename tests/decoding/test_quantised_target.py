"""Drafts on a quantised target: the tokens of vanilla decoding on it."""

from typing import Any

import jax
import numpy as np
import pytest
import tiny
import tiny_heads

from eagle3_jax.config import DraftTree, TargetConfig
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.models.checkpoint.fetch import load_target
from eagle3_jax.models.drafts.head import Draft

CHAIN = DraftTree(num_steps=4, topk=1, num_draft_tokens=5, lookup_tokens=0)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", pytest.param("int4", marks=pytest.mark.long)])
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernels", "weights", "asked_for"),
    [
        ("1", "int4", None),
        pytest.param("0", "int4", None, marks=pytest.mark.long),
        pytest.param("1", None, "int8", marks=pytest.mark.long),
    ],
)
def test_a_head_has_8_bits_beside_a_quantised_target_or_where_asked(tmp_path, monkeypatch, kernels, weights, asked_for):
    """Also where another head takes its place; the tokens stay those of the same target."""
    monkeypatch.setenv("EAGLE3_CPU_KERNELS", kernels)
    target = load_target(TargetConfig(name=str(tiny.write_target(tmp_path)), weights=weights, aux_layers=(1, 2, 3)))
    config: Any = target.model.config
    first = tiny_heads.make_draft(target=config)
    second = Draft(jax.tree.map(lambda x: -x, first.head), first.token_ids)
    engine = Engine(target.model, target.tokenizer, first, CHAIN, max_length=64, draft_weights=asked_for)
    assert engine.draft is not None
    kept = jax.tree.leaves(engine.draft.head)
    held = {leaf.dtype for leaf in kept if leaf.ndim > 1 and leaf.shape[0] > 1 < leaf.shape[1]}
    assert held == {np.dtype(np.uint8 if kernels == "1" else np.int8)}, "panels of bytes, or a matrix's"
    prompt, asked = [*range(3, 23)], SamplingParams(max_tokens=16, ignore_eos=True)
    plain = Engine(target.model, target.tokenizer, max_length=64).generate([prompt], asked)[0].token_ids
    assert engine.generate([prompt], asked)[0].token_ids == plain
    engine.replace_draft(second)
    assert engine.generate([prompt], asked)[0].token_ids == plain
    assert any((x != y).any() for x, y in zip(kept, jax.tree.leaves(engine.draft.head), strict=True))
