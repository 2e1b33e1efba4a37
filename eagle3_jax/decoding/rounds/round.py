"""Rounds on the device: prefill, then draft - verify - commit until every sequence has ended.

A round never asks the host: shapes are static, acceptance is data. Between rounds, with L committed tokens:
the target's cache holds x_0..x_{L-1}; the root is x_L; the draft's cache holds the pairs (x_{t+1}, feature f_t) for
t = 0..L-1, each with the target's true feature (a draft model's: x_0..x_L); the draft state is the head's output at the
last pair, so its logits predict x_{L+1}. Vanilla decoding is the same round with a tree of one node and no draft.

Caches are contiguous, a row a sequence (`generate`, for loops inside a program), or paged (`programs`, for traffic).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jaxtyping import Array, Bool, Float, Int, Key

from eagle3_jax.config import DraftTree
from eagle3_jax.decoding.device.catch_up import Unread
from eagle3_jax.decoding.rounds import lookup
from eagle3_jax.decoding.rounds.sampling import BONUS, COINS, Sampling, sample
from eagle3_jax.decoding.rounds.tree import LastTree, TokenTree, chain_of_copies, grow, root_only, scratch_slots
from eagle3_jax.decoding.rounds.verify import Walk, pretend, row_of, verify
from eagle3_jax.kernels.vocabulary.api import argmax
from eagle3_jax.mesh import constrain
from eagle3_jax.models.cache import KVCache, PageTable
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.target import TargetModel

# The page that nothing is read from: rows that have ended write to it.
TRASH = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Sequences being decoded. Every leaf but paged caches has the batch first.

    Attributes:
        page_table: the page of each stretch of a sequence, in both caches; None where they are contiguous.
        lengths: committed tokens, in the target's cache and in the draft's.
        root: the last token chosen; not yet in the target's cache.
        output: tokens chosen so far, root included; 0 behind them. Room for `limit` tokens and one round more.
        limit: most tokens to choose.
        done: ended by a stop token or by the limit; nothing of such a sequence changes any more.
        failed: ended because the target's logits were not finite.
        stop_ids: tokens that end the sequence; -1 where there is none.
        rounds: rounds it took part in. drafted: of those, with drafts.
        accepted: in how many of them the draft at each depth was accepted.
        logprobs: of each output token, before rules and filters; None where nobody asks (`greedy` programs leave it).
        draft_cache, draft_state: None without a draft head.
        history: the sequence's tokens, root included, where drafts are copied from it (`lookup`); else None.
        unread: what a resting head has missed; None where it never rests.
        ends: `num_output` behind each round of one `decode`, 0 behind those that were not run; None where nobody asks.
        last_tree: of the last round that each took part in; None where nobody asks.
    """

    cache: KVCache
    lengths: Int[Array, " b"]
    root: Int[Array, " b"]
    output: Int[Array, "b m"]
    num_output: Int[Array, " b"]
    limit: Int[Array, " b"]
    done: Bool[Array, " b"]
    failed: Bool[Array, " b"]
    stop_ids: Int[Array, "b stops"]
    sampling: Sampling
    rounds: Int[Array, " b"]
    drafted: Int[Array, " b"]
    accepted: Int[Array, "b s"]
    logprobs: TokenLogprobs | None = None
    page_table: Int[Array, "b pages"] | None = None
    draft_cache: KVCache | None = None
    draft_state: Float[Array, "b h"] | None = None
    history: Int[Array, "b t"] | None = None
    unread: Unread | None = None
    ends: Int[Array, "b rounds"] | None = None
    last_tree: LastTree | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of the output tokens.

    Attributes:
        asked: how many of the best tokens are asked for, -1 for nothing at all.
        chosen: of the output tokens. tokens, best: the k best at each place, best first.
    """

    asked: Int[Array, " b"]
    chosen: Float[Array, "b m"]
    tokens: Int[Array, "b m k"]
    best: Float[Array, "b m k"]


# KV heads over the model axis; the rest whole on every device, where every process can read it.
STATE_SHARDING_RULES = ((r"cache", P(None, "model")),)


def steps_of(tree: DraftTree | None) -> int:
    """Most drafts that one round can accept."""
    return 0 if tree is None else tree.depth


def slots_needed(prompt_slots: int, max_tokens: int, tree: DraftTree | None) -> int:
    """Cache slots for prompts of at most `prompt_slots` tokens, padding included, and their answers."""
    return prompt_slots + max_tokens + scratch_slots(tree)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Read:
    """What reading a stretch of the prompts leaves, beside the caches: the token behind each prompt's end.

    Attributes:
        logits: at the last position read.
        root: chosen from them. failed: they are not finite.
        draft_state: of the last pair; None in vanilla decoding.
    """

    logits: Float[Array, "b v"]
    root: Int[Array, " b"]
    failed: Bool[Array, " b"]
    draft_state: Float[Array, "b h"] | None


def read(
    target: TargetModel,
    draft: Draft | None,
    tokens: Int[Array, "b t"],
    following: Int[Array, "b t"],
    starts: Int[Array, " b"],
    counts: Int[Array, " b"],
    ends: Bool[Array, " b"],
    caches: tuple[KVCache, KVCache | None],
    sampling: Sampling,
    stop_ids: Int[Array, "b stops"],
    page_table: PageTable | None = None,
    *,
    greedy: bool,
) -> tuple[Read, tuple[KVCache, KVCache | None]]:
    """Reads a stretch of each prompt into the caches, and chooses a token behind it.

    Args:
        tokens: the stretch, padded on the right; its first position is `starts`, it has `counts` tokens.
        following: the token behind each of them; behind the prompt's end the chosen one takes its place.
        ends: the prompt ends with this stretch.
        page_table: None where the caches are contiguous.
    """
    positions = starts[:, None] + jnp.arange(tokens.shape[1])[None]
    cache, draft_cache = caches
    hidden, aux, cache = target(tokens, positions, cache, starts, page_table=page_table)
    last = jnp.maximum(counts - 1, 0)
    logits = target.logits(row_of(hidden, last))
    root, failed = _first_token(logits, sampling, starts + counts, stop_ids, greedy=greedy)
    draft_state = None
    if draft is not None and draft_cache is not None:
        at_end = (jnp.arange(tokens.shape[1])[None] == last[:, None]) & ends[:, None]
        following = jnp.where(at_end, root[:, None], following)
        features = draft.head.fuse(aux)
        states, draft_cache = draft.head.feed(
            target.embed[...],
            following,
            features,
            positions,
            draft_cache,
            starts,
            preceding=tokens[:, :1],
            row=last,
            page_table=page_table,
        )
        draft_state = states[:, 0]
    return Read(logits, root, failed, draft_state), (cache, draft_cache)


def _first_token(
    logits: Float[Array, "b v"],
    sampling: Sampling,
    lengths: Int[Array, " b"],
    stop_ids: Int[Array, "b stops"],
    *,
    greedy: bool,
) -> tuple[Int[Array, " b"], Bool[Array, " b"]]:
    """The token that follows a prompt, from the logits at its last position."""
    predicted = argmax(logits)
    failed = ~jnp.isfinite(jnp.take_along_axis(logits, predicted[:, None], axis=1)[:, 0])
    if greedy:
        return predicted, failed
    if sampling.rules is not None:
        logits = sampling.rules.apply(logits, stop_ids, lengths)
    # A prompt's own length belongs to the first round.
    return sample(logits, sampling, sampling.uniform(lengths - 1, BONUS, 2)), failed


def prefill(
    target: TargetModel,
    draft: Draft | None,
    tokens: Int[Array, "b p"],
    prompt_lengths: Int[Array, " b"],
    sampling: Sampling,
    limit: Int[Array, " b"],
    stop_ids: Int[Array, "b stops"],
    *,
    slots: int,
    max_output: int,
    tree: DraftTree | None,
    greedy: bool,
) -> State:
    """Reads whole prompts into contiguous caches and chooses each answer's first token.

    Args:
        tokens: prompts, padded on the right.
        slots: of the caches, at least `slots_needed(p, max_output, tree)`: a write beyond the end would be moved.
        max_output: the largest `limit`.
        tree: None is vanilla decoding; the draft is then not used.
        greedy: every request is `SamplingParams.greedy`.
    """
    batch = tokens.shape[0]
    none = jnp.zeros(batch, jnp.int32)
    draft = None if tree is None else draft
    caches = target.empty_cache(batch, slots), None if draft is None else draft.head.empty_cache(batch, slots)
    found, (cache, draft_cache) = read(
        target,
        draft,
        tokens,
        jnp.roll(tokens, -1, axis=1),
        none,
        prompt_lengths,
        jnp.ones(batch, bool),
        caches,
        sampling,
        stop_ids,
        greedy=greedy,
    )
    state = State(
        cache=cache,
        lengths=prompt_lengths,
        root=found.root,
        output=jnp.zeros((batch, max_output + steps_of(tree) + 1), jnp.int32).at[:, 0].set(found.root),
        num_output=none + 1,
        limit=limit,
        done=(limit <= 1) | is_stop(found.root, stop_ids) | found.failed,
        failed=found.failed,
        stop_ids=stop_ids,
        sampling=sampling,
        rounds=none,
        drafted=none,
        accepted=jnp.zeros((batch, steps_of(tree)), jnp.int32),
        draft_cache=draft_cache,
        draft_state=found.draft_state,
        history=_put(_put(jnp.zeros((batch, slots + 1), jnp.int32), tokens, none), found.root[:, None], prompt_lengths)
        if tree is not None and tree.lookup_tokens
        else None,
    )
    return constrain(state, STATE_SHARDING_RULES)


def advance(
    target: TargetModel,
    draft: Draft | None,
    state: State,
    *,
    tree: DraftTree | None,
    greedy: bool,
    simulated: float | None = None,
) -> State:
    """One round: draft, verify and commit, extend the draft with true features.

    Args:
        draft: None lets the head rest, where the state has one.
        simulated: see `judge`.
    """
    nodes, state = propose(target, draft, state, tree=tree, greedy=greedy)
    head = draft is not None
    judged, state = judge(target, state, nodes, tree=tree, head=head, greedy=greedy, simulated=simulated)
    if state.last_tree is not None:
        last_tree = state.last_tree.note(nodes, judged.walk.path, ~state.done)
        state = dataclasses.replace(state, last_tree=last_tree)
    return extend(target, draft, state, judged, greedy=greedy)


def propose(
    target: TargetModel, draft: Draft | None, state: State, *, tree: DraftTree | None, greedy: bool
) -> tuple[TokenTree, State]:
    """The drafts of a round; the head's scratch behind the committed pairs is written."""
    lengths, table = _in_use(state)
    copied = None
    if tree is not None and tree.lookup_tokens and state.history is not None:
        copied = lookup.copy(state.history, lengths, tree.lookup_tokens)
    if tree is None:
        return root_only(state.root), state
    state = dataclasses.replace(state, drafted=state.drafted + (~state.done).astype(jnp.int32))
    if draft is None or state.draft_cache is None or state.draft_state is None:
        assert copied is not None
        return chain_of_copies(state.root, copied), state
    drawing = state.sampling if tree.sample_drafts and not greedy else None
    nodes, cache = grow(
        target, draft, tree, state.root, state.draft_state, state.draft_cache, lengths, drawing, copied, table
    )
    return nodes, dataclasses.replace(state, draft_cache=cache)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Judged:
    """What the target said of a round's drafts.

    Attributes:
        walk: the way down the tree. chosen: the accepted drafts, then the bonus; then nothing that means anything.
        aux: the target's states along the way, for the head.
        logits: at every node, for log-probabilities; None in greedy programs.
    """

    walk: Walk
    chosen: Int[Array, "b p"]
    aux: Float[Array, "b p f"]
    logits: Float[Array, "b n v"] | None


