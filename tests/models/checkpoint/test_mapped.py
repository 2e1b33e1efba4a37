"""Targets in a mapped file: the bits of those in memory, made once, made again where anything is damaged or another."""

import json
import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import test_gguf_file
import tiny
import tiny_families
import tiny_heads
from safetensors.numpy import load_file, save_file

from eagle3_jax.config import AdaptConfig, DraftTree, TargetConfig
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.kernels.linear import api
from eagle3_jax.kernels.linear.layouts import Panels
from eagle3_jax.models.checkpoint import fetch, load, mapped
from eagle3_jax.models.checkpoint.fetch import load_target, read_config
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.families import FAMILIES, family_of
from eagle3_jax.models.inference_layout import for_inference

ADAPT = AdaptConfig(ring_tokens=512, row_length=64, batch_size=2, judge_every=1000)
CHAIN = DraftTree(num_steps=4, topk=1, num_draft_tokens=5, lookup_tokens=0)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> pathlib.Path:
    """The folder of panels, of which a few rows are read and packed at a time."""
    monkeypatch.setenv("EAGLE3_JAX_PANELS", "1")
    monkeypatch.setenv("EAGLE3_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(load, "_PIECE", 50)
    monkeypatch.setattr(api, "_COLUMNS", 64)
    return tmp_path / "cache" / "panels"


def model_of(folder: pathlib.Path, *, for_engine: bool = True, **options: Any) -> Any:
    config = TargetConfig(name=str(folder), aux_layers=(1, 2, 3), **options)
    return load_target(config, for_engine=for_engine, progress=False).model


def assert_same(found: Any, expected: Any) -> None:
    """Both are of one structure, static fields included, and of the same bytes."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (one.dtype, one.shape, one.committed) == (other.dtype, other.shape, other.committed)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def panels(cache: pathlib.Path) -> list[tuple[str, int]]:
    """The files' names and inodes: one that is made again is another one."""
    return sorted((path.name, path.stat().st_ino) for path in cache.glob("*.panels"))


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(x, id=name, marks=() if name in ("llama", "qwen3_moe", "gpt_oss") else pytest.mark.long)
        for x in FAMILIES
        for name in [x.config.model_type]
    ],
)
@pytest.mark.parametrize("weights", [None, "int8", "int4", pytest.param("fp8", marks=pytest.mark.long)])
def test_a_mapped_target_has_the_bits_of_a_loaded_one(tmp_path, cache, monkeypatch, family, weights):
    tiny_families.write(tmp_path / "target", family, tie_word_embeddings=weights is None)
    options: dict[str, Any] = {"weights": weights, "quantise_vocabulary": weights in ("int4", "fp8")}
    for dtype in ("float32", "bfloat16"):
        options["dtype"] = dtype
        plain = model_of(tmp_path / "target", for_engine=False, **options)
        made = model_of(tmp_path / "target", **options)
        assert_same(for_inference(made), for_inference(plain))
        for name in ("embed", "lm_head"):  # what heads and learners read
            if hasattr(plain, name):
                assert_same(getattr(made, name)[...], getattr(plain, name)[...])
        with monkeypatch.context() as patch:
            patch.setattr(
                fetch, "load_model", lambda *_, **__: pytest.fail("a second reading")
            )  # nothing is read again
            assert_same(model_of(tmp_path / "target", **options), made)
    assert len(panels(cache)) == 2


@pytest.mark.parametrize(("name", "mixture"), [("llama", "Q4_K_M"), ("qwen2", "Q4_1"), ("qwen3", "Q8_0")])
def test_blocks_are_mapped_with_their_bits(tmp_path, name, mixture):
    folder = test_gguf_file.write(tmp_path, name, mixture) / "blocks"
    for weights in (None, "stored"):
        found = model_of(folder, weights=weights)
        assert_same(for_inference(found), for_inference(model_of(folder, for_engine=False, weights=weights)))


def test_arrays_lie_in_the_file_which_no_program_can_write(tmp_path, cache):
    """Donated ones are copied. A page of the file counts as memory once it is used."""
    tiny.write_target(tmp_path / "target")
    model = model_of(tmp_path / "target")
    ((name, _),) = panels(cache)
    before = (cache / name).read_bytes()
    ranges = [line.split()[0] for line in pathlib.Path("/proc/self/maps").read_text().splitlines() if name in line]
    spans = [tuple(int(end, 16) for end in span.split("-")) for span in ranges]
    for leaf in jax.tree.leaves(model):
        assert any(begin <= leaf.unsafe_buffer_pointer() < end for begin, end in spans)
        jax.jit(lambda x: x + x, donate_argnums=0)(leaf).block_until_ready()
    assert (cache / name).read_bytes() == before


