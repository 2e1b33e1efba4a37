"""`StoredHead`, a draft head on disk independent of its form: every form is read into it and written from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int64

from eagle3_jax.formats import draft_vocabulary
from eagle3_jax.formats.tensors import EMBEDDINGS, LM_HEAD, Tensors, draft_table
from eagle3_jax.kernels.linear.layouts import dense
from eagle3_jax.mesh import fetch, parameter_path
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.models.checkpoint.table import Entry
from eagle3_jax.models.drafts.dflash import BlockHeadConfig
from eagle3_jax.models.drafts.eagle3 import DraftHead, DraftHeadConfig
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.shapes import shapes_of
from eagle3_jax.models.target import ModelConfig, default_aux_layers, without_aux_layers

_ROWS = 8192  # rows of embeddings compared at a time: the whole table may fill most of a device


class DraftFormatError(ValueError):
    """A draft checkpoint that cannot be used, or a draft that cannot be saved; the message lists every problem."""


@dataclasses.dataclass(frozen=True)
class StoredHead:
    """A draft head on disk.

    Attributes:
        config: its shape. `aux_layers` is None for the default, which no form writes down.
        tensors: `draft_table`'s, in the stored dtype. Without `lm_head.weight` the LM head is the target's, at the rows
            of the draft vocabulary. `embed_tokens.weight` is kept only if the head is not as wide as its target.
        token_ids: target ids of the draft tokens, ascending.
        target_layers: number of the target's layers, if known.
        verifier: the target by name, as in speculators: `name_or_path`, `architectures`.
    """

    config: DraftHeadConfig
    tensors: Tensors
    token_ids: Int64[np.ndarray, " dv"]
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    target_layers: int | None = None
    verifier: dict[str, Any] | None = None

    @property
    def tied(self) -> bool:
        return LM_HEAD not in self.tensors

    def same(self, other: StoredHead) -> bool:
        """Tells whether two heads draft alike: equal shape, token ids and tensors, to the bit."""
        return (
            self.config == other.config
            and np.array_equal(self.token_ids, other.token_ids)
            and self.tensors.keys() == other.tensors.keys()
            and all(_same_bits(x, other.tensors[name]) for name, x in self.tensors.items())
        )


def misfits(head: DraftHeadConfig | BlockHeadConfig, target: ModelConfig) -> list[str]:
    """Lists why a head cannot draft for a target, a line for each field; empty when it can.

    A block head's file names its aux layers, and the target is observed there; so must an EAGLE-3 head's be already.
    """
    block = isinstance(head, BlockHeadConfig)
    if not block and not target.aux_layers:
        return [without_aux_layers(target)]
    aux_layers = head.aux_layers or default_aux_layers(target.num_hidden_layers)
    pairs = [
        ("vocab_size", head.vocab_size, target.vocab_size),
        ("target_hidden_size", head.target_hidden_size, target.hidden_size),
        ("hidden_size", head.hidden_size, target.hidden_size),  # the head reads the target's embeddings
    ]
    pairs += [] if block else [("aux layers (boundaries)", aux_layers, target.aux_layers)]
    problems = [f"{field}: got {got}, expected {wanted}, the target's" for field, got, wanted in pairs if got != wanted]
    for shift, hint in ((1, "less, as SGLang counts: layers, by their outputs"), (-1, "more, as if counted twice")):
        if not block and tuple(boundary + shift for boundary in aux_layers) == target.aux_layers:
            problems[-1] += f"; each is one {hint}"
    if block and aux_layers[-1] > target.num_hidden_layers:
        expected = f"boundaries up to {target.num_hidden_layers}, the target's last"
        problems.append(f"aux layers (boundaries): got {aux_layers}, expected {expected}")
    if head.draft_vocab_size > target.vocab_size:
        problems.append(f"draft_vocab_size: got {head.draft_vocab_size}, expected at most {target.vocab_size}")
    return problems


def stale_embeddings(tensors: Tensors, target: Target) -> list[str]:
    """Compares a head's copy of the embeddings with the target's: vLLM drafts with the copy, this package does not."""
    return _stale(tensors, EMBEDDINGS, target.model.embed[...], "the target's embeddings")


def stale_lm_head(tensors: Tensors, target: Target) -> list[str]:
    """Compares a block head's copy of the whole LM head with the target's, as `stale_embeddings` does."""
    return _stale(tensors, LM_HEAD, target.model.output_rows, "the target's LM head")


def _stale(tensors: Tensors, name: str, original: Any, words: str) -> list[str]:
    """Lists a copy that differs from the original by more than the rounding of both dtypes.

    Either side may have been rounded to the other's dtype, or its own.
    """
    copy = tensors.get(name)
    if copy is None or not isinstance(original, jax.Array):
        return []
    if copy.shape != original.shape or not jnp.issubdtype(copy.dtype, np.floating):
        return []  # reported by `head_problems`
    kinds = [jnp.finfo(dtype) for dtype in (copy.dtype, original.dtype)]
    relative = sum(float(kind.eps) / 2 for kind in kinds)
    absolute = sum(float(kind.smallest_subnormal) / 2 for kind in kinds)
    stale, largest = False, 0.0
    for start in range(0, len(copy), _ROWS):
        got = copy[start : start + _ROWS].astype(np.float32)
        expected = np.asarray(fetch(original[start : start + _ROWS])).astype(np.float32)
        difference = np.abs(got - expected)
        stale |= not (difference <= relative * np.maximum(np.abs(got), np.abs(expected)) + absolute).all()
        largest = float(np.maximum(largest, difference.max()))  # keeps NaN
    if not stale:
        return []
    return [
        f"{name}: got other values than {words} (largest difference {largest:.3g}), expected equal ones or none; "
        "without the tensor the target's are used"
    ]


def verifier(name: str | None, architecture: str) -> dict[str, Any]:
    """Names a target as speculators does."""
    return {"name_or_path": name, "architectures": [architecture]}


def from_draft(draft: Draft, target: ModelConfig, dtype: str, name: str | None) -> tuple[StoredHead, list[str]]:
    """Converts a head in memory to a stored one, with a list of its problems; `name` is the target's."""
    config = draft.head.config
    ids = np.asarray(draft.token_ids).astype(np.int64)
    problems = misfits(config, target) + draft_vocabulary.problems(ids, config)
    tensors = to_tensors(draft.head, draft_table(config), dtype, problems)
    default = config.aux_layers == default_aux_layers(target.num_hidden_layers)
    stored = StoredHead(
        config=dataclasses.replace(config, aux_layers=None) if default else config,
        tensors=tensors,
        token_ids=ids,
        **of_target(target, name),
    )
    return stored, problems