def judge(
    target: TargetModel,
    state: State,
    nodes: TokenTree,
    *,
    tree: DraftTree | None,
    head: bool,
    greedy: bool,
    simulated: float | None = None,
) -> tuple[Judged, State]:
    """The target's pass over the drafts; what it accepts lies in its cache then. Logits that are no numbers fail.

    Args:
        head: drafts came from the head, not from the text alone.
        simulated: for benchmarks alone: accepts each draft with this probability, whatever the target says of it.
    """
    lengths, table = _in_use(state)
    steps = steps_of(tree)
    branches = tree is not None and head and (tree.topk > 1 or tree.lookup_tokens > 0)
    hidden, aux, cache = target(
        nodes.tokens, lengths[:, None] + nodes.depths, state.cache, lengths, nodes.mask if branches else None, table
    )
    logits = target.logits(hidden)
    if simulated is None:
        walk, bonus = verify(nodes, logits, steps, state.sampling, lengths, state.stop_ids, greedy=greedy)
    else:
        walk, bonus = pretend(nodes, logits, state.sampling.uniform(lengths, COINS, steps) < simulated)
    if branches:
        cache = cache.commit(lengths, walk.path, table)
    failed = ~state.done & ~_finite(logits, walk.path).all(axis=-1)
    judged = Judged(
        walk,
        _chosen(nodes.tokens, walk, bonus),
        jnp.take_along_axis(aux, walk.path[:, :, None], axis=1),
        None if greedy else logits,
    )
    return judged, dataclasses.replace(
        state,
        cache=cache,
        done=state.done | failed,
        failed=state.failed | failed,
    )


