"""Hugging Face checkpoints (safetensors, single file or sharded) -> the target model.

A family's table says which tensors make each parameter and how. All that is wrong with a checkpoint (missing, surplus,
wrongly shaped, unreadable) is reported in one message, by name, before a device sees a byte.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from eagle3_jax.mesh import shardings
from eagle3_jax.models.checkpoint.table import Entry
from eagle3_jax.models.families import family_of
from eagle3_jax.models.families.vision import TOWER, text_name
from eagle3_jax.models.layers import SHARDING_RULES
from eagle3_jax.models.target import ModelConfig, TargetModel
from eagle3_jax.runs import processes
from eagle3_jax.runs.manifest import digest, read_json

INDEX = "model.safetensors.index.json"
_ROWS = 8192  # of two tensors that are compared at a time
_IGNORED_SUFFIX = "rotary_emb.inv_freq"  # a table that old checkpoints carry


class WeightsError(ValueError):
    """A checkpoint that does not fit its config; the message lists every problem."""


def load_model(
    folder: str | pathlib.Path,
    config: ModelConfig,
    dtype: Any,
    mesh: jax.sharding.Mesh | None = None,
    *,
    only: Collection[str] | None = None,
) -> TargetModel:
    """Loads a checkpoint folder, tensor by tensor, straight into the model's layout and sharding.

    A process reads only what its own devices hold, once; and of tied embeddings that are stored twice both.

    Args:
        only: parameters, by their paths in the model; the others are checked but stay `jax.ShapeDtypeStruct`s.

    Raises:
        WeightsError: every missing, surplus, wrongly shaped and unreadable tensor or file, by name; tied embeddings
            and an LM head that differ.
    """
    folder = pathlib.Path(folder)
    family = family_of(config)
    files = locate(folder)
    stored = {text_name(name): name for name in files}
    table = {path: _renamed(entry, stored) for path, entry in family.table(config).items()}
    unused = [name for text, name in stored.items() if text.startswith((*family.unused(config), *TOWER))]
    if unused:
        processes.say(f"{folder}: {len(unused)} tensors are not read: {', '.join(sorted(unused)[:3])} ...")
    for name in unused:
        del files[name]
    _check(folder, table, files, tied=config.tie_word_embeddings)
    abstract = nnx.eval_shape(lambda: family.model(config, dtype=dtype, rngs=nnx.Rngs(0)))
    placement = None if mesh is None else shardings(abstract, mesh, SHARDING_RULES)
    tensor = reader(files)

    def read(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, sharding: Any = None) -> Any:
        name = parameter_path(path)
        if only is not None and name not in only:
            return leaf
        entry = table[name]
        tensors = [tensor(name) for name in entry.tensors]
        parts: dict[tuple[tuple[int, int, int], ...], np.ndarray] = {}  # replicas share one

        def part(index: Any) -> np.ndarray:
            at = tuple(dimension.indices(size) for dimension, size in zip(index, leaf.shape, strict=True))
            if at not in parts:
                parts[at] = np.ascontiguousarray(entry.part(index, *tensors)).astype(leaf.dtype)
            return parts[at]

        if sharding is None:
            return jax.device_put(part((slice(None),) * len(leaf.shape)))
        return jax.make_array_from_callback(leaf.shape, sharding, part)

    if placement is None:
        return jax.tree_util.tree_map_with_path(read, abstract)
    return jax.tree_util.tree_map_with_path(read, abstract, placement)


def save_tensors(tensors: Mapping[str, np.ndarray], path: pathlib.Path) -> None:
    """Writes a file of safetensors as Hugging Face has them, for all whom the umask lets read. Raises OSError."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path}: not written ({error})") from error
    path.chmod(mode)  # the library makes a file that its owner alone may read


def parameter_path(path: tuple[Any, ...]) -> str:
    """A pytree path inside a module as "blocks/0/attention/qkv"."""
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")


def fingerprint(files: dict[str, str], config: ModelConfig) -> str:
    """sha256 in hex over a checkpoint: names and contents of its files, and the architecture that they are read with.

    Args:
        files: see `file_digests`.
        config: what was read of config.json, however that spells it. Its aux layers do not count: they say which
            hidden states are kept, not what the model computes.
    """
    architecture = dataclasses.asdict(dataclasses.replace(config, aux_layers=()))
    return hashlib.sha256(json.dumps([files, architecture], sort_keys=True).encode()).hexdigest()


def weight_files(folder: str | pathlib.Path) -> list[pathlib.Path]:
    """The files of a checkpoint that hold weights or say which file holds which, by name."""
    folder = pathlib.Path(folder)
    return sorted([*folder.glob("*.safetensors"), *folder.glob(INDEX)])


def file_digests(folder: str | pathlib.Path) -> dict[str, str]:
    """Name -> sha256 in hex of each of `weight_files`."""
    return {path.name: digest(path) for path in weight_files(folder)}


