"""A head that learns while it serves: tokens stay, acceptance grows, and what goes wrong is rolled back."""

import asyncio
import dataclasses
import gc
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx
from tiny_blocks import make_block_head
from toy import CHAIN, IDS, SMALL, Tokenizer, fitting, make

from eagle3_jax.config import AdaptConfig, ConfigError, DraftConfig, ExportConfig, MeshConfig, RunConfig
from eagle3_jax.decoding.adapt.api import AdaptStats
from eagle3_jax.decoding.adapt.learner import HeadLearner, _Judged
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.export.__main__ import run as export
from eagle3_jax.formats.heads import load_draft
from eagle3_jax.mesh import make_mesh, shardings
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.models.drafts.dflash import DFlash
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.drafts.model import DraftModel
from eagle3_jax.models.layers import SHARDING_RULES
from eagle3_jax.models.states import target_states
from eagle3_jax.runs.disk import LockError
from eagle3_jax.runs.manifest import ManifestError

ADAPT = AdaptConfig(
    share=0.95, ring_tokens=512, row_length=64, batch_size=2, ttt_steps=2, learning_rate=3e-3, judge_every=4
)
PARAMS = SamplingParams(max_tokens=40)
PROMPTS = [[1 + i % 20, 2 + i % 3, 5] for i in range(16)]


def live(toy, adapt: AdaptConfig = ADAPT, **options) -> Engine:
    return Engine(toy.target, Tokenizer(), toy.plain, CHAIN, **SMALL, adapt=adapt, **options)


@pytest.fixture(scope="module")
def one_engine(toy) -> Engine:
    return live(toy)


@pytest.fixture
def engine(one_engine) -> Engine:
    learner_of(one_engine)._in_vain = 0  # or the tests before could make it rest
    return one_engine


@pytest.fixture(scope="module")
def expected(toy) -> list[list[int]]:
    return [output.token_ids for output in make(toy, None).generate(PROMPTS, PARAMS)]


def tau(outputs) -> float:
    rounds = sum(output.stats.rounds for output in outputs)
    return 1 + sum(sum(output.stats.accepted_per_position) for output in outputs) / rounds


def learner_of(engine: Engine) -> HeadLearner:
    assert isinstance(engine._learner, HeadLearner)
    return engine._learner


def learnt(engine: Engine) -> AdaptStats:
    stats = engine.stats().adapt
    assert stats is not None
    return stats


@pytest.mark.slow
def test_the_head_learns_a_domain_and_the_tokens_stay_the_target_s(toy, engine, expected):
    first = engine.generate(PROMPTS[:2], PARAMS)
    engine.generate(PROMPTS[:6], PARAMS)  # compiles the steps
    programs, losses = engine.stats().programs, [learnt(engine).loss]
    for _ in range(4):
        outputs = engine.generate(PROMPTS, PARAMS)
        assert [output.token_ids for output in outputs] == expected
        losses.append(learnt(engine).loss)
    stats = learnt(engine)
    assert tau(outputs) > tau(first) + 0.5, "the same prompts, later"
    assert losses[-1] < 0.8 * losses[0]
    assert stats.heads > 0 and stats.tau_after >= 1.5
    assert stats.steps >= 4 * (stats.heads + stats.rollbacks)
    assert 0 < stats.share < 1 and stats.seconds > 0
    assert engine.stats().programs == programs, "no head is compiled for"


@pytest.mark.long
def test_it_learns_where_the_target_is_split_over_a_mesh(toy, expected):
    mesh = make_mesh(MeshConfig(data=1, model=2), jax.devices()[:2])
    split = jax.device_put(toy.target, shardings(toy.target, mesh, SHARDING_RULES))
    engine = Engine(split, Tokenizer(), toy.plain, CHAIN, **SMALL, adapt=ADAPT)
    first = engine.generate(PROMPTS[:2], PARAMS)
    engine.generate(PROMPTS[:6], PARAMS)
    programs = engine.stats().programs
    for _ in range(3):
        outputs = engine.generate(PROMPTS, PARAMS)
        assert [output.token_ids for output in outputs] == expected
    assert tau(outputs) > tau(first) + 0.5
    assert learnt(engine).heads > 0 and engine.stats().programs == programs, "no head is compiled for"
    state = learner_of(engine)._state.head
    assert all(leaf.sharding.device_set == set(mesh.devices.flat) for leaf in jax.tree.leaves((state, engine.draft)))
    assert any(leaf.sharding.shard_shape(leaf.shape) != leaf.shape for leaf in jax.tree.leaves(state))


