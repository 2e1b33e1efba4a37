"""Tokens do not depend on the implementation: a CPU's kernels and XLA's operations give the same answers.

`EAGLE3_CPU_KERNELS=0 pytest tests/decoding` runs all other tests of decoding with XLA's operations too.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import CHAIN, NO_TEXT, SMALL, TREE, following

from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.decoding.rounds.generate import generate
from eagle3_jax.kernels.dispatch import default_implementation
from eagle3_jax.kernels.linear.layouts import Panels

PROMPTS = [[1, 2, 3], [5] * 20, [7], [2, 9, 4, 11, 3]]
PARAMS = [SamplingParams(max_tokens=20), SamplingParams(max_tokens=12, temperature=1.0, seed=3)]


@pytest.fixture(params=["cpu", "xla"])
def implementation(request, monkeypatch):
    """Traces programs anew: which implementation they call is no part of their cache's key."""
    monkeypatch.setenv("EAGLE3_CPU_KERNELS", "0" if request.param == "xla" else "1")
    jax.clear_caches()
    assert default_implementation() == request.param
    yield request.param
    jax.clear_caches()


def reference(target, prompt, count):
    """The most probable tokens, each by a pass over the whole text in XLA's operations."""
    text = list(prompt)
    for _ in range(count):
        tokens = jnp.asarray([text + [0] * (48 - len(text))], jnp.int32)
        text.append(int(following(target, tokens)[0, len(text) - 1].argmax()))
    return text[len(prompt) :]


@pytest.fixture(scope="module")
def answers(toy):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE3_CPU_KERNELS", "0")
        jax.clear_caches()
        found = [reference(toy.target, prompt, 20) for prompt in PROMPTS]
    jax.clear_caches()
    return found


@pytest.mark.parametrize(
    "tree",
    [None, pytest.param(CHAIN, marks=pytest.mark.long), pytest.param(TREE, marks=pytest.mark.slow)],
    ids=["none", "chain", "tree"],
)
def test_rounds_give_the_same_tokens(toy, answers, implementation, tree):
    prompts = np.zeros((len(PROMPTS), 20), np.int32)
    for row, prompt in zip(prompts, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    lengths = jnp.asarray([len(prompt) for prompt in PROMPTS], jnp.int32)
    draft = None if tree is None else toy.good
    run = functools.partial(generate, max_tokens=20, tree=tree)
    state = run(toy.target, draft, jnp.asarray(prompts), lengths, jax.random.key(0))
    assert state.output[:, :20].tolist() == answers


@pytest.mark.slow
def test_an_engine_gives_the_same_tokens(toy, answers, implementation):
    """From pages, with the model in the implementation's layout; a drawn answer beside them."""
    engine = Engine(toy.target, NO_TEXT, toy.good, CHAIN, **SMALL)
    assert isinstance(engine.target.lm_head[...], Panels) == (implementation == "cpu")
    outputs = engine.generate([*PROMPTS, PROMPTS[0]], [PARAMS[0]] * len(PROMPTS) + [PARAMS[1]])
    assert [output.token_ids for output in outputs[:-1]] == answers
    assert len(outputs[-1].token_ids) == 12
