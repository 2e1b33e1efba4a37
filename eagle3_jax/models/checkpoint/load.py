"""Loads Hugging Face checkpoints (safetensors, a single file or sharded) into the target model.

A family's table maps tensors to parameters. Every problem of a checkpoint (missing, surplus, wrongly shaped or
unreadable tensors) is reported by name in one message, before any transfer to a device.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import pathlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from eagle3_jax.config import Weights
from eagle3_jax.kernels.linear.api import quantise
from eagle3_jax.kernels.linear.layouts import Quantised
from eagle3_jax.mesh import parameter_path, sharding_of, shardings
from eagle3_jax.models.checkpoint.check import Described, tensor_problems
from eagle3_jax.models.checkpoint.gguf_file import GGUF, with_blocks
from eagle3_jax.models.checkpoint.quantised import scale_problems, with_stored_scales
from eagle3_jax.models.checkpoint.ranges import open_tensors
from eagle3_jax.models.checkpoint.table import Entry, Packed
from eagle3_jax.models.families import family_of
from eagle3_jax.models.families.vision import TOWER, text_name
from eagle3_jax.models.layers import SHARDING_RULES
from eagle3_jax.models.quantisation import GROUP, axis_of, quantised
from eagle3_jax.models.shapes import shapes_of
from eagle3_jax.models.target import TargetModel
from eagle3_jax.models.target_config import ModelConfig
from eagle3_jax.runs import disk, processes
from eagle3_jax.runs.disk import digest, read_json
from eagle3_jax.runs.progress import Progress, shown

INDEX = "model.safetensors.index.json"
_ROWS = 8192  # rows of two tensors compared at a time
# A buffer in old checkpoints; scales of activations, which stay floats here.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", ".input_scale")


class WeightsError(ValueError):
    """A checkpoint that does not fit its config; the message lists every problem."""


def load_model(
    folder: str | disk.Path,
    config: ModelConfig,
    dtype: Any,
    mesh: jax.sharding.Mesh | None = None,
    *,
    only: Collection[str] | None = None,
    weights: Weights | None = None,
    quantise_vocabulary: bool = False,
    progress: Progress = True,
) -> TargetModel:
    """Loads a checkpoint folder, tensor by tensor, directly into the model's layout and sharding.

    Each process reads the parts of its own devices once. Tied embeddings that are stored twice are read and compared.

    Args:
        only: paths of the parameters to load; the others are checked but stay `jax.ShapeDtypeStruct`s.
        weights, quantise_vocabulary: see `TargetConfig`. Each matrix is quantised on its devices before the next one is
            read.
        progress: shows how many tensors are read, see `runs.progress`.

    Raises:
        WeightsError: every missing, surplus, wrongly shaped and unreadable tensor or file, by name; an LM head that
            differs from tied embeddings.
    """
    folder = disk.path_of(folder)
    family = family_of(config)
    files = locate(folder)
    stored = {text_name(name): name for name in files}
    table = {path: _renamed(entry, stored) for path, entry in family.table(config).items()}
    unused = [name for text, name in stored.items() if text.startswith((*family.unused(config), *TOWER))]
    if unused:
        processes.say(f"{folder}: {len(unused)} tensors are not read: {', '.join(sorted(unused)[:3])} ...")
    for name in unused:
        del files[name]
    if config.scales is not None:
        table = with_stored_scales(table, config.scales, _described(files)[0])
    in_blocks = any(path.suffix == GGUF for path in files.values())
    if in_blocks:
        table = with_blocks(table, _described(files)[0])
    _check(folder, table, files, tied=config.tie_word_embeddings)
    if weights == "stored" and not any(entry.packed for entry in table.values()):
        expected = "a checkpoint with quantised matrices, or another value"
        raise WeightsError(f"target.weights: got 'stored' for {folder}, which holds floats; expected {expected}")
    abstract = shapes_of(lambda rngs: family.model(config, dtype=dtype, rngs=rngs))
    placement = None if mesh is None else shardings(abstract, mesh, SHARDING_RULES)
    tensor = reader(files)
    if only is None and (problems := scale_problems(table, tensor)):
        raise WeightsError(f"{folder}: {len(problems)} tensors are unusable:\n  " + "\n  ".join(problems))

    def placed(shape: tuple[int, ...], sharding: Any, part: Callable[[Any], np.ndarray]) -> jax.Array:
        if sharding is None:
            return jax.device_put(part((slice(None),) * len(shape)))
        return jax.make_array_from_callback(shape, sharding, part)

    def as_stored(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, sharding: Any, packed: Packed) -> Quantised:
        tensors = [tensor(name) for name in table[parameter_path(path)].tensors]
        *lead, size, columns = leaf.shape
        held = size if sharding is None else sharding.shard_shape(leaf.shape)[-2]
        group = size if packed.group is None else math.gcd(held, packed.group)
        shape = *lead, size // group, columns
        where = (
            None if mesh is None else sharding_of(path, jax.ShapeDtypeStruct(shape, jnp.float32), mesh, SHARDING_RULES)
        )
        values = placed(leaf.shape, sharding, lambda index: packed.values(index, *tensors))

        def numbers(of: Callable[..., np.ndarray]) -> jax.Array:
            return placed(shape, where, lambda index: of(group, index, *tensors))

        return Quantised(values, numbers(packed.scale), packed.offset and numbers(packed.offset), leaf.dtype)

    def read(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, sharding: Any = None) -> Any:
        name = parameter_path(path)
        if only is not None and name not in only:
            return leaf
        entry = table[name]
        axis = axis_of(name, vocabulary=True) if weights == "stored" and entry.packed is not None else None
        if axis == -2 and entry.packed is not None:
            return as_stored(path, leaf, sharding, entry.packed)
        tensors = [tensor(name) for name in entry.tensors]
        parts: dict[tuple[tuple[int, int, int], ...], np.ndarray] = {}  # shared by replicas

        def part(index: Any) -> np.ndarray:
            at = tuple(dimension.indices(size) for dimension, size in zip(index, leaf.shape, strict=True))
            if at not in parts:
                parts[at] = np.ascontiguousarray(entry.part(index, *tensors)).astype(leaf.dtype)
            return parts[at]

        value = placed(leaf.shape, sharding, part)
        if axis == -1 and in_blocks:  # embeddings and LM head: without loss from Q8_0
            return jax.block_until_ready(quantise(value, "int8", axis=axis, group=math.gcd(leaf.shape[axis], GROUP)))
        if weights in (None, "stored"):
            return value
        return jax.block_until_ready(quantised(name, value, weights, vocabulary=quantise_vocabulary))

    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract)
    places = [None] * len(leaves) if placement is None else structure.flatten_up_to(placement)
    each = shown(list(zip(leaves, places, strict=True)), "load", "tensor", progress)
    return structure.unflatten([read(path, leaf, place) for (path, leaf), place in each])


def save_tensors(tensors: Mapping[str, np.ndarray], path: pathlib.Path) -> None:
    """Writes a safetensors file with Hugging Face's metadata and the umask's permissions. Raises OSError."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path}: not written ({error})") from error
    path.chmod(mode)  # the library makes files readable by their owner only


