"""Requests under traffic: they join and leave, are aborted, late, refused or bad, and the others do not notice."""

import asyncio
import dataclasses
import random
import threading
import time
import types

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from toy import CHAIN, LARGE, LETTERS, SMALL, TREE, Tokenizer, make
from toy import following as following_of

from eagle3_jax.config import DraftTree
from eagle3_jax.decoding import loop, scheduler
from eagle3_jax.decoding.choice import tiers
from eagle3_jax.decoding.choice.tiers import TierChoice
from eagle3_jax.decoding.device import calls, programs, shapes
from eagle3_jax.decoding.device.shapes import Sizes
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.decoding.request import QueueFullError
from eagle3_jax.decoding.rounds.sampling import block_width


def noisy(toy):
    """The toy target with logits close enough together that penalties and prompts decide."""
    graph, parameters = nnx.split(toy.target)
    twin = nnx.merge(graph, parameters)
    twin.lm_head = nnx.Param(twin.lm_head[...] * 0.1)
    return twin


@pytest.fixture(scope="module", params=["chain", pytest.param("tree", marks=pytest.mark.slow)])
def engine(request, toy) -> Engine:
    tree = {"chain": CHAIN, "tree": TREE}[request.param]
    return make(toy, tree, noisy(toy), **LARGE)


@pytest.fixture(scope="module")
def following(toy):
    """Logits behind a sequence, by one pass over all of it."""
    target = noisy(toy)

    def logits(ids: list[int]) -> np.ndarray:
        padded = np.zeros((1, 128), np.int32)
        padded[0, : len(ids)] = ids
        return np.asarray(following_of(target, jnp.asarray(padded)))[0, len(ids) - 1]

    return logits


def greedy(following, prompt: list[int], params: SamplingParams, eos: tuple[int, ...] = ()) -> list[int]:
    """One token after the other, in numpy: Hugging Face's repetition penalty, OpenAI's two others."""
    answer: list[int] = []
    while len(answer) < params.max_tokens:
        logits = following(prompt + answer).copy()
        for token in {*prompt, *answer}:
            logits[token] *= params.repetition_penalty ** (-1 if logits[token] > 0 else 1)
        for token in set(answer):
            logits[token] -= params.presence_penalty + params.frequency_penalty * answer.count(token)
        for token, bias in params.logit_bias.items():
            logits[token] += bias
        stops = {*params.stop_token_ids, *eos}
        if len(answer) < params.min_tokens:
            logits[list(stops)] = -np.inf
        answer.append(int(np.argmax(logits)))
        if answer[-1] in stops:
            break
    return answer


RULES = [
    SamplingParams(max_tokens=25),
    SamplingParams(max_tokens=25, repetition_penalty=1.7),
    SamplingParams(max_tokens=25, presence_penalty=0.8),
    SamplingParams(max_tokens=25, frequency_penalty=0.3),
    SamplingParams(max_tokens=25, frequency_penalty=-0.3, presence_penalty=1.5, repetition_penalty=1.2),
    SamplingParams(max_tokens=25, logit_bias={3: 2.0, 1: -4.0}, frequency_penalty=0.2),
    SamplingParams(max_tokens=25, stop_token_ids=(1, 9), min_tokens=7, presence_penalty=0.5),
]


@pytest.mark.slow
def test_a_long_answer_does_not_hold_the_batch(engine):
    """Of four places one is long taken: eight short answers take turns in the others, and end first."""
    ended, before = [], engine.stats().rounds
    params = [SamplingParams(max_tokens=90), *[SamplingParams(max_tokens=8)] * 8]
    answers = engine.generate([[i + 1, 5] for i in range(9)], params, lambda index, _: ended.append(index))
    assert ended[-1] == 0 and sorted(ended) == list(range(9))
    assert engine.stats().rounds - before == sum(answer.stats.rounds for answer in answers)  # none ran for nobody


@pytest.mark.slow
def test_rules_mix_in_one_batch_and_each_is_what_one_token_after_the_other_gives(engine, following):
    """On a tree each node's logits count the drafts in front of it."""
    prompts = [[i + 1, 5, 7, 5] for i in range(len(RULES))]
    answers = engine.generate(prompts, RULES)
    expected = [greedy(following, prompt, params) for prompt, params in zip(prompts, RULES, strict=True)]
    assert [answer.token_ids for answer in answers] == expected
    assert len({tuple(answer) for answer in expected}) >= 6
    assert answers[-1].finish_reason == "stop"
    assert sum(answers[0].stats.accepted_per_position) > 0


