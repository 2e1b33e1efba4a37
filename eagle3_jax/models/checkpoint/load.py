"""Loads Hugging Face checkpoints (safetensors, a single file or sharded) into the target model.

A family's table maps tensors to parameters. Every problem of a checkpoint (missing, surplus, wrongly shaped or
unreadable tensors) is reported by name in one message, before any transfer to a device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping
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
from eagle3_jax.models.checkpoint.gguf_file import GGUF, with_blocks
from eagle3_jax.models.checkpoint.quantised import scale_problems, with_stored_scales
from eagle3_jax.models.checkpoint.ranges import open_tensors
from eagle3_jax.models.checkpoint.table import Described, Entry, Packed, tensor_problems
from eagle3_jax.models.families import family_of
from eagle3_jax.models.families.vision import TOWER, text_name
from eagle3_jax.models.layers import SHARDING_RULES
from eagle3_jax.models.quantisation import GROUP, VOCABULARY, axis_of, quantised
from eagle3_jax.models.shapes import shapes_of
from eagle3_jax.models.target import TargetModel
from eagle3_jax.models.target_config import ModelConfig
from eagle3_jax.runs import disk, processes
from eagle3_jax.runs.disk import digest, read_json
from eagle3_jax.runs.progress import Progress, shown

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_CONVERT = (
    'python -c \'import torch, safetensors.torch as s; loaded = torch.load("pytorch_model.bin", weights_only=True); '
    f's.save_file({{k: v.contiguous() for k, v in loaded.items()}}, "{WEIGHTS}")\''
)
_ROWS = 8192  # rows of two tensors compared at a time
_PIECE = 4096  # rows of a vocabulary that `keep` gets at a time
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
    keep: Callable[[str, Iterator[Any], int | None], Any] | None = None,
    progress: Progress = True,
) -> TargetModel:
    """Loads a checkpoint folder, tensor by tensor, directly into the model's layout and sharding.

    Each process reads the parts of its own devices once. Tied embeddings that are stored twice are read and compared.

    Args:
        only: paths of the parameters to load; the others are checked but stay `jax.ShapeDtypeStruct`s.
        weights, quantise_vocabulary: see `TargetConfig`. Each matrix is quantised before the next one is read.
        keep: takes each parameter in the model's place, without a mesh: its path, its pieces along the first axis, and
            the rows of all pieces; a vocabulary has several pieces, others one (None).
        progress: shows how many tensors are read, see `runs.progress`.

    Raises:
        WeightsError: every missing, surplus, wrongly shaped and unreadable tensor or file, by name; an LM head that
            differs from tied embeddings.
    """
    folder = disk.path_of(folder)
    family = family_of(config)
    files = locate(folder)
    stored = {text_name(name): name for name in files}
    table = spelt(family.table(config), stored)
    unused = [name for text, name in stored.items() if text.startswith((*family.unused(config), *TOWER))]
    if unused:
        processes.say(f"{folder}: {len(unused)} tensors are not read: {', '.join(sorted(unused)[:3])} ...")
    for name in unused:
        del files[name]
    if config.scales is not None:
        table = with_stored_scales(table, config.scales, _described(files)[0])
    if in_blocks := any(path.suffix == GGUF for path in files.values()):
        table = with_blocks(table, _described(files)[0])
    _check(folder, table, files, tied=config.tie_word_embeddings)
    if weights == "stored" and not any(entry.packed for entry in table.values()):
        expected = "a checkpoint with quantised matrices, or another value"
        raise WeightsError(f"target.weights: got 'stored' for {folder}, which holds floats; expected {expected}")
    abstract = abstract_model(config, jnp.dtype(dtype))
    placement = None if mesh is None else shardings(abstract, mesh, SHARDING_RULES)
    tensor = reader(files)
    if only is None and (problems := scale_problems(table, tensor)):
        raise WeightsError(f"{folder}: {len(problems)} tensors are unusable:\n  " + "\n  ".join(problems))

    def placed(shape: tuple[int, ...], sharding: Any, part: Callable[[Any], np.ndarray], *rows: slice) -> jax.Array:
        if sharding is None:
            return jax.device_put(part(rows + (slice(None),) * (len(shape) - len(rows))))
        return jax.make_array_from_callback(shape, sharding, part)

    def as_stored(
        path: Any, leaf: jax.ShapeDtypeStruct, sharding: Any, packed: Packed, tensors: list[Any]
    ) -> Quantised:
        *lead, size, columns = leaf.shape
        held = size if sharding is None else sharding.shard_shape(leaf.shape)[-2]
        group = size if packed.group is None else math.gcd(held, packed.group)
        shape = *lead, size // group, columns
        spread = jax.ShapeDtypeStruct(shape, jnp.float32)
        where = None if mesh is None else sharding_of(path, spread, mesh, SHARDING_RULES)
        values = placed(leaf.shape, sharding, lambda index: packed.values(index, *tensors))

        def numbers(of: Callable[..., np.ndarray]) -> jax.Array:
            return placed(shape, where, lambda index: of(group, index, *tensors))

        return Quantised(values, numbers(packed.scale), packed.offset and numbers(packed.offset), leaf.dtype)

    def read(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, sharding: Any, *rows: slice) -> Any:
        name = parameter_path(path)
        if only is not None and name not in only:
            return leaf
        entry = table[name]
        tensors = [tensor(name) for name in entry.tensors]
        axis = axis_of(name, vocabulary=True) if weights == "stored" and entry.packed is not None else None
        if axis == -2 and entry.packed is not None:
            return as_stored(path, leaf, sharding, entry.packed, tensors)
        parts: dict[tuple[tuple[int, int, int], ...], np.ndarray] = {}  # shared by replicas

        def part(index: Any) -> np.ndarray:
            at = tuple(dimension.indices(size) for dimension, size in zip(index, leaf.shape, strict=True))
            if at not in parts:
                stored = np.ascontiguousarray(entry.part(index, *tensors))
                parts[at] = stored if entry.kept else stored.astype(leaf.dtype)
            return parts[at]

        value = placed(leaf.shape, sharding, part, *rows)
        if axis == -1 and in_blocks:  # embeddings and LM head: without loss from Q8_0
            return jax.block_until_ready(quantise(value, "int8", axis=axis, group=math.gcd(leaf.shape[axis], GROUP)))
        if weights in (None, "stored"):
            return value
        return jax.block_until_ready(quantised(name, value, weights, vocabulary=quantise_vocabulary))

    def kept(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, place: Any) -> Any:
        if keep is None:
            return read(path, leaf, place)
        name, rows = parameter_path(path), leaf.shape[0]
        if not VOCABULARY.search(name):
            return keep(name, iter([read(path, leaf, None)]), None)
        parts = (slice(start, start + _PIECE) for start in range(0, rows, _PIECE))
        return keep(name, (read(path, leaf, None, part) for part in parts), rows)

    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract)
    places = [None] * len(leaves) if placement is None else structure.flatten_up_to(placement)
    each = shown(list(zip(leaves, places, strict=True)), "load", "tensor", progress)
    return structure.unflatten([kept(path, leaf, place) for (path, leaf), place in each])


@functools.lru_cache(maxsize=8)
def abstract_model(config: ModelConfig, dtype: Any) -> TargetModel:
    """Returns a model with `ShapeDtypeStruct`s for arrays; it is kept, so only twins of it may be changed."""
    return shapes_of(lambda rngs: family_of(config).model(config, dtype=dtype, rngs=rngs))


def save_tensors(tensors: dict[str, np.ndarray], path: pathlib.Path) -> None:
    """Writes a safetensors file with Hugging Face's metadata and the umask's permissions. Raises OSError."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path}: not written ({error})") from error
    path.chmod(mode)  # the library makes files readable by their owner only


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
    names = sorted(set(weight_map.values()))
    if outside := [file for file in names if pathlib.Path(file).name != file or file == ".."]:
        raise WeightsError(f"{folder}: {index.name}: got {outside[0]!r}, expected names of files in this folder")
    if missing := [file for file in names if not (folder / file).exists()]:
        raise WeightsError(f"{folder}: {index.name} names files that are missing: {', '.join(missing)}")
    return {name: folder / file for name, file in weight_map.items()}