@pytest.mark.slow
def test_the_ring_holds_what_a_pass_over_the_whole_text_computes(toy, engine, monkeypatch):
    """Of a short request, of one longer than a row, and of one whose beginning was reused."""
    learner, kept = learner_of(engine), []
    monkeypatch.setattr(learner, "learn", lambda *seconds: None)
    monkeypatch.setattr(learner, "keep", lambda *asked: kept.append(asked))
    long = [(7 * i) % 19 for i in range(50)]
    for prompt, reused in (([3, 9, 4], 0), (long, 0), ([*long[:40], 1], 32)):
        engine.generate([prompt], SamplingParams(max_tokens=30))
        observed, slot, token_ids, first, answer = kept.pop()
        assert (len(token_ids), answer, first) == (len(prompt) + 29, len(prompt), reused)
        first = max(first, len(token_ids) - 64)
        places = np.arange(first, len(token_ids)) % observed.argmax.shape[1]
        aux, last, best, _ = target_states(toy.target, jnp.asarray(token_ids)[None])
        for name, whole in (("aux", aux), ("last_hidden", last)):
            found = getattr(observed, name)[slot, places].view(jnp.bfloat16).astype(jnp.float32)
            np.testing.assert_allclose(found, whole[0, first:].astype(jnp.float32), atol=2e-2)
        best_tokens = np.asarray(observed.argmax)[slot, places][answer - len(token_ids) :]
        assert best_tokens.tolist() == best[0, answer:].tolist()


@pytest.fixture(scope="module")
def lacking(toy) -> tuple[Any, list[list[int]]]:
    """A toy whose head lacks the two tokens that its target says most, though it knows them; and the target's answers.

    The target's LM head has fewer dimensions than there are tokens, so that rows of some tokens tell those of others.
    """
    target, head = (jax.tree.map(jnp.copy, model) for model in (toy.target, toy.good.head))
    left, scales, right = np.linalg.svd(target.lm_head[...], full_matrices=False)
    target.lm_head[...] = jnp.asarray(left[:, :12] * scales[:12] @ right[:12])
    answers = [output.token_ids for output in make(toy, None, target).generate(PROMPTS, PARAMS)]
    ids = jnp.asarray(np.sort(np.argsort(np.bincount(np.concatenate(answers), minlength=24))[:-2]), jnp.int32)
    head.lm_head[...] = target.lm_head[...][ids]
    return dataclasses.replace(toy, target=target, plain=Draft(head, ids)), answers


@pytest.mark.slow
def test_tokens_of_the_answers_get_a_place_in_the_draft_vocabulary(lacking, monkeypatch):
    toy, answers = lacking
    static = Engine(toy.target, Tokenizer(), toy.plain, CHAIN, **SMALL)
    engine = live(toy)
    learner = learner_of(engine)
    monkeypatch.setattr(learner, "_step", lambda rows: False)
    engine.generate(PROMPTS, PARAMS)
    programs, outputs = engine.stats().programs, engine.generate(PROMPTS, PARAMS)
    assert [output.token_ids for output in outputs] == answers
    assert tau(outputs) > tau(static.generate(PROMPTS, PARAMS)) + 0.1, "without a step of training"
    assert engine.stats().programs == programs
    assert learnt(engine).new_tokens >= 2 and learnt(engine).tau_after > learnt(engine).tau_before
    often = np.bincount(np.concatenate(answers), minlength=24) > 40
    assert set(np.flatnonzero(often)) <= set(learner.draft.token_ids.tolist())
    assert np.array_equal(learner.draft.token_ids, learner._teacher.token_ids)
    assert learner._wanted() is None, "nothing is missing"


