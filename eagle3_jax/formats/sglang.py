"""Draft heads on disk as SGLang and vLLM serve them (EAGLE3_SPEC section 6, ENGINES section 3).

`model.safetensors` (names `midlayer.*`, projections [out, in]) and `config.json`. `d2t` is stored as int64 offsets
(target id - draft id) and `t2d` as bool; both go through numpy alone, since JAX would make int32 of them. The
embeddings are the target's and are not stored. An engine drops what it does not know and leaves at random what it
misses, without a word: hence a load here refuses everything that does not fit, all in one message.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx
from jaxtyping import Int32
from safetensors import SafetensorError

from eagle3_jax import manifest
from eagle3_jax.formats.sglang_config import misfits, read_config, uncapturable, write_config
from eagle3_jax.models.draft import Draft, DraftHead, DraftHeadConfig
from eagle3_jax.models.identity import check_same_target
from eagle3_jax.models.llama import LlamaConfig
from eagle3_jax.models.registry import Target
from eagle3_jax.models.weights import Entry, fuse_qkv, parameter_path, same, transposed

WEIGHTS, CONFIG = "model.safetensors", "config.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_EMBEDDINGS = "embed_tokens.weight"  # a copy of the target's in some checkpoints; the target's own is used

Tensors = dict[str, np.ndarray]


class DraftFormatError(ValueError):
    """A draft checkpoint that cannot be used, or a draft that cannot be saved; the message lists every problem."""


@dataclasses.dataclass(frozen=True)
class DraftEntry(Entry):
    """How one parameter is made of tensors, and taken apart again.

    Attributes:
        split: the inverse of `whole`: the parameter -> its tensors, in order.
    """

    split: Callable[[np.ndarray], tuple[np.ndarray, ...]]


def draft_table(config: DraftHeadConfig) -> dict[str, DraftEntry]:
    """Parameter path in `DraftHead` -> the tensors that it is made of."""
    c = config
    h, f, d = c.hidden_size, c.intermediate_size, c.head_dim
    heads, kv = c.num_attention_heads * d, c.num_key_value_heads * d
    attention, mlp = "midlayer.self_attn", "midlayer.mlp"

    def plain(name: str, *shape: int) -> DraftEntry:
        return DraftEntry({name: shape}, same, lambda x: (x,))

    def kernel(name: str, *shape: int) -> DraftEntry:
        return DraftEntry({name: shape}, transposed, lambda x: (x.T,))

    table = {
        "fc": kernel("fc.weight", h, len(c.aux_layers) * c.target_hidden_size),
        "input_norm": plain("midlayer.input_layernorm.weight", h),
        "hidden_norm": plain("midlayer.hidden_norm.weight", h),
        "attention/qkv": DraftEntry(
            {
                f"{attention}.q_proj.weight": (heads, 2 * h),
                f"{attention}.k_proj.weight": (kv, 2 * h),
                f"{attention}.v_proj.weight": (kv, 2 * h),
            },
            functools.partial(fuse_qkv, c),
            lambda x: _split_qkv(c, x),
        ),
        "attention/o": kernel(f"{attention}.o_proj.weight", h, heads),
        "post_norm": plain("midlayer.post_attention_layernorm.weight", h),
        "mlp/gate": kernel(f"{mlp}.gate_proj.weight", f, h),
        "mlp/up": kernel(f"{mlp}.up_proj.weight", f, h),
        "mlp/down": kernel(f"{mlp}.down_proj.weight", h, f),
        "norm": plain("norm.weight", h),
        "lm_head": plain("lm_head.weight", c.draft_vocab_size, h),
    }
    if c.fc_norm:
        table |= {f"fc_norm/{i}": plain(f"fc_norm.{i}.weight", c.target_hidden_size) for i in range(len(c.aux_layers))}
    return table


def save_draft(folder: str | pathlib.Path, draft: Draft, *, target: LlamaConfig, dtype: str) -> None:
    """Writes `folder`, which appears whole or not at all.

    Args:
        folder: must not exist yet.
        target: the model that the head drafts for.
        dtype: of the stored weights, "float32" or "bfloat16".

    Raises:
        DraftFormatError: the head does not fit the target, an engine could not feed it, or its token ids cannot be a
            draft vocabulary.
        FileExistsError: `folder` exists.
    """
    folder = pathlib.Path(folder)
    if folder.exists():
        raise FileExistsError(f"{folder}: exists already, expected a new folder")
    with manifest.atomic(folder) as partial:
        write_draft(partial, draft, target=target, dtype=dtype)


def write_draft(folder: pathlib.Path, draft: Draft, *, target: LlamaConfig, dtype: str) -> None:
    """`save_draft` into a folder that the caller makes appear whole or not at all."""
    config = draft.head.config
    ids = np.asarray(draft.token_ids).astype(np.int64)
    problems = misfits(config, target) + uncapturable(config, target) + _vocabulary_problems(ids, config)
    table = draft_table(config)
    tensors: Tensors = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(draft.head):
        entry, value = table[parameter_path(path)], np.asarray(leaf).astype(jnp.dtype(dtype))
        if not np.isfinite(value).all():
            problems.append(f"{parameter_path(path)}: got NaN or infinity; did the training diverge?")
        tensors |= dict(zip(entry.tensors, map(np.ascontiguousarray, entry.split(value)), strict=True))
    if problems:
        raise DraftFormatError("this draft cannot be saved:\n  " + "\n  ".join(problems))
    tensors["d2t"] = ids - np.arange(len(ids), dtype=np.int64)
    tensors["t2d"] = np.zeros(config.vocab_size, np.bool_)
    tensors["t2d"][ids] = True
    folder.mkdir(parents=True)
    try:
        safetensors.numpy.save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{folder / WEIGHTS}: not written ({error})") from error
    (folder / CONFIG).write_text(json.dumps(write_config(config, target, dtype), indent=2) + "\n")


def load_draft(folder: str | pathlib.Path, *, target: Target | LlamaConfig, dtype: Any = jnp.float32) -> Draft:
    """Reads a draft head that drafts for `target`.

    Also takes what engines take: `layers.0.` for `midlayer.`, a `model.` prefix, no `t2d`, no `rope_theta` (10000).

    Args:
        target: the model that the head shall draft for. The manifest beside a head of `export` says which one it was
            trained with; that must be this one. A head from elsewhere has none, and an architecture alone (a
            `LlamaConfig`) cannot be compared with it: then only shapes are.
        dtype: of the loaded weights.

    Raises:
        DraftFormatError: every problem of config.json and every missing, surplus or wrongly shaped tensor, by name.
        ManifestError: the head was trained with another target.
    """
    folder = pathlib.Path(folder)
    if isinstance(target, Target):
        if (folder / manifest.NAME).exists():
            check_same_target(folder, manifest.read(folder, "export")["identity"].get("target"), target.identity)
        target = target.model.config
    tensors, problems = _read_tensors(folder)
    config, more = read_config(_read_json(folder / CONFIG), target)
    problems += more
    if config is not None:
        problems += _tensor_problems(tensors, config)
    if problems or config is None:
        raise DraftFormatError(f"{folder} does not hold a usable draft head:\n  " + "\n  ".join(problems))
    table = draft_table(config)

    def read(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        entry = table[parameter_path(path)]
        value = entry.whole(*(tensors[name] for name in entry.tensors))
        return jnp.asarray(np.ascontiguousarray(value).astype(leaf.dtype))

    abstract = nnx.eval_shape(lambda: DraftHead(config, dtype=dtype, rngs=nnx.Rngs(0)))
    head = jax.tree_util.tree_map_with_path(read, abstract)
    return Draft(head, jnp.asarray(_absolute(tensors["d2t"])))


def file_digests(folder: str | pathlib.Path) -> dict[str, str]:
    """Name -> sha256 in hex of each file that `load_draft` reads a head from."""
    folder = pathlib.Path(folder)
    return {path.name: manifest.digest(path) for path in sorted([*folder.glob(CONFIG), *folder.glob("*.safetensors")])}


def _split_qkv(config: DraftHeadConfig, x: np.ndarray) -> tuple[np.ndarray, ...]:
    """The inverse of `fuse_qkv`: q [heads * d, in] (a KV head's queries side by side), k and v [kv_heads * d, in]."""
    heads = x.T.reshape(config.num_key_value_heads, -1, config.head_dim, x.shape[0])
    return tuple(part.reshape(-1, x.shape[0]) for part in (heads[:, :-2], heads[:, -2], heads[:, -1]))


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise DraftFormatError(f"{path}: not found, expected the draft head's config") from error
    except ValueError as error:
        raise DraftFormatError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise DraftFormatError(f"{path}: got {type(values).__name__}, expected an object")
    return values


def _read_tensors(folder: pathlib.Path) -> tuple[Tensors, list[str]]:
    """All tensors of a folder under their canonical names, and the names that occur twice."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        found = sorted(path.name for path in folder.glob("*") if path.suffix in _PICKLES)
        hint = f"; {', '.join(found)}: pickles run code when read and are never read, convert to safetensors"
        raise DraftFormatError(f"{folder}: expected {WEIGHTS}{hint if found else ''}")
    tensors: Tensors = {}
    problems: list[str] = []
    for path in files:
        try:
            held = safetensors.numpy.load_file(path)
        except (SafetensorError, KeyError) as error:
            raise DraftFormatError(f"{path}: truncated, or not safetensors of a known dtype ({error})") from error
        for name, tensor in held.items():
            canonical = name.removeprefix("model.")
            if canonical.startswith("layers.0."):
                canonical = "midlayer." + canonical.removeprefix("layers.0.")
            if canonical in tensors:
                problems.append(f"{name}: a second tensor for {canonical}")
            tensors[canonical] = tensor
    return tensors, problems


def _tensor_problems(tensors: Tensors, config: DraftHeadConfig) -> list[str]:
    expected = {name: shape for entry in draft_table(config).values() for name, shape in entry.tensors.items()}
    optional = {"t2d": (config.vocab_size,), _EMBEDDINGS: (config.vocab_size, config.hidden_size)}
    expected["d2t"] = (config.draft_vocab_size,)
    problems = [f"missing tensor {name} {list(shape)}" for name, shape in expected.items() if name not in tensors]
    problems += [f"surplus tensor {name}" for name in sorted(tensors.keys() - expected.keys() - optional.keys())]
    misshapen = set()
    for name, shape in (expected | optional).items():
        if name in tensors and tensors[name].shape != shape:
            problems.append(f"{name}: got shape {list(tensors[name].shape)}, expected {list(shape)}")
            misshapen.add(name)
    kinds = {"d2t": (np.integer, "integer offsets"), "t2d": (np.bool_, "bool")}
    for name in sorted(tensors.keys() & (expected | optional).keys()):
        kind, wanted = kinds.get(name, (np.floating, "floating point"))
        if not jnp.issubdtype(tensors[name].dtype, kind):
            problems.append(f"{name}: got {tensors[name].dtype}, expected {wanted}")
            misshapen.add(name)
    if "d2t" in tensors and not misshapen & {"d2t", "t2d"}:
        problems += _mapping_problems(tensors["d2t"].astype(np.int64), tensors.get("t2d"), config)
    return problems


def _mapping_problems(d2t: np.ndarray, t2d: np.ndarray | None, config: DraftHeadConfig) -> list[str]:
    """Whether the offsets make a draft vocabulary, and the one that `t2d` says."""
    if t2d is not None and len(d2t) > 1 and np.array_equal(np.flatnonzero(t2d), d2t):
        return ["d2t: got absolute target ids, expected offsets (target id - draft id)"]
    problems = _vocabulary_problems(d2t + np.arange(len(d2t)), config)
    if problems:
        return [f"d2t: as offsets (target id - draft id): {problem}" for problem in problems]
    if t2d is not None:
        if not np.array_equal(np.flatnonzero(t2d), d2t + np.arange(len(d2t))):
            return ["t2d: got other tokens than d2t selects"]
    elif len(d2t) > 1 and (np.diff(d2t) > 0).all():
        # No two neighbours of the target's vocabulary among so many tokens: these are ids, not offsets.
        return ["d2t: rises at every step as absolute ids do, expected offsets (target id - draft id); no t2d to tell"]
    return []


def _vocabulary_problems(ids: np.ndarray, config: DraftHeadConfig) -> list[str]:
    if ids.shape != (config.draft_vocab_size,):
        return [f"token ids: got shape {list(ids.shape)}, expected {[config.draft_vocab_size]}"]
    if ids[0] < 0 or ids[-1] >= config.vocab_size or (np.diff(ids) <= 0).any():
        span = f"{ids.min()}..{ids.max()}"
        return [f"token ids: got {span}, expected ascending, distinct, within 0..{config.vocab_size - 1}"]
    return []


def _absolute(d2t: np.ndarray) -> Int32[np.ndarray, " dv"]:
    return (d2t + np.arange(len(d2t))).astype(np.int32)
