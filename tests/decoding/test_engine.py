"""The engine: requests in, tokens out, whatever else is being answered."""

import dataclasses
import itertools
import logging
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx
from toy import CHAIN, PROMPTS, SMALL, Tokenizer, make

from eagle3_jax.config import DraftTree
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.decoding.text import end_ids
from eagle3_jax.runs import progress


@pytest.fixture(scope="module")
def speculative(toy) -> Engine:
    return make(toy)


@pytest.mark.slow
def test_speculative_answers_are_the_vanilla_ones_in_the_order_of_the_prompts(toy, speculative):
    params = [SamplingParams(max_tokens=n) for n in (1, 2, 3, 20, 9)]
    finished = []
    got = speculative.generate(PROMPTS, params, on_output=lambda index, output: finished.append((index, output)))
    expected = make(toy, None).generate(PROMPTS, params)
    assert [out.token_ids for out in got] == [out.token_ids for out in expected]
    assert [len(out.token_ids) for out in got] == [1, 2, 3, 20, 9]
    assert all(out.finish_reason == "length" for out in got)
    assert [out.text for out in got] == [speculative.tokenizer.decode(out.token_ids, True) for out in got]
    assert sorted(finished, key=lambda pair: pair[0]) == list(enumerate(got))
    assert [out.stats.rounds for out in expected] == [0, 1, 2, 19, 8]
    assert all(out.stats.acceptance_length == 1 and out.stats.accepted_per_position == [] for out in expected)
    assert got[0].stats.rounds == 0
    assert got[3].stats.rounds < 19
    assert got[3].stats.acceptance_length > 1.2
    assert len(got[3].stats.accepted_per_position) == 3


@pytest.mark.slow
@pytest.mark.parametrize("sample_drafts", [False, True])
def test_answers_do_not_depend_on_their_neighbours(toy, speculative, sample_drafts):
    if sample_drafts != CHAIN.sample_drafts:
        speculative = make(toy, tree=dataclasses.replace(CHAIN, sample_drafts=sample_drafts))
    params = [SamplingParams(max_tokens=10, temperature=t, top_k=k, seed=3) for t, k in [(0.0, 0), (1.0, 0), (2.0, 5)]]
    prompts = ["same", "same", "same"]
    together = speculative.generate(prompts, params)
    reverse = speculative.generate([*prompts, "other"][::-1], [*params, SamplingParams(temperature=1.0)][::-1])
    alone = [speculative.generate(["same", "fill"], [p, SamplingParams(temperature=1.0)])[0] for p in params]
    for i in range(3):
        assert together[i].token_ids == reverse[3 - i].token_ids == alone[i].token_ids
    assert together[1].token_ids != together[0].token_ids


@pytest.mark.slow
def test_nothing_compiles_once_warm(speculative):
    params = SamplingParams(max_tokens=7)
    speculative.generate(PROMPTS, params)
    speculative.warm_up(progress=False)
    before = speculative.stats().programs
    assert before <= 24
    for count in range(1, 6):
        speculative.generate(
            PROMPTS[:count], SamplingParams(max_tokens=count, temperature=float(count % 2), logprobs=1)
        )
    assert speculative.stats().programs == before


def test_the_first_answer_says_that_it_compiles_and_the_next_one_nothing(toy, monkeypatch, capsys):
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    engine = make(toy)
    for expected in (["prefill", "decode"], []):
        engine.generate([PROMPTS[0]])
        printed = capsys.readouterr().err
        assert re.findall(r"^eagle3_jax: compiling (\w+) \(first call\): \d+ s$", printed, re.MULTILINE) == expected


