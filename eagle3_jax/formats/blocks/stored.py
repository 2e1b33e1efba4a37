"""A block head on disk, independent of its form, and its conversion from and to a head in memory."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from eagle3_jax.formats import draft_vocabulary, fields, files
from eagle3_jax.formats.blocks import config as block_config
from eagle3_jax.formats.blocks.kinds import DFLASH, SPECULATORS_TYPE, BlockKind, kind_of, kind_of_head
from eagle3_jax.formats.blocks.tensors import canonical, table
from eagle3_jax.formats.forms import SPECULATORS
from eagle3_jax.formats.stored import (
    DraftFormatError,
    StoredHead,
    misfits,
    of_target,
    stale_embeddings,
    stale_lm_head,
    target_rows,
    to_tensors,
)
from eagle3_jax.formats.tensors import EMBEDDINGS, LM_HEAD, head_problems
from eagle3_jax.mesh import parameter_path
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.models.checkpoint.table import plain
from eagle3_jax.models.drafts.dflash import BlockHeadConfig, DFlash
from eagle3_jax.models.shapes import shapes_of
from eagle3_jax.models.target import ModelConfig

MASK_EMBEDDING = "mask_embedding.pt"


@dataclasses.dataclass(frozen=True)
class StoredBlockHead(StoredHead):
    """A block head on disk; see `StoredHead`.

    Attributes:
        config: canonical, see `config.canonical`; `aux_layers` is always given.
        tensors: those of `tensors.table`, and `lm_head.weight` unless the LM head is the target's.
    """

    config: BlockHeadConfig  # pyrefly: ignore
    kind: BlockKind = DFLASH

    def same(self, other: StoredHead) -> bool:
        return isinstance(other, StoredBlockHead) and self.kind is other.kind and super().same(other)


def is_block_head(folder: pathlib.Path) -> bool:
    return (folder / files.CONFIG).exists() and kind_of(files.read_config(folder)) is not None


def read_block_head(folder: pathlib.Path, target: Target | ModelConfig | None) -> StoredBlockHead:
    """Reads a block head from its folder; see `heads.read`. Raises DraftFormatError."""
    values = files.read_config(folder)
    kind = kind_of(values)
    assert kind is not None
    tensors, problems = files.read_tensors(folder, canonical)
    if (folder / MASK_EMBEDDING).exists():
        problems.append(
            f"{MASK_EMBEDDING}: got a pickle, which is never read; expected none: the mask token's row of the target's "
            "embeddings is the mask"
        )
    config = block_config.read(kind, values, problems)
    if config is not None:
        problems += head_problems(tensors, table(kind, config), config)
        shape = target.model.config if isinstance(target, Target) else target
        problems += [] if shape is None else misfits(config, shape) + _other_depth(values, shape)
    if config is not None and isinstance(target, Target):
        problems += stale_embeddings(tensors, target)
        if config.draft_vocab_size == config.vocab_size:
            problems += stale_lm_head(tensors, target)
    if problems:
        raise DraftFormatError(f"{folder} does not hold a usable {kind.label} head:\n  " + "\n  ".join(problems))
    assert config is not None
    layer = values.get("transformer_layer_config") or values
    speculation = values.get("speculators_config") or {}
    return StoredBlockHead(
        config=config,
        tensors={name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d", EMBEDDINGS)},
        token_ids=draft_vocabulary.read(tensors.get("d2t"), config),
        bos_token_id=layer.get("bos_token_id"),
        eos_token_id=layer.get("eos_token_id"),
        target_layers=values.get("num_target_layers"),
        verifier=speculation.get("verifier") if SPECULATORS_TYPE in values else None,
        kind=kind,
    )


def config_values(head: StoredBlockHead, form: str) -> dict[str, Any]:
    """Writes config.json in a form."""
    base = fields.llama(head) | {"model_type": "qwen3"}
    if form == SPECULATORS.name:
        return block_config.write_speculators(head.kind, head.config, base, head.verifier)
    return block_config.write(head.kind, head.config, base, head.target_layers)


def from_head(
    head: DFlash, token_ids: Int[Array | np.ndarray, " dv"], target: ModelConfig, dtype: str, name: str | None
) -> tuple[StoredBlockHead, list[str]]:
    """Converts a head in memory to a stored one, with a list of its problems; see `stored.from_draft`.

    The LM head of the whole vocabulary is the target's, and is not stored.
    """
    kind = kind_of_head(head)
    config = block_config.canonical(kind, head.config)
    ids = np.asarray(token_ids).astype(np.int64)
    problems = misfits(config, target) + draft_vocabulary.problems(ids, config)
    problems += block_config.contradictions(kind, config)
    lm_head = plain(LM_HEAD, config.draft_vocab_size, config.hidden_size)
    tensors = to_tensors(head, table(kind, config) | {"lm_head": lm_head}, dtype, problems)
    if config.draft_vocab_size == config.vocab_size:
        tensors.pop(LM_HEAD, None)
    return StoredBlockHead(config, tensors, ids, **of_target(target, name), kind=kind), problems


def to_head(stored: StoredBlockHead, target: Target | ModelConfig, dtype: Any) -> DFlash:
    """Loads a stored head into memory, with `lm_head`; that of the whole vocabulary is the target's own array.

    Raises:
        DraftFormatError: the LM head is the target's, and not loaded.
    """
    config, entries = stored.config, table(stored.kind, stored.config)
    whole = config.draft_vocab_size == config.vocab_size
    if stored.tied or (whole and isinstance(target, Target)):
        rows = target_rows(stored, target)
        rows = rows if whole else rows[stored.token_ids]
    else:
        rows = jnp.asarray(stored.tensors[LM_HEAD])
    rows = rows if rows.dtype == dtype else rows.astype(dtype)

    def value(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = parameter_path(path)
        if name == "lm_head":
            return rows
        parameter = entries[name].whole(*(stored.tensors[tensor] for tensor in entries[name].tensors))
        return jnp.asarray(np.ascontiguousarray(parameter).astype(leaf.dtype))

    abstract = shapes_of(lambda rngs: stored.kind.network(config, dtype=dtype, rngs=rngs))
    head = jax.tree_util.tree_map_with_path(value, abstract)
    head.lm_head = nnx.Param(rows)
    return head


def _other_depth(values: dict[str, Any], target: ModelConfig) -> list[str]:
    depth = values.get("num_target_layers")
    if depth in (None, target.num_hidden_layers):
        return []
    return [f"num_target_layers: got {depth!r}, expected {target.num_hidden_layers}, the target's"]
