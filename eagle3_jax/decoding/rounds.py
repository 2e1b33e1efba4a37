"""Rounds on the device: prefill, then draft - verify - commit until every sequence has ended.

A round never asks the host: shapes are static, acceptance is data. Between rounds, with L committed tokens:
the target's cache holds x_0..x_{L-1}; the root is x_L; the draft's cache holds the pairs (x_{t+1}, feature f_t) for
t = 0..L-1, each with the target's true feature; the draft state is the head's output at the last pair, so its logits
predict x_{L+1}. Vanilla decoding is the same round with a tree of one node and no draft.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jaxtyping import Array, Bool, Float, Int, Key

from eagle3_jax.config import DraftTree
from eagle3_jax.decoding.sampling import Sampling, first_token
from eagle3_jax.decoding.tree import feed, grow, root_only, scratch_slots
from eagle3_jax.decoding.verify import Walk, verify
from eagle3_jax.mesh import constrain
from eagle3_jax.models.cache import KVCache
from eagle3_jax.models.draft import Draft
from eagle3_jax.models.llama import Llama


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Sequences being decoded. Every leaf has the batch first, so that one sequence is inserted leaf by leaf.

    Attributes:
        lengths: committed tokens, in the target's cache and in the draft's.
        root: the last token chosen; not yet in the target's cache.
        output: tokens chosen so far, root included; 0 behind them. Room for `limit` tokens and one round more.
        limit: most tokens to choose.
        done: ended by end-of-sequence or by the limit; nothing of such a sequence changes any more.
        rounds: rounds it took part in.
        accepted: in how many of them the draft at each depth was accepted.
        draft_cache, draft_state: None in vanilla decoding.
    """

    cache: KVCache
    lengths: Int[Array, " b"]
    root: Int[Array, " b"]
    output: Int[Array, "b m"]
    num_output: Int[Array, " b"]
    limit: Int[Array, " b"]
    done: Bool[Array, " b"]
    ignore_eos: Bool[Array, " b"]
    sampling: Sampling
    rounds: Int[Array, " b"]
    accepted: Int[Array, "b s"]
    draft_cache: KVCache | None = None
    draft_state: Float[Array, "b h"] | None = None


# KV heads over the model axis; the rest whole on every device, where every process can read it.
STATE_SHARDING_RULES = ((r"cache", P(None, "model")),)


def steps_of(tree: DraftTree | None) -> int:
    """Most drafts that one round can accept."""
    return 0 if tree is None else tree.num_steps


def slots_needed(prompt_slots: int, max_tokens: int, tree: DraftTree | None) -> int:
    """Cache slots for prompts of at most `prompt_slots` tokens, padding included, and their answers."""
    return prompt_slots + max_tokens + scratch_slots(tree)


