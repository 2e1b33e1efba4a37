"""prepare on Apache Beam makes what it makes in one process, byte for byte, from any bundles and on broken input."""

import gzip
import importlib
import json
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import emulator
import many_prompts
import pytest
from fake_dlp import FakeDlp

from eagle3_jax.config import RunConfig, run_file
from eagle3_jax.prepare import __main__ as prepare
from eagle3_jax.prepare.cleaning import HELD_OUT, REJECTS, TRAIN, WORK
from eagle3_jax.runs import command, disk, manifest

beam = pytest.importorskip("apache_beam")
form = importlib.import_module("eagle3_jax.prepare.beam")
MetricsFilter = importlib.import_module("apache_beam.metrics.metric").MetricsFilter
LOCAL = "--runner=FnApiRunner"  # no other one, which DirectRunner would look for on the network
WORKERS = f"{LOCAL} --direct_running_mode=multi_processing --direct_num_workers=2"


def run(folder: str | pathlib.Path, *sources: dict[str, Any], **section: Any) -> RunConfig:
    """A finished run."""
    config = run_file.from_dict({"run_dir": str(folder), "prepare": {"sources": list(sources), **section}})
    prepare.prepare(config)
    return config


def on_beam(folder: str | pathlib.Path, *sources: dict[str, Any], **section: Any) -> RunConfig:
    return run(folder, *sources, runner="beam", **{"beam_options": LOCAL, **section})


def content(config: RunConfig, name: str) -> bytes:
    """A file, or its shards in order."""
    stem = name.removesuffix(".jsonl")
    found = sorted(path for path in config.folder("prepare").iterdir() if path.name.startswith(stem))
    assert len(found) == 1 or {path.name for path in found} == {
        f"{stem}-{number:05d}-of-{len(found):05d}.jsonl" for number in range(len(found))
    }
    return b"".join(map(disk.read_bytes, found))


def assert_same(found: RunConfig, expected: RunConfig) -> None:
    for name in (TRAIN, HELD_OUT, REJECTS):
        assert content(found, name) == content(expected, name), name
    made, wanted = (manifest.read(config.folder("prepare"), "prepare") for config in (found, expected))
    assert made["results"] == wanted["results"] and made["identity"] == wanted["identity"]
    assert not (found.folder("prepare") / WORK).exists()


@pytest.fixture
def shuffled(monkeypatch):
    """Blocks of some kilobytes, given to Beam in random order."""
    create = beam.Create
    monkeypatch.setattr(form, "_BYTES", 40_000)
    monkeypatch.setattr(form, "_RECORDS", 97)
    monkeypatch.setattr(beam, "Create", lambda values: create(random.Random(1).sample(values, len(values))))


@pytest.mark.slow
@pytest.mark.parametrize("count", [800, pytest.param(20_000, marks=pytest.mark.long)])
def test_output_is_byte_equal(tmp_path, shuffled, count):
    path, bench = tmp_path / "in.jsonl", tmp_path / "bench.jsonl"
    many_prompts.write(path, count)
    asked = json.loads(path.read_text().splitlines()[-1])["messages"][-1]["content"]
    bench.write_text(json.dumps({"question": asked}) + "\n")
    given = ({"kind": "packaged", "limit": 200}, {"kind": "jsonl", "path": str(path)})
    section = {"benchmarks": [str(bench)], "near_duplicate": 0.7}
    expected = run(tmp_path / "a", *given, **section)
    found = on_beam(tmp_path / "b", *given, **section)
    assert_same(found, expected)
    rejected = manifest.read(found.folder("prepare"), "prepare")["results"]["rejected"]
    assert min(rejected[reason] for reason in ("near duplicate", "exact duplicate")) > count // 100
    assert len(list(found.folder("prepare").glob("train-*"))) > 5


SOUND = [{"prompt": f"What is {a} plus {b}?"} for a in range(2, 6) for b in range(10, 15)]


def source(path: pathlib.Path, *lines: bytes | dict[str, Any], **more: Any) -> dict[str, Any]:
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return {"kind": "jsonl", "path": str(path), **more}


