"""The warm-up in the background: requests are answered meanwhile, and notice nothing."""

import contextlib
import threading
import time

import pytest
from toy import PROMPTS, SMALL, Tokenizer, make

from eagle3_jax.decoding import loop, warm_up
from eagle3_jax.decoding.choice import tiers
from eagle3_jax.decoding.device import calls, programs
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.runs import command

PARAMS = [SamplingParams(max_tokens=9, temperature=temperature) for temperature in (0.0, 1.0, 0.0)]


def wait_until(condition) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def runs(engine) -> bool:
    return engine._warm_up is not None and engine._warm_up.running


@pytest.mark.slow
def test_requests_are_answered_while_the_rest_compiles_and_compile_nothing(toy, monkeypatch):
    monkeypatch.setattr(tiers, "of_head", lambda head: (tiers.VANILLA, tiers.CHAIN))
    monkeypatch.setattr(loop, "_IDLE", 0.0)
    engine = Engine(toy.target, Tokenizer(), toy.good, **SMALL)
    assert engine.stats().ready_programs == engine.stats().planned_programs == 0
    runner, drafts_go_on, goes_on = engine.own_runner, threading.Event(), threading.Event()
    compile_one, done = runner.compile, set()

    def slowly(call):
        if runs(engine) and threading.current_thread().name.startswith("eagle3_jax warm-up") and call.key not in done:
            assert (drafts_go_on if engine.stats().ready_programs < 5 else goes_on).wait(60)
        compile_one(call)
        done.add(call.key)

    monkeypatch.setattr(runner, "compile", slowly)
    engine.warm_up(progress=False, background=True)
    before, stats = programs.compiled(), engine.stats()
    assert stats.ready_programs == 3 < stats.planned_programs == 5 + 2
    plain = engine.generate(PROMPTS[:3], PARAMS)
    assert engine.stats().tiers["chain 3"] == 0 < engine.stats().tiers["vanilla"], "until the chain is compiled"
    drafts_go_on.set()
    wait_until(lambda: engine.tiers.default != tiers.VANILLA)
    before, vanilla = programs.compiled(), engine.stats().tiers["vanilla"]
    got = engine.generate(PROMPTS[:3], PARAMS)
    assert engine.stats().tiers["chain 3"] > 0 and engine.stats().tiers["vanilla"] == vanilla, "until costs are known"
    assert [plain[i].token_ids for i in (0, 2)] == [got[i].token_ids for i in (0, 2)]
    expected = [engine.submit(PROMPTS[i], PARAMS[i], drafts=False).result().token_ids for i in (0, 2)]
    assert engine.stats().tiers["vanilla"] > vanilla and [got[i].token_ids for i in (0, 2)] == expected
    assert programs.compiled() == before and engine.stats().ready_programs == 5, "no request compiles"
    with pytest.raises(RuntimeError, match="warm_up: got one that still runs"):
        engine.warm_up(progress=False)
    goes_on.set()
    wait_until(lambda: not runs(engine))
    stats = engine.stats()
    assert stats.ready_programs == stats.planned_programs == 7
    assert runner.widths == [1, 2] and sorted(runner.prefill_shapes) == sorted(runner.sizes.prefill_shapes)
    assert all(set(policy.costs) == {1, 2} for policy in engine.tiers._policies.values())
    for count in (1, 2, 3):
        got = engine.generate(PROMPTS[:count], PARAMS[:count])
        assert got[0].token_ids == expected[0]
    assert programs.compiled() == before and engine.stats().programs == stats.programs


def test_a_failure_beside_requests_is_told_and_they_go_on(toy, monkeypatch, caplog):
    engine = make(toy)
    monkeypatch.setattr(engine.own_runner, "compile", lambda _: None)
    monkeypatch.setattr(warm_up.WarmUp, "rest", lambda *_: 1 / 0)
    engine.warm_up(progress=False, background=True)
    wait_until(lambda: not runs(engine))
    assert "warm-up: it failed; requests go on" in caplog.text and "ZeroDivisionError" in caplog.text


def test_the_device_is_lent_while_it_is_idle_and_requests_go_first(toy, monkeypatch):
    monkeypatch.setattr(loop, "_IDLE", 0.0)
    engine, lent, answered = make(toy), threading.Event(), []
    params = SamplingParams(max_tokens=5)
    (expected,) = engine.generate(PROMPTS[:1], params)

    def ask() -> None:
        assert lent.wait(30)
        answered.append(engine.submit(PROMPTS[0], params).result().token_ids)

    thread = threading.Thread(target=ask)
    thread.start()
    with engine._loop.lend(lambda: None) as give_way:
        engine.own_runner.run(calls.rehearse(engine.own_runner.sizes.measured_length))
        give_way()
        lent.set()
        wait_until(lambda: engine.stats().waiting)
        time.sleep(0.05)
        assert not answered and engine.stats().stalled == 0
        give_way()
        thread.join(30)
        assert answered == [expected.token_ids]
        engine.own_runner.run(calls.rehearse(engine.own_runner.sizes.measured_length))
    assert engine.generate(PROMPTS[:1], params)[0].token_ids == expected.token_ids


def test_who_waits_for_the_device_or_has_it_may_be_stopped(toy, monkeypatch):
    monkeypatch.setattr(loop, "_IDLE", 0.0)
    engine = make(toy)

    def stop() -> None:
        raise command.Stopped

    with pytest.raises(command.Stopped), engine._loop.lend(stop) as give_way:
        give_way()
        raise AssertionError
    engine.submit("abc")  # nobody drives it
    with pytest.raises(command.Stopped), engine._loop.lend(stop):
        raise AssertionError
    with contextlib.ExitStack() as held:
        held.callback(engine._loop._let_go)
        assert engine._loop._working.acquire(blocking=False), "it holds nothing"


def test_a_stop_ends_a_warm_up_between_two_programs(toy, monkeypatch):
    engine, done = make(toy), []

    def one(call) -> None:
        done.append(call.name)
        monkeypatch.setattr(command, "_asked", command.signal.SIGTERM)

    monkeypatch.setattr(engine.own_runner, "compile", one)
    with pytest.raises(command.Stopped):
        engine.warm_up(progress=False)
    assert 1 <= len(done) <= 2, "one of each thread"


def test_programs_are_compiled_two_at_a_time_and_each_once(toy, monkeypatch):
    engine, both, done = make(toy), threading.Barrier(2, timeout=60), []
    monkeypatch.setattr(engine.own_runner, "compile", lambda call: (both.wait(), done.append(call.key)))
    work = [calls.note_prompt(engine.own_runner.sizes), calls.rehearse(16)]
    warm_up.WarmUp(engine.own_runner, engine.tiers, None, False, True)._compile(work)
    assert sorted(done) == sorted(2 * [call.key for call in work]), "both threads ask for both"
    monkeypatch.undo()
    engine.own_runner.begin()
    before = engine.own_runner.compiled
    threads = [threading.Thread(target=engine.own_runner.compile, args=(work[0],)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engine.own_runner.compiled == before + 1
