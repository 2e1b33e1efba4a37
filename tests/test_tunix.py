"""Rollouts of Tunix by an engine, beside Tunix's own sampler and learners. In an environment of its own."""

import contextlib
import dataclasses
import inspect
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

pytest.importorskip("tunix")
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3
from tunix.rl.common import compute_per_token_logps
from tunix.rl.rollout.base_rollout import BaseRollout, CacheConfig, RolloutConfig
from tunix.rl.rollout.vanilla_rollout import VanillaRollout

sys.path += [str(tiny.REPOSITORY / name) for name in ("examples", "tests/decoding", "tests/models/checkpoint")]
import grpo_tunix
import test_trees
import toy as toys

from eagle3_jax.config import TargetConfig
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.models.checkpoint.fetch import load_target
from eagle3_jax.models.checkpoint.load import WeightsError
from eagle3_jax.tunix import EngineRollout

PAD, END = 23, 22
PROMPTS = ["hello", "abc", "q", "sun"]


@pytest.fixture(scope="module", autouse=True)
def as_users_have_it():
    """Tunix's code promotes dtypes and ranks, in threads too."""
    before = {name: getattr(jax.config, name) for name in ("jax_numpy_dtype_promotion", "jax_numpy_rank_promotion")}
    for name, value in zip(before, ("standard", "allow"), strict=True):
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


class Letters(toys.Tokenizer):
    def encode(self, text):
        return self(text, add_special_tokens=False)["input_ids"]

    def decode(self, ids, skip_special_tokens=True):
        return super().decode(ids, skip_special_tokens)

    bos_id, eos_id, pad_id = (lambda _, token=token: token for token in (0, END, PAD))


TOKENIZER = TokenizerAdapter(Letters())


MODELS = {
    "llama": (llama3.Llama3, llama3.ModelConfig, "weight_tying"),
    "qwen2": (qwen2.Qwen2, qwen2.ModelConfig, "use_tied_embedding"),
    "qwen3": (qwen3.Qwen3, qwen3.ModelConfig, "use_tied_embedding"),
}


