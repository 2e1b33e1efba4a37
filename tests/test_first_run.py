"""tools/tpu_first_run.py: its verdicts, and the whole of it at toy sizes on virtual devices."""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import types

import jax
import pytest
import tiny

sys.path.insert(0, str(tiny.REPOSITORY / "tools"))

import tpu_first_run
from tpu.cases import Case, grouped_product
from tpu.first_run import lines, sizes, speeds, tokens

from eagle3_jax.acceptance import AcceptanceCounts
from eagle3_jax.decoding.measure.compare import Tally


# ------------------------------------------------------------------------------------------------------------- verdicts
@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        (lines.right("x", 3, 4), "WRONG"),
        (lines.within("x", 2e-3, 1e-3), "WRONG"),
        (lines.within("x", float("nan"), 1e-3), "WRONG"),
        (lines.time("x", 1.9e-3, 1e-3), "ok"),
        (lines.time("x", 2.1e-3, 1e-3), "slow"),
    ],
)
def test_a_wrong_number_is_wrong_and_a_long_time_is_slow(line, verdict):
    assert line.verdict == verdict and str(line).endswith(f"  {verdict}")


def test_a_failing_check_is_a_line_and_the_lines_before_it_stay():
    def check():
        yield lines.right("first", 1, 1)
        raise ValueError("head: got none\nmore")

    first, last = lines.attempt("all of it", check)
    assert (first.name, first.verdict) == ("first", "ok")
    assert (last.name, last.verdict, last.got) == ("all of it", "WRONG", "ValueError: head: got none")


@pytest.mark.parametrize(
    ("mismatches", "ties", "accepted", "verdict"),
    [
        ([], [], 20, "ok"),
        ([], [{"id": "code"}], 20, "ok"),
        ([{"id": "code", "position": 3}], [], 20, "WRONG"),
        ([], [], 5, "WRONG"),
    ],
)
def test_tokens_are_vanilla_decoding_s_and_drafts_as_good_as_on_a_cpu(mismatches, ties, accepted, verdict):
    tally = Tally(3, AcceptanceCounts(10, [accepted]), mismatches=mismatches, ties=ties)
    line = tokens.judged("x", tally, 3.0)
    assert line.verdict == verdict
    assert ("code differs from token 3 on" in line.got) == bool(mismatches)
    assert tokens.judged("x", Tally(3, AcceptanceCounts(10, [5])), None).verdict == "ok"


def test_a_run_that_was_stopped_is_the_other_in_every_number_but_times():
    run = [{"step": 1, "kind": "train", "loss": 2.5, "tokens_per_second": 7}, {"step": 2, "kind": "train", "loss": 2.0}]
    assert sizes.same(run, [run[0] | {"tokens_per_second": 9}, run[1]], 1).verdict == "ok"
    assert sizes.same(run, run[:1], 1).verdict == "WRONG"
    other = sizes.same(run, [run[0], run[1] | {"loss": 2.1}], 1)
    assert other.verdict == "WRONG" and "another train at step 2" in other.got


@pytest.mark.parametrize(
    ("limit", "used", "verdict"), [(31.2, 0.1, "ok"), (20.0, 0.1, "WRONG"), (31.2, 9.0, "WRONG"), (None, 0, "skipped")]
)
def test_memory_is_the_chip_s(monkeypatch, limit, used, verdict):
    stats = limit and {"bytes_limit": limit * 2**30, "bytes_in_use": used * 2**30}
    chip = types.SimpleNamespace(
        device_kind="TPU v6 lite", id=0, coords=(0, 0), platform="tpu", memory_stats=lambda: stats
    )
    info = types.SimpleNamespace(hbm_capacity_bytes=34.3e9)
    monkeypatch.setattr(speeds.pltpu, "get_tpu_info", lambda: info)
    assert speeds.memory(chip).verdict == verdict


# ------------------------------------------------------------------------------------------------------------- the tool
def test_a_stage_that_crashes_or_hangs_is_told_with_its_last_words(tmp_path, monkeypatch):
    log = tmp_path / "log"
    crash = [sys.executable, "-c", "import os, sys; print('no chips', file=sys.stderr, flush=True); os.abort()"]
    assert tpu_first_run._child(crash, log) == f"exit status -6: no chips (all of it: {log})"
    assert tpu_first_run._child([sys.executable, "-c", ""], log) is None
    monkeypatch.setattr(tpu_first_run, "SECONDS", 0.2)
    assert "no end within 0.2 seconds" in str(tpu_first_run._child(["sleep", "10"], log))


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_a_kernel_whose_result_is_off_fails_the_run_by_name(factor, tmp_path, monkeypatch, capsys):
    def off(*kernel: str, **sizes: int) -> Case:
        case = grouped_product(*kernel, **sizes)

        def function(*x: jax.Array, implementation: str, **_: object) -> jax.Array:
            return case.function(*x, implementation="xla") * (factor if implementation == "pallas" else 1)

        return dataclasses.replace(case, function=function)

    monkeypatch.setitem(speeds._SMALL, off, speeds._SMALL[grouped_product])
    monkeypatch.setattr(speeds, "CASES", [functools.partial(off, "grouped_product")])
    monkeypatch.setattr(speeds, "_equal_scores", lambda how: iter(()))
    output = tmp_path / "first_run.json"
    arguments = {"output": output, "small": True, "target": "", "run_dir": None}

    def in_process(command, log):
        tpu_first_run.run_stage(argparse.Namespace(**arguments, stage=command[-1]))

    monkeypatch.setattr(tpu_first_run, "_child", in_process)
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    status = tpu_first_run.run(argparse.Namespace(**arguments), ["kernels"])
    wrong = [line["name"] for line in json.loads(output.read_text()) if line["verdict"] == "WRONG"]
    assert (status, wrong) == ((1, ["grouped_product, 4 x 256 x 256, 4 bits"]) if factor > 1 else (0, []))
    assert all(f"{name} " in capsys.readouterr().out for name in wrong)


@pytest.mark.long
def test_the_whole_of_it_runs_at_toy_sizes(tmp_path, monkeypatch):
    """Eight virtual devices; a target of seven layers, with a head of random weights."""
    monkeypatch.setitem(tiny.CONFIG, "num_hidden_layers", 7)
    target, output = tiny.write_target(tmp_path / "target"), tmp_path / "out/first_run.json"
    script = str(pathlib.Path(tpu_first_run.__file__))
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, script, "--small", "--target", str(target), "--output", str(output)],
        env=tiny.environment(XLA_FLAGS=flags),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {line["name"]: line for line in json.loads(output.read_text())}
    assert len(done.stdout.splitlines()) == len(found) + 2
    assert {line["verdict"] for line in found.values()} == {"ok", "skipped"}
    assert {line["expected"] for line in found.values() if line["verdict"] == "skipped"} == {
        "does not tell its memory",
        "interpreted",
    }
    for name in (
        *speeds.cases(small=True),
        *(f"float32, {where}, {draft}" for where in ("1 device", "8 devices") for draft in tokens.TREES),
        "bfloat16, 8 devices, tree",
        "all_gather over data (8), 262,144 bytes",
        "rounds of 2 layers x 64 on 8 devices: chain 3",
        "training step, 8 x 64 tokens on 8 devices",
        "train: the run that was stopped",
    ):
        assert name in found
    assert found["chips of this host"]["got"] == "8"
    assert found["float32, 1 device, lookup"]["numbers"]["tau"] > 1
