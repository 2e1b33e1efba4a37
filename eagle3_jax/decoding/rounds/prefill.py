"""Prefill: reads a stretch of each prompt into the caches and chooses the token after it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.decoding.rounds.constraint import Constraints
from eagle3_jax.decoding.rounds.sampling import BONUS, TokenCounts, draw, probabilities
from eagle3_jax.decoding.rounds.state import RequestRows
from eagle3_jax.decoding.rounds.verify import row_of
from eagle3_jax.kernels.vocabulary.api import argmax
from eagle3_jax.models.cache import Cache, Pass
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.target import TargetModel


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Read:
    """The result of reading a stretch of the prompts, beside the caches.

    Attributes:
        logits: at the last position read.
        root: the token chosen from them.
        processed: its log-probability under the distribution that it was drawn from; 0 in greedy programs.
        failed: whether they are not finite.
        draft_state: the head's state at the last pair; None in vanilla decoding.
        hidden, aux: the target's states at every position.
        automaton: the constraint's state behind the root; None without structured outputs.
    """

    logits: Float[Array, "b v"]
    root: Int[Array, " b"]
    processed: Float[Array, " b"]
    failed: Bool[Array, " b"]
    draft_state: Float[Array, "b d"] | None
    hidden: Float[Array, "b t h"]
    aux: Float[Array, "b t f"]
    automaton: Int[Array, " b"] | None = None


def read(
    target: TargetModel,
    draft: Draft | None,
    tokens: Int[Array, "b t"],
    following: Int[Array, "b t"],
    starts: Int[Array, " b"],
    counts: Int[Array, " b"],
    ends: Bool[Array, " b"],
    caches: tuple[Cache, Cache | None],
    requests: RequestRows,
    token_counts: TokenCounts | None = None,
    pages: Int[Array, "b pages"] | None = None,
    states: Int[Array, " b"] | None = None,
    tables: Int[Array, " words"] | None = None,
    *,
    greedy: bool,
) -> tuple[Read, tuple[Cache, Cache | None]]:
    """Reads a stretch of each prompt into the caches, and chooses the token after it.

    Args:
        tokens: the stretch, padded on the right.
        following: the token after each; after the prompt's end the chosen token replaces it.
        starts: position of the stretch's first token.
        counts: tokens of the stretch.
        ends: whether the prompt ends with this stretch.
        pages, states: see `Pass`. With pages, a row may continue the one before it.
        tables: of constraints, see `State`.
    """
    positions = starts[:, None] + jnp.arange(tokens.shape[1])[None]
    cache, draft_cache = caches
    continued = pages is not None and len(tokens) > 1
    this = Pass(positions, starts, pages=pages, states=states, counts=counts, continued=continued)
    hidden, aux, cache = target(tokens, this, cache)
    last = jnp.maximum(counts - 1, 0)
    logits, constraints = target.logits(row_of(hidden, last)), None
    if tables is not None and requests.constraint is not None:
        constraints = Constraints(tables, requests.constraint, jnp.asarray(requests.constraint.start), logits.shape[-1])
        logits = constraints.masked(logits[:, None], constraints.states[:, None])[:, 0]
    root, processed, failed = _first_token(logits, requests, token_counts, starts + counts, greedy=greedy)
    automaton = None if constraints is None else constraints.step(constraints.states[:, None], root[:, None])[:, 0]
    draft_state = None
    if draft is not None and draft_cache is not None:
        at_end = (jnp.arange(tokens.shape[1])[None] == last[:, None]) & ends[:, None]
        following = jnp.where(at_end, root[:, None], following)
        features = draft.head.fuse(aux)
        this = dataclasses.replace(this, preceding=tokens[:, :1], row=last)
        states, draft_cache = draft.head.feed(target.embed[...], following, features, this, draft_cache)
        draft_state = states[:, 0]
    return Read(logits, root, processed, failed, draft_state, hidden, aux, automaton), (cache, draft_cache)


def _first_token(
    logits: Float[Array, "b v"],
    requests: RequestRows,
    token_counts: TokenCounts | None,
    lengths: Int[Array, " b"],
    *,
    greedy: bool,
) -> tuple[Int[Array, " b"], Float[Array, " b"], Bool[Array, " b"]]:
    """Chooses the token after a prompt from the logits at its last position. Returns `root`, `processed`, `failed`."""
    predicted = argmax(logits)
    failed = ~jnp.isfinite(jnp.take_along_axis(logits, predicted[:, None], axis=1)[:, 0])
    if greedy:
        return predicted, jnp.zeros(predicted.shape), failed
    sampling = requests.sampling
    if sampling.rules is not None and token_counts is not None:
        logits = sampling.rules.apply(logits, token_counts, requests.stop_ids, lengths)

    def drawn() -> tuple[Array, Array]:
        # Random numbers are keyed by length; the prompt's full length belongs to the first round.
        probs = probabilities(logits, sampling)
        root = draw(sampling.uniform(lengths - 1, BONUS, 2), probs)
        return root, jnp.log(jnp.take_along_axis(probs, root[:, None], axis=1)[:, 0])

    def best() -> tuple[Array, Array]:
        return argmax(logits), jnp.zeros(predicted.shape)

    return *jax.lax.cond((sampling.temperature > 0).any(), drawn, best), failed
