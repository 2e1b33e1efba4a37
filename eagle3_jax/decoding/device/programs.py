"""The engine's programs: a fixed set, whatever the traffic.

Prefill has a program for each of a few shapes; decode one for each of a few widths and each way to draft. The state is
donated, so caches are written in place. A dispatch takes one array of int32 (`Packed`), and returns another.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from eagle3_jax.decoding.device import report as reports
from eagle3_jax.decoding.device.calls import Models, Packed, PromptChunk
from eagle3_jax.decoding.device.shapes import ROUNDS
from eagle3_jax.decoding.rounds.prefill import read
from eagle3_jax.decoding.rounds.round import run_rounds
from eagle3_jax.decoding.rounds.sampling import TokenCounts
from eagle3_jax.decoding.rounds.state import (
    STATE_SHARDING_RULES,
    TRASH,
    State,
    TokenLogprobs,
    behind,
    is_stop,
    put_logprobs,
)
from eagle3_jax.decoding.rounds.unread import ROOM, feed_unread
from eagle3_jax.decoding.tier import RoundPlan
from eagle3_jax.mesh import constrain

# Programs that need no models: those of other models of the same shapes are theirs too.
OF_STATE = ("rehearse", "note_prompt", "copy_state", "write_table")
# Fields of `State` that all slots share: rows are gathered, pages stay where they are.
_POOLS = ("cache", "draft_cache", "tables")


def _program(function: Callable[..., Any]) -> Any:
    """Compiles a function that donates its state. The arguments behind the state may come as one `Packed`."""

    @functools.wraps(function)
    def program(*arguments: Any) -> Any:
        *own, last = arguments
        return function(*own, *(last.arguments() if isinstance(last, Packed) else (last,)))

    return jax.jit(program, donate_argnames="state")


@_program
def prefill(models: Models, state: State, chunk: PromptChunk) -> tuple[State, Int[Array, "r report"]]:
    """Reads a stretch of some prompts; those that end with it join the batch. Returns `report.of_prefill` too."""
    target, draft = models.modules()
    assert state.token_counts is not None
    assert state.logprobs is not None
    assert state.page_table is not None
    batch, requests = len(state.done), dataclasses.replace(chunk.requests, sampling=chunk.requests.sampling.with_keys())
    in_prompt = state.token_counts.in_prompt[jnp.minimum(chunk.slots, batch - 1)]
    token_counts = TokenCounts(in_prompt, jnp.zeros(in_prompt.shape, jnp.int32))
    stretch = chunk.tokens[:, :-1], chunk.tokens[:, 1:], chunk.starts, chunk.counts, chunk.ends
    places = chunk.page_table, None if state.states is None else _own_states(chunk.slots, batch)
    caches = state.cache, state.draft_cache
    found, caches = read(target, draft, *stretch, caches, requests, token_counts, *places, state.tables, greedy=False)
    none, best = jnp.zeros_like(chunk.slots), state.logprobs.best.shape[-1]
    logprobs = jax.lax.cond(
        (requests.logprobs >= 0).any(),
        lambda x: put_logprobs(x, found.logits[:, None], found.root[:, None], found.processed[:, None], none),
        lambda x: x,
        TokenLogprobs.empty(len(none), 1, best),
    )
    done = (requests.limit <= 1) | is_stop(found.root, requests.stop_ids) | found.failed
    lengths = chunk.starts + chunk.counts
    in_answer = token_counts.add(found.root[:, None], none[:, None] == 0).in_answer
    at = jnp.where(chunk.ends, chunk.slots, batch)

    def join(rows: Any, new: Any) -> Any:
        return jax.tree.map(lambda all_, x: all_.at[at].set(x, mode="drop"), rows, new)

    history, unread, observed = state.history, state.unread, state.observed
    if observed is not None:
        positions = chunk.starts[:, None] + jnp.arange(found.hidden.shape[1])[None]
        stop = jnp.zeros(batch, jnp.int32).at[chunk.slots].max(lengths, mode="drop")[chunk.slots]  # of all rows
        newest = positions >= stop[:, None] - observed.argmax.shape[1]
        taken = (positions < lengths[:, None]) & newest
        unknown = jnp.zeros_like(positions)
        observed = observed.put(chunk.slots, positions, taken, found.aux, found.hidden, unknown)
    if history is not None:
        history = history.at[at, lengths].set(found.root, mode="drop")
    if unread is not None:
        unread = dataclasses.replace(unread, count=join(unread.count, none))
    state = dataclasses.replace(
        state,
        cache=caches[0],
        draft_cache=caches[1],
        requests=join(state.requests, dataclasses.replace(requests, limit=requests.limit - 1)),
        lengths=join(state.lengths, lengths),
        root=join(state.root, found.root),
        num_output=join(state.num_output, none),
        done=join(state.done, done),
        failed=join(state.failed, found.failed),
        token_counts=dataclasses.replace(state.token_counts, in_answer=join(state.token_counts.in_answer, in_answer)),
        page_table=join(state.page_table, chunk.page_table[:, : state.page_table.shape[1]]),
        draft_state=join(state.draft_state, found.draft_state),
        automaton=join(state.automaton, found.automaton),
        history=history,
        unread=unread,
        observed=observed,
    )
    fields = {"root": found.root, "done": done, "failed": found.failed, **vars(logprobs)}
    report = reports.pack(reports.of_prefill(best), **fields)
    return constrain(state, STATE_SHARDING_RULES), constrain(report, ())


@_program
def decode(
    models: Models,
    state: State,
    cancelled: Bool[Array, " b"],
    slots: Int[Array, " r"] | None,
    max_rounds: Int[Array, ""],
    enough: Int[Array, ""],
    plan: RoundPlan,
) -> tuple[State, Int[Array, "r report"]]:
    """Runs `max_rounds` of some requests, at most `ROUNDS`, until `enough` more of them have ended.

    `slots` are those of the requests, the batch's size for no request; None runs the whole batch. `cancelled` requests
    were ended by the host: their pages may be another's by now.

    Returns the state, and one row for each of `slots`: see `report.of_decode`.
    """
    whole, state = _take(state, cancelled, slots)
    state = dataclasses.replace(
        state,
        requests=dataclasses.replace(state.requests, limit=state.requests.limit - state.num_output),
        output=jnp.zeros_like(state.output),
        num_output=jnp.zeros_like(state.num_output),
        rounds=jnp.zeros_like(state.rounds),
        drafted=jnp.zeros_like(state.drafted),
        accepted=jnp.zeros_like(state.accepted),
        ends=jnp.zeros((len(state.done), ROUNDS), jnp.int32),
    )
    stop_at = jnp.minimum(state.done.sum() + enough, len(state.done))
    target, draft = models.modules()
    state = run_rounds(target, draft, state, max_rounds, stop_at, plan)
    tree = state.last_tree
    assert tree is not None
    assert state.logprobs is not None
    sizes = state.accepted.shape[1], tree.tokens.shape[1], state.logprobs.best.shape[-1]
    of_state = ("done", "failed", "num_output", "rounds", "drafted", "accepted", "ends", "output")
    report = reports.pack(
        reports.of_decode(*sizes),
        unread=jnp.zeros_like(state.rounds) if state.unread is None else state.unread.count,
        tree=jnp.stack([tree.tokens, tree.parents, tree.taken.astype(jnp.int32)], axis=1),
        **{name: getattr(state, name) for name in of_state},
        **vars(state.logprobs),
    )
    return _put_back(whole, state, slots), constrain(report, ())


def _take(state: State, cancelled: Bool[Array, " b"], slots: Int[Array, " r"] | None) -> tuple[State, State]:
    """Returns the state without cancelled requests, and the rows of these slots; without a request, an ended row."""
    whole = dataclasses.replace(state, done=state.done | cancelled)
    if slots is None:
        return whole, whole
    batch = len(whole.done)
    at = jnp.minimum(slots, batch - 1)
    taken = dataclasses.replace(whole, **jax.tree.map(lambda x: x[at], _rows(whole)))
    states = None if whole.states is None else _own_states(slots, batch)
    return whole, dataclasses.replace(taken, done=taken.done | (slots == batch), states=states)


def _own_states(slots: Int[Array, " r"], batch: int) -> Int[Array, " r"]:  # no request's is out of range
    return jnp.where(slots == batch, jnp.iinfo(jnp.int32).max, slots)


def _put_back(whole: State, state: State, slots: Int[Array, " r"] | None) -> State:
    if slots is not None:
        back = jax.tree.map(lambda all_, new: all_.at[slots].set(new, mode="drop"), _rows(whole), _rows(state))
        state = dataclasses.replace(state, **back)
    return constrain(state, STATE_SHARDING_RULES)


def _rows(state: State) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state) if field.name not in _POOLS}


@_program
def catch_up(models: Models, state: State, cancelled: Bool[Array, " b"], slots: Int[Array, " r"] | None) -> State:
    """Wakes a head that rested, for some requests: see `feed_unread`; arguments as in `decode`."""
    target, draft = models.modules()
    whole, state = _take(state, cancelled, slots)
    assert draft is not None
    assert state.unread is not None
    assert state.draft_cache is not None
    assert state.draft_state is not None
    this = behind(state)
    assert this.pages is not None
    this = dataclasses.replace(this, pages=beyond(this.pages, state.cache.of_keys.keys.shape[2]))
    unread, cache, draft_state = feed_unread(
        target, draft, state.unread, state.draft_cache, state.draft_state, this, ~state.done
    )
    state = dataclasses.replace(state, unread=unread, draft_cache=cache, draft_state=draft_state)
    return _put_back(whole, state, slots)


def beyond(page_table: Int[Array, "b pages"], page_size: int) -> Int[Array, "b more"]:
    """Pads a page table beyond a sequence's pages, to give a head that catches up room."""
    more = -(-ROOM // page_size)
    return jnp.pad(page_table, ((0, 0), (0, more)), constant_values=TRASH)


@_program
def rehearse(state: State, length: Int[Array, ""]) -> State:
    """Makes all slots busy with sequences of `length` tokens, to measure rounds. Ends all requests."""
    assert state.page_table is not None
    pages = state.cache.of_keys.keys.shape[0] - 1
    own = 1 + jnp.arange(state.page_table.size).reshape(state.page_table.shape) % pages
    each = jnp.zeros_like(state.lengths)
    unread = state.unread
    if unread is not None:
        unread = dataclasses.replace(unread, count=jnp.minimum(each + length, ROOM))
    state = dataclasses.replace(
        state,
        done=jnp.zeros_like(state.done),
        failed=jnp.zeros_like(state.failed),
        lengths=each + length,
        requests=dataclasses.replace(
            state.requests,
            limit=jnp.full_like(state.requests.limit, jnp.iinfo(jnp.int32).max // 2),
            stop_ids=jnp.full_like(state.requests.stop_ids, -1),
        ),
        num_output=each,
        automaton=None if state.automaton is None else each,
        page_table=own,
        history=None if state.history is None else jnp.zeros_like(state.history),
        unread=unread,
    )
    return constrain(state, STATE_SHARDING_RULES)


@_program
def note_prompt(state: State, slot: Int[Array, ""], tokens: Int[Array, " s"]) -> State:
    """Notes the tokens of a prompt, padded with -1, before its last stretch is read: for penalties and for lookup."""
    counts, history = state.token_counts, state.history
    assert counts is not None
    vocabulary = counts.in_prompt.shape[1]
    held = jnp.zeros(vocabulary, bool).at[jnp.where(tokens < 0, vocabulary, tokens)].set(True, mode="drop")
    counts = dataclasses.replace(counts, in_prompt=counts.in_prompt.at[slot].set(held))
    if history is not None:
        history = history.at[slot, : len(tokens)].set(tokens)
    state = dataclasses.replace(state, token_counts=counts, history=history)
    return constrain(state, STATE_SHARDING_RULES)


@_program
def copy_state(state: State, source: Int[Array, ""], target: Int[Array, ""]) -> State:
    """Copies a recurrent state from slot to slot."""
    return constrain(dataclasses.replace(state, cache=state.cache.copied(source, target)), STATE_SHARDING_RULES)


@_program
def write_table(state: State, place: Int[Array, ""], words: Int[Array, " chunk"]) -> State:
    """Writes a part of a constraint's table."""
    assert state.tables is not None
    tables = jax.lax.dynamic_update_slice(state.tables, words, (place,))
    return constrain(dataclasses.replace(state, tables=tables), STATE_SHARDING_RULES)


_PROGRAMS = frozenset(f"jit({name})" for name in ("prefill", "decode", "catch_up", *OF_STATE[1:]))
_compiled: collections.Counter[tuple[int, bool]] = collections.Counter()  # by thread, and whether an engine's


def compiled(*, every: bool = False) -> int:
    """Counts the programs, of engines or `every` one, that this thread compiled, or read from a compilation cache."""
    thread = threading.get_ident()
    return _compiled[thread, True] + every * _compiled[thread, False]


def _count(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _compiled[threading.get_ident(), kwargs.get("fun_name") in _PROGRAMS] += 1


jax.monitoring.register_event_duration_secs_listener(_count)
