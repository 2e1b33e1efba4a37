"""Rounds on the device: draft, verify and commit, extend, until every sequence has ended.

A round never asks the host: shapes are static, acceptance is data. Between rounds, with L committed tokens:

- the target's cache holds x_0..x_{L-1}; the root is x_L;
- the draft's cache holds the pairs (x_{t+1}, feature f_t) for t = 0..L-1, each with the target's true feature (a draft
model's: x_0..x_L);
- the draft state is the head's output at the last pair, so its logits predict x_{L+1}.

Vanilla decoding is the same round with a tree of one node and no draft. Caches are contiguous, one row per sequence
(`generate`, for loops inside a program), or paged (`programs`, for traffic).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.decoding.rounds import lookup
from eagle3_jax.decoding.rounds.draft import grow
from eagle3_jax.decoding.rounds.sampling import COINS
from eagle3_jax.decoding.rounds.state import (
    STATE_SHARDING_RULES,
    State,
    TokenLogprobs,
    behind,
    constraints_of,
    is_stop,
    put_at,
    put_logprobs,
)
from eagle3_jax.decoding.rounds.tree import TokenTree, chain_of_copies, root_only
from eagle3_jax.decoding.rounds.verify import Walk, pretend, row_of, verify
from eagle3_jax.decoding.tier import RoundPlan
from eagle3_jax.kernels.vocabulary.api import argmax
from eagle3_jax.mesh import constrain
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.layers import whole_states
from eagle3_jax.models.target import TargetModel


def advance(target: TargetModel, draft: Draft | None, state: State, plan: RoundPlan) -> State:
    """Runs one round: draft, verify and commit, extend the head with true features."""
    nodes, state = draft_tree(target, draft, state, plan)
    verified, state = verify_tree(target, state, nodes, plan)
    if state.last_tree is not None:
        last_tree = state.last_tree.note(nodes, verified.walk.path, ~state.done)
        state = dataclasses.replace(state, last_tree=last_tree)
    return extend(target, draft, state, verified, plan)


def draft_tree(target: TargetModel, draft: Draft | None, state: State, plan: RoundPlan) -> tuple[TokenTree, State]:
    """Drafts a round's tree; the head's scratch behind the committed pairs is written."""
    tree, this, copied = plan.tier.tree, behind(state), None
    if tree is None:
        return root_only(state.root), state
    constraints = constraints_of(state, target.config.vocab_size)
    if tree.lookup_tokens and state.history is not None:
        copied = lookup.copy(state.history, this.lengths, tree.lookup_tokens)
        copied = copied if constraints is None else constraints.narrowed(copied)
    state = dataclasses.replace(state, drafted=state.drafted + (~state.done).astype(jnp.int32))
    if not plan.tier.head or draft is None or state.draft_cache is None or state.draft_state is None:
        assert copied is not None
        return chain_of_copies(state.root, copied), state
    drawing = state.requests.sampling if tree.sample_drafts and plan.greedy is not True else None
    reads_target = draft.head.reads_target
    of_head = state.root, state.draft_state, this, state.cache if reads_target else state.draft_cache
    nodes, cache = grow(target, draft, tree, *of_head, drawing, copied, constraints, greedy=plan.greedy)
    if reads_target:
        return nodes, dataclasses.replace(state, cache=cache)
    return nodes, dataclasses.replace(state, draft_cache=cache)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verified:
    """The target's verification of a round's drafts.

    Attributes:
        walk: the accepted path down the tree.
        chosen: the accepted drafts, then the bonus; the rest is undefined.
        aux: the target's states along the path, for the head.
        logits: at every node, for log-probabilities; None in greedy programs.
        processed: log-probabilities of `chosen`, see `verify`; None in greedy programs.
        hidden, argmax: the last hidden state and the most probable next token along the path; None unless observed.
        automaton: the constraint's state behind the bonus; None without structured outputs.
    """

    walk: Walk
    chosen: Int[Array, "b p"]
    aux: Float[Array, "b p f"]
    logits: Float[Array, "b n v"] | None
    processed: Float[Array, "b p"] | None
    hidden: Float[Array, "b p h"] | None = None
    argmax: Int[Array, "b p"] | None = None
    automaton: Int[Array, " b"] | None = None


def verify_tree(target: TargetModel, state: State, nodes: TokenTree, plan: RoundPlan) -> tuple[Verified, State]:
    """Runs the target over the drafts, and commits the accepted path to its cache. Logits that are not finite fail."""
    this = behind(state)
    lengths, tier, greedy = this.lengths, plan.tier, plan.greedy
    steps, sampling = tier.depth, state.requests.sampling
    positions, mask = lengths[:, None] + nodes.depths, nodes.mask if tier.branches else None
    of_nodes = dataclasses.replace(this, positions=positions, tail_mask=mask)
    hidden, aux, cache = target(nodes.tokens, of_nodes, state.cache)
    logits = raw = target.logits(hidden)
    constraints, states = constraints_of(state, target.config.vocab_size), None
    if constraints is not None:
        states = constraints.along(nodes.tokens, nodes.parents, steps)
        logits = constraints.masked(raw, states)
    if tier.simulated is None:
        of_requests = sampling, lengths, state.requests.stop_ids, state.token_counts
        walk, bonus, processed = verify(nodes, logits, steps, *of_requests, greedy=greedy)
    else:
        walk, bonus = pretend(nodes, logits, sampling.uniform(lengths, COINS, steps) < tier.simulated)
        processed = None if greedy is True else jnp.zeros(walk.path.shape)
    counts = jnp.where(state.done, 0, walk.accepted + 1)
    cache = cache.commit(this, walk.path, counts, moves=tier.branches)
    failed = ~state.done & ~_finite(logits, walk.path).all(axis=-1)
    features = whole_states(jnp.take_along_axis(aux, walk.path[:, :, None], axis=1))
    of_walk = walk, _chosen(nodes.tokens, walk, bonus), features
    verified = Verified(*of_walk, None if greedy is True else logits, processed)
    if constraints is not None and states is not None:
        automaton = constraints.step(row_of(states, walk.last)[:, None], bonus[:, None])[:, 0]  # 0 of those that ended
        verified = dataclasses.replace(verified, automaton=automaton)
    if state.observed is not None:
        hidden = jnp.take_along_axis(hidden, walk.path[:, :, None], axis=1)
        best = jnp.take_along_axis(argmax(raw), walk.path, axis=1)
        verified = dataclasses.replace(verified, hidden=hidden, argmax=best)
    return verified, dataclasses.replace(state, cache=cache, done=state.done | failed, failed=state.failed | failed)


def extend(target: TargetModel, draft: Draft | None, state: State, verified: Verified, plan: RoundPlan) -> State:
    """Adds a round's tokens to the state; the head reads them with the target's features, or rests."""
    this = behind(state)
    walk, chosen, lengths = verified.walk, verified.chosen, this.lengths
    width = jnp.arange(chosen.shape[1])[None]
    positions = lengths[:, None] + width
    count, accepted, ended = _cut(state, chosen, walk.accepted)
    row = jnp.maximum(count - 1, 0)
    draft_cache, draft_state, unread = state.draft_cache, state.draft_state, state.unread
    if plan.tier.head and draft is not None and draft_cache is not None and draft_state is not None:
        features = draft.head.fuse(verified.aux)
        of_chosen = dataclasses.replace(this, positions=positions, row=row)
        states, draft_cache = draft.head.feed(target.embed[...], chosen, features, of_chosen, draft_cache)
        draft_state = jnp.where(state.done[:, None], draft_state, states[:, 0])
    elif unread is not None:
        unread = unread.note(chosen, verified.aux, count)
    token_counts, logprobs = state.token_counts, state.logprobs
    if plan.greedy is not True and token_counts is not None:
        token_counts = token_counts.add(chosen, width < count[:, None])
    if logprobs is not None and plan.greedy is not True:
        asked = (state.requests.logprobs >= 0).any()
        logprobs = _with_logprobs(logprobs, asked, verified, state.num_output)
    history, observed = state.history, state.observed
    if observed is not None:
        assert verified.hidden is not None
        assert verified.argmax is not None
        rows, taken = jnp.arange(len(count)), width < count[:, None]
        observed = observed.put(rows, positions, taken, verified.aux, verified.hidden, verified.argmax)
    if history is not None:
        column = jnp.arange(history.shape[1])[None]
        history = jnp.where(column > (lengths + count)[:, None], history, put_at(history, chosen, lengths + 1))
    num_output = state.num_output + count
    output = put_at(state.output, chosen, state.num_output)
    return dataclasses.replace(
        state,
        lengths=state.lengths + count,
        root=jnp.where(state.done, state.root, row_of(chosen, row)),
        output=jnp.where(jnp.arange(output.shape[1])[None] < num_output[:, None], output, 0),
        num_output=num_output,
        done=ended,
        token_counts=token_counts,
        rounds=state.rounds + (~state.done).astype(jnp.int32),
        accepted=state.accepted + (jnp.arange(state.accepted.shape[1])[None] < accepted[:, None]).astype(jnp.int32),
        logprobs=logprobs,
        draft_cache=draft_cache,
        draft_state=draft_state,
        history=history,
        unread=unread,
        observed=observed,
        automaton=verified.automaton,
    )


def _chosen(tokens: Int[Array, "b n"], walk: Walk, bonus: Int[Array, " b"]) -> Int[Array, "b p"]:
    """Returns the accepted drafts, then the bonus; the rest is undefined."""
    drafts = jnp.take_along_axis(tokens, jnp.roll(walk.path, -1, axis=1), axis=1)
    return jnp.where(jnp.arange(walk.path.shape[1])[None] == walk.accepted[:, None], bonus[:, None], drafts)


def _finite(logits: Float[Array, "b n v"], path: Int[Array, "b p"]) -> Bool[Array, "b p"]:
    """Tells whether the best logit of each node on the path is finite: a NaN or an infinity is always the argmax."""
    best = jnp.take_along_axis(logits, argmax(logits)[..., None], axis=-1)[..., 0]
    return jnp.isfinite(jnp.take_along_axis(best, path, axis=1))


def _with_logprobs(
    logprobs: TokenLogprobs, asked: Bool[Array, ""], verified: Verified, at: Int[Array, " b"]
) -> TokenLogprobs:
    """Adds the log-probabilities of a round's tokens, if a request asks for them."""

    def measure(logprobs: TokenLogprobs) -> TokenLogprobs:
        assert verified.logits is not None
        assert verified.processed is not None
        logits = jnp.take_along_axis(verified.logits, verified.walk.path[:, :, None], axis=1)
        return put_logprobs(logprobs, logits, verified.chosen, verified.processed, at)

    return jax.lax.cond(asked, measure, lambda x: x, logprobs)


