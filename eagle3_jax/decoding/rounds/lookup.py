"""Drafts copied from the text so far (prompt lookup, n-gram drafting): no model, no training.

The tokens after an earlier occurrence of the last few tokens become drafts. Answers that quote their prompt (edits of
code, summaries, extraction) repeat whole lines of it. https://github.com/apoorvumang/prompt-lookup-decoding
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Probability that a copied token is right, by the length of the match. A right token makes the match one longer, so the
# next token has the probability of that length. Counted on 400 greedy answers of SmolLM2-135M-Instruct to mixed
# prompts (docs/benchmarks.md).
PROBABILITIES = (0.19, 0.46, 0.57, 0.69, 0.74, 0.87)
# Most tokens of a match. The longest match is preferred, then the latest.
MOST = len(PROBABILITIES)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Copied:
    """Tokens that followed an earlier occurrence of each sequence's last tokens.

    A score is the log-probability that a token and all copied before it are right; -inf without a match.
    """

    tokens: Int[Array, "b c"]
    scores: Float[Array, "b c"]


def copy(history: Int[Array, "b s"], end: Int[Array, " b"], count: int) -> Copied:
    """Copies `count` tokens for each root, which stands at `end` of its sequence."""
    tokens, length = continuation(history, end, count)
    known = jnp.log(jnp.asarray(PROBABILITIES))
    each = known[jnp.clip(length[:, None] - 1 + jnp.arange(count)[None], 0, MOST - 1)]
    return Copied(tokens, jnp.where(length[:, None] > 0, jnp.cumsum(each, axis=1), -jnp.inf))


def continuation(
    history: Int[Array, "b s"], end: Int[Array, " b"], count: int
) -> tuple[Int[Array, "b count"], Int[Array, " b"]]:
    """Finds the tokens after the longest earlier match of the last tokens; the latest of equally long ones.

    A match whose continuation reaches the root goes on as a repetition. Returns the tokens and the match's length, at
    most `MOST`. It is 0 if the last token is new; the tokens are then undefined.
    """
    place = jnp.arange(history.shape[1])[None]
    same: Bool[Array, "b s"] = place < end[:, None]
    length = jnp.zeros_like(history)
    for back in range(MOST):
        last = jnp.take_along_axis(history, jnp.maximum(end - back, 0)[:, None], axis=1)
        same &= (jnp.roll(history, back, axis=1) == last) & (place >= back)
        length += same.astype(jnp.int32)
    best = jnp.argmax(jnp.where(length > 0, length * history.shape[1] + place, 0), axis=1)
    period = jnp.maximum(end - best, 1)
    follows = best[:, None] + 1 + jnp.arange(count)[None] % period[:, None]
    return jnp.take_along_axis(history, follows, axis=1), jnp.take_along_axis(length, best[:, None], axis=1)[:, 0]