@pytest.mark.slow
def test_logprobs_are_those_of_the_target_at_every_token(engine, following):
    """And processed ones those of the distribution that it was drawn from."""
    for params in (
        SamplingParams(max_tokens=11, logprobs=3),
        SamplingParams(max_tokens=11, logprobs=0, temperature=0.7),
        SamplingParams(max_tokens=11, logprobs=2, temperature=2.0, top_k=5, top_p=0.9, seed=1),
        SamplingParams(max_tokens=11, logprobs=0, temperature=1.5, presence_penalty=1.0, logit_bias={3: 2.0}),
        SamplingParams(max_tokens=11, logprobs=20, presence_penalty=1.0),
    ):
        (answer,) = engine.generate([[4, 9, 2]], params)
        assert answer.logprobs is not None
        assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
        for i, entry in enumerate(answer.logprobs):
            logits = following([4, 9, 2, *answer.token_ids[:i]]).astype(np.float64)
            expected = logits - np.log(np.exp(logits).sum())
            assert entry.logprob == pytest.approx(expected[entry.token_id], abs=1e-4)
            best = np.argsort(-expected)[: params.logprobs]
            assert [token for token, _ in entry.top] == best.tolist()
            np.testing.assert_allclose([value for _, value in entry.top], expected[best], atol=1e-4)
            for token in set(answer.token_ids[:i]):
                logits[token] -= params.presence_penalty
            for token, bias in params.logit_bias.items():
                logits[token] += bias
            if params.temperature == 0:
                assert entry.token_id == np.argmax(logits) and entry.processed == 0
                continue
            probs = np.exp(logits / params.temperature)
            order = np.argsort(-probs)[: params.top_k or None]
            kept = order[: np.searchsorted(np.cumsum(probs[order]), params.top_p * probs[order].sum()) + 1]
            assert entry.token_id in kept
            assert entry.processed == pytest.approx(np.log(probs[entry.token_id] / probs[kept].sum()), abs=1e-5)
    assert engine.generate([[4, 9, 2]], SamplingParams(max_tokens=3))[0].logprobs is None


@pytest.mark.slow
def test_stop_strings_across_tokens_cut_text_and_tokens(engine):
    whole = engine.generate(["hello"], SamplingParams(max_tokens=30, presence_penalty=0.7))[0]
    stop = whole.text[7:10]
    at = whole.text.index(stop)
    params = SamplingParams(max_tokens=30, presence_penalty=0.7, stop=("never", stop))
    (answer,) = engine.generate(["hello"], params)
    assert answer.finish_reason == "stop"
    assert answer.text == whole.text[:at]
    assert answer.token_ids == whole.token_ids[: at + len(stop)]
    pieces = list(engine.stream("hello", params))
    assert "".join(piece.text for piece in pieces) == answer.text  # no part of the stop string was shown
    assert [token for piece in pieces for token in piece.token_ids] == answer.token_ids
    late = dataclasses.replace(params, min_tokens=at + len(stop) + 1)
    assert len(engine.generate(["hello"], late)[0].token_ids) > at + len(stop)


@pytest.mark.slow
def test_several_answers_to_one_prompt_differ_and_repeat(engine):
    params = SamplingParams(max_tokens=8, temperature=2.0, n=3, seed=4)
    first = engine.generate(["abc", "d"], params)
    assert len(first) == 6
    assert [answer.token_ids for answer in engine.generate(["abc", "d"], params)] == [a.token_ids for a in first]
    assert len({tuple(answer.token_ids) for answer in first}) == 6
    alone = engine.generate(["abc"], dataclasses.replace(params, n=1))[0]
    assert alone.token_ids == first[0].token_ids


