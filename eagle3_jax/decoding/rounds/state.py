"""Sequences being decoded: the pytree that rounds take and return."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.decoding.params import MAX_STOP_IDS, SamplingParams
from eagle3_jax.decoding.rounds.constraint import ConstraintRows, Constraints
from eagle3_jax.decoding.rounds.observed import Observed
from eagle3_jax.decoding.rounds.sampling import Rows, Sampling, TokenCounts, entry
from eagle3_jax.decoding.rounds.tree import LastTree
from eagle3_jax.decoding.rounds.unread import Unread
from eagle3_jax.models.cache import Cache, Pass

# The page that is never read: sequences that have ended write to it.
TRASH = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RequestRows:
    """The settings of requests, one row each: made on the host, read by prefill, kept in the state.

    Attributes:
        limit: most tokens to choose; in the state of a batch, the tokens still to come.
        stop_ids: tokens that end the sequence; -1 is no token.
        logprobs: number of best tokens to report; -1 reports no log-probabilities.
        constraint: None in an engine without structured outputs.
    """

    limit: Int[Rows, " b"]
    stop_ids: Int[Rows, "b stops"]
    logprobs: Int[Rows, " b"]
    sampling: Sampling
    constraint: ConstraintRows | None = None

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        *,
        limit: int,
        stop_ids: Collection[int],
        prompt_length: int,
        digest: int,
        constraint: ConstraintRows | None = None,
    ) -> RequestRows:
        """Makes one row, on the host: `limit` tokens at most, ended by `MAX_STOP_IDS` ids at most.

        With one seed, prompts of different digests get different random numbers; the same prompt always gets the same.
        """
        unused = [-1] * (MAX_STOP_IDS - len(stop_ids))
        return cls(
            limit=entry(limit, np.int32),
            stop_ids=entry([*sorted(stop_ids), *unused], np.int32),
            logprobs=entry(-1 if params.logprobs is None else params.logprobs, np.int32),
            sampling=Sampling.of(params, digest, prompt_length + min(params.min_tokens, limit)),
            constraint=constraint,
        )

    @classmethod
    @functools.cache
    def nobody(cls, *, constrains: bool = False) -> RequestRows:
        """Makes the row of no request, in an engine that `constrains` answers or not."""
        constraint = ConstraintRows.of(None, 0) if constrains else None
        return cls.of(SamplingParams(), limit=0, stop_ids=(), prompt_length=0, digest=0, constraint=constraint)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Sequences being decoded. The batch is the first axis of every leaf but paged caches.

    Attributes:
        page_table: the page of each page_size slots of a sequence, in both caches; None where they are contiguous.
        lengths: committed tokens, in the target's cache and in the draft's.
        root: the last token chosen; not yet in the target's cache.
        output: tokens chosen so far, root included, then 0. It has room for `requests.limit` tokens and one more round.
        done: ended by a stop token or by the limit; such a sequence no longer changes.
        failed: ended because the target's logits were not finite.
        requests: settings of each sequence's request.
        rounds: number of rounds that the sequence took part in.
        drafted: number of these rounds that had drafts.
        accepted: number of these rounds in which the draft at each depth was accepted.
        token_counts: occurrences of each token, for penalties; None if no request has any.
        logprobs: log-probabilities of the output tokens; None if no request asks (`greedy` programs leave it).
        draft_cache, draft_state: None without a draft head.
        history: the sequence's tokens, root included, if drafts are copied from them (`lookup`); else None.
        unread: pairs that a resting head has missed; None if it never rests.
        ends: `num_output` after each round of one `decode`, 0 after rounds that did not run; None if unused.
        last_tree: tree of the last round that each sequence took part in; None if unused.
        observed: what verification computed, for a head that learns from it; else None.
        states: the slot of each sequence's recurrent state; None where the target has none.
        automaton: the state of each sequence's constraint behind its last token; None without structured outputs.
        tables: the words of all constraints' tables; else None.
    """

    cache: Cache
    lengths: Int[Array, " b"]
    root: Int[Array, " b"]
    output: Int[Array, "b m"]
    num_output: Int[Array, " b"]
    done: Bool[Array, " b"]
    failed: Bool[Array, " b"]
    requests: RequestRows
    rounds: Int[Array, " b"]
    drafted: Int[Array, " b"]
    accepted: Int[Array, "b s"]
    token_counts: TokenCounts | None = None
    logprobs: TokenLogprobs | None = None
    page_table: Int[Array, "b pages"] | None = None
    draft_cache: Cache | None = None
    draft_state: Float[Array, "b h"] | None = None
    history: Int[Array, "b t"] | None = None
    unread: Unread | None = None
    ends: Int[Array, "b rounds"] | None = None
    last_tree: LastTree | None = None
    observed: Observed | None = None
    states: Int[Array, " b"] | None = None
    automaton: Int[Array, " b"] | None = None
    tables: Int[Array, " words"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of the output tokens.

    Attributes:
        chosen: log-probabilities of the output tokens before rules, temperature and filters (vLLM's raw_logprobs).
        processed: theirs under the distributions that they were drawn from (vLLM's processed_logprobs).
        tokens: the k best tokens at each place, best first.
        best: the log-probabilities of `tokens`.
    """

    chosen: Float[Array, "b m"]
    processed: Float[Array, "b m"]
    tokens: Int[Array, "b m k"]
    best: Float[Array, "b m k"]

    @classmethod
    def empty(cls, batch: int, room: int, best: int) -> TokenLogprobs:
        shape = batch, room, best
        return cls(jnp.zeros(shape[:2]), jnp.zeros(shape[:2]), jnp.zeros(shape, jnp.int32), jnp.zeros(shape))


# The model axis splits KV heads, and counts of tokens as logits are split. The rest is whole on every device, where
# every process can read it.
STATE_SHARDING_RULES = ((r"cache.*(inputs|tail)", P(None, None, "model")), (r"cache|token_counts", P(None, "model")))


def behind(state: State) -> Pass:
    """Returns the pass of one token behind each sequence. A sequence that has ended owns no pages: its length is 0."""
    if state.page_table is None:
        return Pass(state.lengths[:, None], state.lengths, states=state.states)
    lengths = jnp.where(state.done, 0, state.lengths)
    pages = jnp.where(state.done[:, None], TRASH, state.page_table)
    return Pass(lengths[:, None], lengths, pages=pages, states=state.states)


def constraints_of(state: State, vocabulary: int) -> Constraints | None:
    """Returns the constraints of the running sequences, over so many tokens; None without structured outputs."""
    rows = state.requests.constraint
    if state.tables is None or state.automaton is None or rows is None:
        return None
    return Constraints(state.tables, rows, jnp.where(state.done, 0, state.automaton), vocabulary)


def is_stop(tokens: Int[Array, "b *t"], stop_ids: Int[Rows, "b stops"]) -> Bool[Array, "b *t"]:
    """Tells whether each token is among its sequence's stop tokens."""
    stops = stop_ids.reshape(stop_ids.shape[0], *(1,) * (tokens.ndim - 1), -1)
    return (tokens[..., None] == stops).any(axis=-1)


def put_logprobs(
    logprobs: TokenLogprobs,
    logits: Float[Array, "b p v"],
    chosen: Int[Array, "b p"],
    processed: Float[Array, "b p"],
    at: Int[Array, " b"],
) -> TokenLogprobs:
    """Writes the log-probabilities of p tokens and of the best ones from place `at` on."""
    normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    of_chosen = jnp.take_along_axis(logits, chosen[:, :, None], axis=-1) - normalizer
    # As a matrix: with three dimensions XLA sorts the whole vocabulary on TPUs, and takes long to compile that.
    best, tokens = jax.lax.top_k(logits.reshape(-1, logits.shape[-1]), logprobs.best.shape[-1])
    shape = (*logits.shape[:-1], -1)
    new = of_chosen[:, :, 0], processed, tokens.reshape(shape), best.reshape(shape) - normalizer
    return TokenLogprobs(*(put_at(rows, x, at) for rows, x in zip(vars(logprobs).values(), new, strict=True)))


def put_at(rows: Array, new: Array, at: Int[Array, " b"]) -> Array:
    """Writes new entries into each row, from place `at` on."""
    return jax.vmap(lambda row, x, i: jax.lax.dynamic_update_slice_in_dim(row, x, i, 0))(rows, new, at)
