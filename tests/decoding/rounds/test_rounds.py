"""Rounds: lossless, and in step with what a fresh prefill would hold."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import product_and_sum_fusions
from jax.extend.core import jaxprs_in_params
from toy import CHAIN, LENGTHS, MAX_TOKENS, TEXTS, TREE, following, generated, plan, prefilled

from eagle3_jax.config import DraftTree
from eagle3_jax.decoding.rounds.generate import generate, prefill
from eagle3_jax.decoding.rounds.round import _cut, advance, run_rounds
from eagle3_jax.decoding.rounds.sampling import Sampling
from eagle3_jax.kernels.cache.api import commit
from eagle3_jax.kernels.tree_attention import packed_heads
from eagle3_jax.kernels.tree_attention.api import tree_attention
from eagle3_jax.kernels.vocabulary.api import vocabulary_top_k
from eagle3_jax.models.drafts.head import Head

# A tree, and the rounds that the good head takes with it for all four answers, of 92 without drafts.
KNOWN = {
    "chain1": (DraftTree(num_steps=1, topk=1, num_draft_tokens=2), 56),
    "chain3": (CHAIN, 43),
    "chain5": (DraftTree(num_steps=5, topk=1, num_draft_tokens=6), 41),
    "tree2x2": (DraftTree(num_steps=2, topk=2, num_draft_tokens=4), 44),
    "tree3x3": (TREE, 35),
    "tree4x4": (DraftTree(num_steps=4, topk=4, num_draft_tokens=16), 34),
    "chain3+5": (DraftTree(num_steps=3, topk=1, num_draft_tokens=6, lookup_tokens=5), 43),
    "tree3x3+2": (DraftTree(num_steps=3, topk=3, num_draft_tokens=10, lookup_tokens=2), 35),
}
TREES = {name: tree for name, (tree, _) in KNOWN.items()}
BOTH = ["chain3", pytest.param("tree3x3", marks=pytest.mark.slow)]

decode = jax.jit(run_rounds, static_argnames="plan")


@pytest.mark.slow
def test_vanilla_is_the_argmax_of_the_whole_sequence_again_and_again(toy, vanilla):
    for prompt, length, answer in zip(TEXTS, LENGTHS, vanilla, strict=True):
        sequence = np.concatenate([prompt[:length], answer, np.zeros(9 - length, np.int32)])
        predicted = np.argmax(following(toy.target, jnp.asarray(sequence[None])), axis=-1)[0]
        assert predicted[length - 1 : length - 1 + MAX_TOKENS].tolist() == answer.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, *BOTH])
def test_log_probabilities_are_those_of_a_pass_over_the_whole_sequence(toy, name):
    """For any temperature, before and behind it, of drafts and of tokens of the target's own."""
    temperatures = np.array([0.0, 0.6, 1.0, 3.0], np.float32)
    tree, draft = (None, None) if name is None else (TREES[name], toy.good)
    state = generated(toy.target, draft, tree=tree, temperature=jnp.asarray(temperatures), logprobs=True)
    answers, found = np.asarray(state.output[:, :MAX_TOKENS]), state.logprobs
    assert found is not None
    texts = np.zeros((4, 9 + MAX_TOKENS), np.int32)
    for text, prompt, length, answer in zip(texts, TEXTS, LENGTHS, answers, strict=True):
        text[: length + MAX_TOKENS] = [*prompt[:length], *answer]
    logits = np.asarray(following(toy.target, jnp.asarray(texts)), np.float64)
    for row, (length, answer) in enumerate(zip(LENGTHS, answers, strict=True)):
        own = logits[row, length - 1 : length - 1 + MAX_TOKENS]

        def of_answer(own: np.ndarray, answer: np.ndarray = answer) -> np.ndarray:
            return own[range(MAX_TOKENS), answer] - np.log(np.exp(own - own.max(1, keepdims=True)).sum(1)) - own.max(1)

        np.testing.assert_allclose(found.chosen[row, :MAX_TOKENS], of_answer(own), atol=1e-5)
        drawn = of_answer(own / temperatures[row]) if temperatures[row] else np.zeros(MAX_TOKENS)
        np.testing.assert_allclose(found.processed[row, :MAX_TOKENS], drawn, atol=1e-5)
    assert name is None or np.asarray(state.accepted).sum(axis=1).min() > 0