def fingerprint(files: dict[str, str], config: ModelConfig) -> str:
    """Hashes a checkpoint, its files' names and contents and its architecture, to sha256 in hex.

    Args:
        files: see `file_digests`.
        config: the parsed config.json, whatever its spelling. Aux layers are excluded: they select the hidden states to
            keep and do not change the model. So are the scales' kind: the files tell it.
    """
    architecture = dataclasses.asdict(dataclasses.replace(config, aux_layers=()))
    del architecture["scales"]
    return hashlib.sha256(json.dumps([files, architecture], sort_keys=True).encode()).hexdigest()


def weight_files(folder: str | disk.Path) -> list[disk.Path]:
    """Lists a checkpoint's files of weights and its index, sorted by name."""
    folder = disk.path_of(folder)
    index = folder / INDEX
    found = [*folder.glob("*.safetensors"), *([index] if index.exists() else [])]
    return sorted(found or folder.glob(f"*{GGUF}"))


def file_digests(folder: str | disk.Path) -> dict[str, str]:
    """Maps the name of each of `weight_files` to its sha256 in hex."""
    return {path.name: digest(path) for path in weight_files(folder)}


def read_index(folder: disk.Path) -> dict[str, disk.Path]:
    """Reads the index of a sharded checkpoint: tensor name -> file of this folder. Raises WeightsError."""
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


def locate(folder: disk.Path) -> dict[str, disk.Path]:
    """Maps each tensor's name to its file. Raises WeightsError."""
    if (folder / INDEX).exists():
        return read_index(folder)
    single = folder / "model.safetensors"
    blocks = [] if single.exists() else sorted(folder.glob(f"*{GGUF}"))
    if len(blocks) > 1:
        expected = "one; `llama-gguf-split --merge` joins the parts of a file"
        raise WeightsError(f"{folder}: got {len(blocks)} GGUF files, expected {expected}")
    if blocks:
        (single,) = blocks
    if not single.exists():
        others = sorted(path.name for path in folder.glob("*.bin")) if folder.is_dir() else []
        hint = f" (found {', '.join(others)}: pickle files are never read, convert to safetensors)" if others else ""
        raise WeightsError(f"{folder}: expected model.safetensors, {INDEX} or a GGUF file{hint}")
    try:
        with open_tensors(single) as handle:
            return dict.fromkeys(handle.keys(), single)
    except SafetensorError as error:
        raise WeightsError(f"{single}: truncated or not safetensors ({error})") from error


