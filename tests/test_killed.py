"""Each verb as a process of its own that is killed, stopped or starved of disk; run again, it ends as if it never was.

Kills are SIGKILL at random moments: most of them while the verb holds its folder, many during saves, some before.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import tiny

from eagle3_jax.config import FOLDERS
from eagle3_jax.runs import command, manifest

# Kills of each verb in the long test: 50 altogether, most where most is written.
KILLS = {"prepare": 5, "regenerate": 10, "extract": 10, "train": 14, "export": 5, "evaluate": 4, "report": 2}
LONG = pytest.mark.long
# Runs a module of which no file may grow beyond a limit.
LIMITED = (
    "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


@dataclasses.dataclass(frozen=True, eq=False)
class Runs:
    """A whole run that nothing disturbed, and what others need to repeat its verbs."""

    whole: tiny.Run

    def start(self, verb: str, run: pathlib.Path, *, limit: int | None = None) -> tiny.Started:
        """Starts a verb on a run folder; `limit` is the most bytes that a file of it may have."""
        verb_alone = ["-m", f"eagle3_jax.{verb}"]
        return tiny.Started(
            [
                sys.executable,
                *(verb_alone if limit is None else ["-c", LIMITED.format(limit=limit), f"eagle3_jax.{verb}"]),
                *("--config", str(self.whole.config), "--run_dir", str(run), *tiny.arguments_of(verb, str(run))),
            ],
            cwd=self.whole.config.parent,
            env=tiny.environment(),
        )

    def before(self, verb: str, run: pathlib.Path) -> pathlib.Path:
        """Makes `run` a folder in which the verb's turn has come."""
        run.mkdir()
        for earlier in tiny.VERBS[: tiny.VERBS.index(verb)]:
            if earlier in FOLDERS:
                shutil.copytree(self.whole.folder / FOLDERS[earlier], run / FOLDERS[earlier])
        return run


def locked_file(verb: str, run: pathlib.Path) -> pathlib.Path:
    if verb == "evaluate":
        return run / "evaluation" / ".chain.json.lock"
    return run / (".report.json.lock" if verb == "report" else f".{FOLDERS[verb]}.lock")


def written(verb: str, run: pathlib.Path) -> list[pathlib.Path]:
    """The files that a verb makes, of those that are there."""
    if verb == "evaluate":
        return [path for path in [run / "evaluation/chain.json"] if path.exists()]
    if verb == "report":
        return [path for path in (run / "report.json", run / "report.png") if path.exists()]
    return [path for path in (run / FOLDERS[verb]).rglob("*") if path.is_file()]


def wait_for_lock(process: subprocess.Popen[str], verb: str, run: pathlib.Path) -> None:
    """Until the process holds its folder, or has ended."""
    lock = locked_file(verb, run)
    while process.poll() is None and not (lock.exists() and f"process {process.pid} " in lock.read_text()):
        time.sleep(0.005)


@pytest.fixture(scope="module")
def runs(whole_run: tiny.Run) -> Runs:
    return Runs(whole_run)


def untimed(value: Any) -> Any:
    """Removes the figures that a clock or the machine decides."""
    clocks = (
        *("seconds", "tokens_per_second", "speedup", "data_wait", "folder"),
        *("read_gigabytes_per_second", "teraflops", "mfu", "device_gibibytes"),
    )
    if isinstance(value, dict):
        return {key: untimed(item) for key, item in value.items() if key not in clocks}
    return [untimed(item) for item in value] if isinstance(value, list) else value