@pytest.mark.parametrize(
    "name", [name if name in ("chain3", "tree3x3") else pytest.param(name, marks=pytest.mark.slow) for name in TREES]
)
def test_greedy_speculation_changes_no_token(toy, vanilla, name):
    state = generated(toy.target, toy.good, tree=TREES[name])
    np.testing.assert_array_equal(state.output[:, :MAX_TOKENS], vanilla)
    np.testing.assert_array_equal(state.output[:, MAX_TOKENS:], 0)
    assert state.num_output.tolist() == [MAX_TOKENS] * 4
    assert state.done.all()
    # Same tokens, fewer accepted: that is how a draft that is fed wrongly looks. (One round: another machine's ties.)
    assert int(state.rounds.sum()) <= KNOWN[name][1] + 1
    accepted = np.asarray(state.accepted)
    assert (accepted[:, :-1] >= accepted[:, 1:]).all()
    # All that a round takes counts, but for what the limit cuts off the last one.
    surplus = np.asarray(state.rounds) + accepted.sum(axis=1) - (MAX_TOKENS - 1)
    assert ((surplus >= 0) & (surplus <= TREES[name].depth)).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("chain3", marks=pytest.mark.long), "tree3x3"])
def test_the_kernels_for_tpu_change_no_token(toy, vanilla, name, monkeypatch):
    """Attention of target and head, commits, and the head's choice of tokens as Pallas kernels, interpreted; with
    caches as a TPU has them, heads side by side."""
    monkeypatch.setattr(packed_heads, "default_implementation", lambda: "pallas")
    assert toy.target.empty_cache(1, 16).layers[0].keys.shape[-1] == 128
    for place, kernel in (
        ("cache.tree_attention", tree_attention),
        ("cache.commit", commit),
        ("drafts.head.vocabulary_top_k", vocabulary_top_k),
    ):
        interpreted = functools.partial(kernel, implementation="pallas", interpret=True)
        monkeypatch.setattr(f"eagle3_jax.models.{place}", interpreted)
    state = jax.jit(generated, static_argnames="tree")(toy.target, toy.good, tree=TREES[name])
    np.testing.assert_array_equal(state.output[:, :MAX_TOKENS], vanilla)
    assert (np.asarray(state.rounds) < MAX_TOKENS - 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH)
def test_caches_and_draft_state_after_each_round_are_a_fresh_prefill_s(toy, name):
    """Lengths count committed tokens only, and every committed token has its true feature."""
    tree, slots = TREES[name], 128
    state = prefilled(toy.target, toy.good, TEXTS, LENGTHS, tree)
    for _ in range(5):
        state = decode(toy.target, toy.good, state, 1, 4, plan(tree))
        lengths, counts = np.asarray(state.lengths), np.asarray(state.num_output)
        np.testing.assert_array_equal(lengths, LENGTHS + counts - 1)
        sequences = np.zeros((4, 48), np.int32)
        for row in range(4):
            answer = np.asarray(state.output[row, : counts[row]])
            sequences[row, : lengths[row]] = np.concatenate([TEXTS[row, : LENGTHS[row]], answer])[:-1]
            assert answer[-1] == state.root[row]
        fresh = prefilled(toy.target, toy.good, sequences, lengths, tree)
        np.testing.assert_array_equal(fresh.root, state.root)
        np.testing.assert_allclose(*jax.device_get((fresh.draft_state, state.draft_state)), atol=1e-4)
        committed = (np.arange(slots) < lengths[:, None])[:, None, :, None]
        for got, expected in zip(
            jax.tree.leaves((state.cache, state.draft_cache)),
            jax.tree.leaves((fresh.cache, fresh.draft_cache)),
            strict=True,
        ):
            np.testing.assert_allclose(np.where(committed, got, 0), np.where(committed, expected, 0), atol=1e-4)


@pytest.mark.slow
def test_positions_of_drafting_and_extending(toy, monkeypatch):
    """A pair has its feature's position: 0..6 in prefill, then 7, 8 while drafting, then 7.. again with true ones."""
    seen = []
    feed = Head.feed

    def spy(head, embed, tokens, features, this, cache):
        jax.debug.callback(lambda p: seen.append(np.asarray(p)[0].tolist()), this.positions, ordered=True)
        return feed(head, embed, tokens, features, this, cache)

    monkeypatch.setattr(Head, "feed", spy)
    tree = TREES["chain3"]

    @jax.jit
    def two_rounds():
        state = prefilled(toy.target, toy.random, TEXTS[:1, :7], jnp.array([7], jnp.int32), tree, 32, 9)
        first = advance(toy.target, toy.random, state, plan(tree))
        return first.lengths, advance(toy.target, toy.random, first, plan(tree)).lengths

    lengths = [int(length[0]) for length in two_rounds()]
    jax.effects_barrier()
    second = lengths[0]
    assert seen == [
        [0, 1, 2, 3, 4, 5, 6],
        [7],
        [8],
        [7, 8, 9, 10],
        [second],
        [second + 1],
        [second, second + 1, second + 2, second + 3],
    ]
    assert 8 <= second <= 11


