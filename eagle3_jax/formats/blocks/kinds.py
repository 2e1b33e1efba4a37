"""Heads that draft a block in one pass (DFlash, DSpark, DFlash2) on disk, and their names in engines."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any

from eagle3_jax.config import DraftConfig
from eagle3_jax.formats import fields
from eagle3_jax.formats.blocks import compatibility, tensors
from eagle3_jax.formats.blocks import config as block_config
from eagle3_jax.formats.forms import SPECULATORS
from eagle3_jax.formats.kind import StoredHead
from eagle3_jax.formats.stored import StoredKind
from eagle3_jax.formats.tensors import Tensors, canonical
from eagle3_jax.models.drafts.dflash import FULL, BlockHeadConfig, DFlash
from eagle3_jax.models.drafts.dflash2 import DFlash2
from eagle3_jax.models.drafts.dspark import DSpark
from eagle3_jax.models.drafts.eagle3 import DraftHeadConfig
from eagle3_jax.models.target_config import ModelConfig

MASK_EMBEDDING = "mask_embedding.pt"


def _shape(network: type[DFlash], draft: DraftConfig, target: ModelConfig) -> BlockHeadConfig:
    eagle, mask, name = DraftHeadConfig.for_target(draft, target), draft.mask_token_id, network.__name__.lower()
    if mask is None or mask >= target.vocab_size:
        expected = f"a token of the target without another use, below {target.vocab_size}"
        raise ValueError(f"draft.mask_token_id: got {mask}, expected {expected}, for draft.kind {name!r}")
    names = {field.name for field in dataclasses.fields(BlockHeadConfig)}
    shared: dict[str, Any] = {name: x for name, x in dataclasses.asdict(eagle).items() if name in names}
    shape = BlockHeadConfig(
        **shared,
        block_size=draft.block_size,
        mask_token_id=mask,
        layer_types=draft.layer_types or (FULL,) * draft.num_layers,
        sliding_window=draft.sliding_window,
        is_causal=draft.is_causal,
        selector_rank=draft.selector_rank,
    )
    if problems := block_config.contradictions(network, shape):  # no form of an export could hold the head
        raise ValueError(f"draft.kind {name!r} for this target: {'; '.join(problems)}")
    return shape


def _described(
    network: type[DFlash], folder: pathlib.Path, values: dict[str, Any], _: Tensors, problems: list[str]
) -> dict[str, Any] | None:
    if (folder / MASK_EMBEDDING).exists():
        expected = "expected none: the mask token's row of the target's embeddings is the mask"
        problems.append(f"{MASK_EMBEDDING}: got a pickle, which is never read; {expected}")
    config = block_config.read(network, values, problems)
    if config is None:
        return None
    layer = values.get("transformer_layer_config") or values
    speculation = values.get("speculators_config") or {}
    return {
        "config": config,
        "bos_token_id": layer.get("bos_token_id"),
        "eos_token_id": layer.get("eos_token_id"),
        "target_layers": values.get("num_target_layers"),
        "verifier": speculation.get("verifier") if block_config.SPECULATORS_TYPE in values else None,
    }


def _values(network: type[DFlash], head: StoredHead, form: str) -> dict[str, Any]:
    base = fields.llama(head) | {"model_type": "qwen3"}
    if form == SPECULATORS.name:
        return block_config.write_speculators(network, head.config, base, head.verifier)
    return block_config.write(network, head.config, base, head.target_layers)


def _kind(network: type[DFlash], method: str) -> StoredKind:
    of = functools.partial
    return StoredKind(
        name=network.__name__.lower(),
        label=network.__name__,
        network=network,
        method=method,
        algorithm=method.upper(),
        is_mine=lambda folder, values: block_config.describes(network, values),
        shape=of(_shape, network),
        described=of(_described, network),
        table=of(tensors.table, network),
        values=of(_values, network),
        engines=compatibility.ENGINES,
        canonical=of(canonical, spellings=tensors.SPELLINGS),
        on_disk=lambda config, target: block_config.canonical(network, config),
        contradictions=of(block_config.contradictions, network),
        drafts=lambda config: config.block_size - network.first_row,
    )


DFLASH, DSPARK, DFLASH2 = KINDS = _kind(DFlash, "dflash"), _kind(DSpark, "dspark"), _kind(DFlash2, "dflash")