def read_index(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Tensor name -> file of this folder, as the index of a sharded checkpoint says. Raises WeightsError."""
    index = folder / INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise WeightsError(f"{index}: got no weight_map, expected tensor names with their files")
    names = set(weight_map.values())
    outside = sorted(file for file in names if pathlib.Path(file).name != file or file == "..")
    if outside:
        raise WeightsError(f"{folder}: {index.name}: got {outside[0]!r}, expected names of files in this folder")
    missing = sorted(file for file in names if not (folder / file).exists())
    if missing:
        raise WeightsError(f"{folder}: {index.name} names files that are missing: {', '.join(missing)}")
    return {name: folder / file for name, file in weight_map.items()}


def locate(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Tensor name -> file."""
    if (folder / INDEX).exists():
        return read_index(folder)
    single = folder / "model.safetensors"
    if not single.exists():
        others = sorted(path.name for path in folder.glob("*.bin")) if folder.is_dir() else []
        hint = f" (found {', '.join(others)}: pickle files are never read, convert to safetensors)" if others else ""
        raise WeightsError(f"{folder}: expected model.safetensors or {INDEX}{hint}")
    try:
        with safe_open(single, framework="numpy") as handle:
            return dict.fromkeys(handle.keys(), single)
    except SafetensorError as error:
        raise WeightsError(f"{single}: truncated or not safetensors ({error})") from error


def _renamed(entry: Entry, stored: dict[str, str]) -> Entry:
    """With the tensors' names as the checkpoint has them."""
    return dataclasses.replace(entry, tensors={stored.get(name, name): shape for name, shape in entry.tensors.items()})


def _check(folder: pathlib.Path, table: dict[str, Entry], files: dict[str, pathlib.Path], *, tied: bool) -> None:
    copies = [name for name in files if tied and text_name(name) == "lm_head.weight"]
    ((embeddings, shape),) = table["embed"].tensors.items()
    table = table | {name: dataclasses.replace(table["embed"], tensors={name: shape}) for name in copies}
    problems = misfits(table, files)
    for name in sorted(files.keys() - {name for entry in table.values() for name in entry.tensors}):
        if not name.endswith(_IGNORED_SUFFIX):
            problems.append(f"surplus tensor {name}")
    if not problems:  # so both can be read
        problems = [
            f"{name}: got other values than {embeddings}, expected equal ones or none, as tie_word_embeddings is true"
            for name in copies
            if not _equal(embeddings, name, shape[0], files)
        ]
    if problems:
        raise WeightsError(f"{folder} does not fit its config ({len(problems)} problems):\n  " + "\n  ".join(problems))


def _equal(one: str, other: str, rows: int, files: dict[str, pathlib.Path]) -> bool:
    """Whether two tensors say the same, in whatever dtypes."""
    tensor = reader({name: files[name] for name in (one, other)})
    x, y = tensor(one), tensor(other)
    parts = (slice(start, min(start + _ROWS, rows)) for start in range(0, rows, _ROWS))
    return all(np.array_equal(x[part].astype(np.float32), y[part].astype(np.float32), equal_nan=True) for part in parts)


def misfits(table: dict[str, Entry], files: dict[str, pathlib.Path]) -> list[str]:
    """What is wrong with a table's tensors in the files that `locate` found: missing, misshapen, unreadable."""
    expected = {name: shape for entry in table.values() for name, shape in entry.tensors.items()}
    dtypes = {name: entry.dtypes for entry in table.values() for name in entry.tensors}
    problems = [f"missing tensor {name} {list(shape)}" for name, shape in expected.items() if name not in files]
    by_file: dict[pathlib.Path, list[str]] = {}
    for name, path in files.items():
        if name in expected:
            by_file.setdefault(path, []).append(name)
    for path, names in sorted(by_file.items()):
        try:
            with safe_open(path, framework="numpy") as handle:
                held = set(handle.keys())
                for name in names:
                    if name not in held:
                        problems.append(f"{path.name}: the index promises {name}, the file does not hold it")
                        continue
                    tensor = handle.get_slice(name)
                    shape = tuple(tensor.get_shape())
                    if shape != expected[name]:
                        problems.append(f"{name}: got shape {list(shape)}, expected {list(expected[name])}")
                    if tensor.get_dtype() not in dtypes[name]:  # quantised, and only its own library knows how
                        problems.append(f"{name}: got dtype {tensor.get_dtype()}, expected one of {dtypes[name]}")
        except SafetensorError as error:
            problems.append(f"{path.name}: truncated or not safetensors ({error})")
    return problems


def reader(files: dict[str, pathlib.Path]) -> Callable[[str], Any]:
    """Name -> that tensor, read where it is indexed."""
    handles = {path: safe_open(path, framework="numpy") for path in set(files.values())}

    @functools.cache
    def header(path: pathlib.Path) -> tuple[int, dict[str, Any]]:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            return 8 + size, json.loads(file.read(size))

    def tensor(name: str) -> Any:
        path = files[name]
        found = handles[path].get_slice(name)
        if found.get_dtype() != "F8_E4M3":
            return found
        start, described = header(path)  # safetensors has no array of it for numpy
        offset = start + described[name]["data_offsets"][0]
        return np.memmap(path, jnp.dtype(jnp.float8_e4m3fn), "r", offset, tuple(found.get_shape()))

    return tensor
