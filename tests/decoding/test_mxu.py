"""Greedy decoding with the products of a TPU: what keeps its bits, and what up to near-ties alone.

`pytest --mxu tests/decoding` runs all other tests of decoding with these products too. The documents count what they
change on real text (`tests/mxu.py`).
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from mxu import tpu_products

from eagle3_jax.config import DraftTree
from eagle3_jax.decoding.measure.compare import first_difference
from eagle3_jax.decoding.measure.near_tie import near_tie
from eagle3_jax.decoding.rounds.generate import generate
from eagle3_jax.kernels.linear.api import linear

CHAIN = DraftTree(num_steps=3, topk=1, num_draft_tokens=4, sample_drafts=False)
TREE = DraftTree(num_steps=3, topk=3, num_draft_tokens=10, sample_drafts=False)
PROMPTS = [[1, 2, 3], [5] * 9, [7], [2, 9, 4, 11, 3]]
MAX_TOKENS = 24


@pytest.fixture(params=[False, True], ids=["one row", "padded"])
def padded(request):
    with tpu_products(padded=request.param):
        yield request.param


def test_six_products_of_bfloat16_are_as_exact_as_float32(padded):
    """And a row's sums do not depend on the rows beside it, as long as there are any."""
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((40, 576), (576, 96)))
    exact = np.asarray(x, np.float64) @ np.asarray(y, np.float64)
    product = jax.jit(linear)
    whole = np.asarray(product(x, y))
    np.testing.assert_allclose(whole, exact, atol=4e-6 * np.abs(exact).max())
    for count in (1, 2, 7, 16):
        assert np.array_equal(product(x[:count], y), whole[:count]) == (count > 1 or padded)
    with pytest.raises(ValueError, match="precision: got None .* expected HIGHEST"):
        jax.jit(jnp.matmul)(x, y)


def test_no_product_of_float32_is_left(toy, padded):
    """But those of one row, unless it is padded."""
    leaves, structure = jax.tree.flatten((toy.target, toy.good))

    def program(*leaves):
        prompt, length = jnp.ones((1, 4), jnp.int32), jnp.full(1, 4, jnp.int32)
        models = jax.tree.unflatten(structure, leaves)
        return generate(*models, prompt, length, jax.random.key(0), max_tokens=MAX_TOKENS, tree=CHAIN).output

    found = re.findall(r"dot_general .*: \((.*)\) ->", jax.jit(program).lower(*leaves).as_text())
    alone = [x for x in found if "f32>" in x.replace("bf16", "")]
    assert len(found) > 40 and bool(alone) != padded
    assert all(re.match(r"tensor<1x\d+xf32>", x) for x in alone)


def answers(target, draft, batch, tree=None) -> list[tuple[list[int], np.ndarray]]:
    """Greedy tokens and their log-probabilities."""
    found = []
    for begin in range(0, len(PROMPTS), batch):
        part = PROMPTS[begin : begin + batch]
        rows, lengths = np.zeros((batch, 9), np.int32), jnp.asarray([len(prompt) for prompt in part], jnp.int32)
        for row, prompt in zip(rows, part, strict=True):
            row[: len(prompt)] = prompt
        options: dict[str, Any] = {"max_tokens": MAX_TOKENS, "tree": tree, "logprobs": True}
        state = generate(target, draft, jnp.asarray(rows), lengths, jax.random.key(0), **options)
        assert state.logprobs is not None
        for ids, logprobs in zip(np.asarray(state.output), np.asarray(state.logprobs.chosen), strict=True):
            found.append((ids[:MAX_TOKENS].tolist(), logprobs[:MAX_TOKENS]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tree", "batch"), [(TREE, 1), *(pytest.param(*case, marks=pytest.mark.long) for case in ((CHAIN, 1), (TREE, 4)))]
)
def test_padding_one_row_keeps_every_bit(toy, padded, tree, batch):
    """Of vanilla decoding alone, beside drafts alone or in a batch. Without padding the tokens alone are equal."""
    plain, drafted = answers(toy.target, None, 1), answers(toy.target, toy.good, batch, tree)
    assert [tokens for tokens, _ in plain] == [tokens for tokens, _ in drafted]
    one, other = (np.concatenate([logprobs for _, logprobs in found]) for found in (plain, drafted))
    np.testing.assert_allclose(one, other, atol=1e-5)
    assert np.array_equal(one, other) == padded


@pytest.mark.slow
def test_a_token_that_changes_is_a_near_tie(toy):
    """Half of the tokens have a twin, whose logit differs by a rounding or two."""
    target, ties = toy.with_eos(), []
    rows = target.lm_head[...]
    noise = 1 + 1e-7 * jax.random.normal(jax.random.key(0), (len(rows) // 2, rows.shape[1]))
    target.lm_head = nnx.Param(rows.at[1::2].set(rows[::2] * noise))
    with tpu_products():
        plain, drafted = answers(target, None, 1), answers(target, toy.good, 1, CHAIN)
        for prompt, (one, _), (other, _) in zip(PROMPTS, plain, drafted, strict=True):
            at = first_difference(one, other)
            if at is not None:
                ties.append(near_tie(target, [*prompt, *one[:at]], (one[at], other[at])))
    assert ties and all(tie is not None and tie.gap <= tie.bound < 1e-4 for tie in ties)