def extend(target: TargetModel, draft: Draft | None, state: State, judged: Judged, *, greedy: bool) -> State:
    """Takes a round's tokens into the state; the head reads them with the target's features, or rests."""
    lengths, table = _in_use(state)
    walk, chosen = judged.walk, judged.chosen
    width = jnp.arange(chosen.shape[1])[None]
    count, accepted, ended = _cut(state, chosen, walk.accepted)
    row = jnp.maximum(count - 1, 0)
    draft_cache, draft_state, unread = state.draft_cache, state.draft_state, state.unread
    if draft is not None and draft_cache is not None and draft_state is not None:
        features, positions = draft.head.fuse(judged.aux), lengths[:, None] + width
        states, draft_cache = draft.head.feed(
            target.embed[...], chosen, features, positions, draft_cache, lengths, row=row, page_table=table
        )
        draft_state = jnp.where(state.done[:, None], draft_state, states[:, 0])
    elif unread is not None:
        unread = unread.note(chosen, judged.aux, count)
    sampling, logprobs = state.sampling, state.logprobs
    if not greedy and sampling.rules is not None:
        sampling = dataclasses.replace(sampling, rules=sampling.rules.count(chosen, width < count[:, None]))
    if judged.logits is not None and logprobs is not None:
        logprobs = _with_logprobs(logprobs, judged.logits, walk.path, chosen, state.num_output)
    history = state.history
    if history is not None:
        column = jnp.arange(history.shape[1])[None]
        history = jnp.where(column > (lengths + count)[:, None], history, _put(history, chosen, lengths + 1))
    num_output = state.num_output + count
    output = _put(state.output, chosen, state.num_output)
    return dataclasses.replace(
        state,
        lengths=state.lengths + count,
        root=jnp.where(state.done, state.root, row_of(chosen, row)),
        output=jnp.where(jnp.arange(output.shape[1])[None] < num_output[:, None], output, 0),
        num_output=num_output,
        done=ended,
        sampling=sampling,
        rounds=state.rounds + (~state.done).astype(jnp.int32),
        accepted=state.accepted + (jnp.arange(state.accepted.shape[1])[None] < accepted[:, None]).astype(jnp.int32),
        logprobs=logprobs,
        draft_cache=draft_cache,
        draft_state=draft_state,
        history=history,
        unread=unread,
    )


