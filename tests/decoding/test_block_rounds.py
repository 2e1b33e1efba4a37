"""Block heads in rounds: the pass over a cache against training's, then the promises of every draft."""

import dataclasses
import itertools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_blocks import make_block_head
from toy import IDS, NO_TEXT, SMALL, fitting

from eagle3_jax.config import DraftTree
from eagle3_jax.decoding.choice.tiers import choice_for
from eagle3_jax.decoding.engine import Engine, SamplingParams
from eagle3_jax.decoding.rounds import generate as contiguous
from eagle3_jax.decoding.rounds.draft import grow
from eagle3_jax.decoding.rounds.sampling import Sampling
from eagle3_jax.models.cache import Pass
from eagle3_jax.models.drafts.dflash import SLIDING, DFlash
from eagle3_jax.models.drafts.dflash2 import DFlash2
from eagle3_jax.models.drafts.dspark import DSpark
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.training.batch import Batch, Teacher
from eagle3_jax.training.block import BlockLossConfig, block_loss, draw_anchors, replay_blocks

pytestmark = pytest.mark.slow  # the fixture trains three heads

KINDS = [DFlash, DSpark, DFlash2]
TYPES = {
    "full": {},
    "sliding": {"layer_types": (SLIDING, "full_attention"), "sliding_window": 5},
    "sliding both ways": {"layer_types": (SLIDING, SLIDING), "sliding_window": 4, "is_causal": False},
}
PROMPT, MAX_TOKENS = 9, 24


def prompts() -> tuple[jax.Array, jax.Array]:
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 24, (8, PROMPT)), jnp.int32)
    return tokens, jnp.asarray([9, 3, 6, 1, 9, 5, 2, 7], jnp.int32)


def answered(target, draft=None, tree=None, **options: Any):
    key = jax.random.key(0)
    return contiguous.generate(target, draft, *prompts(), key, max_tokens=MAX_TOKENS, tree=tree, **options)


def conversations(target) -> Batch:
    """The prompts and the target's greedy answers, a row each, with its states."""
    tokens, lengths = prompts()
    output = answered(target).output[:, :MAX_TOKENS]
    place = jnp.arange(PROMPT + MAX_TOKENS)[None]
    told = jnp.take_along_axis(output, jnp.clip(place - lengths[:, None], 0, MAX_TOKENS - 1), axis=1)
    answers = (place >= lengths[:, None]) & (place < lengths[:, None] + MAX_TOKENS)
    rows = jnp.where(answers, told, jnp.pad(tokens, ((0, 0), (0, MAX_TOKENS))))
    inside = (place < lengths[:, None] + MAX_TOKENS).astype(jnp.int32)
    at = jnp.broadcast_to(place, rows.shape)
    hidden, aux, _ = target(rows, Pass(at, jnp.zeros(len(rows), jnp.int32)), target.empty_cache(*rows.shape))
    best = jnp.argmax(target.logits(hidden), axis=-1).astype(jnp.int32)
    return Batch(rows, aux, hidden, best, answers.astype(jnp.int32), inside, at * inside)


@pytest.fixture(scope="module")
def trained(toy):
    """A head of each kind that knows the answers to the prompts in part."""
    batch, ids = jax.jit(conversations)(toy.target), jnp.asarray(IDS, jnp.int32)
    teacher = Teacher.of(toy.target.embed[...], toy.target.output_rows, ids)
    optimizer = optax.adam(3e-3)

    def make(kind: type[DFlash]) -> Draft:
        head = make_block_head(kind, **fitting(toy, block_size=5))
        head.lm_head[...] = teacher.rows

        def step(carry, key):
            head, state = carry
            anchors = draw_anchors(key, batch, 12)
            loss = lambda head: block_loss(head, teacher, batch, anchors, BlockLossConfig())[0]  # noqa: E731
            updates, state = optimizer.update(jax.grad(loss)(head), state, head)
            return (optax.apply_updates(head, updates), state), None

        keys = jax.random.split(jax.random.key(1), 60)
        with jax.numpy_dtype_promotion("standard"):  # optax counts steps in integers
            (head, _), _ = jax.jit(lambda head: jax.lax.scan(step, (head, optimizer.init(head)), keys))(head)
        return Draft(head, ids)

    made = {kind: make(kind) for kind in KINDS}
    return types.SimpleNamespace(batch=batch, teacher=teacher, draft=made.__getitem__)