def actor_of(target: Any, family: str = "llama") -> nnx.Module:
    """Tunix's model with the weights of a target."""
    c, (model, config, tied) = target.config, MODELS[family]
    sizes = dict(num_layers=c.num_hidden_layers, vocab_size=c.vocab_size, embed_dim=c.hidden_size)
    sizes |= dict(hidden_dim=c.intermediate_size, num_heads=c.num_attention_heads, head_dim=c.head_dim)
    sizes |= dict(num_kv_heads=c.num_key_value_heads, rope_theta=c.rope_theta, norm_eps=c.rms_norm_eps)
    actor = model(config(**sizes, **{tied: c.tie_word_embeddings}), rngs=nnx.Rngs(0))
    weights = test_trees.tunix(target)

    def weight(path, _):
        return jnp.asarray(weights.pop(jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")))

    nnx.update(actor, jax.tree_util.tree_map_with_path(weight, nnx.state(actor, nnx.Param)))
    assert not weights
    return actor


@pytest.fixture(scope="module")
def toy() -> toys.Toy:
    """Rotated as Tunix's Llama does, whatever its config says."""
    toy = toys.make_toy()
    toy.target.config = dataclasses.replace(toy.target.config, rope_theta=1e6)
    return toy


def asked(**changes: Any) -> RolloutConfig:
    return RolloutConfig(**dict(max_tokens_to_generate=20, max_prompt_length=8, temperature=1.0, seed=1) | changes)


def made(toy: toys.Toy, tree: Any = toys.CHAIN, actor: Any = None, **changes: Any) -> EngineRollout:
    engine = toys.make(toy, tree)
    actor = actor or actor_of(toy.target)
    return EngineRollout(engine=engine, rollout_actor=actor, tokenizer=TOKENIZER, rollout_config=asked(**changes))


@pytest.fixture(scope="module")
def rollout(toy) -> EngineRollout:
    return made(toy)


def test_it_is_a_rollout_of_tunix(rollout):
    assert isinstance(rollout, BaseRollout)
    for name in BaseRollout.__abstractmethods__ - {"__init__"}:
        theirs, ours = (inspect.signature(getattr(cls, name)).parameters for cls in (BaseRollout, EngineRollout))
        assert [(x.name, x.kind, x.default) for x in theirs.values()] == [
            (x.name, x.kind, x.default) for x in ours.values()
        ]
    assert (rollout.pad_id(), rollout.eos_id(), rollout.model()) == (PAD, END, None)


def test_greedy_answers_are_those_of_tunix_s_own_sampler(toy, rollout):
    c = toy.target.config
    sizes = CacheConfig(64, c.num_hidden_layers, c.num_key_value_heads, c.head_dim)
    theirs = VanillaRollout(actor_of(toy.target), TOKENIZER, sizes)
    config = asked(temperature=0.0, top_p=None, return_logprobs=True)
    expected, rounds = theirs.generate(PROMPTS, config), rollout._engine.stats().rounds
    for ours in (rollout, made(toy, None)):
        output = ours.generate(PROMPTS, config)
        np.testing.assert_array_equal(output.left_padded_prompt_tokens, expected.left_padded_prompt_tokens)
        for tokens, logprobs, own, own_logprobs in zip(
            output.tokens, output.logprobs, expected.tokens, expected.logprobs, strict=True
        ):
            own = own if len(own) == 20 else [*own, END]  # theirs leave the end out
            np.testing.assert_array_equal(tokens, own)
            np.testing.assert_allclose(logprobs[: len(own_logprobs)], own_logprobs, atol=1e-4)
    assert rollout._engine.stats().rounds - rounds < 0.75 * sum(map(len, output.tokens))  # drafts were accepted


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_names_and_passes_of_every_family_are_tunix_s(family):
    """Untied; rotated by 1e6, whatever the config of Tunix's Llama and Qwen 3 says."""
    target = test_trees.make(family)
    target.config = dataclasses.replace(target.config, rope_theta=1e6)
    engine = Engine(target, toys.Tokenizer(), batch_size=1, max_length=64, page_size=16)
    tokenizer = TokenizerAdapter(Letters())
    actor = actor_of(jax.tree.map(lambda x: x * 1.1, target), family)
    ours = EngineRollout(engine=engine, rollout_actor=actor, tokenizer=tokenizer, rollout_config=asked())
    rows = jnp.asarray([[PAD, PAD, 3, 1, 5], [7, 2, 9, 4, 4]]), jnp.asarray([[8, 3, 1], [2, 2, PAD]])
    learner, found = compute_per_token_logps(*nnx.split(actor), *rows, PAD, END), ours.get_per_token_logps(*rows)
    np.testing.assert_allclose(found[0], learner[0], atol=1e-3)
    np.testing.assert_allclose(found[1, :2], learner[1, :2], atol=1e-3)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_log_probabilities_are_the_learner_s(toy, rollout, temperature):
    config, actor = asked(temperature=temperature, return_logprobs=True), actor_of(toy.target)
    ours = EngineRollout(engine=rollout._engine, rollout_actor=actor, tokenizer=TOKENIZER, rollout_config=config)
    output = ours.generate(PROMPTS, config)
    completions = np.full((len(PROMPTS), 20), PAD, np.int32)
    for row, tokens in zip(completions, output.tokens, strict=True):
        row[: len(tokens)] = tokens
    rows = jnp.asarray(output.left_padded_prompt_tokens), jnp.asarray(completions)
    learner = compute_per_token_logps(*nnx.split(actor), *rows, PAD, END, temperature=temperature)
    recomputed = ours.get_per_token_logps(*rows)
    for row, logprobs in enumerate(output.logprobs):
        np.testing.assert_allclose(logprobs, learner[row, : len(logprobs)], atol=1e-4)
        np.testing.assert_allclose(recomputed[row, : len(logprobs)], learner[row, : len(logprobs)], atol=1e-4)


def test_drawn_tokens_have_the_learner_s_distribution(toy, rollout):
    """Of pairs of tokens, the second of which may be a draft."""
    count, temperature = 3000, 1.5
    output = rollout.generate(["hello"] * count, asked(temperature=temperature, max_tokens_to_generate=2, seed=None))
    drawn = np.array([[*tokens, END][:2] for tokens in output.tokens])
    prompt = output.left_padded_prompt_tokens[0]
    prompt = jnp.asarray(prompt[prompt != PAD])[None]
    every = jnp.arange(toys.VOCABULARY)
    pairs = jnp.stack([x.ravel() for x in jnp.meshgrid(every, every, indexing="ij")], axis=1)
    learner = compute_per_token_logps(
        *nnx.split(actor_of(toy.target)), jnp.repeat(prompt, len(pairs), 0), pairs, -1, -1, temperature=temperature
    )
    expected = np.exp(learner.sum(1)).reshape(toys.VOCABULARY, -1)
    expected[END] = np.where(every == END, expected[END].sum(), 0)
    found = np.zeros_like(expected)
    np.add.at(found, tuple(drawn.T), 1 / count)
    # A fair sample's expected distance, and some.
    fair = np.sqrt(expected * (1 - expected) / count).sum() * np.sqrt(2 / np.pi)
    assert np.abs(found - expected).sum() < 1.2 * fair


def test_a_seed_repeats_and_none_goes_on(rollout):
    def tokens(seed):
        output = rollout.generate(["hello"] * 3, asked(seed=seed, temperature=2.0))
        return [row.tolist() for row in output.tokens]

    assert tokens(5) == tokens(5) != tokens(jax.random.key(5)) == tokens(jax.random.PRNGKey(5))
    first = tokens(None)
    assert first != tokens(None) and first[0] != first[1]


def test_another_policy_as_the_cluster_gives_it(toy, rollout):
    actor = actor_of(jax.tree.map(lambda x: x * 1.05, toy.target))
    rows = jnp.asarray([[PAD, 7, 4, 11]]), jnp.asarray([[1, 2, 3]])
    before, programs = rollout.get_per_token_logps(*rows), rollout._engine.stats().programs
    for place in jax.devices()[0], jax.devices()[3]:
        params = jax.device_put(nnx.state(actor, nnx.Param), place)
        with contextlib.ExitStack() as stack:  # as `RLCluster.sync_weights` on CPUs
            stack.enter_context(jax.transfer_guard_device_to_host("disallow_explicit"))
            stack.enter_context(jax.transfer_guard_host_to_device("disallow_explicit"))
            rollout.update_params(params, (nnx.Param,))
        learner = compute_per_token_logps(*nnx.split(actor), *rows, PAD, END)
        np.testing.assert_allclose(rollout.get_per_token_logps(*rows), learner, atol=1e-4)
        assert np.abs(before - learner).max() > 1e-2
        rollout.update_params(nnx.state(actor_of(toy.target), nnx.Param))
    with jax.make_mesh((1,), ("fsdp",)):  # as `RLCluster.generate`
        rollout.generate(PROMPTS, asked())
    assert rollout._engine.stats().programs == programs


def test_what_does_not_fit_is_refused(toy, rollout):
    with pytest.raises(ValueError, match=r"prompts: got 132 tokens with an answer, expected 128 at most"):
        rollout.generate(["hello" * 20], asked(max_tokens_to_generate=32))
    with pytest.raises(ValueError, match=r"prompts: got the padding token, 23, expected a `pad_token`"):
        rollout.generate(["ab", "c#"], asked())
    with pytest.raises(WeightsError, match="w_lora_a"):
        rollout.update_params({"layers": {"0": {"attn": {"q_proj": {"w_lora_a": jnp.zeros(3)}}}}})


def test_an_actor_that_computes_something_else_is_refused(tmp_path):
    """This Llama's `rope_theta` is 1e4; Tunix's rotates by 1e6."""
    target = load_target(TargetConfig(name=str(tiny.write_target(tmp_path)))).model
    engine = Engine(target, toys.Tokenizer(), batch_size=1, max_length=64, page_size=16)
    given: Any = dict(rollout_actor=actor_of(target), tokenizer=TOKENIZER, rollout_config=asked())
    with pytest.raises(ValueError, match=r"rollout_actor: got log-probabilities that differ .* `rope_theta`"):
        EngineRollout(engine=engine, **given)


def test_the_reward_rises_alike_with_drafts_and_without(tmp_path, monkeypatch):
    """The policy learns to repeat itself, so that drafts are found in what it wrote."""
    monkeypatch.setattr(llama3, "apply_rope", llama3.apply_rope)  # which the example replaces
    folder, wanted = tiny.write_target(tmp_path / "target"), set(tiny.WORDS[::2])
    settings = grpo_tunix.Settings(
        steps=12, questions=4, answers=4, prompt=48, max_tokens=16, learning_rate=1e-2, batch_size=4
    )

    def question(rng):
        return " ".join(rng.choice(tiny.WORDS, 4)), ""

    def reward(answer, _):
        words = answer.split()
        return sum(word in wanted for word in words) / max(len(words), 1)

    last, passes = {}, {}
    for draft in ("lookup", None):
        rows = grpo_tunix.train(load_target(TargetConfig(name=str(folder))), draft, settings, question, reward)
        assert len(rows) == settings.steps
        first, last[draft] = (np.mean([row["reward"] for row in part]) for part in (rows[:3], rows[-3:]))
        assert last[draft] > first + 0.15, rows
        passes[draft] = sum(row["rounds"] for row in rows[-3:]) / sum(row["tokens"] for row in rows[-3:])
    assert abs(last["lookup"] - last[None]) < 0.2, last
    assert passes["lookup"] < 0.7 < 0.9 < passes[None], passes