def locate(folder: disk.Path) -> dict[str, disk.Path]:
    """Maps each tensor's name to its file. Raises WeightsError."""
    if (folder / INDEX).exists():
        return read_index(folder)
    found = [path for path in (folder / WEIGHTS,) if path.exists()]
    found = found or sorted(folder.glob("*.safetensors")) or sorted(folder.glob(f"*{GGUF}"))
    if len(found) > 1:
        expected = f"one, or {INDEX}; `llama-gguf-split --merge` joins the parts of a GGUF file"
        raise WeightsError(f"{folder}: got {', '.join(path.name for path in found)}, expected {expected}")
    if not found:
        others = sorted(path.name for path in folder.glob("*") if path.suffix in _PICKLES)
        hint = f"; {', '.join(others)}: pickles run code when read and are never read, convert them: {_CONVERT}"
        raise WeightsError(f"{folder}: expected {WEIGHTS}, {INDEX} or a GGUF file{hint if others else ''}")
    (single,) = found
    try:
        return dict.fromkeys(open_tensors(single)[0], single)
    except SafetensorError as error:
        raise WeightsError(f"{single}: truncated or not safetensors ({error})") from error


def _described(files: dict[str, disk.Path]) -> tuple[dict[str, Described], list[str]]:
    """Maps each tensor's name to its dtype and shape; lists the files that are damaged, whose tensors are left out."""
    found: dict[str, Described] = {}
    problems: list[str] = []
    for path in sorted(set(files.values())):
        names = {name for name, other in files.items() if other == path}
        try:
            held, _ = open_tensors(path)
        except SafetensorError as error:
            problems.append(f"{path.name}: truncated or not safetensors ({error})")
            continue
        found |= {name: held[name] for name in names & held.keys()}
        missing = sorted(names - held.keys())
        problems += [f"{path.name}: the index promises {name}, the file does not hold it" for name in missing]
    return found, problems


def spelt(table: dict[str, Entry], stored: Mapping[str, str]) -> dict[str, Entry]:
    """Replaces a table's names of tensors, those of a text-only checkpoint, by this one's: their values in `stored`."""
    found = {}
    for path, entry in table.items():
        if entry.other is not None and entry.other.tensors.keys() <= stored.keys():
            entry = entry.other
        tensors = {stored.get(name, name): shape for name, shape in entry.tensors.items()}
        found[path] = dataclasses.replace(entry, tensors=tensors)
    return found


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
    x, y = map(reader({name: files[name] for name in (one, other)}), (one, other))
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
    opened = {path: open_tensors(path)[1] for path in set(files.values())}
    return lambda name: opened[files[name]](name)
