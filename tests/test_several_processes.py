"""The whole chain as several processes on one mesh: the same tokens, rows and losses as a single process has."""

from __future__ import annotations

import json
import pathlib
import shutil
import signal
import time
from typing import Any

import numpy as np
import pytest
import tiny

from eagle3_jax.data.features import FeatureSource
from eagle3_jax.runs import command

VERBS = ("prepare", "regenerate", "extract", "train", "export", "evaluate", "report")
SPLITS = ("train", "held_out")
# Processes of one CPU device each, and the mesh over them. Over a model axis of 2 or 4 a row spans processes.
MESHES = [(2, "1x2"), (2, "2x1"), (4, "2x2"), (4, "1x4")]
DECODES = ("--train.decode-every", "6", "--train.decode-prompts", "4")


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("run")
    sources = [{"kind": "jsonl", "path": str(folder / "prompts.jsonl")}, {"kind": "self", "count": 6, "max_tokens": 16}]
    return tiny.write_run(
        folder,
        prepare={"sources": sources, "batch_size": 4},
        train={
            "max_steps": 12,
            "log_every": 1,
            "eval_every": 6,
            "checkpoint_every": 5,
            "ttt_steps": 2,
            "row_length": 256,
            # A recipe's: at 1e-2 a feature's last bit moves the fourth loss by 3e-3, the order in which four processes
            # sum a gradient by 5e-6.
            "learning_rate": 1e-3,
        },
        evaluate={"limit": 4, "max_tokens": 16},
    )


def arguments(verb: str, run: pathlib.Path, mesh: str) -> list[str]:
    data, model = mesh.split("x")
    given = ["--run_dir", str(run), "--mesh.data", data, "--mesh.model", model]
    if verb == "evaluate":
        prompts, output = run / "prompts/held_out.jsonl", run / "evaluation/chain.json"
        given += ["--prompts", str(prompts), "--output", str(output)]
    return given


def chain(
    config: pathlib.Path, run: pathlib.Path, mesh: str, processes: int, *more: str, devices: int = 1, verbs=VERBS
) -> pathlib.Path:
    """Runs verbs one behind the other; all processes of each must end well."""
    for verb in verbs:
        started = tiny.start_verb(processes, verb, config, *arguments(verb, run, mesh), *more, devices=devices)
        ends = tiny.end_processes(started)
        assert [status for status, _ in ends] == [0] * processes, (verb, *(output[-2000:] for _, output in ends))
    return run


@pytest.fixture(scope="module")
def alone(config) -> pathlib.Path:
    """What one process on one device makes of it."""
    return chain(config, config.parent / "alone", "1x1", 1, *DECODES)


def metrics(run: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "checkpoints/metrics.jsonl").read_text().splitlines()]


def losses(run: pathlib.Path) -> list[float]:
    return [line["loss"] for line in metrics(run) if line["kind"] == "train"]


def check_same(alone: pathlib.Path, run: pathlib.Path) -> None:
    """Prompts, tokens, order and counts are the same; hidden states but for their last bit of bfloat16."""
    for name in ("prompts/rejects", *(f"{kind}/{split}" for kind in ("prompts", "conversations") for split in SPLITS)):
        assert (run / f"{name}.jsonl").read_bytes() == (alone / f"{name}.jsonl").read_bytes(), name
    for split in SPLITS:
        mine, other = FeatureSource(run / "features" / split), FeatureSource(alone / "features" / split)
        assert mine.lengths.tolist() == other.lengths.tolist()
        for i in range(len(other)):
            for field in ("token_ids", "loss_mask", "argmax"):
                np.testing.assert_array_equal(mine[i][field], other[i][field])
            for field in ("aux", "last_hidden"):
                got, expected = mine[i][field].astype(np.float32), other[i][field].astype(np.float32)
                np.testing.assert_allclose(got, expected, rtol=2**-7, atol=2**-7)
    np.testing.assert_allclose(losses(run), losses(alone), rtol=2e-3)
    decoded = [line for line in metrics(run) if line["kind"] == "served"]
    assert [line["step"] for line in decoded] == [6, 12]
    assert all(line["rounds"] >= 4 and 1 <= line["tau"] <= 3 for line in decoded)
    mine, other = (json.loads((folder / "evaluation/chain.json").read_text()) for folder in (run, alone))
    assert mine["identical"] == mine["prompts"] == other["prompts"] == 4
    assert (mine["tokens"], mine["rounds"]) == (other["tokens"], other["rounds"])
    assert (run / "report.json").exists()


@pytest.mark.long
@pytest.mark.parametrize(("processes", "mesh"), MESHES)
def test_the_chain_on_several_processes(config, alone, processes, mesh):
    check_same(alone, chain(config, config.parent / f"{processes}-{mesh}", mesh, processes, *DECODES))


@pytest.mark.long
def test_the_chain_with_two_engines_in_a_process(config, alone):
    check_same(alone, chain(config, config.parent / "1-2x1", "2x1", 1, *DECODES, devices=2))