@pytest.mark.slow
def test_a_vocabulary_that_fewer_drafts_are_accepted_with_is_not_moved_to(lacking, monkeypatch):
    engine = live(lacking[0])
    learner, verdicts, written = learner_of(engine), iter([_Judged(1.0, 2.0, 1.0), _Judged(0.5, 1.9, 1.1)] * 9), []
    monkeypatch.setattr(learner, "_step", lambda rows: False)
    monkeypatch.setattr(learner, "_judged", lambda *asked: next(verdicts))
    state, renew = learner._state, learner._renew
    monkeypatch.setattr(learner, "_renew", lambda ids: written.append(learner._ring.written) or renew(ids))
    engine.generate(PROMPTS, PARAMS)
    assert learner._state is state and learner._token_ids.tolist() == lacking[0].plain.token_ids.tolist()
    assert learnt(engine).new_tokens == 0 and len(written) > 1
    assert min(np.diff(written)) >= ADAPT.ring_tokens // 2, "and is tried again once half of the ring is new"


@pytest.mark.slow
def test_a_request_that_opts_out_leaves_nothing_in_the_ring(engine):
    before = learnt(engine)
    engine.submit([9, 9, 9], PARAMS, adapt=False).result()
    assert (learnt(engine).requests, learnt(engine).tokens) == (before.requests, before.tokens)
    engine.submit([9, 9, 9], PARAMS).result()
    assert learnt(engine).requests == before.requests + 1


@pytest.mark.slow
@pytest.mark.parametrize("factor", [float("nan"), -3.0], ids=["nan", "worse"])
def test_a_head_that_got_worse_is_rolled_back_and_requests_go_on(engine, expected, factor):
    learner = learner_of(engine)
    engine.generate(PROMPTS, PARAMS)
    served, before = learner.draft.head.lm_head[...], learnt(engine)
    learner._state = dataclasses.replace(learner._state, head=jax.tree.map(lambda x: x * factor, learner._state.head))
    learner._unjudged, learner._in_vain = ADAPT.judge_every - 1, 0
    assert [output.token_ids for output in engine.generate(PROMPTS, PARAMS)] == expected
    stats = learnt(engine)
    assert stats.rollbacks > before.rollbacks
    assert np.isfinite(learner.draft.head.lm_head[...]).all()
    assert stats.heads > before.heads or np.array_equal(learner.draft.head.lm_head[...], served)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("judged", "heads", "rollbacks", "kept", "in_vain"),
    [
        pytest.param((0.5, 2.0), 1, 0, True, (2, 0), id="better"),
        pytest.param((0.5, 2.04), 1, 0, True, (2, -1), id="better by more than a hundredth of 3 tokens"),
        pytest.param((0.5, 1.5), 0, 0, True, (0, 1), id="fewer"),
        pytest.param((1.5, 2.5), 0, 1, False, (1, 2), id="worse"),
        pytest.param((1.5, 2.5), 0, 1, False, (2, 2), id="worse again"),
        pytest.param((0.5, 2.0), 1, 0, True, (-1, 0), id="better by little from the beginning"),
        pytest.param((1.5, 2.5), 0, 1, False, (-1, 1), id="worse from the beginning"),
    ],
)
def test_a_head_drafts_once_as_many_of_its_drafts_are_accepted(
    engine, monkeypatch, judged, heads, rollbacks, kept, in_vain
):
    """Cross entropy and accepted drafts of the head that drafts, (1, 2), and of the one that learnt."""
    learner = learner_of(engine)
    engine.generate(PROMPTS, PARAMS)
    served, verdicts = learner._served, iter([_Judged(1.0, 2.2, 2.0), _Judged(judged[0], 2.1, judged[1])])
    monkeypatch.setattr(learner, "_judged", lambda *asked: next(verdicts))
    monkeypatch.setattr(learner, "_unjudged", ADAPT.judge_every - 1)
    before = dataclasses.replace(learner.stats)
    monkeypatch.setattr(learner, "_in_vain", in_vain[0])
    assert learner._step(learner._ring.filled[:2].tolist()) == bool(heads)
    assert learner._in_vain == in_vain[1]
    assert (learner.stats.heads - before.heads, learner.stats.rollbacks - before.rollbacks) == (heads, rollbacks)
    assert learner.stats.tau_after == (2.1 if heads else 2.2)
    learnt = learner._state.head.lm_head[...]
    assert np.array_equal(learnt, served.head.lm_head[...]) != kept, "its steps stay"
    assert np.array_equal(learner._served.head.lm_head[...], learnt) == (heads == 1 or not kept)