@pytest.mark.long
def test_in_another_order_drawn_answers_differ_at_borders_alone(engine):
    """Other prompts are read together then, and sums rounded otherwise. `sampling.draw` inverts running sums of blocks,
    then one in a block: a random number at a border chooses the block or the token next to it.
    """
    rng, width = random.Random(0), block_width(len(LETTERS))
    prompts = [[rng.randrange(len(LETTERS)) for _ in range(rng.randint(1, 60))] for _ in range(40)]
    params = [SamplingParams(temperature=1.0, max_tokens=50, seed=seed, ignore_eos=True) for seed in range(40)]
    answers = engine.generate(prompts, params)
    order = rng.sample(range(40), 40)
    again = engine.generate([prompts[i] for i in order], [params[i] for i in order])
    odd = [(answers[i].token_ids, other.token_ids) for i, other in zip(order, again, strict=True)]
    odd = [pair for pair in odd if pair[0] != pair[1]]
    assert len(odd) <= 2, "a border is met once in some 10,000 tokens"
    for one, other in odd:
        first, second = next(pair for pair in zip(one, other, strict=True) if pair[0] != pair[1])
        assert abs(first - second) in (1, width)


@pytest.mark.slow
def test_a_prefix_is_read_once_and_changes_nothing(toy):
    system = [(7 * i) % 23 for i in range(50)]
    turns = [[*system, 3], [*system, 4, 9], [*system[:20], 8], [1, 2, 3]]
    params = SamplingParams(max_tokens=20)

    def ask(tree: DraftTree | None, reuse: bool) -> tuple[list[list[int]], list[int], list[int]]:
        engine = make(toy, tree, noisy(toy), prefix_cache=reuse)
        answers = []
        for turn in turns:  # one after the other, and the second turn of a conversation
            (answer,) = engine.generate([turn], params)
            (again,) = engine.generate([[*turn, *answer.token_ids, 5]], params)
            answers += [answer, again]
        hits = [answer.stats.cached_tokens for answer in answers]
        return [answer.token_ids for answer in answers], hits, [sum(a.stats.accepted_per_position) for a in answers]

    plain, none, _ = ask(None, False)
    assert none == [0] * 8
    vanilla, hits, _ = ask(None, True)
    assert vanilla == plain
    assert hits == [0, 64, 48, 64, 16, 32, 0, 16]
    for tree in (CHAIN, TREE):
        _, _, fresh = ask(tree, False)
        tokens, with_draft, accepted = ask(tree, True)
        assert tokens == plain
        assert with_draft == hits
        assert accepted == fresh  # the draft's part of the prefix is right too


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [16, *(pytest.param(size, marks=pytest.mark.long) for size in (64, 256))])
def test_page_sizes_change_nothing(toy, page_size):
    """Drafts cross pages everywhere: prompts of every length around a page's end."""
    prompts = [[(3 * i + n) % 24 for i in range(n)] for n in range(page_size - 6, page_size + 6)]
    params = SamplingParams(max_tokens=20)
    size = LARGE | {"max_length": 128 if page_size == 16 else 512}
    engine = make(toy, TREE, noisy(toy), **size | {"page_size": page_size})
    vanilla = make(toy, None, noisy(toy), **size | {"page_size": 32})
    got, expected = engine.generate(prompts, params), vanilla.generate(prompts, params)
    assert [answer.token_ids for answer in got] == [answer.token_ids for answer in expected]


@pytest.mark.slow
def test_requests_wait_where_pages_are_short_and_nothing_is_thrown_out(toy):
    """Room for one request of full length: places are free, pages are not."""
    engine = make(toy, **LARGE, kv_tokens=144)
    expected = make(toy, **LARGE).generate(["abc", "hello", "q", "sun"], SamplingParams(max_tokens=100))
    requests = [engine.submit(prompt, SamplingParams(max_tokens=100)) for prompt in ("abc", "hello", "q", "sun")]
    engine._scheduler.turn()
    assert (engine.stats().running, engine.stats().waiting) == (1, 3)
    assert [request.result().token_ids for request in requests] == [answer.token_ids for answer in expected]
    with pytest.raises(ValueError, match="kv_tokens: got 128, expected at least 144, room for one request"):
        make(toy, kv_tokens=128)


@pytest.mark.long
def test_long_prompts_are_read_in_stretches_between_the_others_rounds(toy, monkeypatch):
    """A long prompt does not stop the others, and its answer is the one it has alone."""
    for name, value in (("PACKED", ((4, 4),)), ("ALONE", ((1, 32),)), ("MOST_READ", 32)):
        monkeypatch.setattr(shapes, name, value)
    long, short = [(5 * i) % 24 for i in range(200)], [3, 1, 2]
    params = SamplingParams(max_tokens=30)
    engine = make(toy, CHAIN, noisy(toy), max_length=256)
    first = engine.submit(short, SamplingParams(max_tokens=150))
    while len(first.tokens) < 4:
        engine._scheduler.turn()
    second = engine.submit(long, params)
    progress = []
    while second.read < 200:
        engine._scheduler.turn()
        progress.append(len(first.tokens))
    assert len(progress) >= 6
    assert progress[0] < progress[-1]
    whole = make(toy, None, noisy(toy), max_length=256, batch_size=1)
    assert second.result().token_ids == whole.generate([long], params)[0].token_ids
    assert first.result().token_ids == whole.generate([short], SamplingParams(max_tokens=150))[0].token_ids