@pytest.mark.slow
@pytest.mark.parametrize("first", ["float32", "bfloat16"])
def test_another_head_compiles_nothing(toy, first, caplog):
    """Though bfloat16 may hold what the one head says and not what the other does: then panels differ."""
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), toy.good.head)
    heads = {"float32": toy.good, "bfloat16": dataclasses.replace(toy.good, head=rounded)}
    params = SamplingParams(max_tokens=7)
    engine = Engine(toy.target, Tokenizer(), heads.pop(first), CHAIN, **SMALL)
    expected = [output.token_ids for output in engine.generate(PROMPTS, params)]
    before = engine.stats().programs
    (other,) = heads.values()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        engine.replace_draft(other)
        outputs = engine.generate(PROMPTS, params)
    assert engine.stats().programs == before
    assert "empty_state" not in caplog.text
    half = dataclasses.replace(other, head=jax.tree.map(lambda x: x.astype(jnp.bfloat16), other.head))
    with pytest.raises(ValueError, match=r"draft: got a head of .*bfloat16.*, expected one of .*float32"):
        engine.replace_draft(half)
    assert [output.token_ids for output in outputs] == expected
    assert sum(sum(output.stats.accepted_per_position) for output in outputs) > 0


@pytest.mark.slow
@pytest.mark.parametrize("named_by", ["target", "tokenizer"])
def test_end_of_sequence_stops_unless_ignored(toy, named_by, monkeypatch):
    free = make(toy, None).generate(["hello"], SamplingParams(max_tokens=12))[0].token_ids
    stop = free[4]
    if named_by == "tokenizer":
        monkeypatch.setattr(Tokenizer, "eos_token_id", stop, raising=False)
    engine = make(toy, target=toy.with_eos(*[stop] * (named_by == "target")))
    out = engine.generate(["hello"], SamplingParams(max_tokens=12))[0]
    assert out.token_ids == free[: free.index(stop) + 1]
    assert out.finish_reason == "stop"
    out = engine.generate(["hello"], SamplingParams(max_tokens=12, ignore_eos=True))[0]
    assert (out.token_ids, out.finish_reason) == (free, "length")
    pieces = list(engine.stream("hello", SamplingParams(max_tokens=12)))
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == "stop"


def test_the_tokenizer_s_end_joins_the_model_s():
    config = tiny.llama_config(eos_token_ids=(2, 3))
    for own, expected in ((None, {2, 3}), (2, {2, 3}), (0, {0, 2, 3}), (39, {2, 3, 39}), (40, {2, 3})):
        assert end_ids(config, types.SimpleNamespace(eos_token_id=own)) == expected


def test_streamed_pieces_join_to_the_answer(speculative):
    for params in (SamplingParams(max_tokens=60), SamplingParams(max_tokens=1)):
        whole = speculative.generate(["hello", "abc"], params)[0]
        pieces = list(speculative.stream("hello", params))
        assert "".join(piece.text for piece in pieces) == whole.text
        assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
        assert pieces[-1].finish_reason == "length"
        depths = [depth for piece in pieces for depth in piece.depths]
        assert all(len(piece.depths) == len(piece.token_ids) for piece in pieces)
        assert depths[0] == 0 and all(depth in (0, 1, before + 1) for before, depth in itertools.pairwise(depths))
        for depth, accepted in enumerate(whole.stats.accepted_per_position, 1):
            assert accepted - 1 <= depths.count(depth) <= accepted  # the limit cuts the last round
        for i, piece in enumerate(pieces[:-1]):
            tree, shown = piece.tree, [x for before in pieces[: i + 1] for x in before.token_ids]
            drafts = piece.depths[-2] if len(piece.depths) > 1 else 0
            taken = [token for token, accepted in zip(tree.token_ids, tree.accepted, strict=True) if accepted]
            assert taken == shown[-drafts - 2 : -1] and tree.parents[0] == -1  # root and drafts; then the bonus
            assert len(tree.token_ids) == 4 and tree.parents[1:] == [0, 1, 2]
        request = speculative.submit("hello", params)
        request.result()
        (at_once,) = request
        assert (at_once.token_ids, at_once.depths) == (whole.token_ids, depths)