def _in_use(state: State) -> tuple[Int[Array, " b"], PageTable | None]:
    """Lengths and page table for a pass: what has ended owns no pages, and nothing of it need be read."""
    if state.page_table is None:
        return state.lengths, None
    return jnp.where(state.done, 0, state.lengths), PageTable(jnp.where(state.done[:, None], TRASH, state.page_table))


def _chosen(tokens: Int[Array, "b n"], walk: Walk, bonus: Int[Array, " b"]) -> Int[Array, "b p"]:
    """Accepted drafts, then the bonus; what stands behind it means nothing."""
    drafts = jnp.take_along_axis(tokens, jnp.roll(walk.path, -1, axis=1), axis=1)
    return jnp.where(jnp.arange(walk.path.shape[1])[None] == walk.accepted[:, None], bonus[:, None], drafts)


def _finite(logits: Float[Array, "b n v"], path: Int[Array, "b p"]) -> Bool[Array, "b p"]:
    """Whether the best logit of each node on the way is a number: a NaN or an infinity is always the argmax."""
    best = jnp.take_along_axis(logits, argmax(logits)[..., None], axis=-1)[..., 0]
    return jnp.isfinite(jnp.take_along_axis(best, path, axis=1))


def _with_logprobs(
    logprobs: TokenLogprobs,
    logits: Float[Array, "b n v"],
    path: Int[Array, "b p"],
    chosen: Int[Array, "b p"],
    at: Int[Array, " b"],
) -> TokenLogprobs:
    """With those of a round's tokens, where anyone asks for them."""

    def measure(logprobs: TokenLogprobs) -> TokenLogprobs:
        return put_logprobs(logprobs, jnp.take_along_axis(logits, path[:, :, None], axis=1), chosen, at)

    return jax.lax.cond((logprobs.asked >= 0).any(), measure, lambda x: x, logprobs)