@pytest.mark.long
@pytest.mark.parametrize(
    ("processes", "mesh"),
    [MESHES[0], *(pytest.param(*many, marks=pytest.mark.long) for many in MESHES[1:])],
)
def test_training_is_that_of_one_process(config, whole_run, processes, mesh):
    """On the same features and the same mesh: every loss within 1e-6, whoever holds the devices."""
    runs = []
    for count in (1, processes):
        run = config.parent / f"train-{mesh}-{count}"
        shutil.copytree(whole_run.folder / "features", run / "features")
        steps = ["--train.max-steps", "4"]
        runs.append(losses(chain(config, run, mesh, count, *steps, devices=processes // count, verbs=["train"])))
    assert len(runs[0]) == 4
    np.testing.assert_allclose(runs[1], runs[0], rtol=1e-6)


@pytest.mark.long
def test_online_training_is_that_of_stored_features(config, whole_run):
    """On 2 processes of 2 devices each, float32: every loss within 1e-6."""
    runs = []
    for mode, states in (("stored", "bfloat16"), ("online", "none")):
        run = config.parent / mode
        for name in ("prompts", "conversations"):
            shutil.copytree(whole_run.folder / name, run / name)
        flags = ["--extract.states", states, "--train.features", mode, "--train.max-steps", "4"]
        runs.append(losses(chain(config, run, "2x2", 2, *flags, devices=2, verbs=["extract", "train"])))
    assert len(runs[0]) == 4
    np.testing.assert_allclose(runs[1], runs[0], rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("verb", ["regenerate", "train"])
def test_one_killed_process_ends_all_and_the_rerun_goes_on(config, alone, verb, victim):
    """Killed in the middle; the rest of the chain, on another number of processes, comes to the same."""
    run = config.parent / f"killed-{verb}-{victim}"
    before = VERBS[: VERBS.index(verb)]
    for name in ("prompts", "conversations", "features")[: len(before)]:
        shutil.copytree(alone / name, run / name)
    processes = tiny.start_verb(2, verb, config, *arguments(verb, run, "2x1"), *DECODES)
    begun = run / "checkpoints/5" if verb == "train" else run / "conversations"
    until = time.monotonic() + 200
    while time.monotonic() < until and all(process.poll() is None for process in processes):
        logs = list(begun.glob("*.partial")) if begun.exists() else []
        if begun.exists() if verb == "train" else any(log.stat().st_size for log in logs):
            break
        time.sleep(0.05)
    processes[victim].send_signal(signal.SIGKILL)
    ends = tiny.end_processes(processes)
    status, output = ends[1 - victim]
    assert ends[victim][0] == -signal.SIGKILL, ends[victim][1][-2000:]
    assert status != 0 and "run the same command on all hosts again" in output.splitlines()[-1], output[-2000:]
    chain(config, run, "1x1", 1, *DECODES, verbs=VERBS[len(before) :])
    check_same(alone, run)


# Nothing but a stop, and the end, saves.
STEPS = 80
UNSAVED = ("--train.max-steps", str(STEPS), "--train.eval-every", "1000", "--train.checkpoint-every", "1000")
SMALL = ("--train.ttt-steps", "1", "--train.row-length", "128")


def stopped(config: pathlib.Path, run: pathlib.Path, mesh: str, processes: int, devices: int) -> int:
    """Begins or resumes a training; SIGTERM goes to its last process. Returns the step that all of them saved."""
    folder = run / "checkpoints"
    log = folder / "metrics.jsonl"
    before = len(log.read_text().splitlines()) if log.exists() else 0
    command_line = (*arguments("train", run, mesh), *UNSAVED, *SMALL)
    started = tiny.start_verb(processes, "train", config, *command_line, devices=devices)
    until = time.monotonic() + 200
    while time.monotonic() < until and all(process.poll() is None for process in started):
        if log.exists() and len(log.read_text().splitlines()) > before:
            break
        time.sleep(0.005)
    started[-1].send_signal(signal.SIGTERM)
    ends = tiny.end_processes(started)
    assert [status for status, _ in ends] == [command.STOPPED] * processes, [output[-2000:] for _, output in ends]
    assert all("stopped by SIGTERM" in output and "Traceback" not in output for _, output in ends), ends
    step = tiny.saved_steps(folder)[-1]
    assert step == metrics(run)[-1]["step"] < STEPS
    return step


@pytest.mark.long
@pytest.mark.parametrize(("counts", "mesh"), [((2, 1), "2x1"), ((4, 2, 1), "2x2")])
def test_sigterm_to_one_process_saves_on_all_and_fewer_processes_go_on(config, whole_run, monkeypatch, counts, mesh):
    """In float32, on the same devices, with ever fewer processes: every step is that of a training without a stop.

    The devices of a single process sum in another order where they are more than two.
    """
    # XLA cuts a CPU's sums by the threads of the process: NPROC, but at least one a device. All have as many here.
    monkeypatch.setenv("NPROC", str(counts[0]))
    runs = [config.parent / f"{name}-{mesh}" for name in ("whole", "stopped")]
    for run in runs:
        shutil.copytree(whole_run.folder / "features", run / "features")
    devices, alike = counts[0], counts[0] if counts[0] > 2 else 1
    chain(config, runs[0], mesh, alike, *UNSAVED, *SMALL, devices=devices // alike, verbs=["train"])
    steps = [stopped(config, runs[1], mesh, count, devices // count) for count in counts[:-1]]
    assert steps == sorted(set(steps))
    chain(config, runs[1], mesh, 1, *UNSAVED, *SMALL, devices=devices, verbs=["train"])
    lines = [[(x["step"], x["loss"], x["gradient_norm"]) for x in metrics(run) if x["kind"] == "train"] for run in runs]
    assert [step for step, *_ in lines[1]] == list(range(1, STEPS + 1))
    if devices == 2:
        assert lines[0] == lines[1]
        whole, resumed = (tiny.saved(run / "checkpoints", STEPS) for run in runs)
        assert [name for name in whole if whole[name] != resumed[name]] == []
    else:
        last = steps[-1]  # behind it a single process sums
        assert lines[0][:last] == lines[1][:last]
        np.testing.assert_allclose(lines[1][last], lines[0][last], rtol=1e-6)
        np.testing.assert_allclose(losses(runs[1]), losses(runs[0]), rtol=2e-3)