@pytest.mark.slow
def test_drafts_can_be_left_out_to_compare_with(toy, speculative):
    choosing = make(toy, tree=[CHAIN])
    params = SamplingParams(max_tokens=20)
    plain = choosing.submit("hello", params, drafts=False).result()
    assert plain.stats.rounds == 19 and choosing.stats().tiers["vanilla"] > 0 == choosing.stats().tiers["chain 3"]
    fast = choosing.submit("hello", params).result()
    assert fast.token_ids == plain.token_ids and fast.stats.rounds < 19
    together = choosing.submit("hello", params, drafts=False), choosing.submit("abc", params)
    assert together[0].result().stats.rounds < 19  # one of them wants drafts
    with pytest.raises(ValueError, match="drafts: got False, expected an engine with a choice"):
        speculative.submit("hello", drafts=False)


def test_max_length_cuts_the_answer(speculative):
    prompt = np.arange(120) % 20
    out = speculative.generate([prompt.tolist()], SamplingParams(max_tokens=100))[0]
    assert (len(out.token_ids), out.finish_reason) == (8, "length")
    assert speculative.generate([]) == []


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("hello", SamplingParams(), r"prompts: got the string 'hello', expected a list"),
        (["a", [1] * 128], SamplingParams(), r"prompts\[1\]: got 128 tokens, expected 1 to 127"),
        ([[]], SamplingParams(), r"prompts\[0\]: got 0 tokens"),
        ([[1, 24]], SamplingParams(), r"prompts\[0\]: got token ids 1 to 24, expected 0 to 23"),
        (["a", [{"role": "user"}]], SamplingParams(), r"prompts\[1\]\[0\].content: got None, expected text"),
        (["a", "b"], [SamplingParams()], r"params: got 1, expected one for all or 2"),
        ((prompt for prompt in ["a"]), SamplingParams(), r"prompts: got generator, expected a list of prompts"),
        (["a"], {"max_tokens": 3}, r"params: got dict, expected SamplingParams"),
        (["a"], None, r"params: got NoneType, expected SamplingParams"),
        (["a"], ["max_tokens"], r"params\[0\]: got str, expected SamplingParams"),
    ],
)
def test_impossible_requests_are_refused_before_any_work(speculative, prompts, params, message):
    with pytest.raises(ValueError, match=message), tiny.no_type_checks():
        speculative.generate(prompts, params, on_output=lambda *_: pytest.fail("work began"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size: got 0"),
        ({"max_length": 1000}, "max_length: got 1000, expected a whole number, 2 to the target's 512"),
        ({"tree": None, "draft_weights": "int8"}, "draft_weights: got 'int8', expected None where no head or model"),
        ({"tree": DraftTree(num_steps=1, topk=23, num_draft_tokens=3)}, "tree.topk: got 23, expected at most"),
        ({"max_length": "128"}, r"max_length: got '128', expected a whole number"),
        ({"batch_size": True}, r"batch_size: got True, expected a whole number"),
        ({"kv_tokens": 1.5}, r"kv_tokens: got 1\.5, expected a whole number"),
        ({"kv_dtype": "int8"}, r"kv_dtype: got 'int8', expected 'float32', 'bfloat16', 'float8_e4m3fn', or None"),
        ({"kv_dtype": "float64"}, r"kv_dtype: got 'float64', expected"),
        ({"draft_weights": "stored"}, r"draft_weights: got 'stored', expected 'int8', 'fp8', 'int4', or None"),
    ],
)
def test_what_an_engine_cannot_be_made_with_is_refused_by_name(toy, options, message):
    with pytest.raises(ValueError, match=message), tiny.no_type_checks():
        make(toy, **options)