def test_what_is_damaged_or_another_is_made_again(tmp_path, cache, capsys):
    folder = tiny.write_target(tmp_path / "target")
    expected = for_inference(model_of(folder))
    ((name, _),) = panels(cache)
    path = cache / name
    header, content = path.with_suffix(".json"), path.read_bytes()

    def flip(path: pathlib.Path) -> None:
        """Changes a byte, and hides it as well as a program can."""
        status, whole = path.stat(), bytearray(path.read_bytes())
        whole[len(whole) // 2] ^= 1
        with path.open("r+b") as stream:
            stream.write(whole)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    damages = {
        "truncated": lambda: os.truncate(path, len(content) - 64),
        "flipped": lambda: flip(path),
        "the header": lambda: flip(header),
        "no header": header.unlink,
        "no panels": path.unlink,
    }
    for damage, act in damages.items():
        before = panels(cache)
        act()
        capsys.readouterr()
        assert_same(for_inference(model_of(folder)), expected)
        assert panels(cache) != before and path.read_bytes() == content, damage
        assert capsys.readouterr().err.count("it is made again") == (damage != "no header"), damage
        before = panels(cache)
        model_of(folder)
        assert panels(cache) == before
    copied = path.read_bytes()
    path.unlink()
    path.write_bytes(copied)  # as from another machine: its bytes are read once
    before = panels(cache)
    assert_same(for_inference(model_of(folder)), expected)
    assert panels(cache) == before
    tensors = load_file(folder / "model.safetensors")
    status = (folder / "model.safetensors").stat()
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"] * 2}, folder / "model.safetensors")
    os.utime(folder / "model.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns))
    found = model_of(folder)
    np.testing.assert_array_equal(found.norm[...], 2 * expected.norm[...])
    assert len(panels(cache)) == 2


def test_what_was_mapped_longest_ago_is_removed(tmp_path, cache, monkeypatch):
    folders = [tiny.write_target(tmp_path / str(seed), seed) for seed in range(3)]
    found = []
    for folder in (*folders[:2], folders[0]):
        model_of(folder)
        found.append({name for name, _ in panels(cache)})
        for header in cache.glob("*.json"):
            os.utime(header, (header.stat().st_mtime - 100,) * 2)
    (first,) = found[0]
    size = (cache / first).stat().st_size
    os.utime((cache / first).with_suffix(".json"))
    monkeypatch.setattr(mapped, "_MOST_BYTES", int(2.5 * size))
    model_of(folders[2])
    left = {name for name, _ in panels(cache)}
    assert len(left) == 2 and first in left and len(list(cache.glob("*.json"))) == 2
    monkeypatch.setattr(mapped, "_MOST_BYTES", 0)
    model_of(folders[1])
    assert len(panels(cache)) == 1, "the newest one stays"


def test_without_a_folder_that_can_be_written_nothing_is_kept(tmp_path, cache, monkeypatch, capsys):
    folder = tiny.write_target(tmp_path / "target")
    expected = for_inference(model_of(folder, for_engine=False))
    (tmp_path / "cache").write_text("no folder")
    assert_same(for_inference(model_of(folder)), expected)
    assert "no panels are kept for the next load" in capsys.readouterr().err
    (tmp_path / "cache").unlink()
    for name, value in (("EAGLE3_JAX_PANELS", "0"), ("EAGLE3_CPU_KERNELS", "0")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert not any(isinstance(x, Panels) for x in jax.tree.leaves(model_of(folder), is_leaf=lambda _: True))
    assert not cache.exists()


SCRIPT = """
import os, sys
import jax, numpy
from eagle3_jax.models.checkpoint import fetch
from eagle3_jax.models.checkpoint.fetch import load_target
fsync, loads = os.fsync, fetch.load_model
def pause(number):
    fsync(number)
    print("written", flush=True)
    sys.stdin.readline()
def tell(*args, **options):
    print("reads", flush=True)
    return loads(*args, **options)
fetch.load_model = tell
if sys.argv[2] == "pause":
    os.fsync = pause
print("begins", flush=True)
model = load_target(sys.argv[1], for_engine=True, progress=False).model
print(hash(tuple(numpy.asarray(x).tobytes() for x in jax.tree.leaves(model))), flush=True)
"""


def start(folder: pathlib.Path, mode: str) -> subprocess.Popen:
    command = [sys.executable, "-c", SCRIPT, str(folder), mode]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=os.environ | {"PYTHONHASHSEED": "0"}, **pipes)


def wait_for(process: subprocess.Popen, line: str) -> None:
    assert process.stdout is not None
    assert line in iter(process.stdout.readline, ""), process.communicate()


@pytest.mark.slow
def test_a_kill_leaves_nothing_that_is_believed_and_one_of_two_processes_makes_it(tmp_path, cache):
    folder = tiny.write_target(tmp_path / "target")
    killed = start(folder, "pause")
    wait_for(killed, "written\n")
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert list(cache.glob(".*.partial")) and not panels(cache)
    first = start(folder, "pause")
    wait_for(first, "written\n")
    second = start(folder, "go")
    wait_for(second, "begins\n")
    answers = [first.communicate("go on\n", timeout=100), second.communicate(timeout=100)]
    assert [process.returncode for process in (first, second)] == [0, 0], answers
    assert answers[0][0] == answers[1][0], "the second one reads no checkpoint"
    assert not list(cache.glob(".*.partial")) and len(panels(cache)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, *(pytest.param(x, marks=pytest.mark.long) for x in ("int4", "int8"))])
def test_an_engine_of_a_mapped_target_answers_replaces_and_learns_as_another(tmp_path, weights):
    folder = tiny.write_target(tmp_path / "target")
    prompt, asked = [*range(3, 23)], SamplingParams(max_tokens=16, ignore_eos=True)
    config = TargetConfig(name=str(folder), weights=weights, aux_layers=(1, 2, 3), quantise_vocabulary=bool(weights))
    floats = load_target(TargetConfig(name=str(folder), aux_layers=(1, 2, 3)), progress=False)
    other = jax.tree.map(lambda x: x * 1.5, floats.model)
    load_target(config, for_engine=True, progress=False)  # makes the file
    found = []
    for for_engine in (False, True):
        target = load_target(config, for_engine=for_engine, progress=False)
        shape: Any = target.model.config
        head = tiny_heads.make_draft(target=shape)
        engine = Engine(target.model, target.tokenizer, head, CHAIN, max_length=64)
        packed = engine.target, engine.draft
        outputs = engine.generate([prompt], asked)
        engine.replace_draft(Draft(jax.tree.map(lambda x: -x, head.head), head.token_ids))
        outputs += engine.generate([prompt], asked)
        engine.replace_target(other)
        outputs += engine.generate([prompt], asked)
        live = Engine(target.model, target.tokenizer, head, CHAIN, max_length=64, adapt=ADAPT)
        outputs += live.generate([prompt], asked)
        found.append((packed, [(one.token_ids, one.stats.rounds) for one in outputs], live.draft))
    (plain, answers, learnt), (packed, *others, draft) = found
    assert_same((packed, draft), (plain, learnt))
    assert others == [answers]
    ((first, *_), (_, *_), (replaced, *_), (learns, *_)) = answers
    assert first == learns != replaced


RESIDENT = """
import re, sys, jax
from eagle3_jax.models.checkpoint.fetch import load_target
from eagle3_jax.models.inference_layout import for_inference
def kilobytes(field):
    return int(re.search(field + r":\\s*(\\d+)", open("/proc/self/status").read())[1])
jax.jit(lambda x: x + 1)(jax.numpy.ones(3)).block_until_ready()
load_target(sys.argv[1], for_engine=True, progress=False)  # imports
before = kilobytes("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
model = for_inference(load_target(sys.argv[2], for_engine=True, progress=False).model)
print((kilobytes("VmHWM") - before) * 1024, (kilobytes("VmRSS") - before) * 1024)
"""


@pytest.mark.slow
def test_the_first_load_keeps_no_second_copy_and_the_next_one_none(tmp_path, cache):
    """Peaks and rests of memory above those of a process that has loaded a small target."""
    small, large = tiny.write_target(tmp_path / "small"), tiny.write_target(tmp_path / "large")
    values = json.loads((large / "config.json").read_text())
    values |= {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 24000}
    (large / "config.json").write_text(json.dumps(values))
    shape = read_config(large)
    rng = np.random.default_rng(0)
    save_file(
        {
            name: rng.standard_normal(size, np.float32).astype(ml_dtypes.bfloat16)
            for entry in family_of(shape).table(shape).values()
            for name, size in entry.tensors.items()
        },
        large / "model.safetensors",
    )
    size = (large / "model.safetensors").stat().st_size
    runs = []
    for _ in range(2):
        command = [sys.executable, "-c", RESIDENT, str(small), str(large)]
        runs.append([int(x) / size for x in subprocess.check_output(command, text=True).split()])
    assert size > 100e6 and runs[0][0] < 1.5 and runs[1][0] < 0.3, runs