def _described(files: dict[str, disk.Path]) -> tuple[dict[str, Described], list[str]]:
    """Maps each tensor's name to its dtype and shape; lists the files that are damaged, whose tensors are left out."""
    found: dict[str, Described] = {}
    problems: list[str] = []
    for path in sorted(set(files.values())):
        names = [name for name, other in files.items() if other == path]
        try:
            with open_tensors(path) as handle:
                stored = set(handle.keys())
                for name in names:
                    if name in stored:
                        tensor = handle.get_slice(name)
                        found[name] = Described(tensor.get_dtype(), tuple(tensor.get_shape()))
                    else:
                        problems.append(f"{path.name}: the index promises {name}, the file does not hold it")
        except SafetensorError as error:
            problems.append(f"{path.name}: truncated or not safetensors ({error})")
    return found, problems


def _renamed(entry: Entry, stored: dict[str, str]) -> Entry:
    """Replaces the table's tensor names by the checkpoint's, in the spelling that it has."""
    if entry.other is not None and entry.other.tensors.keys() <= stored.keys():
        entry = entry.other
    return dataclasses.replace(entry, tensors={stored.get(name, name): shape for name, shape in entry.tensors.items()})


def _check(folder: disk.Path, table: dict[str, Entry], files: dict[str, disk.Path], *, tied: bool) -> None:
    copies = [name for name in files if tied and text_name(name) == "lm_head.weight"]
    ((embeddings, shape),) = table["embed"].tensors.items()
    table = table | {name: dataclasses.replace(table["embed"], tensors={name: shape}) for name in copies}
    problems = misfits(table, files)
    for name in sorted(files.keys() - {name for entry in table.values() for name in entry.tensors}):
        if not name.endswith(_IGNORED_SUFFIXES):
            problems.append(f"surplus tensor {name}")
    if not problems:  # both can be read
        problems = [
            f"{name}: got other values than {embeddings}, expected equal ones or none, as tie_word_embeddings is true"
            for name in copies
            if not _equal(embeddings, name, shape[0], files)
        ]
    if problems:
        raise WeightsError(f"{folder} does not fit its config ({len(problems)} problems):\n  " + "\n  ".join(problems))


def _equal(one: str, other: str, rows: int, files: dict[str, disk.Path]) -> bool:
    """Tells whether two tensors hold equal values, whatever their dtypes."""
    tensor = reader({name: files[name] for name in (one, other)})
    x, y = tensor(one), tensor(other)
    parts = (slice(start, min(start + _ROWS, rows)) for start in range(0, rows, _ROWS))
    return all(np.array_equal(x[part].astype(np.float32), y[part].astype(np.float32), equal_nan=True) for part in parts)


def misfits(table: dict[str, Entry], files: dict[str, disk.Path]) -> list[str]:
    """Lists the table's tensors that are missing, wrongly shaped or unreadable in the files that `locate` found."""
    expected = {name: shape for entry in table.values() for name, shape in entry.tensors.items()}
    dtypes = {name: entry.dtypes for entry in table.values() for name in entry.tensors}

    def other_dtype(name: str, dtype: str) -> str | None:  # quantised in a way that only its own library reads
        return None if dtype in dtypes[name] else f"one of {dtypes[name]}"

    found, damaged = _described({name: path for name, path in files.items() if name in expected})
    there = {name: shape for name, shape in expected.items() if name in found or name not in files}
    return tensor_problems(found, there, None, other_dtype) + damaged


def reader(files: dict[str, disk.Path]) -> Callable[[str], Any]:
    """Makes a function from a tensor's name to the tensor, which is read lazily, when indexed."""
    handles = {path: open_tensors(path) for path in set(files.values())}

    @functools.cache
    def header(path: disk.Path) -> tuple[int, dict[str, Any]]:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            return 8 + size, json.loads(file.read(size))

    def tensor(name: str) -> Any:
        path = files[name]
        found = handles[path].get_slice(name)
        if found.get_dtype() != "F8_E4M3" or disk.is_remote(path):
            return found
        start, entries = header(path)  # safetensors has no numpy array of FP8
        offset = start + entries[name]["data_offsets"][0]
        return np.memmap(path, jnp.dtype(jnp.float8_e4m3fn), "r", offset, tuple(found.get_shape()))

    return tensor