def test_aborted_late_and_refused_requests_leave_nothing(toy):
    engine = make(toy, queue_limit=3)
    idle = engine.stats().free_pages
    params = SamplingParams(max_tokens=100)
    running = [engine.submit("abc", params), engine.submit("def", params)]
    for _ in range(3):
        engine._scheduler.turn()
    late = engine.submit("u", params, timeout=0.001)
    time.sleep(0.002)
    engine._scheduler.turn()
    assert late.done and not any(request.done for request in running), "late though nobody is aborted"
    late, waiting = engine.submit("u", params, timeout=0.001), engine.submit("v", params)
    engine.submit("w", SamplingParams(max_tokens=2))
    with pytest.raises(QueueFullError, match="queue: got 3 waiting requests"):
        engine.submit("much", params)
    running[0].abort()
    waiting.abort()
    time.sleep(0.002)
    assert (late.result().finish_reason, late.result().token_ids) == ("timeout", [])
    aborted = running[0].result()
    assert aborted.finish_reason == "abort"
    assert aborted.token_ids == engine.generate(["abc"], params)[0].token_ids[: len(aborted.token_ids)]
    assert len(aborted.token_ids) > 0
    assert waiting.result().finish_reason == "abort"
    assert running[1].result().finish_reason == "length"
    running[1].abort()  # it has ended: nothing happens
    assert running[1].result().finish_reason == "length"
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.free_pages, stats.refused) == (0, 0, idle, 1)


@pytest.mark.slow
def test_a_request_whose_logits_are_no_numbers_fails_alone(toy):
    """And its pages are given to others, who read nothing of it."""
    target = noisy(toy)
    target.embed = nnx.Param(target.embed[...].at[13].set(jnp.nan))
    engine = make(toy, TREE, target)
    params = SamplingParams(max_tokens=12, logit_bias={13: -100.0})
    good = [[1, 2, 3], [4, 5], [9, 9, 9]]
    expected = [answer.token_ids for answer in engine.generate(good, params)]
    # Two read the token whose embedding is damaged in their prompts; the last one says it, and reads it in a round.
    prompts = [good[0], [1, 13, 2], good[1], [13], good[2], [2, 2]]
    answers = engine.generate(prompts, [params] * 5 + [SamplingParams(max_tokens=12, logit_bias={13: 100.0})])
    reasons = [answer.finish_reason for answer in answers]
    assert reasons == ["length", "error", "length", "error", "length", "error"]
    for failed in (1, 3, 5):
        assert answers[failed].error == "logits: got values that are not finite, expected numbers"
    assert [answers[i].token_ids for i in (0, 2, 4)] == expected
    assert [answer.token_ids for answer in engine.generate(good, params)] == expected


def test_a_device_that_hangs_shows_in_the_stats(toy, monkeypatch):
    engine = make(toy)
    engine.generate(["abc"])
    assert engine.stats().stalled == 0
    wakes, decode = threading.Event(), programs.decode
    monkeypatch.setattr(programs, "decode", lambda *args, **options: wakes.wait(60) and decode(*args, **options))
    request = engine.submit("abc")
    waiting = threading.Thread(target=request.result)
    waiting.start()
    end = time.monotonic() + 60
    while engine.stats().stalled < 0.5 and time.monotonic() < end:
        time.sleep(0.05)
    assert 0.5 <= engine.stats().stalled < 30
    assert not request.done
    wakes.set()
    waiting.join(60)
    assert request.done
    assert engine.stats().stalled == 0