@pytest.mark.slow
def test_broken_lines_are_rejects(tmp_path, monkeypatch):
    """A line of 100 MB, other encodings, and a last line that is half written; limits count prompts, not rejects."""
    monkeypatch.setattr(form, "_BYTES", 300)
    huge = b'{"prompt": "' + b"x" * 100_000_000 + b'"}'
    utf16 = '{"prompt": "What?"}'.encode("utf-16")
    broken = [b"\xef\xbb\xbf" + json.dumps(SOUND[0]).encode(), huge, *SOUND[1:], b"\xff\xfe", utf16, b"", b'{"pro']
    packed = tmp_path / "in.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"text": "Who packs?"}\n{"text": "And who unpacks it?"}\n'))
    given = (
        source(tmp_path / "in.jsonl", *broken),
        source(tmp_path / "limited.jsonl", b"[]", *SOUND[:3], b"{", {"prompt": "A fourth?"}, b"{", SOUND[0], limit=4),
        {"kind": "jsonl", "path": str(packed), "limit": 1},
    )
    expected, found = run(tmp_path / "a", *given), on_beam(tmp_path / "b", *given)
    assert_same(found, expected)
    results = manifest.read(found.folder("prepare"), "prepare")["results"]
    assert results["rejected"]["a line of more than 16 MiB"] == 1
    assert results["sources"] == {"jsonl:in.jsonl": 24, "jsonl:limited.jsonl": 7, "jsonl:in.jsonl.gz": 1}
    assert sum(results["sources"].values()) == sum(results["prompts"].values())


@pytest.mark.parametrize("change", ["vanishes", "shrinks", "changes"])
def test_a_source_that_changes_in_mid_run_is_one_error(tmp_path, monkeypatch, change):
    path = tmp_path / "in.jsonl"
    given = source(path, *SOUND)
    whole, plan = path.read_bytes(), form.plan

    def meddle(*arguments: Any) -> list[Any]:
        planned = plan(*arguments)
        if change == "vanishes":
            path.unlink()
        else:
            path.write_bytes({"shrinks": whole[:-9], "changes": whole[::-1]}[change])
        return planned

    monkeypatch.setattr(form, "plan", meddle)
    expected = "in.jsonl: " + ("No such file or directory" if change == "vanishes" else "changed while it was read")
    with pytest.raises(ValueError, match=f"^[^\n]*{expected}$"):
        on_beam(tmp_path / "run", given)
    assert not (tmp_path / "run/prompts" / HELD_OUT).exists()
    path.write_bytes(whole)
    monkeypatch.setattr(form, "plan", plan)
    assert_same(on_beam(tmp_path / "run", given), run(tmp_path / "a", given))


def test_an_interrupted_run_goes_on(tmp_path, monkeypatch, shuffled):
    many_prompts.write(tmp_path / "in.jsonl", 300)
    given = {"kind": "jsonl", "path": str(tmp_path / "in.jsonl")}
    write = form._write_shards

    def full(block: Any, *more: Any) -> None:
        if block.number == 1:
            raise OSError(28, "No space left on device", "rejects.jsonl")
        write(block, *more)

    monkeypatch.setattr(form, "_write_shards", full)
    with pytest.raises(ValueError, match="^rejects.jsonl: No space left on device$"):
        on_beam(tmp_path / "run", given)
    monkeypatch.setattr(form, "_write_shards", write)
    monkeypatch.setattr(form, "_write_cleaned", None)  # no record is cleaned again
    found = on_beam(tmp_path / "run", given)
    assert_same(found, run(tmp_path / "a", given))


IN_SMALL_BLOCKS = (
    "import runpy; from eagle3_jax.prepare import beam; beam._BYTES = 40_000; "
    "runpy.run_module('eagle3_jax.prepare', run_name='__main__', alter_sys=True)"
)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("options", [LOCAL, WORKERS], ids=["one process", "workers"])
def test_a_run_that_is_killed_goes_on(tmp_path, options):
    """SIGKILL while records are cleaned, while they are related, and while shards are written."""
    path, config = tmp_path / "in.jsonl", tmp_path / "run.yaml"
    many_prompts.write(path, 3000)
    given = {"kind": "jsonl", "path": str(path)}
    section = {"sources": [given], "runner": "beam", "beam_options": options}
    config.write_text(json.dumps({"run_dir": str(tmp_path / "run"), "prepare": section}))
    work, cleaned = tmp_path / "run/prompts" / WORK, dict[pathlib.Path, int]()
    for kind, count in (("signed", 6), ("reasons", 1), ("written", 3)):
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", IN_SMALL_BLOCKS, "--config", str(config)], stdout=log, stderr=log
            )
            while process.poll() is None and len(list((work / kind).glob("[0-9]*"))) < count:
                time.sleep(0.01)
            process.kill()
        assert process.wait(timeout=60) == -signal.SIGKILL, (tmp_path / "log").read_text()
        times = {done: done.stat().st_mtime_ns for done in (work / "signed").glob("[0-9]*")}
        assert cleaned.items() <= times.items()  # no block is cleaned again
        cleaned = times
    found = run(tmp_path / "run", given, runner="beam", beam_options=options)
    assert_same(found, run(tmp_path / "a", given))


