"""Output folders that know what they hold: `manifest.json`, exclusive locks, atomic files, resumption.

A verb works inside `claim` and ends with `finish`. `claim` locks the folder, removes what a killed run left half
written, and answers whether the folder already holds the finished result of exactly this work. It refuses a folder that
another run is working on, or that holds the result of other work. Of the processes of one run process 0 locks, writes
and answers, and the others are told.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import socket
import uuid
import zlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any, TextIO

import filelock

from eagle3_jax.runs import processes

NAME = "manifest.json"
# Of output folders. Raised when what a verb writes changes its meaning.
FORMAT = 1
_PACKAGES = ("eagle3_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "transformers", "numpy")

_TIMINGS = ("seconds", "tokens_per_second", "data_wait")


class JsonError(ValueError):
    """A file that does not hold the JSON it should; the message names file and line."""


class ManifestError(ValueError):
    """A folder whose manifest is missing, unfinished, or made from something else."""


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a result."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def hardware() -> dict[str, Any]:
    """The machine that this runs on."""
    import jax  # not needed by those who only read and write files

    import eagle3_jax.mesh  # noqa: F401  where there is no TPU, JAX does not look for one

    cpu = platform.processor() or platform.machine()
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    device = jax.devices()[0]
    accelerator = None if device.platform == "cpu" else device.device_kind
    return {"cpu": cpu, "cores": cores, "accelerator": accelerator, "devices": jax.device_count()}


def timed_on(model: int) -> dict[str, Any]:
    """What decides how fast the same work is: the devices of an engine (`mesh.model`), the machine, versions."""
    return {"mesh": {"model": model}, "hardware": hardware(), "versions": versions()}


def digest(path: str | pathlib.Path) -> str:
    """sha256 of a file, in hex."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def atomic(path: str | pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary path beside `path`, for a file or a folder.

    On success it takes the place of `path` (of a file or an empty folder, or of nothing); on failure it is removed.
    """
    path = pathlib.Path(path)
    # Processes of several hosts and containers share folders: there, process ids repeat.
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}.partial")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        if error.errno and error.filename is None:  # of a write, which does not say where
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        _remove(temporary)


@contextlib.contextmanager
def lock(path: str | pathlib.Path) -> Iterator[None]:
    """Holds this run's exclusive right to write `path`, a file or a folder, until the block ends or process 0 dies.

    The operating system's own lock (flock) on `.<name>.lock` beside `path`: it vanishes with a killed owner. The file
    stays, as removing a locked file would let two processes in. Across hosts it holds where the file system says so
    (NFS does; a mounted bucket locks for one host only). What `atomic` left behind in killed runs is removed.

    Raises:
        ManifestError: another run holds it; the message says which process. Or the run's processes do not share it.
    """
    path = pathlib.Path(path)
    file = path.with_name(f".{path.name}.lock")
    with contextlib.ExitStack() as held:
        owner = processes.agree(lambda: held.enter_context(_lock(path, file)))
        if not file.exists() or file.read_text() != owner:
            raise ManifestError(f"{path}: not what process 0 has there, expected a run_dir that all hosts share")
        yield
        processes.barrier()


@contextlib.contextmanager
def _lock(path: pathlib.Path, file: pathlib.Path) -> Iterator[str]:
    """Yields what the lock's file says of its owner."""
    path.parent.mkdir(parents=True, exist_ok=True)
    held = filelock.FileLock(file, blocking=False, fallback_to_soft=False)
    try:
        held.acquire()
    except filelock.Timeout as error:
        owner = file.read_text().strip() or "another process"
        raise ManifestError(f"{path}: in use by {owner}, wait for its end") from error
    try:
        owner = f"process {os.getpid()} on host {socket.gethostname()}\n"
        file.write_text(owner)
        for left_behind in [*path.parent.glob(f".{glob.escape(path.name)}.*.partial"), *path.rglob(".*.partial")]:
            _remove(left_behind)
        yield owner
    finally:
        held.release()


