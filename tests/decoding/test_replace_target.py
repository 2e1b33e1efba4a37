"""Another policy in a running engine: its tokens, nothing compiled, nothing reused of what the one before has read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from toy import SMALL, Tokenizer, make

from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.models.checkpoint.load import WeightsError
from eagle3_jax.models.families.llama import Llama

PROMPT = list(range(20)) * 2  # more than a page
PARAMS = SamplingParams(max_tokens=12, logprobs=0)


def other(target: Llama) -> Llama:
    """The target with all tokens' rows one further, so that it says something else."""
    twin = jax.tree.map(lambda x: x * 1.01, target)
    twin.lm_head[...] = jnp.roll(twin.lm_head[...], 1, axis=0)
    return twin


@pytest.fixture(scope="module")
def engine(toy) -> Engine:
    return make(toy)


@pytest.fixture(scope="module")
def expected(toy) -> dict[str, list]:
    """The answer of each policy, by an engine of its own, with log-probabilities."""
    policies = {"old": toy.target, "new": other(toy.target)}
    found = {}
    for name, target in policies.items():
        (output,) = make(toy, None, target).generate([PROMPT], PARAMS)
        assert output.logprobs is not None
        found[name] = [output.token_ids, [entry.logprob for entry in output.logprobs]]
    assert found["old"][0] != found["new"][0]
    return found


def check(engine: Engine, expected: list, cached: int) -> None:
    (output,) = engine.generate([PROMPT], PARAMS)
    assert output.token_ids == expected[0] and output.stats.cached_tokens == cached
    assert output.logprobs is not None
    np.testing.assert_allclose([entry.logprob for entry in output.logprobs], expected[1], atol=1e-5)


@pytest.mark.slow
def test_the_next_answer_is_the_new_policy_s_and_nothing_is_compiled(toy, engine, expected):
    engine.replace_target(toy.target)
    check(engine, expected["old"], cached=0)
    check(engine, expected["old"], cached=32)
    # A trainer's arrays are committed to its devices.
    before, policy = engine.stats().programs, jax.device_put(other(toy.target), jax.devices()[0])
    engine.replace_target(policy)
    for leaf in jax.tree.leaves(policy):
        leaf.delete()  # as a step of training does that donates
    check(engine, expected["new"], cached=0)
    engine.replace_target(toy.target)
    check(engine, expected["old"], cached=0)
    assert engine.stats().programs == before


@pytest.mark.slow
def test_running_requests_go_on_with_the_new_policy_and_leave_nothing_to_reuse(toy, engine):
    """Both policies write the first page."""
    engine.replace_target(toy.target)
    prompt, params = PROMPT[:3], SamplingParams(max_tokens=60)
    running = engine.submit(prompt, params)
    first = next(iter(running)).token_ids
    assert len(prompt + first) < 16
    engine.replace_target(other(toy.target))
    output = running.result()
    assert (len(output.token_ids), output.finish_reason) == (60, "length")
    old = make(toy, None).generate([prompt], params)[0].token_ids
    assert output.token_ids[: len(first)] == first == old[: len(first)]
    assert output.token_ids != old
    (again,) = engine.generate([prompt + output.token_ids[:20]], params)
    assert again.stats.cached_tokens == 0
    assert engine.stats().free_pages == engine.stats().pages


@pytest.mark.slow
def test_weights_that_do_not_fit_change_nothing(toy, engine, expected):
    engine.replace_target(toy.target)
    wrong = other(toy.target)
    wrong.norm[...] = wrong.norm[...].at[3].set(jnp.nan)
    with pytest.raises(WeightsError, match=r"norm: got NaN or infinity"):
        engine.replace_target(wrong)
    wrong.norm = nnx.Param(jnp.ones(5))
    with pytest.raises(WeightsError, match=r"norm: got shape \[5\], expected \[32\]"):
        engine.replace_target(wrong)
    check(engine, expected["old"], cached=0)


@pytest.mark.slow
def test_panels_in_bfloat16_widen_once_for_weights_that_it_does_not_hold(toy, expected):
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), toy.target)
    engine = Engine(rounded, Tokenizer(), **SMALL)
    engine.warm_up(progress=False)
    engine.replace_target(toy.target)
    check(engine, expected["old"], cached=0)
    before = engine.stats().programs
    for policy in (rounded, toy.target):
        engine.replace_target(policy)
        engine.generate([PROMPT], PARAMS)
    check(engine, expected["old"], cached=32)
    assert engine.stats().programs == before
