"""The verb `train` as a user starts it: whole, and stopped by SIGTERM and started again; both must be the same."""

from __future__ import annotations

import functools
import json
import pathlib
import re
import signal
import subprocess
import sys
import time as clock
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import yaml

from eagle3_jax.config import TargetConfig, run_file
from eagle3_jax.extract import __main__ as extract
from eagle3_jax.models.checkpoint.fetch import load_target
from eagle3_jax.runs import disk, manifest, processes
from eagle3_jax.runs.command import STOPPED
from tpu.first_run import sizes
from tpu.first_run.lines import OK, Line, attempt, right, skipped

SECONDS = 300  # for one run of the verb
FEATURES = "features of the verb extract"
# Numbers that depend on the clock.
_TIMES = re.compile(r"second|wait|teraflops|mfu|gibibytes")


def training(arguments: Any, folder: pathlib.Path) -> Iterator[Line]:
    """Training steps; then two equal runs up to their features, and their config, which `resumed` runs."""
    yield from sizes.steps(small=arguments.small)
    config = folder / "train.yaml"
    config.unlink(missing_ok=True)
    if arguments.run_dir is None and processes.count() > 1:
        yield skipped(FEATURES, "needs --run-dir, a folder that all hosts see, such as gs://BUCKET/first-run")
        return
    place = processes.agree(lambda: f"{arguments.run_dir or folder / 'training'}/{clock.strftime('%Y%m%d-%H%M%S')}")
    write = functools.partial(_features, arguments.target, place, config, small=arguments.small)
    yield from attempt(FEATURES, write)


def _features(target: str, run_dir: str, path: pathlib.Path, *, small: bool) -> Iterator[Line]:
    """The target computes the states of its conversations while the head is trained: no states are kept."""
    rows, length, steps = (jax.device_count(), 64, 10) if small else (jax.device_count(), 1024, 30)
    values = {
        "target": {"name": target},
        "draft": {"vocab_size": 128 if small else 8192},
        "mesh": {"data": 0, "model": 1},
        "extract": {"states": "none", "max_length": length, "batch_tokens": length},
        "train": {"features": "online", "ttt_steps": 2 if small else 7, "batch_size": rows, "row_length": length}
        | {"loss_block": min(length, 512), "epochs": 1000, "log_every": 1, "argmax_mask": False}
        | dict.fromkeys(("max_steps", "eval_every", "checkpoint_every"), steps),
    }
    identity = load_target(TargetConfig(name=target), only=()).identity
    for run in ("whole", "stopped"):
        config = run_file.from_dict(values | {"run_dir": f"{run_dir}/{run}"})
        processes.agree(functools.partial(_conversations, config.folder("regenerate"), identity, rows))
        extract.extract(config)
    path.write_text(yaml.safe_dump(values | {"run_dir": run_dir}))
    yield Line(FEATURES, f"written, {rows} rows of {length} tokens a step", "-", OK)


def _conversations(folder: disk.Path, identity: Any, rows: int) -> None:
    if manifest.begin(folder, {"target": identity}):
        return
    for split, count in (("train", 4 * rows), ("held_out", 2)):
        lines = []
        for number in range(count):
            words = " ".join(f"{number * place % 97} and {place}" for place in range(40))
            messages = [{"role": "user", "content": f"Count {number}."}, {"role": "assistant", "content": words}]
            line = {"id": f"{split}-{number}", "category": "chat", "truncated": False, "answer_ids": None}
            lines.append(json.dumps(line | {"messages": messages}) + "\n")
        with disk.atomic(folder / f"{split}.jsonl") as temporary:
            temporary.write_text("".join(lines))
    manifest.finish(folder, files=["train.jsonl", "held_out.jsonl"])


def resumed(config: pathlib.Path) -> Iterator[Line]:
    """Runs the verb on both runs, in processes of their own; called where no device is held."""
    yield from attempt("train", functools.partial(_resumed, config))


def _resumed(config: pathlib.Path) -> Iterator[Line]:
    run_dir = yaml.safe_load(config.read_text())["run_dir"]
    whole, stopped = f"{run_dir}/whole", f"{run_dir}/stopped"
    yield right("train: exit status", _train(config, whole, "whole"), 0)
    before = metrics(whole)
    yield right("train: exit status after SIGTERM", _train(config, stopped, "stopped", stop=True), STOPPED)
    reached = max(line["step"] for line in metrics(stopped))
    yield right("train: exit status, started again", _train(config, stopped, "again"), 0)
    yield same(before, metrics(stopped), reached)


def metrics(run_dir: str) -> list[dict[str, Any]]:
    """Reads the metrics of a run; none before its first step."""
    path = disk.path_of(run_dir) / "checkpoints" / "metrics.jsonl"
    if disk.system_path(path) is None:
        with disk.open_log(path) as log:
            lines = list(log)
    else:  # `open_log` would cut the line that the verb is writing
        lines = path.read_bytes().rpartition(b"\n")[0].splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def same(expected: Sequence[dict[str, Any]], got: Sequence[dict[str, Any]], stopped: int) -> Line:
    """Makes the line of a run that was stopped behind a step: every number must be that of the run that was not."""
    mine, theirs = (
        [{name: value for name, value in line.items() if not _TIMES.search(name)} for line in lines]
        for lines in (expected, got)
    )
    differ = next((line for line, other in zip(mine, theirs, strict=False) if line != other), None)
    text = f"{len(got)} lines, stopped behind step {stopped}"
    if differ is not None:
        text += f", another {differ['kind']} at step {differ['step']}"
    ok = differ is None and len(expected) == len(got)
    return right("train: the run that was stopped", text, f"the same {len(expected)} lines", ok=ok)


def _train(config: pathlib.Path, run_dir: str, log: str, *, stop: bool = False) -> int:
    """Runs the verb to its end, or sends SIGTERM behind its first step; returns its exit status."""
    command = [sys.executable, "-m", "eagle3_jax.train", "--config", str(config), "--run-dir", run_dir]
    with open(config.parent / f"train-{log}.log", "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    until = clock.monotonic() + SECONDS
    while process.poll() is None:
        if stop and metrics(run_dir):
            process.send_signal(signal.SIGTERM)
            stop = False
        if clock.monotonic() > until:
            process.kill()
        clock.sleep(0.02)
    return process.returncode