def read_json(path: str | pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file. Raises JsonError."""
    return _object(pathlib.Path(path).read_bytes(), str(path))


def write_sealed(path: str | pathlib.Path, values: dict[str, Any]) -> None:
    """Writes a JSON object with a checksum in it, atomically."""
    write_json(path, values | {"checksum": _checksum(values)})


def read_sealed(path: str | pathlib.Path) -> dict[str, Any]:
    """What `write_sealed` wrote. Raises JsonError: not that, to the letter."""
    return _unsealed(read_json(path), path)


def _unsealed(values: dict[str, Any], path: str | pathlib.Path) -> dict[str, Any]:
    if values.pop("checksum", None) != _checksum(values):
        raise JsonError(f"{path}: altered since it was written")
    return values


def _checksum(values: dict[str, Any]) -> str:
    plain = json.loads(json.dumps(values))  # tuples are lists there, and keys are text
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def read_jsonl(path: str | pathlib.Path) -> Iterator[dict[str, Any]]:
    """The objects in a JSONL file, one a line. Raises JsonError."""
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            yield _object(line, f"{path}, line {number}")


def append(log: TextIO, value: Any) -> None:
    """Adds a line to a log that `read_log` reads: a checksum and JSON."""
    text = json.dumps(value, ensure_ascii=False)
    log.write(f"{zlib.crc32(text.encode()):08x} {text}\n")
    log.flush()


def read_log(path: str | pathlib.Path) -> list[Any]:
    """What `append` wrote; empty where there is no log. A last line that a kill tore is cut off the file.

    Raises:
        JsonError: a whole line was altered.
    """
    path = pathlib.Path(path)
    cut_torn_line(path)
    values = []
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else (), start=1):
        checksum, _, text = line.partition(b" ")
        if checksum != b"%08x" % zlib.crc32(text):
            raise JsonError(f"{path}, line {number}: altered since it was written; remove the file")
        values.append(json.loads(text))
    return values


def cut_torn_line(path: pathlib.Path) -> None:
    """Removes what follows the last newline of a file that is appended to, where there is such a file."""
    raw = path.read_bytes() if path.exists() else b""
    if (whole := raw.rfind(b"\n") + 1) < len(raw):
        os.truncate(path, whole)


def _object(text: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: thousands of brackets
        raise JsonError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise JsonError(f"{where}: got {type(value).__name__}, expected an object")
    return value


def write_json(path: str | pathlib.Path, value: Any) -> None:
    """Writes JSON atomically, with stable key order."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def claim(
    folder: str | pathlib.Path, identity: dict[str, Any], newer: Collection[str] = (), place: str = "run_dir"
) -> Iterator[bool]:
    """Locks `folder` for the work that `identity` describes.

    Args:
        identity: see `begin`. The same on all processes of the run.
        newer, place: see `begin`.

    Yields:
        True when the folder already holds the finished result, so that there is nothing to do.

    Raises:
        ManifestError: another run is working on the folder, it holds other work, or the run's processes differ in
            what they want to do.
    """
    identity = json.loads(json.dumps(identity))
    with lock(folder):
        answer = processes.agree(lambda: {"finished": begin(folder, identity, newer, place), "identity": identity})
        if differing := list(_differences(answer["identity"], identity)):
            lines = "\n".join(f"  {field}: process 0 has {old!r}, this one {new!r}" for field, old, new in differing)
            raise ManifestError(f"{folder}: the processes of this run were not started alike:\n{lines}")
        yield answer["finished"]