def result(verb: str, run: pathlib.Path) -> dict[str, Any]:
    """All that a verb leaves behind, timings excepted, by file."""
    if verb in ("evaluate", "report"):
        path = run / ("evaluation/chain.json" if verb == "evaluate" else "report.json")
        report = untimed(json.loads(path.read_text()))
        report.pop("config", None)
        return report
    folder = run / FOLDERS[verb]
    made = manifest.read(folder, verb)
    found: dict[str, Any] = {"fingerprint": manifest.fingerprint(made | {"results": untimed(made["results"])})}
    if verb == "train":
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        found["metrics"] = [untimed(json.loads(line)) for line in lines]
        for step in tiny.saved_steps(folder):
            found |= {f"{step}/{name}": leaf for name, leaf in tiny.saved(folder, step).items()}
        return found
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != manifest.NAME:
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def assert_as_if_nothing_was(runs: Runs, verb: str, run: pathlib.Path) -> None:
    expected, got = result(verb, runs.whole.folder), result(verb, run)
    assert got.keys() == expected.keys()
    assert [name for name in expected if got[name] != expected[name]] == []
    assert not [path for path in run.rglob("*") if path.name.endswith(".partial")]


def assert_last_checkpoint_is_the_same(runs: Runs, run: pathlib.Path) -> None:
    """Of a training that was stopped: there is one more line of metrics and one more checkpoint where it was."""
    expected, got = result("train", runs.whole.folder), result("train", run)
    last = max(int(name.partition("/")[0]) for name in expected if name.partition("/")[0].isdecimal())
    of_last = [name for name in expected if name.startswith(f"{last}/")]
    assert of_last and all(got[name] == expected[name] for name in of_last)


def unfinished(run: pathlib.Path) -> set[str]:
    """What is being written at this moment, or was when a process was killed: this package's files and Orbax's."""
    return {
        os.path.join(folder, name)
        for folder, folders, files in os.walk(run)  # other than `rglob` it minds no folder that vanishes
        for name in (*folders, *files)
        if (name.startswith(".") and name.endswith(".partial")) or ".orbax-checkpoint-tmp" in name
    }


def wait_for_save(process: subprocess.Popen[str], run: pathlib.Path) -> None:
    """Until the process begins to write a file or a checkpoint, or has ended."""
    before = unfinished(run)
    while process.poll() is None and not (now := unfinished(run)) - before:
        before &= now
        time.sleep(0.002)


