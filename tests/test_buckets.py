"""A run in a bucket: the verbs, killed and run twice at once, make there what they make in a local folder."""

import pathlib
import shutil
import signal
import time

import emulator
import numpy as np
import pytest
import tiny

from eagle3_jax.data.features import FeatureError, FeatureSource, is_complete, shard_path, write_shard
from eagle3_jax.runs import disk, manifest
from eagle3_jax.runs.bucket import leases, objects

MADE = {"prepare": "prompts", "regenerate": "conversations", "extract": "features", "train": "checkpoints"}
MADE |= {"export": "export"}


@pytest.fixture(autouse=True)
def short_leases(monkeypatch):
    """Of the processes that a test starts, too."""
    monkeypatch.setenv(leases.LEASE_SECONDS, "6")


def upload(local: pathlib.Path, address: str) -> None:
    """A local file, or all files of a folder."""
    for file in [local] if local.is_file() else sorted(local.rglob("*")):
        if file.is_file() and not file.name.startswith("."):
            name = "" if local.is_file() else f"/{file.relative_to(local)}"
            with disk.atomic(disk.path_of(f"{address}{name}")) as temporary:
                shutil.copy(file, temporary)


def arguments(verb: str, run: str) -> list[str]:
    return ["--run_dir", run, *tiny.arguments_of(verb, run)]


def start(verb: str, config: pathlib.Path, run: str) -> tiny.Started:
    (process,) = tiny.start_verb(1, verb, config, *arguments(verb, run))
    return process


def finish(verb: str, config: pathlib.Path, run: str) -> str:
    status, output = start(verb, config, run).ended()
    assert status == 0 and "Traceback" not in output, output
    return output


def untimed(value):
    """Without what depends on a clock."""
    clocks = ("seconds", "tokens_per_second", "data_wait", "teraflops", "mfu")
    if isinstance(value, dict):
        return {key: untimed(item) for key, item in value.items() if key not in clocks}
    return [untimed(item) for item in value] if isinstance(value, list) else value


def result(folder: disk.Path, verb: str) -> dict:
    made = manifest.read(folder / MADE[verb], verb)
    return {name: untimed(made[name]) for name in ("identity", "files", "results")}


def before(verb: str, whole: pathlib.Path) -> str:
    """A run in a bucket in which the verb's turn has come."""
    run = f"{emulator.new_bucket()}/run"
    for earlier in list(MADE)[: list(MADE).index(verb)]:
        upload(whole / MADE[earlier], f"{run}/{MADE[earlier]}")
    return run


def wait_for(process: tiny.Started, there) -> None:
    while process.poll() is None and not there():
        time.sleep(0.005)


# -------------------------------------------------------------------------------------------------------------- short
def test_features(tmp_path):
    """Shards in a bucket hold what local ones hold, and are refused alike where they are altered."""
    rng = np.random.default_rng(0)
    records = [
        {"token_ids": rng.integers(0, 9, length).astype(np.int32), "loss_mask": np.ones(length, np.uint8)}
        for length in (3, 40_000, 7, 1)
    ]
    remote = disk.path_of(f"{emulator.new_bucket()}/features/train")
    for folder in (tmp_path, remote):
        for shard in range(2):
            path = shard_path(folder, shard, 2)
            assert not is_complete(path)
            write_shard(path, records[2 * shard : 2 * shard + 2], {"ids": ["a", "b"]})
            assert is_complete(path)
    found, expected = FeatureSource(remote), FeatureSource(tmp_path)
    assert found.lengths.tolist() == expected.lengths.tolist() and found.name(3).startswith("b, train/00001")
    for index in range(4):
        for name, array in expected[index].items():
            np.testing.assert_array_equal(found[index][name], array)
    altered = shard_path(remote, 1, 2)
    content = bytearray(disk.read_bytes(altered))
    content[content.index(records[2]["token_ids"].tobytes())] ^= 1
    objects.put(altered, bytes(content), objects.generation(altered))
    with pytest.raises(FeatureError, match=r"train/00001-of-00002.array_record, record 2: unreadable .*extract again"):
        _ = [FeatureSource(remote)[index] for index in (2, 3)]
    objects.put(altered, bytes(content[:-1]), objects.generation(altered))
    assert not is_complete(altered)
    with pytest.raises(FeatureError, match=r"got \d+ bytes, expected \d+"):
        FeatureSource(remote)


