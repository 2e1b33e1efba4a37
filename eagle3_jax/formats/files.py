"""The files of a draft head: config.json and safetensors, a single file or shards with an index; never a pickle.

Or one GGUF file, alone or in a folder, whose keys are read as a config.json.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import safetensors.numpy
from safetensors import SafetensorError

from eagle3_jax.formats.llama_cpp import reader
from eagle3_jax.formats.tensors import Tensors, canonical
from eagle3_jax.models.checkpoint.gguf_file import GGUF
from eagle3_jax.models.checkpoint.load import INDEX, WEIGHTS, WeightsError, locate, save_tensors
from eagle3_jax.runs import disk

CONFIG, HEAD = "config.json", f"head{GGUF}"


class DraftFormatError(ValueError):
    """A draft checkpoint that cannot be used, or a draft that cannot be saved; the message lists every problem."""


def write(folder: pathlib.Path, values: dict[str, Any], tensors: Tensors) -> None:
    """Creates `folder` with config.json and the weights. Raises OSError."""
    folder.mkdir(parents=True)
    save_tensors(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n")


def gguf_file(folder: pathlib.Path) -> pathlib.Path | None:
    """Returns the GGUF file that `folder` is, or holds; None if there is none."""
    path = folder if folder.suffix == GGUF else folder / HEAD
    return path if path.is_file() else None


def read_config(folder: pathlib.Path) -> dict[str, Any]:
    """Reads config.json, or what a GGUF file says in its place. Raises DraftFormatError."""
    if gguf := gguf_file(folder):
        try:
            return reader.config(gguf)
        except ValueError as error:
            raise DraftFormatError(str(error)) from error
    path = folder / CONFIG
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise DraftFormatError(f"{path}: not found, expected the draft head's config") from error
    except ValueError as error:
        raise DraftFormatError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise DraftFormatError(f"{path}: got {type(values).__name__}, expected an object")
    return values


def read_tensors(folder: pathlib.Path, canonical: Callable[[str], str] = canonical) -> tuple[Tensors, list[str]]:
    """Reads all tensors by canonical name; lists names that are missing or occur twice. Raises DraftFormatError."""
    if gguf := gguf_file(folder):
        try:
            return reader.tensors(gguf)
        except ValueError as error:
            raise DraftFormatError(str(error)) from error
    tensors: Tensors = {}
    problems: list[str] = []
    try:
        located = locate(folder)
    except (WeightsError, disk.JsonError) as error:
        raise DraftFormatError(str(error)) from error
    for path in sorted(set(located.values())):
        try:
            loaded = safetensors.numpy.load_file(path)
        except (SafetensorError, KeyError) as error:
            raise DraftFormatError(f"{path}: truncated, or not safetensors of a known dtype ({error})") from error
        for name in sorted(name for name, other in located.items() if other == path and name not in loaded):
            problems.append(f"{path.name}: the index promises {name}, the file does not hold it")
        for name, tensor in loaded.items():
            if canonical(name) in tensors:
                problems.append(f"{name}: a second tensor for {canonical(name)}")
            tensors[canonical(name)] = tensor
    return tensors, problems


def file_digests(folder: str | pathlib.Path) -> dict[str, str]:
    """Maps the name of each file that a head is read from to its sha256 in hex."""
    folder = pathlib.Path(folder)
    found = [path for pattern in (CONFIG, INDEX, "*.safetensors") for path in folder.glob(pattern)]
    found += [gguf] if (gguf := gguf_file(folder)) else []
    return {path.name: disk.digest(path) for path in sorted(found)}