def wait(process: subprocess.Popen[str], seconds: float) -> None:
    """So long, or until the process has ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


# Of ten attempts: in the middle of its work, as soon as something is being written, before it holds its folder.
MOMENTS = ("work", "save", "work", "save", "work", "save", "work", "start", "work", "save")


def kill_at_random(runs: Runs, verb: str, run: pathlib.Path, kills: int, rng: random.Random) -> list[str]:
    """Starts the verb again and again until it was killed so many times, and at last lets it end.

    A moment that came after the end is no kill: the result is compared, and the next attempt begins from nothing.

    Returns:
        The moments of the kills.
    """
    whole = runs.whole.seconds[verb]  # with all that it compiled: the others take less
    killed: list[str] = []
    for attempt in range(4 * kills):
        if len(killed) == kills:
            break
        process, kind, begun = runs.start(verb, run), MOMENTS[attempt % len(MOMENTS)], time.monotonic()
        if kind == "start":
            wait(process, rng.uniform(0, whole / 3))
        else:
            wait_for_lock(process, verb, run)
            left = max(whole - (time.monotonic() - begun), 0)
            wait(process, rng.uniform(0, (0.7 if kind == "save" else 1) * left))
        if process.poll() is not None:
            whole = min(whole, time.monotonic() - begun)
        if kind == "save":
            wait_for_save(process, run)
            time.sleep(rng.uniform(0, 0.02))
        process.send_signal(signal.SIGKILL)
        moment = f"{time.monotonic() - begun:.2f} s ({kind})"
        status, output = process.ended()
        assert status in (0, -signal.SIGKILL), f"{output}\nafter {killed}"
        if status:
            killed.append(moment)
        else:
            assert_as_if_nothing_was(runs, verb, run)
            shutil.rmtree(run)
            runs.before(verb, run)
    assert len(killed) == kills
    status, output = runs.start(verb, run).ended()
    assert status == 0, f"{output}\nafter {killed}"
    return killed


@pytest.mark.long
@pytest.mark.parametrize("verb", tiny.VERBS)
def test_killed_again_and_again(runs, tmp_path, verb):
    assert sum(KILLS.values()) == 50
    run = runs.before(verb, tmp_path / "run")
    seed = random.randrange(10**6)
    print(f"{verb}, seed {seed}: {kill_at_random(runs, verb, run, KILLS[verb], random.Random(seed))}")
    assert_as_if_nothing_was(runs, verb, run)


@pytest.mark.long
@pytest.mark.parametrize(("verb", "sent"), [("train", signal.SIGINT), *((verb, signal.SIGTERM) for verb in tiny.VERBS)])
def test_a_signal_saves_and_the_rerun_goes_on(runs, tmp_path, verb, sent):
    run = runs.before(verb, tmp_path / "run")
    process, begun = runs.start(verb, run), time.monotonic()
    wait_for_lock(process, verb, run)
    time.sleep(0.3 * max(runs.whole.seconds[verb] - (time.monotonic() - begun), 0))
    process.send_signal(sent)
    status, output = process.ended()
    finished = "stopped by" not in output  # where the signal came too late
    if finished and status == -sent:  # behind its work: Python gives signals back before it is gone
        status = 0
    stopped = command.STOPPED if sent == signal.SIGTERM else -signal.SIGINT
    assert status == (0 if finished else stopped) and "Traceback" not in output, output
    if not finished and verb in FOLDERS and verb != "evaluate":
        # A signal before the first stop point ends the verb at once, perhaps before it writes its manifest.
        with pytest.raises(manifest.ManifestError, match="unfinished|not found"):
            manifest.read(run / FOLDERS[verb], verb)
    status, output = runs.start(verb, run).ended()
    assert status == 0, output
    if verb == "train":
        assert_last_checkpoint_is_the_same(runs, run)
    else:
        assert_as_if_nothing_was(runs, verb, run)


@pytest.mark.long
@pytest.mark.parametrize("verb", tiny.VERBS)
def test_a_full_disk_is_one_sentence_and_the_rerun_goes_on(runs, tmp_path, verb):
    """No file may grow beyond a limit that the verb's largest exceeds: writes fail as they do on a full disk."""
    run = runs.before(verb, tmp_path / "run")
    largest = max(written(verb, runs.whole.folder), key=lambda path: path.stat().st_size)
    status, output = runs.start(verb, run, limit=largest.stat().st_size * 2 // 3).ended()
    assert status == 1 and "Traceback" not in output, output
    assert f"eagle3_jax.{verb}: " in output and ("File too large" in output or "Failed writing" in output), output
    if verb in ("evaluate", "report"):
        assert largest.name not in [path.name for path in written(verb, run)]
    else:
        with pytest.raises(manifest.ManifestError):
            manifest.read(run / FOLDERS[verb], verb)
    status, output = runs.start(verb, run).ended()
    assert status == 0, output
    assert_as_if_nothing_was(runs, verb, run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "verb", ["prepare", *(pytest.param(verb, marks=LONG) for verb in tiny.VERBS if verb != "prepare")]
)
def test_a_second_process_in_the_same_folder_is_refused(runs, tmp_path, verb):
    run = runs.before(verb, tmp_path / "run")
    first = runs.start(verb, run)
    wait_for_lock(first, verb, run)
    first.send_signal(signal.SIGSTOP)  # in the middle of its work, for as long as the second one takes to start
    status, output = runs.start(verb, run).ended()
    first.send_signal(signal.SIGCONT)
    assert status == 1 and f"in use by process {first.pid} on host" in output and "Traceback" not in output, output
    status, output = first.ended()
    assert status == 0, output
    assert_as_if_nothing_was(runs, verb, run)