@pytest.mark.slow
def test_in_a_bucket(tmp_path, shuffled):
    many_prompts.write(tmp_path / "in.jsonl", 300)
    address = emulator.new_bucket()
    path = f"{address}/in/in.jsonl"
    with disk.atomic(disk.path_of(path)) as temporary:
        shutil.copy(tmp_path / "in.jsonl", temporary)
    given = {"kind": "jsonl", "path": path}
    assert_same(on_beam(f"{address}/run", given), run(tmp_path / "a", given))


def test_cloud_dlp_is_asked_by_workers(tmp_path, monkeypatch, shuffled):
    """With the same result as in one process; many prompts share a request."""
    monkeypatch.setenv("DLP_TOKEN", "secret")
    many_prompts.write(tmp_path / "in.jsonl", 300)
    given = {"kind": "jsonl", "path": str(tmp_path / "in.jsonl")}
    with FakeDlp() as fake:
        how = {"project": "my-project", "location": "europe-west1", "token_variable": "DLP_TOKEN", "url": fake.url}
        section = {"personal_data_engine": "cloud_dlp", "cloud_dlp": how}
        found = on_beam(tmp_path / "b", given, **section)
        blocks_written = len(list(found.folder("prepare").glob("train-*")))
        assert 1 < blocks_written == len(fake.asked) < 300 / 20
        assert_same(found, run(tmp_path / "a", given, **section))
        results = manifest.read(found.folder("prepare"), "prepare")["results"]
        assert results["personal_data"]["EMAIL_ADDRESS"] > 2 and "u1@example" not in content(found, TRAIN).decode()
        fake.rule = lambda _: (403, {})
        with pytest.raises(ValueError, match=r"^prepare.cloud_dlp: .*content:inspect: status 403: .*Quota"):
            on_beam(tmp_path / "c", given, **section)


def test_counters(tmp_path, monkeypatch):
    """Beam's metrics say what the manifest says."""
    counted: dict[str, int] = {}
    counters = MetricsFilter().with_namespace("prepare")
    run_pipeline = beam.Pipeline.run

    def noting(pipeline: Any, *arguments: Any) -> Any:
        result = run_pipeline(pipeline, *arguments)
        found = result.metrics().query(counters)["counters"]
        counted.update({metric.key.metric.name: metric.committed for metric in found})
        return result

    monkeypatch.setattr(beam.Pipeline, "run", noting)
    given = source(tmp_path / "in.jsonl", *SOUND, SOUND[0], b"{", {"prompt": "Ask bob@example.org"})
    on_beam(tmp_path / "run", given)
    expected = {"read: jsonl:in.jsonl": 23, "kept": 21, "rejected: exact duplicate": 1, "rejected: not valid JSON": 1}
    assert counted == expected | {"personal data: EMAIL_ADDRESS": 1}


def test_clear_errors(tmp_path, monkeypatch):
    given = source(tmp_path / "in.jsonl", SOUND[0])
    with pytest.raises(ValueError, match="^prepare: got 1 usable prompts, expected at least 2"):
        on_beam(tmp_path / "a", given)
    for options, text in (
        ("--runner=Nope", "pipeline runner: Nope"),
        ("--direct_num_workers=x", "invalid int"),
        ("'", "quotation"),
    ):
        with pytest.raises(ValueError, match=f"^prepare.beam_options: got .*{text}.*, expected options of Apache Beam"):
            on_beam(tmp_path / "b", given, beam_options=options)
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"run_dir": str(tmp_path / "run"), "prepare": {"sources": [given]}}))
    arguments = ["--config", str(path), "--prepare.runner", "beam", "--prepare.beam-options=--runner=Nope"]
    with pytest.raises(SystemExit, match="eagle3_jax.prepare: prepare.beam_options: got '--runner=Nope'"):
        prepare.main(arguments)
    monkeypatch.setitem(command.EXTRAS, "beam", ("nothing_has_this_name",))
    with pytest.raises((SystemExit, ImportError), match="got no nothing_has_this_name, expected the extra `beam`"):
        prepare.main(arguments)
