"""The engine's programs: a fixed set, whatever the traffic.

Prefill reads a stretch of a few prompts (one program for each of a few shapes), decode runs rounds of the requests that
are there (one program for each of a few widths, where all requests are greedy and for everything else). The state is
donated, so caches are written in place; what the host wants to know comes back as one array of int32 a dispatch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from eagle3_jax.decoding.choice.modes import Tier, copies, depth_of, nodes_of, scratch_of
from eagle3_jax.decoding.device import catch_up as resting
from eagle3_jax.decoding.device.catch_up import Unread
from eagle3_jax.decoding.device.report import ROUNDS, Report
from eagle3_jax.decoding.params import MAX_BIASED, MAX_LOGPROBS, MAX_STOP_IDS
from eagle3_jax.decoding.rounds import round as rounds
from eagle3_jax.decoding.rounds.round import State, TokenLogprobs
from eagle3_jax.decoding.rounds.sampling import LogitRules, Sampling
from eagle3_jax.decoding.rounds.tree import LastTree
from eagle3_jax.mesh import constrain
from eagle3_jax.models.cache import PageTable
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.target import TargetModel

# (rows, tokens of each) of the prefill programs. Short prompts are packed: each takes as many rows as it needs, one
# behind the other. A long one is read alone, in one row.
PACKED = ((4, 16), (16, 16))
ALONE = ((1, 256), (1, 1024))
# Tokens of prompts, padding included, between two dispatches of rounds.
MOST_READ = 1024
# What a dispatch costs beside its tokens, in tokens; padding is no better.
_DISPATCH = 64
# Rows of the decode programs, beside the whole batch (batch buckets): one client of a large batch pays for few rows.
# On CPUs 2 and 4 rows cost what one does where weights are float32; from 8 rows on twice the rows cost 1.4 times as
# much and more.
WIDTHS = (1, 4, 8, 16, 32, 64, 128, 256)
# Of `State`, what belongs to all places together: rows are gathered, pages stay where they are.
_POOLS = ("cache", "draft_cache")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What an engine allocates once.

    Attributes:
        batch: sequences decoded together. max_length: of prompt and answer.
        pages: of the caches, `rounds.TRASH` not counted. page_size: in tokens.
        pages_per_sequence: of the longest request, the scratch of a round included.
    """

    batch: int
    max_length: int
    pages: int
    page_size: int
    pages_per_sequence: int

    @classmethod
    def plan(
        cls, batch: int, max_length: int, page_size: int, tiers: Sequence[Tier], kv_tokens: int | None = None
    ) -> Sizes:
        """Args: kv_tokens: of all requests together; None lets the whole batch be `max_length` long.

        Raises:
            ValueError: no room for one request.
        """
        each = -(-(max_length + scratch_of(tiers)) // page_size)
        pages = each * batch if kv_tokens is None else kv_tokens // page_size
        if pages < each:
            raise ValueError(f"kv_tokens: got {kv_tokens}, expected at least {each * page_size}, room for one request")
        return cls(batch, max_length, pages, page_size, each)

    @property
    def slots(self) -> int:
        """Of the longest request, in its pages."""
        return self.pages_per_sequence * self.page_size

    @property
    def columns(self) -> int:
        """Of a chunk's page table: a prompt's last stretch is padded beyond its pages."""
        return self.pages_per_sequence + -(-max(length for _, length in self.chunks) // self.page_size)

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """(rows, tokens of each) of the prefill programs that this engine has a use for."""
        alone = [shape for shape in ALONE if math.prod(shape) < 2 * self.max_length]
        together = [shape for shape in PACKED[1:] if math.prod(shape) < 2 * self.max_length * (self.batch - 1)]
        return [*alone, *PACKED[:1], *together]

    @property
    def widths(self) -> list[int]:
        """Rows of the decode programs, ascending."""
        return [width for width in WIDTHS if width < self.batch] + [self.batch]

    def chunk_for(self, left: Sequence[int]) -> tuple[int, int]:
        """The prefill program for prompts with so many tokens left, the first one's turn: the least padding."""

        def use(shape: tuple[int, int]) -> tuple[float, int]:
            free, length = shape
            read = 0
            for tokens in left:
                rows = min(-(-tokens // length), free)
                read, free = read + min(tokens, rows * length), free - rows
            return read / (math.prod(shape) + _DISPATCH), math.prod(shape)

        return max(self.chunks, key=use)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunk:
    """A stretch of a prompt in each of r rows, and what its request asks for.

    A row may continue the one before it: the next stretch of the same prompt.

    Attributes:
        slots: the place of each request in the batch; the batch's size where there is none.
        tokens: the stretch, padded on the right, and one column more: the token behind each.
        starts: first position. counts: tokens of the stretch.
        ends: the prompt ends with it; only then the request becomes part of the state.
        page_table: of each request; `rounds.TRASH` behind its pages.
        limits: most tokens to answer.
        seeds: a request's, and a digest of its prompt: different prompts under one seed get different random numbers,
            the same prompt always the same.
        asked: see `TokenLogprobs`.
        others: `Sampling` and `LogitRules` without what is filled in on the device.
    """

    slots: Int[Array, " r"]
    tokens: Int[Array, "r t"]
    starts: Int[Array, " r"]
    counts: Int[Array, " r"]
    ends: Bool[Array, " r"]
    page_table: Int[Array, "r pages"]
    limits: Int[Array, " r"]
    stop_ids: Int[Array, "r stops"]
    seeds: UInt[Array, "r 2"]
    asked: Int[Array, " r"]
    temperature: Float[Array, " r"]
    top_k: Int[Array, " r"]
    top_p: Float[Array, " r"]
    min_p: Float[Array, " r"]
    repetition: Float[Array, " r"]
    presence: Float[Array, " r"]
    frequency: Float[Array, " r"]
    bias_tokens: Int[Array, "r k"]
    bias: Float[Array, "r k"]
    first_stop: Int[Array, " r"]

    @staticmethod
    def blank(rows: int, length: int, sizes: Sizes) -> dict[str, np.ndarray]:
        """The same on the host, to be filled in: rows without a request."""

        def full(*shape: int, dtype: Any = np.int32, value: Any = 0) -> np.ndarray:
            return np.full((rows, *shape), value, dtype)

        return {
            "slots": full(value=sizes.batch),
            "tokens": full(length + 1),
            "starts": full(),
            "counts": full(),
            "ends": full(dtype=bool),
            "page_table": full(sizes.columns, value=rounds.TRASH),
            "limits": full(),
            "stop_ids": full(MAX_STOP_IDS, value=-1),
            "seeds": full(2, dtype=np.uint32),
            "asked": full(value=-1),
            "temperature": full(dtype=np.float32),
            "top_k": full(),
            "top_p": full(dtype=np.float32, value=1),
            "min_p": full(dtype=np.float32),
            "repetition": full(dtype=np.float32, value=1),
            "presence": full(dtype=np.float32),
            "frequency": full(dtype=np.float32),
            "bias_tokens": full(MAX_BIASED),
            "bias": full(MAX_BIASED, dtype=np.float32),
            "first_stop": full(),
        }


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Models:
    """Target and draft as a flat list of arrays: JAX flattens it ten times as fast as modules, in every call."""

    leaves: Sequence[Any]
    structure: Any

    @classmethod
    def of(cls, target: TargetModel, draft: Draft | None) -> Models:
        return cls(*jax.tree.flatten((target, draft)))

    def modules(self) -> tuple[TargetModel, Draft | None]:
        return jax.tree.unflatten(self.structure, self.leaves)

    def tree_flatten(self) -> tuple[Sequence[Any], Any]:
        return self.leaves, self.structure

    @classmethod
    def tree_unflatten(cls, structure: Any, leaves: Sequence[Any]) -> Models:
        return cls(leaves, structure)


def empty_state(models: Models, sizes: Sizes, tiers: Sequence[Tier], kv_dtype: Any) -> State:
    """A batch of free places, and caches one page of which is `rounds.TRASH`; for any of the tiers."""
    target, draft = models.modules()
    batch, pages, page_size = sizes.batch, sizes.pages + 1, sizes.page_size
    steps, vocabulary = depth_of(tiers), target.config.vocab_size
    room = ROUNDS * (steps + 1)
    none, nothing = jnp.zeros(batch, jnp.int32), jnp.zeros(batch)
    rules = LogitRules(
        repetition=nothing + 1,
        presence=nothing,
        frequency=nothing,
        bias_tokens=jnp.zeros((batch, MAX_BIASED), jnp.int32),
        bias=jnp.zeros((batch, MAX_BIASED)),
        first_stop=none,
        in_prompt=jnp.zeros((batch, vocabulary), bool),
        counts=jnp.zeros((batch, vocabulary), jnp.int32),
    )
    best = min(MAX_LOGPROBS, vocabulary)
    state = State(
        cache=target.empty_pages(pages, page_size, kv_dtype),
        lengths=none,
        root=none,
        output=jnp.zeros((batch, room), jnp.int32),
        num_output=none,
        limit=none,
        done=jnp.ones(batch, bool),
        failed=jnp.zeros(batch, bool),
        stop_ids=jnp.full((batch, MAX_STOP_IDS), -1, jnp.int32),
        sampling=dataclasses.replace(Sampling.greedy(batch), rules=rules),
        rounds=none,
        drafted=none,
        accepted=jnp.zeros((batch, steps), jnp.int32),
        logprobs=TokenLogprobs(
            none - 1,
            jnp.zeros((batch, room)),
            jnp.zeros((batch, room, best), jnp.int32),
            jnp.zeros((batch, room, best)),
        ),
        # Without the padding of prompts: XLA's attention reads every page that a table has room for, in each round.
        page_table=jnp.full((batch, sizes.pages_per_sequence), rounds.TRASH, jnp.int32),
        draft_cache=None if draft is None else draft.head.empty_pages(pages, page_size),
        draft_state=None if draft is None else jnp.zeros((batch, draft.head.config.hidden_size), draft.head.dtype),
        history=jnp.zeros((batch, sizes.slots + 1), jnp.int32) if copies(tiers) else None,
        ends=jnp.zeros((batch, ROUNDS), jnp.int32),
        last_tree=LastTree.empty(batch, nodes_of(tiers)),
    )
    if draft is not None and not all(tier.head for tier in tiers):
        width = draft.head.config.num_aux_layers * draft.head.config.target_hidden_size
        state = dataclasses.replace(state, unread=Unread.empty(batch, width, steps + 1, draft.head.dtype))
    return constrain(state, rounds.STATE_SHARDING_RULES)


@functools.partial(jax.jit, donate_argnames="state")
def prefill(models: Models, state: State, chunk: Chunk) -> tuple[State, Int[Array, "r report"]]:
    """Reads a stretch of some prompts; those that end with it join the batch.

    Returns:
        The state, and a row a request: see `Report.of_prefill`.
    """
    (target, draft), rows = models.modules(), dataclasses.replace
    key = jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed[0]), seed[1]))(chunk.seeds)
    place = jnp.minimum(chunk.slots, state.done.shape[0] - 1)
    kept = state.sampling.rules
    assert kept is not None
    assert state.logprobs is not None
    assert state.page_table is not None
    rules = LogitRules(
        chunk.repetition,
        chunk.presence,
        chunk.frequency,
        chunk.bias_tokens,
        chunk.bias,
        chunk.first_stop,
        kept.in_prompt[place],
        jnp.zeros((len(chunk.slots), kept.counts.shape[1]), jnp.int32),
    )
    sampling = Sampling(chunk.temperature, chunk.top_k, chunk.top_p, chunk.min_p, key, rules)
    found, (cache, draft_cache) = rounds.read(
        target,
        draft,
        chunk.tokens[:, :-1],
        chunk.tokens[:, 1:],
        chunk.starts,
        chunk.counts,
        chunk.ends,
        (state.cache, state.draft_cache),
        sampling,
        chunk.stop_ids,
        PageTable(chunk.page_table, continued=chunk.slots.shape[0] > 1),
        greedy=False,
    )
    none = jnp.zeros_like(chunk.slots)
    logprobs = TokenLogprobs(
        chunk.asked,
        jnp.zeros((len(none), 1)),
        jnp.zeros((len(none), 1, state.logprobs.best.shape[-1]), jnp.int32),
        jnp.zeros((len(none), 1, state.logprobs.best.shape[-1])),
    )
    logprobs = jax.lax.cond(
        (chunk.asked >= 0).any(),
        lambda x: rounds.put_logprobs(x, found.logits[:, None], found.root[:, None], none),
        lambda x: x,
        logprobs,
    )
    done = (chunk.limits <= 1) | rounds.is_stop(found.root, chunk.stop_ids) | found.failed
    rules = rules.count(found.root[:, None], jnp.ones((len(none), 1), bool))
    joined = {
        "lengths": chunk.starts + chunk.counts,
        "root": found.root,
        "limit": chunk.limits - 1,  # of the tokens still to come
        "num_output": none,
        "done": done,
        "failed": found.failed,
        "stop_ids": chunk.stop_ids,
        "sampling": rows(sampling, rules=rules),
        "page_table": chunk.page_table[:, : state.page_table.shape[1]],
        "draft_state": found.draft_state,
    }
    history, unread = state.history, state.unread
    at = jnp.where(chunk.ends, chunk.slots, state.done.shape[0])

    def join(all_: Array, new: Array) -> Array:
        return all_.at[at].set(new, mode="drop")

    if history is not None:
        history = history.at[at, joined["lengths"]].set(found.root, mode="drop")
    if unread is not None:
        unread = rows(unread, count=join(unread.count, none))
    state = rows(
        state,
        history=history,
        unread=unread,
        cache=cache,
        draft_cache=draft_cache,
        logprobs=rows(state.logprobs, asked=join(state.logprobs.asked, chunk.asked)),
        **{name: jax.tree.map(join, getattr(state, name), new) for name, new in joined.items()},
    )
    report = Report.of_prefill(logprobs.best.shape[-1]).pack(
        root=found.root, done=done, failed=found.failed, **_logprob_columns(logprobs)
    )
    return constrain(state, rounds.STATE_SHARDING_RULES), constrain(report, ())


@functools.partial(jax.jit, static_argnames=("tier", "greedy"), donate_argnames="state")
def decode(
    models: Models,
    state: State,
    cancelled: Bool[Array, " b"],
    places: Int[Array, " r"] | None,
    max_rounds: Int[Array, ""],
    enough: Int[Array, ""],
    *,
    tier: Tier,
    greedy: bool,
) -> tuple[State, Int[Array, "r report"]]:
    """Rounds of some requests, until `enough` more of them have ended.

    Args:
        cancelled: requests that the host ended: their pages may be another's by now.
        places: of the requests in the batch, the batch's size where there is none; None runs the whole batch.
        max_rounds: at most `ROUNDS`.

    Returns:
        The state, and a row for each of `places`: see `Report.of_decode`.
    """
    whole, state = _take(state, cancelled, places)
    state = dataclasses.replace(
        state,
        limit=state.limit - state.num_output,
        output=jnp.zeros_like(state.output),
        num_output=jnp.zeros_like(state.num_output),
        rounds=jnp.zeros_like(state.rounds),
        drafted=jnp.zeros_like(state.drafted),
        accepted=jnp.zeros_like(state.accepted),
        ends=jnp.zeros((len(state.done), ROUNDS), jnp.int32),
    )
    stop_at = jnp.minimum(state.done.sum() + enough, len(state.done))
    target, draft = models.modules()
    state = rounds.decode(
        target,
        draft if tier.head else None,
        state,
        max_rounds,
        stop_at,
        tree=tier.tree,
        greedy=greedy,
        simulated=tier.simulated,
    )
    assert state.ends is not None
    assert state.last_tree is not None
    logprobs = None if greedy else state.logprobs
    report = Report.of_decode(
        state.accepted.shape[1], state.last_tree.tokens.shape[1], None if logprobs is None else logprobs.best.shape[-1]
    ).pack(
        done=state.done,
        failed=state.failed,
        num_output=state.num_output,
        rounds=state.rounds,
        drafted=state.drafted,
        unread=jnp.zeros_like(state.rounds) if state.unread is None else state.unread.count,
        accepted=state.accepted,
        ends=state.ends,
        tree=state.last_tree.stacked(),
        output=state.output,
        **_logprob_columns(logprobs),
    )
    return _put_back(whole, state, places), constrain(report, ())


def _take(state: State, cancelled: Bool[Array, " b"], places: Int[Array, " r"] | None) -> tuple[State, State]:
    """The state without what was cancelled, and the rows of these places; one that has ended where there is none."""
    whole = dataclasses.replace(state, done=state.done | cancelled)
    if places is None:
        return whole, whole
    batch = len(whole.done)
    at = jnp.minimum(places, batch - 1)
    taken = dataclasses.replace(whole, **jax.tree.map(lambda x: x[at], _rows(whole)))
    return whole, dataclasses.replace(taken, done=taken.done | (places == batch))


def _put_back(whole: State, state: State, places: Int[Array, " r"] | None) -> State:
    """The whole batch with the rows of `_take`, and their caches."""
    if places is not None:
        back = jax.tree.map(lambda all_, new: all_.at[places].set(new, mode="drop"), _rows(whole), _rows(state))
        state = dataclasses.replace(state, **back)
    return constrain(state, rounds.STATE_SHARDING_RULES)


def _rows(state: State) -> dict[str, Any]:
    """What has the batch first."""
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state) if field.name not in _POOLS}