def _remove(path: pathlib.Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def begin(
    folder: str | pathlib.Path, identity: dict[str, Any], newer: Collection[str] = (), place: str = "run_dir"
) -> bool:
    """Writes the manifest of unfinished work into `folder`, or compares the one that is there. See `claim`.

    Args:
        identity: all that decides the result: verb, config sections, input digests, target identity. JSON-ready.
        newer: fields that manifests of earlier versions lack; there they are not compared.
        place: see `check_same`.

    Returns:
        True when the folder already holds the finished result, so that there is nothing to do.

    Raises:
        ManifestError: the folder holds other work; the message names each differing field.
    """
    folder = pathlib.Path(folder)
    path = folder / NAME
    identity = json.loads(json.dumps(identity))
    if path.exists():
        found = load(path)
        known = {name: value for name, value in identity.items() if name not in newer or name in found["identity"]}
        check_same(folder, found["identity"], known, place)
        return bool(found.get("finished"))
    folder.mkdir(parents=True, exist_ok=True)
    write_sealed(path, {"format": FORMAT, "finished": False, "identity": identity, "versions": versions()})
    return False


def check_same(path: str | pathlib.Path, found: Any, identity: dict[str, Any], place: str) -> None:
    """Refuses other work than that of `identity`.

    Args:
        path: what was made; it says `found`.
        place: what names the path, and could name another one; and what more may be done.

    Raises:
        ManifestError: every field that differs, with both values.
    """
    differing = list(_differences(found, json.loads(json.dumps(identity))))
    if differing:
        lines = "\n".join(f"  {field}: found {old!r}, expected {new!r}" for field, old, new in differing)
        raise ManifestError(f"{path} was made from something else:\n{lines}\nremove it, or choose another {place}")


def finish(folder: str | pathlib.Path, files: Iterable[str] = (), **results: Any) -> None:
    """Marks the folder as complete and records `results` (counts, rates).

    Args:
        files: what the next verb reads, relative to the folder: `read` compares their digests.
    """
    folder = pathlib.Path(folder)
    digests = {name: digest(folder / name) for name in files}
    path = folder / NAME
    write_sealed(path, load(path) | {"finished": True, "files": digests, "results": results, "versions": versions()})


def read(folder: str | pathlib.Path, made_by: str, *, verify: bool = True) -> dict[str, Any]:
    """The manifest of a finished folder: {"identity": ..., "files": ..., "results": ..., "versions": ...}.

    Args:
        verify: compares the files that the manifest names with their digests.

    Raises:
        ManifestError: no manifest, the verb that makes it has not finished, or a file was altered since.
    """
    folder = pathlib.Path(folder)
    path = folder / NAME
    if not path.exists():
        raise ManifestError(f"{path}: not found, expected the output of `python -m eagle3_jax.{made_by}`")
    manifest = load(path)
    if not manifest.get("finished"):
        raise ManifestError(f"{folder}: unfinished, run `python -m eagle3_jax.{made_by}` to its end first")
    for name, expected in manifest["files"].items() if verify else ():
        try:
            found = digest(folder / name)
        except FileNotFoundError as error:
            raise ManifestError(
                f"{folder / name}: not found, but {NAME} names it; {_again(folder, made_by)}"
            ) from error
        if found != expected:
            raise ManifestError(
                f"{folder / name}: altered since it was written: sha256 {found}, expected {expected}; "
                + _again(folder, made_by)
            )
    return manifest


def _again(folder: pathlib.Path, made_by: str) -> str:
    return f"remove {folder} and run `python -m eagle3_jax.{made_by}` again"


def fingerprint(manifest: dict[str, Any]) -> str:
    """Identifies a finished folder as the input of the next verb: a digest over its identity, files and results.

    What a clock said is left out, so that the same work done again has the same fingerprint.
    """
    essence = json.dumps(_untimed([manifest["identity"], manifest["files"], manifest["results"]]), sort_keys=True)
    return hashlib.sha256(essence.encode()).hexdigest()


def _untimed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _untimed(item) for key, item in value.items() if key not in _TIMINGS}
    return [_untimed(item) for item in value] if isinstance(value, list) else value


def load(path: pathlib.Path) -> dict[str, Any]:
    """The manifest in a file, of finished work or unfinished.

    Raises:
        ManifestError: damaged, or made by a version of this package with another format.
    """
    try:
        manifest = read_json(path)
    except JsonError as error:
        raise ManifestError(f"{error}, expected a manifest") from error
    if not isinstance(manifest.get("identity"), dict):
        raise ManifestError(f"{path}: got no identity, expected a manifest")
    if manifest.get("format") != FORMAT:
        raise ManifestError(
            f"{path}: got format {manifest.get('format')!r}, expected {FORMAT}; another version of eagle3_jax made it: "
            f"remove {path.parent} and run its verb again"
        )
    try:
        return _unsealed(manifest, path)
    except JsonError as error:
        raise ManifestError(f"{error}; remove {path.parent} and run its verb again") from error


def _differences(found: Any, expected: Any, field: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in sorted(found.keys() | expected.keys()):
            yield from _differences(found.get(key), expected.get(key), f"{field}.{key}" if field else key)
    elif found != expected:
        yield field, found, expected