@pytest.mark.slow
def test_learning_rests_the_longer_the_less_it_brings(engine, monkeypatch):
    learner, steps = learner_of(engine), []
    engine.generate(PROMPTS, PARAMS)
    monkeypatch.setattr(learner.stats, "steps", 0)
    monkeypatch.setattr(learner, "_step", lambda rows: bool(steps.append(rows)))

    def steps_at(share: float, in_vain: int, busy: float = 0.0, idle: float = 0.0) -> bool:
        steps.clear()
        monkeypatch.setattr(learner, "_busy", 100 * (1 - share))
        monkeypatch.setattr(learner, "_idle", 0.0)
        monkeypatch.setattr(learner, "_spent", 100 * share)
        monkeypatch.setattr(learner, "_in_vain", in_vain)
        learner.learn(busy, idle, lambda: None)
        return bool(steps)

    assert ADAPT.share == 0.95
    assert steps_at(0.94, 0) and not steps_at(0.96, 0)
    assert steps_at(0.05, 2) and not steps_at(0.06, 2)
    # After two half-lives of work: 95 / 4 of 95 / 4 + 5 / 4 + 600 seconds.
    assert steps_at(0.95, 2, busy=600) and learnt(engine).share == pytest.approx(0.038, abs=1e-3)
    # A tenth of idle time comes on top, of which a sixteenth is left: 94 / 2 spent of 95 / 2 + 300 / 10 seconds, by 16.
    assert steps_at(0.94, 0, idle=300) and not steps_at(0.94, 2, idle=300)
    assert steps_at(0.09, 2, idle=300) and not steps_at(0.1, 2, idle=300)
    # What pays is worth four times the share between dispatches, not in idle time: 0.2 + 30 seconds.
    monkeypatch.setattr(learner, "_config", dataclasses.replace(ADAPT, share=0.001))
    assert steps_at(0.003, -1) and not steps_at(0.003, 0)
    assert steps_at(0.6, -1, idle=300) and not steps_at(0.61, -1, idle=300)
    monkeypatch.setattr(learner.stats, "steps", 2 * learner._ring.written // (2 * 64) + 1)
    assert not steps_at(0.1, 0) and not learner.learns_on, "what was learnt often enough is left"


@pytest.mark.slow
def test_the_time_of_a_dispatch_is_not_learning_s(engine, monkeypatch):
    learner, reports, ready = learner_of(engine), engine._scheduler._reports, []
    step = learner._step
    monkeypatch.setattr(
        learner, "_step", lambda rows: ready.extend(each[0].is_ready() for each in reports) or step(rows)
    )
    while not ready:
        engine.generate(PROMPTS, PARAMS)
    assert all(ready), "a step begins when nothing else runs"
    monkeypatch.setattr(learner, "_step", lambda rows: False)
    monkeypatch.setattr(learner, "_spent", 0.0)
    monkeypatch.setattr(learner.stats, "steps", 0)  # not learnt often enough
    busy, seconds = learner._busy, learnt(engine).seconds
    learner.learn(0.0, 0.0, lambda: time.sleep(0.2))
    assert learner._busy >= busy + 0.2 and learnt(engine).seconds < seconds + 0.1


@pytest.mark.slow
def test_a_head_is_judged_once_on_what_is_held_back(toy):
    engine, evaluated = live(toy, dataclasses.replace(ADAPT, ring_tokens=2048)), []
    learner, held = learner_of(engine), learner_of(engine)._held
    learner.compile()
    assert learner._compiled is not None
    train, evaluate, move = learner._compiled
    learner._compiled = train, lambda *asked: evaluated.append(1) or evaluate(*asked), move
    while learnt(engine).heads == 0 or len(held.filled) < 4:  # all rows: two batches
        engine.generate(PROMPTS, PARAMS)

    def judged(known: dict[bytes, Any]) -> tuple[_Judged, int]:
        evaluated.clear()
        return learner._judged(learner._served.head, learner._teacher, known), len(evaluated)

    whole, batches = judged({})
    assert batches == len(held.filled) // 2
    judged(learner._known)
    assert judged(learner._known) == (whole, 0)
    observed = learner._ring._states  # any states
    held.keep(observed, 0, [1, 2, 3, 4], 0, 1)
    again, batches = judged(learner._known)
    assert batches == 1 and (again, 2) == judged({}), "one row of four is new"
    learner.teach(learner._teacher.embed, toy.target.lm_head[...] * 2)
    assert judged(learner._known) == judged({}) and judged({})[0] != again, "another target judges anew"


@pytest.mark.slow
def test_a_head_is_judged_on_answers_longer_than_a_row(toy, monkeypatch):
    engine = live(dataclasses.replace(toy, plain=toy.good))
    learner = learner_of(engine)
    monkeypatch.setattr(learner, "learn", lambda *asked: None)
    output = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=100))[0]  # the first request is held back
    learner.compile()
    judged = learner._judged(learner._served.head, learner._teacher, {})
    assert judged.tau == pytest.approx(tau([output]), abs=0.1) and judged.tau > 1.1