@pytest.mark.slow
def test_a_prompt_that_is_read_alone_shows_progress_and_stops_when_it_is_aborted(toy, monkeypatch):
    """Each stretch takes ten seconds of a clock that is ours. What the device was given is bounded by a turn's work."""
    for name, value in (("PACKED", ((4, 4),)), ("ALONE", ((1, 32),)), ("MOST_READ", 32)):
        monkeypatch.setattr(shapes, name, value)
    engine, clock, seen = make(toy, max_length=512), [0.0], []
    for module in (loop, scheduler):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    prefill = programs.prefill

    def slow(*args, **options):
        seen.append(engine.stats().stalled)
        clock[0] += 10
        if len(seen) == 8:
            request.abort()
        return prefill(*args, **options)

    monkeypatch.setattr(programs, "prefill", slow)
    request = engine.submit([(5 * i) % 23 for i in range(480)])
    assert request.result().finish_reason == "abort"
    assert max(seen) <= 20 and len(seen) <= 10


def test_asynchronous_requests_stream_side_by_side(toy):
    engine = make(toy)
    expected = [answer.token_ids for answer in engine.generate(["abc", "hello", "q", "sun"])]

    async def stream(prompt: str) -> list[int]:
        return [token async for piece in engine.submit(prompt) for token in piece.token_ids]

    async def main():
        whole = engine.submit("q")
        streamed = await asyncio.gather(*(stream(prompt) for prompt in ("abc", "hello", "sun")))
        return streamed, (await whole).token_ids

    (a, b, d), c = asyncio.run(asyncio.wait_for(main(), 60))
    assert [a, b, c, d] == expected
    for thread in threading.enumerate():  # it ends when nothing is left to do
        if thread.name == "eagle3_jax engine":
            thread.join(10)
            assert not thread.is_alive()


@pytest.mark.slow
def test_threads_share_an_engine(toy):
    engine = make(toy)
    prompts = [letter * 3 for letter in LETTERS[:12]]
    expected = [answer.token_ids for answer in engine.generate(prompts)]
    got: dict[int, list[int]] = {}

    def ask(i: int) -> None:
        got[i] = engine.submit(prompts[i]).result().token_ids if i % 2 else engine.generate([prompts[i]])[0].token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [got[i] for i in range(12)] == expected


@pytest.mark.parametrize(
    "count", [pytest.param(100, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.long)]
)
def test_a_soak_of_mixed_traffic_leaks_nothing_and_answers_each_once(toy, count):
    """Random prompts, parameters, aborts, deadlines and bad input; every greedy answer is vanilla's."""
    engine = make(toy, CHAIN, noisy(toy), batch_size=8, queue_limit=9)
    soak(engine, make(toy, None, noisy(toy)), 24, count)


@pytest.mark.long
def test_a_soak_of_tiers_that_take_turns(toy, monkeypatch):
    """The head rests and wakes between dispatches, whoever joins, leaves or is aborted."""
    every, draw = [tiers.VANILLA, tiers.LOOKUP, tiers.CHAIN], random.Random(7)
    monkeypatch.setattr(tiers, "of_head", lambda head: tuple(every))
    monkeypatch.setattr(shapes, "WIDTHS", (3,))  # of each there are six programs to compile
    monkeypatch.setattr(TierChoice, "useful", lambda self, costs: costs)
    monkeypatch.setattr(TierChoice, "choose", lambda *args, **kwargs: draw.choice(every))
    size = SMALL | {"batch_size": 8}
    engine = Engine(noisy(toy), Tokenizer(), toy.good, queue_limit=9, **size)
    vanilla = make(toy, None, noisy(toy), **size)
    monkeypatch.setattr(vanilla.tiers, "choose", lambda *args, **kwargs: tiers.VANILLA)
    soak(engine, vanilla, 24, 10_000)


