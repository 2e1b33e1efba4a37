"""Output folders with a `manifest.json` of their content: recognised when finished, resumed when not.

A verb works inside `claim` and ends with `finish`. Process 0 locks, writes and answers, and tells the other processes
of its run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from eagle3_jax.runs import disk, processes
from eagle3_jax.runs.machine import versions

NAME = "manifest.json"
# Format of output folders; it rises when a verb's files change their meaning.
FORMAT = 1
_TIMINGS = ("seconds", "tokens_per_second", "data_wait")


class ManifestError(ValueError):
    """A folder whose manifest is missing, unfinished, or made from something else."""


@contextlib.contextmanager
def claim(folder: str | disk.Path, identity: dict[str, Any], place: str = "run_dir") -> Iterator[bool]:
    """Locks `folder` for the work that `identity` describes; yields what `begin` returns.

    Raises LockError: another run has the folder; ManifestError: it holds other work, or the processes want others.
    """
    identity = json.loads(json.dumps(identity))
    with disk.lock(folder):
        answer = processes.agree(lambda: {"finished": begin(folder, identity, place), "identity": identity})
        if differing := list(_differences(answer["identity"], identity)):
            lines = "\n".join(f"  {field}: process 0 has {old!r}, this one {new!r}" for field, old, new in differing)
            raise ManifestError(f"{folder}: the processes of this run were not started alike:\n{lines}")
        yield answer["finished"]


def begin(folder: str | disk.Path, identity: dict[str, Any], place: str = "run_dir") -> bool:
    """Writes the manifest of unfinished work into `folder`, or compares the one that is there. See `claim`.

    `identity`, JSON-ready, is all that decides the result: verb, config sections, input digests, target identity.
    Returns True when the folder already holds the finished result. Raises ManifestError: it holds other work.
    """
    folder = disk.path_of(folder)
    path = folder / NAME
    identity = json.loads(json.dumps(identity))
    if path.exists():
        found = load(path)
        check_same(folder, found["identity"], identity, place)
        return bool(found.get("finished"))
    disk.write_sealed(path, {"format": FORMAT, "finished": False, "identity": identity, "versions": versions()})
    return False


def check_same(path: str | disk.Path, found: Any, identity: dict[str, Any], place: str) -> None:
    """Refuses a file or folder that was made by other work than `identity`'s, which is `found` there.

    Raises ManifestError: names every field that differs, with both values, and advises another `place`, an option.
    """
    if differing := list(_differences(found, json.loads(json.dumps(identity)))):
        lines = "\n".join(f"  {field}: found {old!r}, expected {new!r}" for field, old, new in differing)
        raise ManifestError(f"{path} was made from something else:\n{lines}\nremove it, or choose another {place}")


def finish(folder: str | disk.Path, files: Iterable[str] = (), **results: Any) -> None:
    """Marks the folder as complete; records `results` (counts, rates) and digests of files that the next verb reads."""
    folder = disk.path_of(folder)
    names = list(files)
    digests = dict(zip(names, disk.each(disk.digest, [folder / name for name in names]), strict=True))
    path = folder / NAME
    done = {"finished": True, "files": digests, "results": results, "versions": versions()}
    disk.write_sealed(path, load(path) | done)


def read(folder: str | disk.Path, made_by: str, *, verify: bool = True) -> dict[str, Any]:
    """Reads the manifest of a finished folder: {"identity": ..., "files": ..., "results": ..., "versions": ...}.

    `verify` compares its files with their digests. Raises ManifestError: none, unfinished, or a file was altered.
    """
    folder = disk.path_of(folder)
    path = folder / NAME
    if not path.exists():
        raise ManifestError(f"{path}: not found, expected the output of `python -m eagle3_jax.{made_by}`")
    manifest = load(path)
    if not manifest.get("finished"):
        raise ManifestError(f"{folder}: unfinished, run `python -m eagle3_jax.{made_by}` to its end first")
    files = manifest["files"] if verify else {}
    digests = disk.each(_digest, [folder / name for name in files])
    for (name, expected), found in zip(files.items(), digests, strict=True):
        if found is None:
            raise ManifestError(f"{folder / name}: not found, but {NAME} names it; {_again(folder, made_by)}")
        if found != expected:
            altered = f"{folder / name}: altered since it was written: sha256 {found}, expected {expected}"
            raise ManifestError(f"{altered}; {_again(folder, made_by)}")
    return manifest


def shards(folder: disk.Path, manifest: dict[str, Any], name: str) -> list[disk.Path]:
    """The files of a finished folder that hold `train.jsonl`: itself, or `train-00000-of-00002.jsonl` and so on."""
    stem, _, ending = name.rpartition(".")
    found = re.compile(rf"{re.escape(stem)}(-\d+-of-\d+)?\.{re.escape(ending)}")
    return [folder / file for file in sorted(manifest["files"]) if found.fullmatch(file)]


def _digest(path: disk.Path) -> str | None:
    with contextlib.suppress(FileNotFoundError):
        return disk.digest(path)
    return None


def _again(folder: disk.Path, made_by: str) -> str:
    return f"remove {folder} and run `python -m eagle3_jax.{made_by}` again"


def fingerprint(manifest: dict[str, Any]) -> str:
    """Identifies a finished folder as an input: a digest of its identity, files and results, without times."""
    essence = json.dumps(_untimed([manifest["identity"], manifest["files"], manifest["results"]]), sort_keys=True)
    return hashlib.sha256(essence.encode()).hexdigest()


def _untimed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _untimed(item) for key, item in value.items() if key not in _TIMINGS}
    return [_untimed(item) for item in value] if isinstance(value, list) else value


def load(path: disk.Path) -> dict[str, Any]:
    """Reads a manifest, of finished work or unfinished. Raises ManifestError: damaged, or of another format."""
    try:
        manifest = disk.read_json(path)
    except disk.JsonError as error:
        raise ManifestError(f"{error}, expected a manifest") from error
    if not isinstance(manifest.get("identity"), dict):
        raise ManifestError(f"{path}: got no identity, expected a manifest")
    if manifest.get("format") != FORMAT:
        got = f"{path}: got format {manifest.get('format')!r}, expected {FORMAT}; another version of eagle3_jax made it"
        raise ManifestError(f"{got}: remove {path.parent} and run its verb again")
    try:
        return disk.unsealed(manifest, path)
    except disk.JsonError as error:
        raise ManifestError(f"{error}; remove {path.parent} and run its verb again") from error


def _differences(found: Any, expected: Any, field: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in sorted(found.keys() | expected.keys()):
            yield from _differences(found.get(key), expected.get(key), f"{field}.{key}" if field else key)
    elif found != expected:
        yield field, found, expected