@functools.partial(jax.jit, donate_argnames="state")
def catch_up(models: Models, state: State, cancelled: Bool[Array, " b"], places: Int[Array, " r"] | None) -> State:
    """Wakes a head that rested, for some requests: see `resting.catch_up`. Args: as of `decode`."""
    target, draft = models.modules()
    whole, state = _take(state, cancelled, places)
    assert draft is not None
    assert state.unread is not None
    assert state.draft_cache is not None
    assert state.draft_state is not None
    assert state.page_table is not None
    table = jnp.where(state.done[:, None], rounds.TRASH, state.page_table)
    table = beyond(table, state.draft_cache.keys[0].shape[2])
    unread, cache, draft_state = resting.catch_up(
        target,
        draft,
        state.unread,
        state.draft_cache,
        state.draft_state,
        jnp.where(state.done, 0, state.lengths),
        ~state.done,
        PageTable(table),
    )
    state = dataclasses.replace(state, unread=unread, draft_cache=cache, draft_state=draft_state)
    return _put_back(whole, state, places)


def beyond(page_table: Int[Array, "b pages"], page_size: int) -> Int[Array, "b more"]:
    """A page table with room for a head that catches up: it is padded beyond a sequence's pages."""
    more = -(-resting.ROOM // page_size)
    return jnp.pad(page_table, ((0, 0), (0, more)), constant_values=rounds.TRASH)


@functools.partial(jax.jit, donate_argnames="state")
def rehearse(state: State, length: Int[Array, ""]) -> State:
    """All places busy, each with a sequence of so many tokens, to measure what rounds cost. Ends all that was there."""
    assert state.page_table is not None
    pages = state.cache.keys[0].shape[0] - 1
    own = 1 + jnp.arange(state.page_table.size).reshape(state.page_table.shape) % pages
    each = jnp.zeros_like(state.lengths)
    unread = state.unread
    if unread is not None:
        unread = dataclasses.replace(unread, count=jnp.minimum(each + length, resting.ROOM))
    state = dataclasses.replace(
        state,
        done=jnp.zeros_like(state.done),
        failed=jnp.zeros_like(state.failed),
        lengths=each + length,
        limit=jnp.full_like(state.limit, jnp.iinfo(jnp.int32).max // 2),
        num_output=each,
        stop_ids=jnp.full_like(state.stop_ids, -1),
        page_table=own,
        history=None if state.history is None else jnp.zeros_like(state.history),
        unread=unread,
    )
    return constrain(state, rounds.STATE_SHARDING_RULES)


@functools.partial(jax.jit, donate_argnames="state")
def note_prompt(state: State, slot: Int[Array, ""], tokens: Int[Array, " s"]) -> State:
    """Notes the tokens of a prompt, padded with -1, before its last stretch is read: for penalties and for lookup."""
    rules, history = state.sampling.rules, state.history
    assert rules is not None
    vocabulary = rules.in_prompt.shape[1]
    held = jnp.zeros(vocabulary, bool).at[jnp.where(tokens < 0, vocabulary, tokens)].set(True, mode="drop")
    rules = dataclasses.replace(rules, in_prompt=rules.in_prompt.at[slot].set(held))
    if history is not None:
        history = history.at[slot, : len(tokens)].set(tokens)
    state = dataclasses.replace(state, sampling=dataclasses.replace(state.sampling, rules=rules), history=history)
    return constrain(state, rounds.STATE_SHARDING_RULES)


def _logprob_columns(logprobs: TokenLogprobs | None) -> dict[str, Array]:
    if logprobs is None:
        return {}
    return {"logprobs": logprobs.chosen, "best_tokens": logprobs.tokens, "best_logprobs": logprobs.best}


_PROGRAMS = frozenset(("jit(prefill)", "jit(decode)", "jit(catch_up)", "jit(note_prompt)"))
_compiled = 0


def compiled() -> int:
    """Programs that were compiled in this process, for all engines; those that a compilation cache held, too."""
    return _compiled


def _count(event: str, duration_secs: float, **kwargs: str | int) -> None:
    global _compiled
    _compiled += event == "/jax/core/compile/backend_compile_duration" and kwargs.get("fun_name") in _PROGRAMS


jax.monitoring.register_event_duration_secs_listener(_count)