@pytest.mark.parametrize(
    "kind, layers",
    [(DFlash, "full"), (DFlash, "sliding"), (DFlash, "sliding both ways"), (DSpark, "full"), (DFlash2, "full")],
)
def test_a_pass_over_the_cache_equals_training_s(toy, kind, layers):
    """Of all drafts of a block and of its first ones, behind contexts of different lengths."""
    head = make_block_head(kind, **fitting(toy, **TYPES[layers]))
    rng, lengths = np.random.default_rng(2), jnp.asarray([11, 6], jnp.int32)
    aux = jnp.asarray(rng.normal(size=(2, 11, 3 * 32)), jnp.float32)
    anchor, at = jnp.asarray([5, 17], jnp.int32), jnp.broadcast_to(jnp.arange(11)[None], (2, 11))
    embed = toy.target.embed[...]

    @jax.jit
    def run(head):
        fused = head.fuse(aux)
        one = lengths[:, None]
        expected = head.states(embed, anchor[:, None], one, head.context(fused, at), 0 * one, one)[:, 0]
        cache = head.empty_cache(2, 32)
        _, cache = head.feed(embed, at[:, :8], fused[:, :8], Pass(at[:, :8], jnp.zeros(2, jnp.int32)), cache)
        _, cache = head.feed(embed, at[:, 8:], fused[:, 8:], Pass(at[:, 8:], jnp.full(2, 8)), cache)
        this = Pass(lengths[:, None], lengths)
        states, cache = head.rows(embed, anchor, fused[:, 0], this, cache, head.drafts)
        again, _ = head.rows(embed, anchor, fused[:, 0], this, cache, head.drafts)  # its entries were scratch
        return expected, states, again

    expected, states, again = run(head)
    np.testing.assert_allclose(states, expected, rtol=2e-4, atol=2e-4)
    np.testing.assert_array_equal(states, again)


def trees(kind: type[DFlash]) -> dict[str, DraftTree]:
    steps = 5 if kind is DSpark else 4
    return {
        "chain": DraftTree(num_steps=steps, num_draft_tokens=steps + 1),
        "tree": DraftTree(num_steps=3, topk=3, num_draft_tokens=12),
        "tree and text": DraftTree(num_steps=4, topk=2, num_draft_tokens=10, lookup_tokens=4),
    }