def to_tensors(head: nnx.Module, table: Mapping[str, Entry], dtype: str, problems: list[str]) -> Tensors:
    """Converts a head's parameters to its tensors. Appends to `problems` by parameter."""
    tensors: Tensors = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(head):
        entry, value = table[parameter_path(path)], np.asarray(leaf).astype(jnp.dtype(dtype))
        if not np.isfinite(value).all():
            problems.append(f"{parameter_path(path)}: got NaN or infinity; did the training diverge?")
        tensors |= dict(zip(entry.tensors, map(np.ascontiguousarray, entry.split(value)), strict=True))
    return tensors


def of_target(target: ModelConfig, name: str | None) -> dict[str, Any]:
    """Returns the fields of `StoredHead` that describe the target; `name` is its name."""
    eos = target.eos_token_ids
    return {
        "bos_token_id": target.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "target_layers": target.num_hidden_layers,
        "verifier": verifier(name, target.architecture),
    }


def to_draft(stored: StoredHead, target: Target | ModelConfig, dtype: Any) -> Draft:
    """Loads a stored head into memory. Raises DraftFormatError if its LM head is the target's, and not loaded."""
    architecture = target.model.config if isinstance(target, Target) else target
    config = stored.config
    if config.aux_layers is None:
        config = dataclasses.replace(config, aux_layers=default_aux_layers(architecture.num_hidden_layers))
    tensors = stored.tensors
    if stored.tied:
        tensors = tensors | {LM_HEAD: np.asarray(target_rows(stored, target)[stored.token_ids])}
    table = draft_table(config)

    def read(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        entry = table[parameter_path(path)]
        value = entry.whole(*(tensors[name] for name in entry.tensors))
        return jnp.asarray(np.ascontiguousarray(value).astype(leaf.dtype))

    abstract = shapes_of(lambda rngs: DraftHead(config, dtype=dtype, rngs=rngs))
    head = jax.tree_util.tree_map_with_path(read, abstract)
    return Draft(head, jnp.asarray(stored.token_ids.astype(np.int32)))


def target_rows(stored: StoredHead, target: Target | ModelConfig) -> Float[Array, "v h"]:
    """Returns the target's LM head, which a head without its own uses. Raises DraftFormatError if it is not loaded."""
    rows = dense(target.model.output_rows) if isinstance(target, Target) else None
    if not isinstance(rows, jax.Array) or not rows.is_fully_addressable:
        shape = [stored.config.draft_vocab_size, stored.config.hidden_size]
        raise DraftFormatError(
            f"missing tensor {LM_HEAD} {shape}: to use the target's rows, expected a target that is loaded, with "
            "its LM head on this process"
        )
    return rows


def _same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