def prefill(
    target: Llama,
    draft: Draft | None,
    tokens: Int[Array, "b p"],
    prompt_lengths: Int[Array, " b"],
    sampling: Sampling,
    limit: Int[Array, " b"],
    ignore_eos: Bool[Array, " b"],
    *,
    slots: int,
    max_output: int,
    tree: DraftTree | None,
    greedy: bool,
) -> State:
    """Reads the prompts and chooses each answer's first token.

    Args:
        tokens: prompts, padded on the right.
        slots: of the caches, at least `slots_needed(p, max_output, tree)`: a write beyond the end would be moved.
        max_output: the largest `limit`.
        tree: None is vanilla decoding; the draft is then not used.
        greedy: every temperature is 0.
    """
    batch, length = tokens.shape
    none = jnp.zeros(batch, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    hidden, aux, cache = target(tokens, positions, target.empty_cache(batch, slots), none)
    last = prompt_lengths - 1
    root = first_token(target.logits(_row(hidden, last)), sampling, prompt_lengths, greedy=greedy)
    draft_cache = draft_state = None
    if draft is not None and tree is not None:
        following = jnp.where(positions == last[:, None], root[:, None], jnp.roll(tokens, -1, axis=1))
        states, draft_cache = feed(
            target, draft, following, draft.head.fuse(aux), positions, draft.head.empty_cache(batch, slots), none
        )
        draft_state = _row(states, last)
    state = State(
        cache=cache,
        lengths=prompt_lengths,
        root=root,
        output=jnp.zeros((batch, max_output + steps_of(tree) + 1), jnp.int32).at[:, 0].set(root),
        num_output=none + 1,
        limit=limit,
        done=(limit <= 1) | (_is_eos(target, root) & ~ignore_eos),
        ignore_eos=ignore_eos,
        sampling=sampling,
        rounds=none,
        accepted=jnp.zeros((batch, steps_of(tree)), jnp.int32),
        draft_cache=draft_cache,
        draft_state=draft_state,
    )
    return constrain(state, STATE_SHARDING_RULES)


def advance(target: Llama, draft: Draft | None, state: State, *, tree: DraftTree | None, greedy: bool) -> State:
    """One round: draft, verify, commit, extend the draft with true features."""
    steps, lengths = steps_of(tree), state.lengths
    draft_cache, draft_state = state.draft_cache, state.draft_state
    if tree is None or draft is None or draft_cache is None or draft_state is None:
        nodes = root_only(state.root)
    else:
        nodes, draft_cache = grow(target, draft, tree, state.root, draft_state, draft_cache, lengths)
    branches = tree is not None and tree.topk > 1
    hidden, aux, cache = target(
        nodes.tokens, lengths[:, None] + nodes.depths, state.cache, lengths, nodes.mask if branches else None
    )
    walk, bonus = verify(nodes, target.logits(hidden), steps, state.sampling, lengths, greedy=greedy)
    if branches:
        cache = cache.commit(lengths, walk.path)
    chosen = _chosen(nodes.tokens, walk, bonus)
    count, accepted, ended = _cut(target, state, chosen, walk.accepted)
    row = jnp.maximum(count - 1, 0)
    if draft is not None and draft_cache is not None and draft_state is not None:
        features = draft.head.fuse(jnp.take_along_axis(aux, walk.path[:, :, None], axis=1))
        positions = lengths[:, None] + jnp.arange(steps + 1)[None]
        states, draft_cache = feed(target, draft, chosen, features, positions, draft_cache, lengths)
        draft_state = jnp.where(state.done[:, None], draft_state, _row(states, row))
    num_output = state.num_output + count
    output = jax.vmap(lambda o, new, at: jax.lax.dynamic_update_slice(o, new, (at,)))(
        state.output, chosen, state.num_output
    )
    return dataclasses.replace(
        state,
        cache=cache,
        lengths=lengths + count,
        root=jnp.where(state.done, state.root, _row(chosen, row)),
        output=jnp.where(jnp.arange(output.shape[1])[None] < num_output[:, None], output, 0),
        num_output=num_output,
        done=ended,
        rounds=state.rounds + (~state.done).astype(jnp.int32),
        accepted=state.accepted + (jnp.arange(steps)[None] < accepted[:, None]).astype(jnp.int32),
        draft_cache=draft_cache,
        draft_state=draft_state,
    )


def _chosen(tokens: Int[Array, "b n"], walk: Walk, bonus: Int[Array, " b"]) -> Int[Array, "b p"]:
    """Accepted drafts, then the bonus; what stands behind it means nothing."""
    drafts = jnp.take_along_axis(tokens, jnp.roll(walk.path, -1, axis=1), axis=1)
    return jnp.where(jnp.arange(walk.path.shape[1])[None] == walk.accepted[:, None], bonus[:, None], drafts)


def _cut(
    target: Llama, state: State, chosen: Int[Array, "b p"], accepted: Int[Array, " b"]
) -> tuple[Int[Array, " b"], Int[Array, " b"], Bool[Array, " b"]]:
    """What of a round's tokens counts: up to the first end-of-sequence, and not beyond the limit.

    Returns:
        How many tokens to take; how many drafts count as accepted (the limit cuts the answer, it says nothing of the
        draft); whether the sequence has ended.
    """
    column = jnp.arange(chosen.shape[1])[None]
    stop = _is_eos(target, chosen) & ~state.ignore_eos[:, None] & (column <= accepted[:, None])
    stops = stop.any(axis=-1)
    until = jnp.where(stops, jnp.argmax(stop, axis=-1).astype(jnp.int32), accepted) + 1
    count = jnp.where(state.done, 0, jnp.minimum(until, state.limit - state.num_output))
    drafts = jnp.where(state.done, 0, jnp.minimum(until, accepted))
    return count, drafts, state.done | stops | (state.num_output + count >= state.limit)


def decode(
    target: Llama,
    draft: Draft | None,
    state: State,
    max_rounds: Int[Array, ""] | int,
    stop_at: Int[Array, ""] | int,
    *,
    tree: DraftTree | None,
    greedy: bool,
) -> State:
    """Rounds until `stop_at` sequences are done, at most `max_rounds` of them, in one loop on the device."""

    def proceed(carry: tuple[Array, State]) -> Array:
        return (carry[0] < max_rounds) & (carry[1].done.sum() < stop_at)

    def body(carry: tuple[Array, State]) -> tuple[Array, State]:
        return carry[0] + 1, advance(target, draft, carry[1], tree=tree, greedy=greedy)

    return constrain(jax.lax.while_loop(proceed, body, (jnp.int32(0), state))[1], STATE_SHARDING_RULES)


def insert(state: State, slot: Int[Array, ""] | int, sequence: State) -> State:
    """Puts one prefilled sequence (batch 1, same slots) into a slot of the batch."""
    state = jax.tree.map(lambda all_, one: jax.lax.dynamic_update_slice_in_dim(all_, one, slot, 0), state, sequence)
    return constrain(state, STATE_SHARDING_RULES)


@functools.partial(jax.jit, static_argnames=("max_tokens", "tree"))
def generate(
    target: Llama,
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
    ignore_eos: bool | Bool[Array, "..."] = False,
) -> State:
    """Answers a batch of prompts without a host: for reinforcement learning and other loops inside a program.

    On several TPU chips call it under `jax.set_mesh`: the attention kernel is split over the mesh that is set.

    Args:
        prompts: padded on the right. lengths: of each prompt, at least 1.
        tree: None is vanilla decoding, and the draft may then be None.
        temperature: None is greedy and leaves sampling out of the program.
        temperature, top_k, top_p, ignore_eos: one for all, or one a sequence.

    Returns:
        The final state: `output[:, :max_tokens]` with `num_output` tokens each (the end-of-sequence token included),
        0 behind them; `rounds` and `accepted` say how well the draft did.
    """
    batch, length = prompts.shape

    def each(value: Any, dtype: Any) -> Array:
        return jnp.broadcast_to(jnp.asarray(0 if value is None else value, dtype), (batch,))

    sampling = Sampling(
        each(temperature, jnp.float32), each(top_k, jnp.int32), each(top_p, jnp.float32), jax.random.split(rng, batch)
    )
    greedy = temperature is None
    state = prefill(
        target,
        draft,
        prompts,
        lengths,
        sampling,
        each(max_tokens, jnp.int32),
        each(ignore_eos, bool),
        slots=slots_needed(length, max_tokens, tree),
        max_output=max_tokens,
        tree=tree,
        greedy=greedy,
    )
    return decode(target, draft, state, max_tokens, batch, tree=tree, greedy=greedy)


def _row(array: Array, row: Int[Array, " b"]) -> Array:
    """array[b, row[b]]."""
    return jnp.take_along_axis(array, row.reshape(-1, *(1,) * (array.ndim - 1)), axis=1)[:, 0]


def _is_eos(target: Llama, tokens: Int[Array, "*shape"]) -> Bool[Array, "*shape"]:
    return jnp.isin(tokens, jnp.asarray(target.config.eos_token_ids, jnp.int32))