@pytest.mark.parametrize(
    "shape", [*(pytest.param(x, marks=pytest.mark.long) for x in ("chain", "tree")), "tree and text"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_drafts_change_no_token(toy, trained, kind, shape):
    vanilla, drafted = answered(toy.target), answered(toy.target, trained.draft(kind), trees(kind)[shape])
    np.testing.assert_array_equal(drafted.output[:, :MAX_TOKENS], vanilla.output[:, :MAX_TOKENS])
    assert int(drafted.accepted.sum()) > 60  # it is of use


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_are_those_that_training_expects(toy, trained, kind):
    draft = trained.draft(kind)
    expected = jax.jit(lambda head: replay_blocks(head, trained.teacher, draft.token_ids, trained.batch, 11))(
        draft.head
    )
    drafted = answered(toy.target, draft, trees(kind)["chain"])
    assert int(drafted.rounds.sum()) == int(expected["rounds"])
    beyond = np.asarray(drafted.accepted.sum(axis=0)) - np.asarray(expected["accepted"])
    assert (beyond >= 0).all() and (beyond <= 8).all(), "each answer's last round may draft beyond the limit"


@pytest.mark.parametrize("kind", [*(pytest.param(x, marks=pytest.mark.long) for x in (DFlash, DSpark)), DFlash2])
def test_the_engine_drafts_blocks(toy, trained, kind, monkeypatch):
    """Paged, in batches, with reused prefixes, with tiers that rest; drawn answers are the same with any neighbours."""
    rows, lengths = (np.asarray(x) for x in prompts())
    texts = [row[:n].tolist() for row, n in zip(rows, lengths, strict=True)]
    params = [SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0 if i % 3 else 1.0) for i in range(8)]
    plain = Engine(toy.target, NO_TEXT, **SMALL).generate(texts, params)
    every = [*trees(kind).values()]
    engine = Engine(toy.target, NO_TEXT, trained.draft(kind), every, **SMALL)
    turns = itertools.cycle(engine.tiers.tiers)
    # Vanilla decoding among them: the head rests.
    monkeypatch.setattr(engine.tiers, "choose", lambda *_, **__: next(turns))
    got = engine.generate(texts, params)
    assert [x.token_ids for x, p in zip(got, params, strict=True) if p.greedy] == [
        x.token_ids for x, p in zip(plain, params, strict=True) if p.greedy
    ]
    assert sum(sum(x.stats.accepted_per_position) for x in got) > 20
    long = texts[1] + plain[1].token_ids
    again = engine.generate([long], params[1])[0]
    assert again.stats.cached_tokens == 16
    assert again.token_ids == Engine(toy.target, NO_TEXT, **SMALL).generate([long], params[1])[0].token_ids


def test_auto_chooses_among_parts_of_the_block(toy, trained):
    names = [tier.name for tier in choice_for(toy.target.config, trained.draft(DFlash), "auto").tiers]
    assert names == [
        "vanilla",
        "lookup 8",
        "chain 2",
        "chain 4",
        "tree 4, 4, 8 and lookup 7",
        "tree 4, 4, 16 and lookup 8",
        "tree 4, 4, 32 and lookup 8",
    ]
    narrow = choice_for(toy.target.config, trained.draft(DFlash2), DraftTree(num_steps=4, topk=5, num_draft_tokens=16))
    assert len(narrow.tiers) == 1
    deep, wide = DraftTree(num_steps=5, num_draft_tokens=6), DraftTree(num_steps=2, topk=6, num_draft_tokens=8)
    with pytest.raises(ValueError, match=r"tree\.num_steps: got 5, expected at most the head's 4"):
        choice_for(toy.target.config, trained.draft(DFlash), deep)
    with pytest.raises(ValueError, match=r"tree\.topk: got 6, expected at most the head's candidates, 5"):
        choice_for(toy.target.config, trained.draft(DFlash2), wide)


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_drafts_come_with_what_they_were_drawn_from(toy, trained, kind):
    """Rejection sampling is exact with any q as long as it is the draw's own (see test_verify.py)."""
    draft, tree = trained.draft(kind), DraftTree(num_steps=3, topk=2, num_draft_tokens=9)
    length, batch = 7, trained.batch
    root, lengths = batch.token_ids[:, length], jnp.full(8, length, jnp.int32)
    greedy = Sampling.greedy(8)
    sampling = dataclasses.replace(greedy, temperature=jnp.full_like(greedy.temperature, 0.7))

    @jax.jit
    def drafts(draft):
        head, embed = draft.head, toy.target.embed[...]
        none, at = jnp.zeros(8, jnp.int32), batch.positions[:, :length]
        fused = head.fuse(batch.aux[:, :length])
        state, cache = head.feed(embed, at, fused, Pass(at, none, row=none), head.empty_cache(8, 32))
        this = Pass(lengths[:, None], lengths)
        nodes, cache = grow(toy.target, draft, tree, root, state[:, 0], this, cache, sampling)
        states, _ = head.rows(embed, root, state[:, 0], this, cache, tree.num_steps)
        return nodes, states

    nodes, states = drafts(draft)
    row = jnp.maximum(nodes.depths - 1, 0)  # that proposed each node
    read = jnp.take_along_axis(states, row[:, :, None], axis=1)
    before = jnp.take_along_axis(nodes.tokens, jnp.maximum(nodes.parents, 0), axis=1)
    logits = draft.head.adjusted(draft.head.logits(read), read, before)
    got = jnp.take_along_axis(nodes.drawn.probs, jnp.maximum(nodes.drawn.group, 0)[:, :, None], axis=1)
    np.testing.assert_allclose(got[:, 1:], jax.nn.softmax(logits / 0.7)[:, 1:], atol=1e-5)
    chosen = jnp.searchsorted(draft.token_ids, nodes.tokens[:, 1:])
    assert (jnp.take_along_axis(got[:, 1:], chosen[:, :, None], axis=2) > 0).all()
