"""Drafts on a quantised target: the tokens of vanilla decoding on it."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
import tiny
import tiny_heads
from flax import nnx
from safetensors.numpy import load_file

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "vocabulary", "kernels"),
    [
        ("int4", True, "1"),
        pytest.param("int8", False, "1", marks=pytest.mark.long),
        pytest.param("int8", True, "0", marks=pytest.mark.long),
        pytest.param("fp8", False, "1", marks=pytest.mark.long),
    ],
)
def test_another_policy_gets_the_few_bits_of_the_one_before(tmp_path, monkeypatch, weights, vocabulary, kernels):
    """Its tokens and log-probabilities are those of an engine that loads it; the same goes for another head."""
    monkeypatch.setenv("EAGLE3_CPU_KERNELS", kernels)
    folders = [tiny.write_target(tmp_path / name, seed) for seed, name in enumerate(("first", "second"))]
    targets = [
        load_target(TargetConfig(name=str(x), weights=weights, quantise_vocabulary=vocabulary, aux_layers=(1, 2, 3)))
        for x in folders
    ]
    asked = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=0)

    def answer(engine: Engine) -> Any:
        (output,) = engine.generate([[*range(3, 23)]], asked)
        assert output.logprobs is not None
        return output.token_ids, [entry.logprob for entry in output.logprobs]

    expected = [answer(Engine(x.model, x.tokenizer, max_length=64)) for x in targets]
    config: Any = targets[0].model.config
    head = tiny_heads.make_draft(target=config)
    heads = [head, Draft(jax.tree.map(lambda x: -x, head.head), head.token_ids)]
    engine = Engine(targets[0].model, targets[0].tokenizer, heads[0], CHAIN, max_length=64)
    kinds = [leaf.dtype for leaf in jax.tree.leaves(engine.target)]
    policies = [load_file(folder / "model.safetensors") for folder in folders]
    for number in (0, 1, 0):
        engine.replace_target(policies[number])
        engine.replace_draft(heads[number])
        tokens, logprobs = answer(engine)
        assert tokens == expected[number][0]
        np.testing.assert_allclose(logprobs, expected[number][1], atol=1e-5)
    assert expected[0][0] != expected[1][0]
    assert [leaf.dtype for leaf in jax.tree.leaves(engine.target)] == kinds


@pytest.mark.slow
def test_scales_that_float16_does_not_hold_compile_once_more(tmp_path):
    folder = tiny.write_target(tmp_path)
    policy = load_file(folder / "model.safetensors")
    tiny_numbers = {name: x * 1e-4 if "mlp" in name else x for name, x in policy.items()}
    engine = Engine.load(str(folder), None, weights="int4", max_length=64)
    engine.warm_up(progress=False)
    prompt, asked = [*range(3, 23)], SamplingParams(max_tokens=8, ignore_eos=True)
    first = engine.generate([prompt], asked)[0].token_ids
    for weights in (tiny_numbers, policy):
        engine.replace_target(weights)
        answer = engine.generate([prompt], asked)[0].token_ids
        assert (answer == first) == (weights is policy)


@pytest.mark.slow
def test_few_bits_that_no_floats_are_rounded_to_are_refused(tmp_path):
    """A GGUF's 8 bits with offsets, and panels of another engine; the old weights stay."""
    folder = tiny.write_target(tmp_path)
    policy = load_file(folder / "model.safetensors")
    target: Any = load_target(TargetConfig(name=str(folder), weights="int8", aux_layers=(1, 2, 3)))
    mlp = target.model.blocks[0].mlp
    mlp.down = nnx.Param(dataclasses.replace(mlp.down[...], offset=mlp.down[...].scale * 0))
    engine = Engine(target.model, target.tokenizer, max_length=64)
    another = Engine(engine.target, target.tokenizer, max_length=64)
    for one, place in ((engine, "blocks/0/mlp/down"), (another, "blocks/0/")):
        before = jax.tree.leaves(one.target)
        with pytest.raises(ValueError, match=rf"weights: got floats for {place}.*'stored'.*, expected an engine"):
            one.replace_target(policy)
        assert all(x is y for x, y in zip(before, jax.tree.leaves(one.target), strict=True))