@pytest.mark.slow
def test_a_round_is_cut_at_the_end_of_sequence_and_at_the_limit(toy):
    """Every place of the end of sequence among drafts and bonus, under every limit, against plain Python."""
    steps, eos = 3, 5
    cases = [
        (accepted, place, room, ignore, done)
        for accepted in range(steps + 1)
        for place in (*range(steps + 1), None)
        for room in (1, 2, 3, 4, 9)
        for ignore in (False, True)
        for done in (False, True)
    ]
    batch = len(cases)
    chosen = np.ones((batch, steps + 1), np.int32)
    for row, (_, place, *_) in enumerate(cases):
        if place is not None:
            chosen[row, place:] = eos
    accepted, _, room, ignore, done = zip(*cases, strict=True)
    one = prefilled(toy.target, None, TEXTS[:1], LENGTHS[:1], None)
    state = jax.tree.map(lambda x: jnp.repeat(x, batch, axis=0), one)
    state = dataclasses.replace(
        state,
        requests=dataclasses.replace(
            state.requests,
            limit=state.num_output + jnp.asarray(room),
            stop_ids=jnp.where(jnp.asarray(ignore), -1, eos)[:, None],
        ),
        done=jnp.asarray(done),
    )
    count, drafts, ended = _cut(state, jnp.asarray(chosen), jnp.asarray(accepted, jnp.int32))
    for row, (walked, place, left, ignored, was_done) in enumerate(cases):
        tokens = [1 if place is None or i < place else eos for i in range(walked + 1)]
        stops = eos in tokens and not ignored
        if stops:
            tokens = tokens[: tokens.index(eos) + 1]
        if was_done:
            expected = (0, 0, True)
        else:
            expected = (min(len(tokens), left), min(len(tokens), walked), stops or len(tokens) >= left)
        assert (int(count[row]), int(drafts[row]), bool(ended[row])) == expected, cases[row]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chain3", "tree3x3"])
def test_the_end_of_sequence_ends_each_sequence_where_vanilla_ends(toy, vanilla, name):
    eos = (int(vanilla[0, 7]), int(vanilla[3, 2]))
    target = toy.with_eos(*eos)
    state = generated(target, toy.good, tree=TREES[name], ignore_eos=jnp.array(False))
    for row in range(4):
        stops = np.flatnonzero(np.isin(vanilla[row], eos))
        expected = vanilla[row, : stops[0] + 1] if len(stops) else vanilla[row]
        assert state.output[row, : state.num_output[row]].tolist() == expected.tolist()
        assert (np.asarray(state.output[row, state.num_output[row] :]) == 0).all()
    assert len(set(state.num_output.tolist())) > 1
    ignoring = generated(target, toy.good, tree=TREES[name], ignore_eos=jnp.array(True))
    np.testing.assert_array_equal(ignoring.output[:, :MAX_TOKENS], vanilla)


@pytest.mark.slow
@pytest.mark.parametrize("sample_drafts", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "name", ["tree3x3", *(pytest.param(x, marks=pytest.mark.long) for x in ("chain3", "chain3+5"))]
)
def test_sampled_tokens_have_the_target_s_distribution(toy, name, sample_drafts):
    """Second and third token of 4096 answers (the first round's) against the exact distribution, by chi-square."""
    samples, vocabulary, prompt = 4096, 24, TEXTS[2, :6]
    state = generate(
        toy.target,
        toy.good,
        jnp.asarray(np.tile(prompt, (samples, 1))),
        jnp.full(samples, 6, jnp.int32),
        jax.random.key(7),
        max_tokens=3,
        tree=dataclasses.replace(TREES[name], sample_drafts=sample_drafts),
        temperature=1.5,
    )
    assert int(state.accepted.sum()) > samples // 10  # both ways of getting a token are seen
    got = np.zeros((vocabulary, vocabulary))
    np.add.at(got, (np.asarray(state.output[:, 1]), np.asarray(state.output[:, 2])), 1)
    pairs = np.stack(np.meshgrid(range(vocabulary), range(vocabulary), indexing="ij"), axis=-1).reshape(-1, 2)
    logits = following(toy.target, jnp.asarray(np.concatenate([np.tile(prompt, (len(pairs), 1)), pairs], axis=1)))[
        :, 5:
    ]
    probs = np.asarray(jax.nn.softmax(logits / 1.5, axis=-1), np.float64)
    probs = np.asarray(probs, np.float64).reshape(vocabulary, vocabulary, 3, vocabulary)
    expected = samples * np.einsum("x,xy,xyz->yz", probs[0, 0, 0], probs[:, 0, 1], probs[:, :, 2])
    common = expected >= 5
    chi_square = ((got - expected)[common] ** 2 / expected[common]).sum()
    rest, rest_expected = got[~common].sum(), expected[~common].sum()
    chi_square += (rest - rest_expected) ** 2 / rest_expected
    freedom = common.sum()
    assert freedom > 40
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