def test_what_cannot_be_loaded_is_refused_before_anything_is(monkeypatch, tmp_path, speculative):
    monkeypatch.setattr("eagle3_jax.decoding.load.load_target", lambda *_: pytest.fail("loads"))
    options: Any
    for options, message in (
        (
            {"draft": False},
            r"draft: got False, expected a folder, a name, 'auto', 'lookup', 'mtp', a loaded head, or N",
        ),
        ({"dtype": "float16"}, r"target\.dtype: got 'float16', expected 'float32' or 'bfloat16'"),
        ({"dtype": "bf16"}, r"target\.dtype: got 'bf16', expected"),
        ({"target": tmp_path / "none"}, r"target: got .*none, no such folder"),
    ):
        with pytest.raises(ValueError, match=message), tiny.no_type_checks():
            Engine.load(**{"target": "smollm2-135m-instruct"} | options)  # pyrefly: ignore
    with pytest.raises(ValueError, match=r"target: got 'a', expected a loaded model; `Engine.load\('a'\)` loads one"):
        Engine("a")  # pyrefly: ignore[bad-argument-type]
    for call in (speculative.submit, speculative.stream):
        with pytest.raises(ValueError, match="params: got dict, expected SamplingParams"), tiny.no_type_checks():
            list(call("a", {"max_tokens": 3}))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", 64, "draft.hidden_size: got 64, expected 32"),
        ("vocab_size", 25, "draft.vocab_size: got 25, expected the target's 24"),
        ("aux_layers", (0, 1), r"draft.aux_layers: got \(0, 1\), expected the target's \(0, 1, 2\)"),
    ],
)
def test_a_draft_of_another_shape_is_refused(toy, field, value, message):
    graph, parameters = nnx.split(toy.good.head)
    other = nnx.merge(graph, parameters)
    other.config = dataclasses.replace(other.config, **{field: value})
    with pytest.raises(ValueError, match=message):
        Engine(toy.target, Tokenizer(), dataclasses.replace(toy.good, head=other), CHAIN, max_length=64)


@pytest.mark.slow
def test_positions_beyond_what_the_head_declares_are_warned_of_and_stay_exact(toy):
    head = toy.good.head
    graph, parameters = nnx.split(head)
    short = nnx.merge(graph, parameters)
    short.config = dataclasses.replace(head.config, max_position_embeddings=24)
    draft = dataclasses.replace(toy.good, head=short)
    with pytest.warns(UserWarning, match=r"max_length: got 128, more than the 24 positions that the draft"):
        engine = Engine(toy.target, Tokenizer(), draft, CHAIN, **SMALL)
    params = SamplingParams(max_tokens=60)
    assert engine.generate(["hello"], params)[0].token_ids == make(toy, None).generate(["hello"], params)[0].token_ids
    Engine(toy.target, Tokenizer(), draft, CHAIN, max_length=24)  # silent: warnings are errors here


def test_quantization_is_another_name_of_weights(tmp_path):
    folder = tiny.write_target(tmp_path)
    with pytest.raises(ValueError, match=r"weights, quantization: got \('int8', 'fp8'\), expected one"):
        Engine.load(folder, None, weights="int8", quantization="fp8")
    engine = Engine.load(folder, None, max_length=32, quantization="fp8")
    assert jnp.dtype("float8_e4m3fn") in {leaf.dtype for leaf in jax.tree.leaves(engine.target)}


@pytest.mark.slow
def test_the_messages_of_one_chat_are_one_prompt(speculative):
    chat, params = PROMPTS[1], SamplingParams(max_tokens=4)
    (output,) = speculative.generate(chat, params)
    assert output.token_ids == speculative.generate([chat], params)[0].token_ids


@pytest.mark.slow
def test_a_closed_engine_has_no_request_no_caches_and_takes_none(toy):
    with make(toy) as engine:
        requests = [engine.submit(prompt, SamplingParams(max_tokens=90)) for prompt in ("hello", "abc", "sun")]
        assert next(iter(requests[0])).token_ids  # two run, one waits
    assert [request.result().finish_reason for request in requests] == ["abort"] * 3
    assert engine.own_runner._state is None and engine.stats().free_pages == engine.stats().pages
    with pytest.raises(RuntimeError, match="engine: got a request, expected none after `close`"):
        engine.generate(["hello"])
    engine.close()
