"""An engine's allocations on the device, made once: its state, and the size of its caches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from eagle3_jax.decoding.device.calls import Models
from eagle3_jax.decoding.device.shapes import ROUNDS, Sizes
from eagle3_jax.decoding.params import MAX_LOGPROBS
from eagle3_jax.decoding.rounds.observed import Observed
from eagle3_jax.decoding.rounds.sampling import TokenCounts
from eagle3_jax.decoding.rounds.state import STATE_SHARDING_RULES, TRASH, RequestRows, State, TokenLogprobs
from eagle3_jax.decoding.rounds.tree import LastTree
from eagle3_jax.decoding.rounds.unread import Unread
from eagle3_jax.decoding.tier import Tier
from eagle3_jax.mesh import constrain, mesh_of, mesh_set, shardings
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.target import TargetModel


def empty_state(models: Models, sizes: Sizes, tiers: Sequence[Tier], kv_dtype: Any) -> State:
    """Makes a batch of free slots, and caches with one page for `TRASH`; it fits each of the tiers."""
    target, draft = models.modules()
    batch, pages, page_size = sizes.batch, sizes.pages + 1, sizes.page_size
    steps, vocabulary = max(tier.depth for tier in tiers), target.config.vocab_size
    room, tail = ROUNDS * (steps + 1), max(tier.nodes for tier in tiers)
    none = jnp.zeros(batch, jnp.int32)
    nobody = RequestRows.nobody(constrains=sizes.tables > 0)
    requests = jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x), batch, axis=0), nobody)
    width = 0 if draft is None else draft.head.config.num_aux_layers * draft.head.config.target_hidden_size
    state = State(
        cache=target.empty_pages(pages, page_size, kv_dtype, states=batch + (sizes.kept_states or 0), tail=tail),
        lengths=none,
        root=none,
        output=jnp.zeros((batch, room), jnp.int32),
        num_output=none,
        done=jnp.ones(batch, bool),
        failed=jnp.zeros(batch, bool),
        requests=dataclasses.replace(requests, sampling=requests.sampling.with_keys()),
        rounds=none,
        drafted=none,
        accepted=jnp.zeros((batch, steps), jnp.int32),
        token_counts=TokenCounts(jnp.zeros((batch, vocabulary), bool), jnp.zeros((batch, vocabulary), jnp.int32)),
        logprobs=TokenLogprobs.empty(batch, room, min(MAX_LOGPROBS, vocabulary)),
        # Without room for a prompt's padding: XLA's attention reads every page of the table in each round.
        page_table=jnp.full((batch, sizes.pages_per_sequence), TRASH, jnp.int32),
        draft_cache=None if draft is None else draft.head.empty_pages(pages, page_size),
        draft_state=None if draft is None else jnp.zeros((batch, draft.head.config.hidden_size), draft.head.dtype),
        history=jnp.zeros((batch, sizes.cache_length + 1), jnp.int32) if any(tier.copies for tier in tiers) else None,
        ends=jnp.zeros((batch, ROUNDS), jnp.int32),
        last_tree=LastTree.empty(batch, tail),
        states=jnp.arange(batch) if target.config.recurrent else None,
        automaton=none if sizes.tables else None,
        tables=jnp.full(sizes.tables, -1, jnp.int32) if sizes.tables else None,  # the first mask allows everything
    )
    if draft is not None and not all(tier.head for tier in tiers):
        state = dataclasses.replace(state, unread=Unread.empty(batch, width, steps + 1, draft.head.dtype))
    if draft is not None and sizes.observed:
        observed = Observed.empty(batch, sizes.observed, width, target.config.hidden_size)
        state = dataclasses.replace(state, observed=observed)
    return constrain(state, STATE_SHARDING_RULES)


def tokens_that_fit(
    target: TargetModel, draft: Draft | None, memory_fraction: float, sizes: Sizes, tiers: Sequence[Tier], kv_dtype: Any
) -> int:
    """Returns the tokens that fit into caches in this share of a device's memory. Raises ValueError: it is unknown."""
    mesh = mesh_of(target.embed[...])
    device = jax.local_devices()[0] if mesh is None else mesh.local_devices[0]
    memory = device.memory_stats() or {}
    if "bytes_limit" not in memory:
        raise ValueError(f"memory_fraction: got it for {device}, which does not tell its memory; give kv_tokens")

    def of_state(pages: int) -> int:
        """Returns the bytes on each device: KV heads that the model axis does not divide are on all devices."""

        def leaves(*models: Any) -> dict[str, jax.Array]:
            state = empty_state(Models.of(*models), dataclasses.replace(sizes, pages=pages), tiers, kv_dtype)
            return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}

        with mesh_set(mesh):
            planned = jax.eval_shape(leaves, target, draft)
        shapes = {name: leaf.shape for name, leaf in planned.items()}
        if mesh is not None:
            places = shardings(planned, mesh, STATE_SHARDING_RULES)
            shapes = {name: places[name].shard_shape(shape) for name, shape in shapes.items()}
        return sum(math.prod(shapes[name]) * leaf.dtype.itemsize for name, leaf in planned.items())

    empty = of_state(0)
    free = memory_fraction * memory["bytes_limit"] - memory["bytes_in_use"] - empty
    return max(0, int(free // (of_state(1) - empty))) * sizes.page_size