@pytest.mark.slow
@pytest.mark.parametrize("sample_drafts", [False, True])
def test_temperatures_mix_in_one_batch_and_the_key_matters(toy, vanilla, sample_drafts):
    temperature, tree = jnp.array([0.0, 1e-6, 1e-5, 2.0]), TREES["tree3x3" if sample_drafts else "chain3"]
    tree = dataclasses.replace(tree, sample_drafts=sample_drafts)
    run = functools.partial(generated, toy.target, toy.good, tree=tree, temperature=temperature)
    state = run()
    np.testing.assert_array_equal(state.output[:3, :MAX_TOKENS], vanilla[:3])
    assert state.output[3].tolist() != vanilla[3].tolist()
    np.testing.assert_array_equal(run().output, state.output)
    other = run(key=1)
    np.testing.assert_array_equal(other.output[:3], state.output[:3])
    assert other.output[3].tolist() != state.output[3].tolist()


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.parametrize("greedy", [True, False])
def test_rounds_have_no_fusion_that_cpus_compute_wrongly(toy, greedy):
    tree = TREES["tree3x3"]
    state = prefilled(toy.target, toy.good, TEXTS, LENGTHS, tree)
    leaves, structure = jax.tree.flatten(state)

    @jax.jit
    def program(*leaves):
        state = jax.tree.unflatten(structure, leaves)
        return jax.tree.leaves(run_rounds(toy.target, toy.good, state, 4, 4, plan(tree, greedy)))

    text = program.lower(*leaves).compile().as_text() or ""
    assert "__ynn_fusion" in text
    assert product_and_sum_fusions(text) == []


def random_numbers(jaxpr, choose) -> int:
    """Counts the equations that make random numbers; `choose` takes the count of one of a conditional's branches."""
    total = 0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        parts = [random_numbers(part, choose) for part in jaxprs_in_params(equation.params)]
        total += name.startswith("random_") and "wrap" not in name
        total += choose(parts) if name == "cond" else sum(parts)
    return total


@pytest.mark.parametrize("name", ["chain3", "tree3x3"])
def test_greedy_requests_cost_no_random_numbers(toy, name):
    """One program serves both kinds: the first token of greedy requests and their rounds take branches without them."""
    tree, requests = TREES[name], (Sampling.greedy(4), jnp.full(4, MAX_TOKENS, jnp.int32), jnp.full((4, 1), -1))

    def both(greedy):
        sizes: dict[str, Any] = {"cache_length": 128, "max_output": MAX_TOKENS, "tree": tree}
        state = prefill(
            toy.target, toy.good, jnp.asarray(TEXTS), jnp.asarray(LENGTHS), *requests, greedy=False, **sizes
        )
        return advance(toy.target, toy.good, state, plan(tree, greedy)).root

    jaxpr = jax.make_jaxpr(both)(jnp.bool_(True)).jaxpr
    assert random_numbers(jaxpr, min) == 0 < random_numbers(jaxpr, max)


def test_a_policy_update_between_two_calls_compiles_nothing(toy):
    """As a loop of reinforcement learning does: both networks change, shapes do not."""
    tree = TREES["chain3"]
    jitted: Any = generate
    generated(toy.target, toy.good, tree=tree)
    compiled = jitted._cache_size()
    policy = jax.tree.map(lambda x: x * 1.05, toy.target)
    policy.norm[...] *= jnp.linspace(0.5, 1.5, policy.norm.shape[0])
    head = jax.tree.map(lambda x: x * 0.9, toy.good.head)
    state = generated(policy, dataclasses.replace(toy.good, head=head), tree=tree)
    assert jitted._cache_size() == compiled
    expected = generated(policy, None)
    np.testing.assert_array_equal(state.output[:, :MAX_TOKENS], expected.output[:, :MAX_TOKENS])
    assert state.output.tolist() != generated(toy.target, toy.good, tree=tree).output.tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_length": 32}, "cache_length: got 32, expected at least 38"),
        ({"max_tokens": 504}, r"prompts, max_tokens: got 9 \+ 504, expected the target's 512 at most"),
        ({"max_tokens": 0}, "max_tokens: got 0"),
        ({"draft": None}, "draft: got None, expected a draft head"),
    ],
)
def test_sizes_that_cannot_fit_are_refused(toy, options, message):
    with pytest.raises(ValueError, match=message):
        generated(toy.target, **{"draft": toy.good, "tree": CHAIN} | options)
