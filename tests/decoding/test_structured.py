"""Answers with a shape: drafts change none of them, and spend nothing on what cannot come."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import regex
from letters import Letters
from toy import CHAIN, TEXTS, TREE, following, plan

from eagle3_jax.config import DraftTree
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.decoding.request import Output
from eagle3_jax.decoding.rounds.constraint import ConstraintRows
from eagle3_jax.decoding.rounds.generate import prefill
from eagle3_jax.decoding.rounds.round import draft_tree, run_rounds
from eagle3_jax.decoding.rounds.sampling import Sampling
from eagle3_jax.decoding.rounds.state import State
from eagle3_jax.decoding.structured.compile import Compiler, Table, mask_words
from eagle3_jax.decoding.structured.params import StructuredOutputsParams as Shape
from eagle3_jax.decoding.structured.pool import CHUNK

END, VOCABULARY = 23, 24
WITH_TEXT = DraftTree(num_steps=3, topk=3, num_draft_tokens=10, lookup_tokens=3)
SIZES: dict[str, Any] = {"batch_size": 3, "max_length": 128, "page_size": 16, "structured_mib": 2}
SHAPES = [
    Shape(regex="(?:ab|cd){2,9}(?:e|abc)"),
    Shape(regex="[a-f]{3}(?:bcdbcd|eee)[h-k]{2,6}"),
    Shape(choice=["abcabc", "bcbc"], after="a"),
    None,
]
PROMPTS = [TEXTS[0].tolist(), TEXTS[1].tolist()[:5], TEXTS[2].tolist(), TEXTS[3].tolist()[:4], [5, 1, 2], [9, 9, 9, 9]]


def engine(toy: Any, draft: Any, tree: Any = "auto", **options: Any) -> Engine:
    return Engine(toy.with_eos(END), Letters(), draft, tree, **SIZES | options)


def asked(count: int, **params: Any) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=20, structured=SHAPES[i % len(SHAPES)], **params) for i in range(count)]


def allowed(shape: Shape | None, answer: list[int]) -> list[int]:
    """Returns what may follow, by a matcher that knows texts alone."""
    names, start = Letters().names, 0
    if shape is None or END in answer:
        return [*range(VOCABULARY)]
    if shape.after is not None:
        token = names.index(shape.after)
        if token not in answer:
            return [*range(VOCABULARY)]
        start = answer.index(token) + 1
    text = "".join(names[token] for token in answer[start:])
    ways = [t for t in range(END) if regex.fullmatch(shape.pattern, text + names[t], partial=True)]
    return ways + ([END] if regex.fullmatch(shape.pattern, text) else [])


def greedy_reference(toy: Any, prompt: list[int], shape: Shape | None) -> list[int]:
    """One token after the other, each by a pass over all before."""
    answer: list[int] = []
    while len(answer) < 20 and END not in answer:
        text = [*prompt, *answer]
        logits = np.asarray(following(toy.target, jnp.asarray([[*text, *[0] * (40 - len(text))]])))[0, len(text) - 1]
        ways = allowed(shape, answer)
        answer.append(ways[int(np.argmax(logits[ways]))])
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vanilla", "chain", "tree and text", "text"])
def test_greedy_answers_are_the_best_that_the_shape_allows(toy, name):
    """Several shapes and none in one batch, of three kinds of drafts; nothing is compiled for a new shape."""
    of_name: dict[str, Any] = {
        "vanilla": (None,),
        "chain": (toy.good, CHAIN),
        "tree and text": (toy.good, WITH_TEXT),
        "text": ("lookup", DraftTree(num_steps=4, num_draft_tokens=5)),
    }
    runs = engine(toy, *of_name[name])
    params = asked(len(PROMPTS))
    outputs = runs.generate(PROMPTS, params)
    for prompt, one, output in zip(PROMPTS, params, outputs, strict=True):
        assert output.error is None
        assert output.token_ids == greedy_reference(toy, prompt, one.structured)
        assert output.finish_reason == ("stop" if output.token_ids[-1] == END else "length")
    compiled = runs.stats().programs
    again = runs.generate(PROMPTS[:1], SamplingParams(max_tokens=20, structured=Shape(choice=["dede", "cdcde"])))
    assert again[0].text in ("dede", "cdcde") and again[0].finish_reason == "stop"
    assert runs.stats().programs == compiled
    if name == "tree and text":
        forced = runs.generate(PROMPTS[:1], SamplingParams(structured=Shape(choice=["gghhiijjkk"])))[0]
        assert forced.token_ids == [6, 6, 7, 7, 8, 8, 9, 9, 10, 10, END]
        assert forced.stats.rounds == 3  # three forced tokens and one more in each


@pytest.mark.slow
def test_drawn_answers_keep_their_shape_and_count_the_mask(toy):
    """Vanilla decoding and drafts that are not drawn give the same tokens and the same probabilities."""
    params = [dataclasses.replace(one, temperature=1.5, seed=i, logprobs=3) for i, one in enumerate(asked(6))]
    vanilla, drafted = (
        engine(toy, *of, sample_drafts=False).generate(PROMPTS, params) for of in [(None,), (toy.good, WITH_TEXT)]
    )
    for prompt, one, plain, output in zip(PROMPTS, params, vanilla, drafted, strict=True):
        assert output.token_ids == plain.token_ids
        check_logprobs(toy, prompt, one, output)


def check_logprobs(toy: Any, prompt: list[int], params: SamplingParams, output: Output) -> None:
    assert output.logprobs is not None
    for place, found in enumerate(output.logprobs):
        answer = output.token_ids[:place]
        text, ways = [*prompt, *answer], allowed(params.structured, answer)
        assert found.token_id in ways
        logits = np.asarray(following(toy.target, jnp.asarray([[*text, *[0] * (40 - len(text))]])))[0, len(text) - 1]
        for value, temperature in ((found.logprob, 1.0), (found.processed, 1.5)):
            kept = logits[ways] / temperature
            expected = kept[ways.index(found.token_id)] - jax.nn.logsumexp(kept)
            np.testing.assert_allclose(value, expected, atol=1e-3)
        assert {token for token, _ in found.top} <= {*ways}


def constrained(state: State, table: Table, automaton: Any) -> State:
    """Puts sequences under a constraint, in these states of its table."""
    width, batch = mask_words(VOCABULARY), len(state.done)
    rows = ConstraintRows.of(table, width)
    rows = jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x), batch, axis=0), rows)
    words = jnp.concatenate([jnp.full(width, -1, jnp.int32), jnp.asarray(table.words)])
    requests = dataclasses.replace(state.requests, constraint=rows)
    return dataclasses.replace(state, requests=requests, automaton=jnp.asarray(automaton), tables=words)


@pytest.mark.slow
@pytest.mark.parametrize("sample_drafts", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("tree", [CHAIN, pytest.param(TREE, marks=pytest.mark.long), WITH_TEXT])
def test_sampled_tokens_have_the_distribution_that_the_shape_leaves(toy, tree, sample_drafts):
    """Second and third token of 4096 answers against the exact distribution, by chi-square."""
    samples, prompt = 4096, TEXTS[2, :6]
    tree = dataclasses.replace(tree, sample_drafts=sample_drafts)
    shape = Shape(regex="[ac-h][b-fi-k].*|bc.*|(?:ab|de)[cdk].*")
    table = Compiler(Letters(), VOCABULARY, {END}).table(shape)
    keys = jax.random.split(jax.random.key(7), samples)
    sampling = Sampling.greedy(samples)
    sampling = dataclasses.replace(sampling, temperature=jnp.full(samples, 1.5), key=keys)
    run = functools.partial(prefill, cache_length=64, max_output=3, tree=tree, greedy=False)
    texts = jnp.asarray(np.tile(prompt, (samples, 1))), jnp.full(samples, 6, jnp.int32)
    state = jax.jit(run)(toy.target, toy.good, *texts, sampling, jnp.full(samples, 3), jnp.full((samples, 1), -1))
    state = constrained(state, table, jnp.full(samples, table.start))
    state = jax.jit(run_rounds, static_argnames="plan")(toy.target, toy.good, state, 3, samples, plan(tree, False))
    assert int(state.accepted.sum()) > samples // 10  # both ways of getting a token are seen
    got = np.zeros((VOCABULARY, VOCABULARY))
    np.add.at(got, (np.asarray(state.output[:, 1]), np.asarray(state.output[:, 2])), 1)
    pairs = np.stack(np.meshgrid(range(VOCABULARY), range(VOCABULARY), indexing="ij"), axis=-1).reshape(-1, 2)
    whole = np.concatenate([np.tile(prompt, (len(pairs), 1)), pairs], axis=1)
    logits = np.asarray(following(toy.target, jnp.asarray(whole)), np.float64)[:, 5:] / 1.5
    logits = logits.reshape(VOCABULARY, VOCABULARY, 3, VOCABULARY)
    mask = np.full((VOCABULARY, VOCABULARY), -np.inf)  # of the third token behind the second
    mask[END] = 0  # behind the end anything goes
    for second in range(END):
        mask[second, allowed(shape, [second])] = 0
    first = np.full(VOCABULARY, -np.inf)
    first[allowed(shape, [])] = 0

    def softmax(x: Any) -> np.ndarray:
        found = np.exp(x - np.where(np.isfinite(x.max(-1, keepdims=True)), x.max(-1, keepdims=True), 0))
        return found / np.maximum(found.sum(-1, keepdims=True), 1e-300)

    root, second = softmax(logits[0, 0, 0]), softmax(logits[:, 0, 1] + first)
    third = softmax(logits[:, :, 2] + mask[None])
    expected = samples * np.einsum("x,xy,xyz->yz", root, second, third)
    assert got[expected == 0].sum() == 0
    common = expected >= 5
    chi_square = ((got - expected)[common] ** 2 / expected[common]).sum()
    rest, rest_expected = got[~common].sum(), expected[~common].sum()
    chi_square += (rest - rest_expected) ** 2 / max(rest_expected, 1)
    freedom = common.sum()
    assert freedom > 20
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("greedy", [True, False])
def test_no_draft_is_spent_on_a_token_that_cannot_come(toy, greedy):
    """Of wide enough shapes: each node is allowed behind its own path."""
    shape, batch = Shape(regex="(?:[a-d](?:[e-h]{2}|[i-k]))*"), len(PROMPTS)
    table = Compiler(Letters(), VOCABULARY, {END}).table(shape)
    texts, lengths = np.zeros((batch, 9), np.int32), np.array([len(prompt) for prompt in PROMPTS], np.int32)
    for row, prompt in zip(texts, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    sampling = dataclasses.replace(Sampling.greedy(batch), temperature=jnp.full(batch, 0.0 if greedy else 1.0))

    @jax.jit
    def drafted(texts, lengths):
        of_requests = sampling, jnp.full(batch, 9), jnp.full((batch, 1), -1)
        sizes: dict[str, Any] = {"cache_length": 64, "max_output": 9, "tree": TREE, "greedy": False}
        state = prefill(toy.target, toy.random, texts, lengths, *of_requests, **sizes)
        state = constrained(state, table, jnp.full(batch, table.start))
        nodes, _ = draft_tree(toy.target, toy.random, state, plan(TREE, greedy))
        return nodes.tokens, nodes.parents

    every, above = map(np.asarray, drafted(jnp.asarray(texts), jnp.asarray(lengths)))
    for tokens, parents in zip(every, above, strict=True):
        paths: list[list[int]] = [[]]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            assert token in allowed(shape, paths[parent])
            paths.append([*paths[parent], int(token)])
    assert len({*every[:, 1:].reshape(-1).tolist()}) > 5


@pytest.mark.slow
def test_a_shape_waits_for_room_and_one_that_never_fits_is_refused(toy):
    runs = engine(toy, None)
    runs.generate([[1, 2]], SamplingParams(max_tokens=2))
    pool = runs._scheduler._tables
    pool._chunks = pool._first + 1  # room for one shape at a time
    outputs = runs.generate(PROMPTS[:3], asked(3))
    assert [output.token_ids for output in outputs] == [
        greedy_reference(toy, prompt, shape) for prompt, shape in zip(PROMPTS[:3], SHAPES[:3], strict=True)
    ]
    assert all(not requests for *_, requests in pool._held.values())
    with pytest.raises(ValueError, match="structured_mib"):
        engine(toy, None, structured_mib=0).generate([[1]], asked(1))
    tight = engine(toy, None)
    tight._runner.sizes = dataclasses.replace(tight._runner.sizes, tables=CHUNK)
    with pytest.raises(ValueError, match="structured: got .*MiB"):
        tight.generate([[1]], asked(1))
    with pytest.raises(ValueError, match="structured"):
        engine(toy, None).generate([[1]], SamplingParams(structured=Shape(regex="[xyz]")))
    with pytest.raises(ValueError, match="structured_mib"):
        engine(toy, None, structured_mib=-1)