def _cut(
    state: State, chosen: Int[Array, "b p"], accepted: Int[Array, " b"]
) -> tuple[Int[Array, " b"], Int[Array, " b"], Bool[Array, " b"]]:
    """Cuts a round's tokens at the first stop token and at the limit.

    Returns the number of tokens to take, that of accepted drafts, and whether the sequence has ended. The limit lowers
    no number of drafts: it tells nothing about them.
    """
    column = jnp.arange(chosen.shape[1])[None]
    stop = is_stop(chosen, state.requests.stop_ids) & (column <= accepted[:, None])
    stops = stop.any(axis=-1)
    until = jnp.where(stops, jnp.argmax(stop, axis=-1).astype(jnp.int32), accepted) + 1
    count = jnp.where(state.done, 0, jnp.minimum(until, state.requests.limit - state.num_output))
    drafts = jnp.where(state.done, 0, jnp.minimum(until, accepted))
    return count, drafts, state.done | stops | (state.num_output + count >= state.requests.limit)


def run_rounds(
    target: TargetModel,
    draft: Draft | None,
    state: State,
    max_rounds: Int[Array, ""] | int,
    stop_at: Int[Array, ""] | int,
    plan: RoundPlan,
) -> State:
    """Runs rounds until `stop_at` sequences are done, at most `max_rounds` of them, in one loop on the device."""

    def proceed(carry: tuple[Array, State]) -> Array:
        return (carry[0] < max_rounds) & (carry[1].done.sum() < stop_at)

    def drafted(state: State) -> State:
        return advance(target, draft, state, plan)

    def undrafted(state: State) -> State:
        vanilla = dataclasses.replace(plan, tier=dataclasses.replace(plan.tier, tree=None))
        return advance(target, draft, state, vanilla)

    def body(carry: tuple[Array, State]) -> tuple[Array, State]:
        number, state = carry
        if not plan.tier.copies_alone:
            state = drafted(state)
        else:
            assert state.history is not None
            found = lookup.continuation(state.history, state.lengths, 1)[1] > 0  # without a match there are no drafts
            constraints = constraints_of(state, target.config.vocab_size)
            found = found if constraints is None else found | (constraints.forced(constraints.states) >= 0)
            state = jax.lax.cond((found & ~state.done).any(), drafted, undrafted, state)
        if state.ends is not None:
            state = dataclasses.replace(state, ends=state.ends.at[:, number].set(state.num_output))
        return number + 1, state

    return constrain(jax.lax.while_loop(proceed, body, (jnp.int32(0), state))[1], STATE_SHARDING_RULES)
