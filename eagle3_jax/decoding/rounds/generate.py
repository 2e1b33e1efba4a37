"""Decoding as a pure function over contiguous caches, for reinforcement learning and other loops inside a program."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from eagle3_jax.config import DraftTree
from eagle3_jax.config.checks import require
from eagle3_jax.decoding.rounds.prefill import read
from eagle3_jax.decoding.rounds.round import run_rounds
from eagle3_jax.decoding.rounds.sampling import Sampling
from eagle3_jax.decoding.rounds.state import (
    STATE_SHARDING_RULES,
    RequestRows,
    State,
    TokenLogprobs,
    is_stop,
    put_at,
    put_logprobs,
)
from eagle3_jax.decoding.tier import RoundPlan, Tier
from eagle3_jax.mesh import constrain
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.target import TargetModel


@functools.partial(jax.jit, static_argnames=("max_tokens", "tree", "logprobs", "cache_length"))
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
    logprobs: bool = False,
    cache_length: int | None = None,
) -> State:
    """Answers a batch of prompts without the host, inside a jitted program.

    Pure: the weights of target and draft are ordinary arguments, and may change between calls without a compilation. On
    several TPU chips call it under `jax.set_mesh`: the attention kernel is split over the current mesh.

    Args:
        prompts: padded on the right.
        lengths: length of each prompt, at least 1.
        tree: None is vanilla decoding. With `lookup_tokens` the draft may be None: all drafts are then copied.
        temperature: one for all, or one per sequence. None is greedy and leaves sampling out of the program.
        top_k, top_p, min_p, ignore_eos: one for all, or one per sequence.
        logprobs: adds log-probabilities of the output tokens.
        cache_length: entries of each sequence's caches; None is as many as it needs.

    Returns:
        The final state: `output[:, :max_tokens]` has `num_output` tokens per sequence, the end-of-sequence token
        included, then 0. `rounds` and `accepted` count rounds and accepted drafts. With `logprobs`, `logprobs.chosen`
        and `logprobs.processed` hold those of the same places (see `TokenLogprobs`), undefined behind `num_output`.

    Raises ValueError: prompts and answers exceed `cache_length` or the target's positions; a tree without a draft.
    """
    batch, length = prompts.shape
    need, most = cache_length_needed(length, max_tokens, tree), target.config.max_position_embeddings
    require(max_tokens >= 1, "max_tokens", max_tokens, "at least 1")
    if length + max_tokens > most:
        raise ValueError(f"prompts, max_tokens: got {length} + {max_tokens}, expected the target's {most} at most")
    fits = cache_length is None or cache_length >= need
    require(fits, "cache_length", cache_length, f"at least {need} for these prompts, max_tokens and tree")
    drafts = tree is None or draft is not None or tree.num_draft_tokens == tree.lookup_tokens + 1
    require(drafts, "draft", draft, f"a draft head for {tree}")

    def each(value: Any, dtype: Any) -> Array:
        return jnp.broadcast_to(jnp.asarray(0 if value is None else value, dtype), (batch,))

    of_all = each(temperature, jnp.float32), each(top_k, jnp.int32), each(top_p, jnp.float32), each(min_p, jnp.float32)
    sampling = Sampling(*of_all, jax.random.split(rng, batch))
    greedy = temperature is None and not logprobs
    eos = jnp.asarray(target.config.eos_token_ids or (-1,), jnp.int32)
    limits = each(max_tokens, jnp.int32), jnp.where(each(ignore_eos, bool)[:, None], -1, eos[None])
    sizes: Any = {"cache_length": cache_length or need, "max_output": max_tokens}
    how: Any = {"tree": tree, "greedy": greedy, "logprobs": logprobs}
    state = prefill(target, draft, prompts, lengths, sampling, *limits, **sizes, **how)
    tier = Tier(tree, head=tree is not None and draft is not None)
    return run_rounds(target, draft, state, max_tokens, batch, RoundPlan(tier, greedy))


def prefill(
    target: TargetModel,
    draft: Draft | None,
    tokens: Int[Array, "b p"],
    prompt_lengths: Int[Array, " b"],
    sampling: Sampling,
    limit: Int[Array, " b"],
    stop_ids: Int[Array, "b stops"],
    *,
    cache_length: int,
    max_output: int,
    tree: DraftTree | None,
    greedy: bool,
    logprobs: bool = False,
) -> State:
    """Reads whole prompts into contiguous caches and chooses each answer's first token.

    Args:
        cache_length: entries of the caches, `cache_length_needed(p, max_output, tree)` at least: JAX moves a write that
            exceeds the end.
        max_output: the largest `limit`.
        greedy: every request is `SamplingParams.greedy`.
    """
    batch, depth = tokens.shape[0], 0 if tree is None else tree.depth
    none = jnp.zeros(batch, jnp.int32)
    draft = None if tree is None else draft
    requests = RequestRows(limit, stop_ids, none + (0 if logprobs else -1), sampling)
    draft_cache = None if draft is None else draft.head.empty_cache(batch, cache_length)
    caches = target.empty_cache(batch, cache_length, Tier(tree, head=True).nodes), draft_cache
    whole = tokens, jnp.roll(tokens, -1, axis=1), none, prompt_lengths, jnp.ones(batch, bool)
    found, (cache, draft_cache) = read(target, draft, *whole, caches, requests, greedy=greedy)
    room, of_tokens = max_output + depth + 1, None
    if logprobs:
        first = found.logits[:, None], found.root[:, None], found.processed[:, None]
        of_tokens = put_logprobs(TokenLogprobs.empty(batch, room, 0), *first, none)
    history = None
    if tree is not None and tree.lookup_tokens:
        history = put_at(jnp.zeros((batch, cache_length + 1), jnp.int32), tokens, none)
        history = put_at(history, found.root[:, None], prompt_lengths)
    state = State(
        cache=cache,
        lengths=prompt_lengths,
        root=found.root,
        output=jnp.zeros((batch, room), jnp.int32).at[:, 0].set(found.root),
        num_output=none + 1,
        done=(limit <= 1) | is_stop(found.root, stop_ids) | found.failed,
        failed=found.failed,
        requests=requests,
        rounds=none,
        drafted=none,
        accepted=jnp.zeros((batch, depth), jnp.int32),
        logprobs=of_tokens,
        draft_cache=draft_cache,
        draft_state=found.draft_state,
        history=history,
    )
    return constrain(state, STATE_SHARDING_RULES)


def cache_length_needed(prompt_length: int, max_tokens: int, tree: DraftTree | None) -> int:
    """Returns the cache entries for prompts of at most `prompt_length` tokens, padding included, and their answers."""
    return prompt_length + max_tokens + Tier(tree, head=True).scratch