@pytest.mark.slow
def test_it_learns_between_requests_until_it_knows_them(engine, expected, monkeypatch):
    monkeypatch.setattr("eagle3_jax.decoding.loop._IDLE", 0.01)
    monkeypatch.setattr("eagle3_jax.decoding.adapt.learner._IDLE_SHARE", 100.0)
    learner = learner_of(engine)
    monkeypatch.setattr(learner, "_config", dataclasses.replace(ADAPT, share=1e-9))

    async def answers(prompts: list[list[int]]) -> list[list[int]]:
        outputs = await asyncio.gather(*(engine.submit(prompt, PARAMS) for prompt in prompts))
        return [output.token_ids for output in outputs]

    def wait(until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not until():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    engine.generate(PROMPTS, PARAMS)
    steps = learner.stats.steps
    epochs = (steps + 4) * ADAPT.batch_size * ADAPT.row_length / learner._ring.written
    monkeypatch.setattr("eagle3_jax.decoding.adapt.learner._EPOCHS", epochs)
    engine.generate(PROMPTS[:1], PARAMS)
    assert learner.stats.steps == steps, "nothing is left of the share"
    assert asyncio.run(answers(PROMPTS[:2])) == expected[:2]
    wait(lambda: learner.stats.steps > steps)
    assert asyncio.run(answers(PROMPTS)) == expected
    wait(lambda: not learner.learns_on)
    wait(lambda: engine._loop._thread is None)  # or the process would not end


@pytest.mark.slow
def test_the_next_start_goes_on_and_export_exports(lacking, tmp_path):
    """A head that has moved to another vocabulary, and learnt since."""
    toy, folder, identity = lacking[0], tmp_path / "checkpoints", tiny.identity(lacking[0].target.config.aux_layers)
    adapt = dataclasses.replace(ADAPT, folder=str(folder))
    engine = live(toy, adapt, identity=identity)
    with pytest.raises(LockError, match="in use"):
        live(toy, adapt, identity=identity)
    while not (learnt(engine).heads and learnt(engine).new_tokens):
        engine.generate(PROMPTS, PARAMS)
    served = learner_of(engine).draft
    assert served.token_ids.tolist() != toy.plain.token_ids.tolist()
    del engine
    gc.collect()  # as the process's end
    again = learner_of(live(toy, adapt, identity=identity)).draft
    assert all(map(np.array_equal, jax.tree.leaves(served), jax.tree.leaves(again)))
    del again
    gc.collect()
    with pytest.raises(ManifestError, match="target.name"):
        live(toy, adapt, identity=identity | {"name": "another"})
    gc.collect()
    target = Target(toy.target, Tokenizer(), identity, tmp_path)
    c = toy.plain.head.config
    draft = DraftConfig(
        vocab_size=22,
        intermediate_size=40,
        norm_output=True,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
    )
    export(RunConfig(run_dir=str(tmp_path), draft=draft, export=ExportConfig(format="vllm", dtype="float32")), target)
    exported = load_draft(tmp_path / "export", target=target, dtype=jnp.float32)
    assert np.array_equal(exported.head.lm_head[...], served.head.lm_head[...])
    assert np.array_equal(exported.token_ids, served.token_ids)


@pytest.mark.long
def test_a_block_head_learns_too(toy, expected):
    draft = Draft(make_block_head(DFlash, **fitting(toy)), jnp.asarray(IDS, jnp.int32))
    engine = Engine(toy.target, Tokenizer(), draft, **SMALL, adapt=ADAPT)
    losses = []
    for _ in range(3):
        assert [output.token_ids for output in engine.generate(PROMPTS, PARAMS)] == expected
        losses.append(learnt(engine).loss)
        learner_of(engine)._in_vain = 0  # or rollbacks could make it rest
    assert losses[-1] < losses[0] and learnt(engine).heads > 0


def test_a_block_head_drafts_with_the_target_s_own_rows(toy):
    """Whatever the dtype of its steps."""
    head = make_block_head(DFlash, **fitting(toy, draft_vocab_size=24))
    head.lm_head = nnx.Param(toy.target.lm_head[...])
    learner = HeadLearner(ADAPT, toy.target, Draft(head, jnp.arange(24, dtype=jnp.int32)), None)
    assert np.array_equal(learner.draft.head.lm_head[...], toy.target.lm_head[...])


@pytest.mark.slow
def test_a_head_of_bfloat16_learns_in_float32(toy):
    """Steps smaller than bfloat16's are not lost, and the head that drafts has the dtype that it had."""
    draft = dataclasses.replace(toy.plain, head=jax.tree.map(lambda x: x.astype(jnp.bfloat16), toy.plain.head))
    learner = HeadLearner(ADAPT, toy.target, draft, None)
    heads = learner._state.head, learner.draft.head
    assert [{str(leaf.dtype) for leaf in jax.tree.leaves(x)} for x in heads] == [{"float32"}, {"bfloat16"}]


def test_impossible_requests_to_adapt_are_refused_before_work(toy, engine):
    with pytest.raises(ValueError, match="this engine's own head learns"):
        engine.replace_draft(toy.plain)
    with pytest.raises(ConfigError, match=r"adapt.*ring_tokens: got 512, expected at least 768"):
        AdaptConfig(ring_tokens=512)
    wrong: dict[str, dict[str, Any]] = {
        "no draft head": {"draft": None},
        "simulated_acceptance": {"draft": toy.plain, "tree": CHAIN, "simulated_acceptance": 0.5},
    }
    for message, options in wrong.items():
        with pytest.raises(ValueError, match=f"adapt: got .*{message}"):
            Engine(toy.target, Tokenizer(), **options, max_length=64, adapt=ADAPT)
    model = Draft(DraftModel(toy.target), jnp.arange(24))
    with pytest.raises(ValueError, match="adapt: got a draft of DraftModel"):
        HeadLearner(ADAPT, toy.target, model, None)
    with pytest.raises(ValueError, match=r"adapt.folder: got here .* `Engine.load`"):
        live(toy, dataclasses.replace(ADAPT, folder="here"))
