"""Checks that all hosts of one server agree, before they load and compile for minutes."""

from __future__ import annotations

import hashlib
from typing import Any

from eagle3_jax.config import RunConfig, run_file
from eagle3_jax.models.checkpoint.fetch import fetch
from eagle3_jax.models.checkpoint.load import weight_files
from eagle3_jax.runs import disk, machine, processes

# Parts of a file that are compared, and bytes of each: weights of another training differ in every part.
_PARTS, _BYTES = 16, 1 << 16


def check(config: RunConfig) -> None:
    """Compares versions, configuration and the target's weights of all processes. Raises ValueError on all of them."""
    if processes.count() == 1:
        return
    processes.check_alike({f"version of {name}": version for name, version in machine.versions().items()})
    processes.check_alike(_flat(run_file.to_dict(config)))
    files = weight_files(fetch(config.target.name))
    processes.check_alike({f"weights, {path.name}": _sample(path) for path in files})


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Names the values of all sections by their dotted fields."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def _sample(path: disk.Path) -> str:
    """Digests a file's size and some of its parts: each host would read hundreds of GB for the whole."""
    size = disk.size(path)
    found = hashlib.sha256(str(size).encode())
    with path.open("rb") as stream:
        for part in range(_PARTS):
            stream.seek(max(0, (size - _BYTES) * part // (_PARTS - 1)))
            found.update(stream.read(_BYTES))
    return found.hexdigest()[:16]