@pytest.mark.slow
def test_rounds_are_as_wide_as_the_traffic_and_the_tokens_the_same(toy, monkeypatch):
    """Requests come in waves and leave gaps between their places; some are aborted, and their pages given to others."""
    monkeypatch.setattr(shapes, "WIDTHS", (1, 4))
    engine = make(toy, CHAIN, noisy(toy), batch_size=6, prefix_cache=False, kv_tokens=640)
    engine.warm_up(progress=False, greedy_alone=True)
    draw, compiled, taken = random.Random(3), engine.stats().programs, []
    decode = calls.decode

    def watched(sizes, cancelled, places, *args, width, **kwargs):
        taken.append((width, places))
        return decode(sizes, cancelled, places, *args, width=width, **kwargs)

    prompts = [[draw.randrange(24) for _ in range(draw.randint(1, 60))] for _ in range(20)]
    expected = make(toy, None, noisy(toy)).generate(prompts, SamplingParams(max_tokens=60))
    monkeypatch.setattr(calls, "decode", watched)
    requests = []
    for wave in [1, 6, 2, 0, 3, 0, 5, 0, 0, 4, 1, 6, 0, 0, 0, 2, 0, 3]:
        for number in draw.choices(range(20), k=wave):
            params = SamplingParams(max_tokens=draw.choice([3, 10, 30, 60]))
            requests.append((number, engine.submit(prompts[number], params)))
        for _ in range(draw.randint(1, 4)):
            engine._scheduler.turn()
        if wave != 1:
            requests[-draw.randint(1, 3)][1].abort()
    answers = [(number, request.result()) for number, request in requests]
    assert all(answer.token_ids == expected[number].token_ids[: len(answer.token_ids)] for number, answer in answers)
    assert {answer.finish_reason for _, answer in answers} == {"length", "abort"}
    assert {width for width, _ in taken} == {1, 4, 6}
    assert all(min(w for w in (1, 4, 6) if w >= len(places)) == width for width, places in taken)
    assert any(places != list(range(len(places))) for width, places in taken if width < 6), "no gap was met"
    assert engine.stats().programs == compiled


def soak(engine: Engine, vanilla: Engine, vocabulary: int, count: int) -> None:
    """`count` requests to an engine with 8 places, 128 tokens each, and a queue of 9."""
    draw = random.Random(count)
    engine.warm_up(progress=False)
    compiled, idle = engine.stats().programs, engine.stats().free_pages
    assert compiled <= 24 * len(engine.own_runner.widths)
    systems = [[draw.randrange(vocabulary) for _ in range(n)] for n in (0, 17, 40)]
    prompts = [
        [*draw.choice(systems), *(draw.randrange(vocabulary) for _ in range(draw.randint(1, 30)))] for _ in range(60)
    ]
    answers = vanilla.generate(prompts, SamplingParams(max_tokens=40))
    checked = bad = refused = 0
    requests = []
    while len(requests) < count:
        number = draw.randrange(len(prompts))
        if draw.random() < 0.05:
            with pytest.raises(ValueError, match="got .*expected"):
                engine.submit(draw.choice([[], [vocabulary], [1] * 128, [{"role": "user"}]]))
            bad += 1
            continue
        params = SamplingParams(
            max_tokens=draw.randint(1, 40),
            temperature=draw.choice([0.0, 0.0, 0.0, 1.0]),
            top_k=draw.choice([0, 5]),
            seed=draw.randrange(9),
            logprobs=draw.choice([None, None, 2]),
            presence_penalty=draw.choice([0.0] * 9 + [0.5]),
        )
        try:
            timeout = draw.choice([None, None, None, 0.001, 0.05])
            requests.append((number, params, engine.submit(prompts[number], params, timeout=timeout)))
        except QueueFullError:
            refused += 1
            draw.choice(requests)[2].result()
        if draw.random() < 0.1:
            draw.choice(requests)[2].abort()
        if draw.random() < 0.1:
            engine._scheduler.turn()
    for number, params, request in requests:
        output = request.result()
        assert output.finish_reason in ("length", "stop", "abort", "timeout")
        if params.temperature == 0 and params.presence_penalty == 0:
            assert output.token_ids == answers[number].token_ids[: len(output.token_ids)]
            checked += len(output.token_ids)
        if output.finish_reason == "length":
            assert len(output.token_ids) == params.max_tokens
    stats = engine.stats()
    assert sum(stats.finished.values()) == len(requests) == count
    assert set(stats.finished) - {"stop"} == {"length", "abort", "timeout"}
    assert (stats.running, stats.waiting, stats.free_pages, stats.refused) == (0, 0, idle, refused)
    assert stats.programs == compiled
    assert stats.cached_tokens > 0
    assert refused > 0
    assert bad > 0
    assert checked > 5 * count