@pytest.mark.slow
def test_prompts_and_config_in_a_bucket(tmp_path):
    address = emulator.new_bucket()
    config = tiny.write_run(tmp_path, 24)
    config.write_text(config.read_text().replace("path: prompts.jsonl", f"path: {address}/in/prompts.jsonl"))
    upload(tmp_path / "prompts.jsonl", f"{address}/in/prompts.jsonl")
    upload(config, f"{address}/in/run.yaml")
    ended = tiny.run_verb("prepare", config, "--config", f"{address}/in/run.yaml", "--run_dir", f"{address}/run")
    assert ended.returncode == 0, ended.stderr
    made = manifest.read(disk.path_of(f"{address}/run/prompts"), "prepare")
    assert sum(made["results"]["prompts"].values()) == 24
    ended = tiny.run_verb("prepare", config, "--run_dir", "gs://no-such-bucket/run")
    assert ended.returncode == 2
    assert "eagle3_jax.prepare: run_dir: got 'gs://no-such-bucket/run', expected a bucket that exists" in ended.stderr


# --------------------------------------------------------------------------------------------------------------- long
@pytest.mark.long
def test_the_whole_chain(whole_run):
    run = f"{emulator.new_bucket()}/run"
    for verb in tiny.VERBS:
        output = finish(verb, whole_run.config, run)
        assert "Warning" not in output, output
        if verb in MADE:
            expected = result(whole_run.folder, verb)
            assert result(disk.path_of(run), verb) == expected
            assert "is finished already" in (again := finish(verb, whole_run.config, run)) or "nothing to do" in again
    report = disk.read_json(disk.path_of(f"{run}/report.json"))
    assert (
        report["drafts"]["chain"]["tau"] == disk.read_json(whole_run.folder / "report.json")["drafts"]["chain"]["tau"]
    )
    assert disk.read_bytes(disk.path_of(f"{run}/report.png"))[1:4] == b"PNG"


@pytest.mark.long
@pytest.mark.parametrize("moment", [1, 2, 3])
@pytest.mark.parametrize("verb", ["extract", "train"])
def test_killed_in_the_middle_of_a_write(whole_run, verb, moment):
    """SIGKILL behind the first objects of a shard or of a checkpoint, before the one that makes it whole."""
    run = before(verb, whole_run.folder)
    folder = disk.path_of(run) / MADE[verb]

    def written() -> bool:
        names = objects.names_below(folder)
        if verb == "extract":
            shards = [name for name in names if name.endswith(".array_record")]
            return len(shards) >= moment and f"{shards[moment - 1].removesuffix('.array_record')}.json" not in names
        steps = {name.partition("/")[0] for name in names if name.partition("/")[0].isdecimal()}
        half = [step for step in steps if f"{step}/commit_success.txt" not in names]
        return bool(half) and len(steps) >= moment

    process = start(verb, whole_run.config, run)
    wait_for(process, written)
    process.send_signal(signal.SIGKILL)
    status, output = process.ended()
    assert status == -signal.SIGKILL, output
    with pytest.raises(manifest.ManifestError, match="unfinished"):
        manifest.read(folder, verb)
    finish(verb, whole_run.config, run)
    assert result(disk.path_of(run), verb) == result(whole_run.folder, verb)


@pytest.mark.long
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_answers_outlive_a_stop(whole_run, sent):
    run = before("regenerate", whole_run.folder)
    process = start("regenerate", whole_run.config, run)
    wait_for(process, lambda: "answers/s, " in process.printed())
    process.send_signal(sent)
    status, output = process.ended()
    if sent == signal.SIGTERM and status:
        assert "stopped by SIGTERM" in output, output
        assert disk.read_log(disk.path_of(f"{run}/conversations/answers.0.jsonl.partial"))
    finish("regenerate", whole_run.config, run)
    assert result(disk.path_of(run), "regenerate") == result(whole_run.folder, "regenerate")
    assert not [name for name in objects.names_below(disk.path_of(run)) if "partial" in name]


@pytest.mark.long
def test_two_runs_want_one_run_dir(whole_run):
    run = before("train", whole_run.folder)
    both = [start("train", whole_run.config, run) for _ in range(2)]
    ends = [process.ended() for process in both]
    statuses = sorted(status for status, _ in ends)
    assert statuses == [0, 1], ends
    (refused,) = [output for status, output in ends if status]
    winner = both[[status for status, _ in ends].index(0)]
    assert f"run/checkpoints: in use by process {winner.pid} on host" in refused and "Traceback" not in refused
    assert result(disk.path_of(run), "train") == result(whole_run.folder, "train")


@pytest.mark.long
def test_two_processes_are_one_run(whole_run):
    run = before("extract", whole_run.folder)
    for verb in ("extract", "train"):
        more = [*arguments(verb, run), "--mesh.data", "2", "--mesh.model", "1"]
        ends = tiny.end_processes(tiny.start_verb(2, verb, whole_run.config, *more))
        assert [status for status, _ in ends] == [0, 0], ends
    found, expected = (
        manifest.read(folder / "checkpoints", "train")["results"] for folder in (disk.path_of(run), whole_run.folder)
    )
    assert found["steps"] == expected["steps"]
    assert found["held_out"]["tau"] == pytest.approx(expected["held_out"]["tau"], rel=0.05)
