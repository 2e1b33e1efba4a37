"""Output folders that know what they hold: `manifest.json`, atomic files, resumption.

A verb calls `begin` before work and `finish` after it. `begin` answers whether the folder already holds the finished
result of exactly this work, and refuses a folder that holds the result of other work.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
from collections.abc import Iterator
from typing import Any

NAME = "manifest.json"
_PACKAGES = ("eagle3_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "transformers", "numpy")

_TIMINGS = ("seconds", "tokens_per_second")


class ManifestError(ValueError):
    """A folder whose manifest is missing, unfinished, or made from something else."""


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a result."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def digest(path: str | pathlib.Path) -> str:
    """sha256 of a file, in hex."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def atomic(path: str | pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary path beside `path`; on success it takes the place of `path`, on failure it is removed."""
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | pathlib.Path, value: Any) -> None:
    """Writes JSON atomically, with stable key order."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def begin(folder: str | pathlib.Path, identity: dict[str, Any]) -> bool:
    """Claims `folder` for the work that `identity` describes.

    Args:
        identity: all that decides the result: verb, config sections, input digests, target identity. JSON-ready.

    Returns:
        True when the folder already holds the finished result, so that there is nothing to do.

    Raises:
        ManifestError: the folder holds other work; the message names each differing field.
    """
    folder = pathlib.Path(folder)
    path = folder / NAME
    identity = json.loads(json.dumps(identity))
    if path.exists():
        found = _load(path)
        differing = list(_differences(found["identity"], identity))
        if differing:
            lines = "\n".join(f"  {field}: found {old!r}, expected {new!r}" for field, old, new in differing)
            raise ManifestError(
                f"{folder} was made from something else:\n{lines}\nremove it, or choose another run_dir"
            )
        return bool(found.get("finished"))
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, {"finished": False, "identity": identity, "versions": versions()})
    return False


def finish(folder: str | pathlib.Path, **results: Any) -> None:
    """Marks the folder as complete and records `results` (counts, rates, file digests)."""
    path = pathlib.Path(folder) / NAME
    write_json(path, _load(path) | {"finished": True, "results": results, "versions": versions()})


def read(folder: str | pathlib.Path, made_by: str) -> dict[str, Any]:
    """The manifest of a finished folder: {"identity": ..., "results": ..., "versions": ...}.

    Raises:
        ManifestError: no manifest, or the verb that makes it has not finished.
    """
    path = pathlib.Path(folder) / NAME
    if not path.exists():
        raise ManifestError(f"{path}: not found, expected the output of `python -m eagle3_jax.{made_by}`")
    manifest = _load(path)
    if not manifest.get("finished"):
        raise ManifestError(f"{folder}: unfinished, run `python -m eagle3_jax.{made_by}` to its end first")
    return manifest


def fingerprint(manifest: dict[str, Any]) -> str:
    """Identifies a finished folder as the input of the next verb: a digest over its identity and results.

    What a clock said is left out, so that the same work done again has the same fingerprint.
    """
    essence = json.dumps(_untimed([manifest["identity"], manifest["results"]]), sort_keys=True)
    return hashlib.sha256(essence.encode()).hexdigest()


def _untimed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _untimed(item) for key, item in value.items() if key not in _TIMINGS}
    return [_untimed(item) for item in value] if isinstance(value, list) else value


def _load(path: pathlib.Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text())
    except ValueError as error:
        raise ManifestError(f"{path}: not valid JSON ({error}), expected a manifest") from error
    if not isinstance(manifest, dict) or "identity" not in manifest:
        raise ManifestError(f"{path}: got no identity, expected a manifest")
    return manifest


def _differences(found: Any, expected: Any, field: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in sorted(found.keys() | expected.keys()):
            yield from _differences(found.get(key), expected.get(key), f"{field}.{key}" if field else key)
    elif found != expected:
        yield field, found, expected