@pytest.mark.long
def test_half_a_million_greedy_tokens_are_vanilla_s(toy):
    """Batches 1 to 16, pages of 16 to 256 tokens, chains and trees; requests join and leave, some are aborted."""
    draw, target, compared = random.Random(1), noisy(toy), 0
    prompts = [[draw.randrange(24) for _ in range(draw.randint(1, 200))] for _ in range(400)]
    vanilla = Engine(target, Tokenizer(), max_length=512, batch_size=16, prefix_cache=False)
    expected = vanilla.generate(prompts, SamplingParams(max_tokens=300))
    one, large = DraftTree(num_steps=1, num_draft_tokens=2), DraftTree(num_steps=5, topk=4, num_draft_tokens=32)
    trees = [CHAIN, TREE, one, large]
    for batch, page_size, tree in zip((1, 4, 16, 7), (16, 64, 128, 256), trees, strict=True):
        engine = Engine(target, Tokenizer(), toy.good, tree, max_length=512, batch_size=batch, page_size=page_size)
        requests = []
        for _ in range(120 if batch == 1 else 760):
            number = draw.randrange(len(prompts))
            requests.append((number, engine.submit(prompts[number], SamplingParams(max_tokens=draw.randint(200, 300)))))
            if draw.random() < 0.3:
                engine._scheduler.turn()
            if draw.random() < 0.03:
                draw.choice(requests)[1].abort()
        for number, request in requests:
            got = request.result().token_ids
            assert got == expected[number].token_ids[: len(got)]
            compared += len(got)
        assert engine.stats().free_pages == engine.stats().pages
    assert compared > 500_000


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", [pytest.param("bfloat16", marks=pytest.mark.long), "float8_e4m3fn"])
def test_narrow_keys_and_values_decode_the_same_with_drafts_and_without(toy, kv_dtype):
    """Tokens may differ from float32's; chains and vanilla decoding read the same narrow entries."""
    params = SamplingParams(max_tokens=20)
    engine, vanilla = (make(toy, tree, kv_dtype=kv_dtype) for tree in (CHAIN, None))
    got, expected = engine.generate(["hello", "sun"], params), vanilla.generate(["hello", "sun"], params)
    assert [answer.token_ids for answer in got] == [answer.token_ids for answer in expected]
    assert engine.own_runner._state is not None
    assert engine.own_runner._state.cache.layers[0].keys.dtype == kv_dtype


@pytest.mark.slow
@pytest.mark.parametrize(
    ("packed", "most", "expected"),
    [
        ((4, 16), 1024, [(4, 8)]),  # all are read at once, in two dispatches
        ((3, 16), 64, [(1, 3), (3, 6), (4, 8)]),  # 48 of 64 are read: no further dispatch of 48 fits
        ((8, 6), 48, [(1, 2), (2, 5), (4, 8)]),  # of 16 tokens each: 2 and two thirds, 5 and a third, 8
    ],
)
def test_prompts_are_read_before_rounds_that_few_would_share(toy, monkeypatch, packed, most, expected):
    monkeypatch.setattr(shapes, "PACKED", (packed,))
    monkeypatch.setattr(shapes, "MOST_READ", most)
    engine = make(toy, CHAIN, noisy(toy), batch_size=8)
    decode, given = calls.decode, []

    def counted(sizes, cancelled, places, rounds, *args, **kwargs):
        given.append((rounds, len(places)))
        return decode(sizes, cancelled, places, rounds, *args, **kwargs)

    monkeypatch.setattr(calls, "decode", counted)
    engine.generate([[1 + i % 7] * 16 for i in range(8)], SamplingParams(max_tokens=20))
    assert given[: len(expected)] == expected
    assert {rounds for rounds, _ in given[len(expected) :]} == {shapes.ROUNDS}


def test_stretches_are_those_with_least_padding():
    sizes = Sizes.plan(16, 2048, 16, [tiers.VANILLA])
    for left, expected in (
        ([38], (4, 16)),
        ([38] * 2, (4, 16)),
        ([38] * 3, (4, 16)),
        ([38] * 8, (16, 16)),
        ([6] * 16, (16, 16)),
        ([300, 20, 30, 40], (1, 256)),
        ([1000], (1, 1024)),
        ([600], (1, 256)),
    ):
        assert sizes.prefill_shape_for(left) == expected, left


@pytest.mark.slow
def test_thousands_that_wait_are_aborted_at_once(toy):
    """A verb that is told to stop has seconds."""
    engine = make(toy, None, noisy(toy))

    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    start, prompts = time.process_time(), [[1 + i % 20] for i in range(20_000)]
    with pytest.raises(Stop):
        engine.generate(prompts, SamplingParams(max_tokens=2), stop)
    assert time.process_time() - start < 20  # of the processor: other work beside it does not count
    assert engine.stats().waiting == 0
    assert engine.generate([[1, 2]], SamplingParams(max_tokens=3))[0].finish_reason == "length"