def put_logprobs(
    logprobs: TokenLogprobs, logits: Float[Array, "b p v"], chosen: Int[Array, "b p"], at: Int[Array, " b"]
) -> TokenLogprobs:
    """Writes the log-probabilities of p tokens and of the best ones from place `at` on."""
    normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    of_chosen = jnp.take_along_axis(logits, chosen[:, :, None], axis=-1) - normalizer
    # Of a matrix: of an array of three dimensions XLA sorts the whole vocabulary on TPUs, and compiles that for long.
    best, tokens = jax.lax.top_k(logits.reshape(-1, logits.shape[-1]), logprobs.best.shape[-1])
    shape = (*logits.shape[:-1], -1)
    return dataclasses.replace(
        logprobs,
        chosen=_put(logprobs.chosen, of_chosen[:, :, 0], at),
        tokens=_put(logprobs.tokens, tokens.reshape(shape), at),
        best=_put(logprobs.best, best.reshape(shape) - normalizer, at),
    )


def _put(rows: Array, new: Array, at: Int[Array, " b"]) -> Array:
    """Each row with its new entries from place `at` on."""
    return jax.vmap(lambda row, x, i: jax.lax.dynamic_update_slice_in_dim(row, x, i, 0))(rows, new, at)


def _cut(
    state: State, chosen: Int[Array, "b p"], accepted: Int[Array, " b"]
) -> tuple[Int[Array, " b"], Int[Array, " b"], Bool[Array, " b"]]:
    """What of a round's tokens counts: up to the first stop token, and not beyond the limit.

    Returns:
        How many tokens to take; how many drafts count as accepted (the limit cuts the answer, it says nothing of the
        draft); whether the sequence has ended.
    """
    column = jnp.arange(chosen.shape[1])[None]
    stop = is_stop(chosen, state.stop_ids) & (column <= accepted[:, None])
    stops = stop.any(axis=-1)
    until = jnp.where(stops, jnp.argmax(stop, axis=-1).astype(jnp.int32), accepted) + 1
    count = jnp.where(state.done, 0, jnp.minimum(until, state.limit - state.num_output))
    drafts = jnp.where(state.done, 0, jnp.minimum(until, accepted))
    return count, drafts, state.done | stops | (state.num_output + count >= state.limit)


def decode(
    target: TargetModel,
    draft: Draft | None,
    state: State,
    max_rounds: Int[Array, ""] | int,
    stop_at: Int[Array, ""] | int,
    *,
    tree: DraftTree | None,
    greedy: bool,
    simulated: float | None = None,
) -> State:
    """Rounds until `stop_at` sequences are done, at most `max_rounds` of them, in one loop on the device.

    Args:
        simulated: see `judge`.
    """

    def proceed(carry: tuple[Array, State]) -> Array:
        return (carry[0] < max_rounds) & (carry[1].done.sum() < stop_at)

    def round_of(tree: DraftTree | None) -> Callable[[State], State]:
        return lambda state: advance(target, draft, state, tree=tree, greedy=greedy, simulated=simulated)

    def body(carry: tuple[Array, State]) -> tuple[Array, State]:
        number, state = carry
        if tree is None or draft is not None:
            state = round_of(tree)(state)
        else:
            assert state.history is not None
            found = lookup.continuation(state.history, state.lengths, 1)[1] > 0  # nothing to copy: no drafts
            state = jax.lax.cond((found & ~state.done).any(), round_of(tree), round_of(None), state)
        if state.ends is not None:
            state = dataclasses.replace(state, ends=state.ends.at[:, number].set(state.num_output))
        return number + 1, state

    return constrain(jax.lax.while_loop(proceed, body, (jnp.int32(0), state))[1], STATE_SHARDING_RULES)


