"""Every kind of file that a verb reads, damaged in every way: refused by name in a sentence, or read as it was.

What nobody notices (a bit of a version number, an unused byte) may be accepted only where the reader gets the same.
"""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from flax import nnx
from safetensors.numpy import load_file, save_file

from eagle3_jax.config import SPLITS, RunConfig, TargetConfig, run_file
from eagle3_jax.data.features import FeatureSource
from eagle3_jax.export import __main__ as export
from eagle3_jax.extract import __main__ as extract
from eagle3_jax.formats.heads import load_draft
from eagle3_jax.models.checkpoint import fetch
from eagle3_jax.models.checkpoint.identity import check_same_target
from eagle3_jax.models.drafts.eagle3 import DraftHead, DraftHeadConfig
from eagle3_jax.regenerate import __main__ as regenerate
from eagle3_jax.runs import command
from eagle3_jax.train import __main__ as train
from eagle3_jax.training import checkpoint
from eagle3_jax.training.checkpoint import Checkpoints
from eagle3_jax.training.state import make_optimizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def config(whole_run: tiny.Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunConfig]:
    """Of a finished run, in whose folder the tests are."""
    run = whole_run.copy(tmp_path_factory.mktemp("corrupted") / "run")
    shard_target(run.config.with_name("target"), run.config.with_name("sharded"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(run.config.parent)
        yield run_file.load(run.config)


def shard_target(folder: pathlib.Path, sharded: pathlib.Path) -> None:
    """The same target with its weights in two files and an index."""
    shutil.copytree(folder, sharded, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(folder / "model.safetensors")
    weight_map = {}
    for number, names in enumerate((list(tensors)[::2], list(tensors)[1::2]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, sharded / file)
        weight_map |= dict.fromkeys(names, file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def flip(data: bytes, place: float, bit: int = 0) -> bytes:
    at = min(int(place * len(data)), len(data) - 1)
    return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "removed": lambda data: None,
    "empty": lambda data: b"",
    "truncated": lambda data: data[: len(data) // 2],
    "short by one": lambda data: data[:-1],
    "foreign bytes": lambda data: b"\x80\x04\x95" + bytes(range(256)),
    "foreign JSON": lambda data: b"[1, 2]\n",
    "empty JSON": lambda data: b"{}\n",
    **{f"flip at {place}": lambda data, place=place: flip(data, place) for place in (0, 0.2, 0.4, 0.6, 0.8, 1)},
    "flip a high bit": lambda data: flip(data, 0.5, bit=6),
}


@contextlib.contextmanager
def damaged(path: pathlib.Path, damage: str) -> Iterator[bool]:
    """Whether the file is another one inside the block."""
    data = path.read_bytes()
    changed = DAMAGES[damage](data)
    path.unlink()
    if changed is not None:
        path.write_bytes(changed)
    try:
        yield changed != data
    finally:
        path.write_bytes(data)


# ---------------------------------------------------------------------------------------------------------- readers
# What a verb reads of a finished run, as something that can be compared. Verbs that are finished compare all that they
# were made from, and do nothing.


def again(verb: Callable[[RunConfig], Any]) -> Callable[[RunConfig], Any]:
    return lambda config: verb(config) and None


def read_records(config: RunConfig) -> Any:
    sources = [FeatureSource(config.folder("extract") / split) for split in SPLITS]
    return [{name: x.tobytes() for name, x in source[i].items()} for source in sources for i in range(len(source))]


def head_config(config: RunConfig) -> DraftHeadConfig:
    target = fetch.read_config(pathlib.Path(config.target.name), config.target.aux_layers)
    return DraftHeadConfig.for_target(config.draft, target)


def read_export(config: RunConfig) -> Any:
    target = fetch.load_target(config.target)
    draft = load_draft(config.folder("export"), target=target)
    return [np.asarray(x).tobytes() for x in jax.tree.leaves((draft.head, draft.token_ids))]


def read_sharded(config: RunConfig) -> Any:
    """Nothing beside a checkpoint says what its weights should be; what was made with it before does."""
    folder = pathlib.Path(config.target.name).with_name("sharded")
    target = fetch.load_target(TargetConfig(name=str(folder), aux_layers=config.target.aux_layers))
    if read_sharded in _EXPECTED:
        check_same_target(folder, _EXPECTED[read_sharded], target.identity)
    return target.identity


def read_whole_checkpoint(config: RunConfig) -> Any:
    head = DraftHead(head_config(config), rngs=nnx.Rngs(0))
    parts = {"head": head, "optimizer": make_optimizer(config.train, 10).init(head)}  # pyrefly: ignore
    with Checkpoints(config.folder("train")) as checkpoints:
        step, found = checkpoints._load({name: checkpoint._abstract(part) for name, part in parts.items()})
    leaves = jax.tree.leaves({name: found[name] for name in parts})
    return step, [np.asarray(leaf).tobytes() for leaf in leaves]


FILES: dict[str, tuple[Callable[[RunConfig], Any], str]] = {
    "run/prompts/manifest.json": (again(regenerate.regenerate), "prompts"),
    "run/prompts/train.jsonl": (again(regenerate.regenerate), "train.jsonl"),
    "run/prompts/held_out.jsonl": (again(regenerate.regenerate), "held_out.jsonl"),
    "run/conversations/manifest.json": (again(extract.extract), "conversations"),
    "run/conversations/train.jsonl": (again(extract.extract), "train.jsonl"),
    "run/features/manifest.json": (again(train.train), "features"),
    "run/features/vocab.npz": (again(train.train), "vocab.npz"),
    "run/features/train/00001-of-*.json": (again(train.train), "00001-of-"),
    "run/features/train/00001-of-*.array_record": (read_records, "00001-of-"),
    "run/features/held_out/00000-of-*.json": (read_records, "00000-of-"),
    "run/checkpoints/manifest.json": (again(export.run), "checkpoints"),
    "run/checkpoints/vocab.npz": (again(export.run), "vocab.npz"),
    "run/export/manifest.json": (read_export, "export"),
    "run/export/config.json": (read_export, "config.json"),
    "run/export/model.safetensors": (read_export, "model.safetensors"),
    "target/config.json": (again(extract.extract), "config.json|target.weights|target.aux_layers"),
    "target/generation_config.json": (again(extract.extract), "generation_config.json|target.weights"),
    "target/tokenizer.json": (again(extract.extract), "tokenizer"),
    "target/tokenizer_config.json": (again(extract.extract), "tokenizer|chat_template|chat template"),
    "target/model.safetensors": (again(extract.extract), "model.safetensors|target.weights"),
    "sharded/model.safetensors.index.json": (read_sharded, "index.json|sharded"),
    "sharded/model-00001-of-00002.safetensors": (read_sharded, "model-00001|target.weights"),
}
OFTEN = ("removed", "truncated", "foreign bytes", "flip at 0.4")  # the others are long
CASES = [
    pytest.param(file, damage, marks=() if damage in OFTEN else pytest.mark.long)
    for file in FILES
    for damage in DAMAGES
]


_EXPECTED: dict[Callable[[RunConfig], Any], Any] = {}


def check(config: RunConfig, path: pathlib.Path, damage: str, read: Callable[[RunConfig], Any], names: str) -> None:
    """The damaged file is refused by one of `names` (separated by |), or read as it was."""
    expected = _EXPECTED[read] if read in _EXPECTED else _EXPECTED.setdefault(read, read(config))
    with damaged(path, damage) as changed:
        try:
            got = read(config)
        except (ValueError, OSError) as error:  # what `command.run` makes a sentence of
            message = command.sentence(error)
            assert any(name in message for name in names.split("|")), message
            assert len(message) < 1500 and "Traceback" not in message, message
        else:
            assert not changed or got == expected, f"{path}, {damage}: accepted with another result"


@pytest.mark.parametrize(("file", "damage"), CASES, ids=lambda value: value.replace("/", "-"))
def test_a_damaged_file_is_refused_by_name_or_read_as_it_was(config, file, damage):
    (path,) = pathlib.Path().glob(file)
    check(config, path, damage, *FILES[file])


def damage_checkpoint(run: str, damage: str) -> None:
    """Damages one file after the other of all that Orbax wrote; the main function of a process of its own."""
    config = run_file.load(run)
    step = max(
        (path for path in config.folder("train").iterdir() if path.name.isdecimal()), key=lambda path: int(path.name)
    )
    files = [path for path in sorted(step.rglob("*")) if path.is_file()]
    assert len(files) > 20
    for path in files:
        print(path.relative_to(step), flush=True)  # the last one is where it failed or hangs
        check(config, path, damage, read_whole_checkpoint, str(config.folder("train")))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda value: value.replace(" ", "-"))
def test_a_checkpoint_with_a_damaged_file_is_refused_by_name_or_read_as_it_was(config, damage):
    """What Orbax finds is not all: values are stored without checksums of its own.

    In a process of its own, as it leaves coroutines behind that nobody awaits, and Python says that in a later test.
    """
    main = "import sys, test_corrupted; test_corrupted.damage_checkpoint(*sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", main, "run.yaml", damage],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tiny.REPOSITORY), str(pathlib.Path(__file__).parent)])},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