@functools.partial(jax.jit, static_argnames=("max_tokens", "tree", "slots"))
def generate(
    target: TargetModel,
    draft: Draft | None,
    prompts: Int[Array, "b p"],
    lengths: Int[Array, " b"],
    rng: Key[Array, ""],
    *,
    max_tokens: int,
    tree: DraftTree | None = None,
    temperature: float | Float[Array, "..."] | None = None,
    top_k: int | Int[Array, "..."] = 0,
    top_p: float | Float[Array, "..."] = 1.0,
    min_p: float | Float[Array, "..."] = 0.0,
    ignore_eos: bool | Bool[Array, "..."] = False,
    slots: int | None = None,
) -> State:
    """Answers a batch of prompts without a host: for reinforcement learning and other loops inside a program.

    Pure: the weights of target and draft are arguments like any other, and may change from call to call without a
    compilation. On several TPU chips call it under `jax.set_mesh`: the attention kernel is split over the mesh that is
    set.

    Args:
        prompts: padded on the right. lengths: of each prompt, at least 1.
        tree: None is vanilla decoding. With `lookup_tokens` the draft may be None: all drafts are copied then.
        temperature: None is greedy and leaves sampling out of the program.
        temperature, top_k, top_p, min_p, ignore_eos: one for all, or one a sequence.
        slots: of each sequence's caches; None is as many as they need.

    Returns:
        The final state: `output[:, :max_tokens]` with `num_output` tokens each (the end-of-sequence token included),
        0 behind them; `rounds` and `accepted` say how well the draft did.

    Raises:
        ValueError: prompts and answers that do not fit into `slots` or the target's positions; a tree without a draft.
    """
    batch, length = prompts.shape
    need, most = slots_needed(length, max_tokens, tree), target.config.max_position_embeddings
    if max_tokens < 1:
        raise ValueError(f"max_tokens: got {max_tokens}, expected at least 1")
    if length + max_tokens > most:
        raise ValueError(f"prompts, max_tokens: got {length} + {max_tokens}, expected the target's {most} at most")
    if slots is not None and slots < need:
        raise ValueError(f"slots: got {slots}, expected at least {need} for these prompts, max_tokens and tree")
    if tree is not None and draft is None and tree.num_draft_tokens != tree.lookup_tokens + 1:
        raise ValueError(f"draft: got None, expected a draft head for {tree}")

    def each(value: Any, dtype: Any) -> Array:
        return jnp.broadcast_to(jnp.asarray(0 if value is None else value, dtype), (batch,))

    sampling = Sampling(
        each(temperature, jnp.float32),
        each(top_k, jnp.int32),
        each(top_p, jnp.float32),
        each(min_p, jnp.float32),
        jax.random.split(rng, batch),
    )
    greedy = temperature is None
    eos = jnp.asarray(target.config.eos_token_ids or (-1,), jnp.int32)
    state = prefill(
        target,
        draft,
        prompts,
        lengths,
        sampling,
        each(max_tokens, jnp.int32),
        jnp.where(each(ignore_eos, bool)[:, None], -1, eos[None]),
        slots=slots or need,
        max_output=max_tokens,
        tree=tree,
        greedy=greedy,
    )
    return decode(target, draft, state, max_tokens, batch, tree=tree, greedy=greedy)


def is_stop(tokens: Int[Array, "b *t"], stop_ids: Int[Array, "b stops"]) -> Bool[Array, "b *t"]:
    """Whether each token is among its sequence's stop tokens."""
    stops = stop_ids.reshape(stop_ids.shape[0], *(1,) * (tokens.ndim - 1), -1)
    return (tokens[..., None] == stops).any(axis=-1)
