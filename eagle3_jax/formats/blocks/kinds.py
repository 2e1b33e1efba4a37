"""Heads that draft a block in one pass (DFlash, DSpark, DFlash2) on disk: their tensors, and their names in engines.

Names of tensors are those of z-lab's and DeepSpec's checkpoints; projections are [out, in], as in torch. SGLang
(models/dflash.py, dspark.py, 0.5.23) drops a tensor that it does not know without a message.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any

import numpy as np

from eagle3_jax.config import DraftConfig
from eagle3_jax.formats.blocks import compatibility
from eagle3_jax.formats.blocks import config as block_config
from eagle3_jax.formats.stored import StoredKind
from eagle3_jax.formats.tensors import Tensors, canonical
from eagle3_jax.models.checkpoint.table import Entry, kernel, plain, swiglu
from eagle3_jax.models.drafts.dflash import FULL, BlockHeadConfig, DFlash
from eagle3_jax.models.drafts.dflash2 import DFlash2
from eagle3_jax.models.drafts.dspark import DSpark
from eagle3_jax.models.drafts.eagle3 import DraftHeadConfig
from eagle3_jax.models.target_config import ModelConfig

MASK_EMBEDDING = "mask_embedding.pt"
MARKOV, CONFIDENCE, SELECTOR = "markov_head.", "confidence_head.proj.", "candidate_selector."
# Other spelling -> canonical one (vLLM's qwen3_dflash.py, 0.32.0; SGLang has the last two).
SPELLINGS = (("midlayer.", "layers.0."), ("encoder.fc.", "fc."), ("encoder.output_norm_enc.", "hidden_norm."))


def table(network: type[DFlash], config: BlockHeadConfig) -> dict[str, Entry]:
    """Maps each parameter path in the head to its tensors, but the LM head."""
    c = config
    h = c.hidden_size
    entries = {
        "fc": kernel("fc.weight", h, len(c.aux_layers) * c.target_hidden_size),
        "hidden_norm": plain("hidden_norm.weight", h),
        "norm": plain("norm.weight", h),
    }
    for i in range(len(c.layer_types)):
        layer = _layer(c, f"layers.{i}.", convolved=network.corrector == "selector")
        entries |= {f"layers/{i}/{path}": entry for path, entry in layer.items()}
    if network.corrector == "markov":
        entries["markov_in"] = plain(f"{MARKOV}markov_w1.weight", c.vocab_size, c.markov_rank)
        entries["markov_out"] = plain(f"{MARKOV}markov_w2.weight", c.draft_vocab_size, c.markov_rank)
        if c.confidence:
            entries["confidence"] = kernel(f"{CONFIDENCE}weight", 1, h + c.markov_rank)
            entries["confidence_bias"] = plain(f"{CONFIDENCE}bias", 1)
    if network.corrector == "selector":
        entries["predecessors"] = plain(f"{SELECTOR}predecessor_codebook", c.vocab_size, c.selector_rank)
        entries["successors"] = plain(f"{SELECTOR}successor_codebook", c.draft_vocab_size, c.selector_rank)
        entries["selector"] = kernel(f"{SELECTOR}hidden_projection.weight", c.selector_rank, h)
    return entries


def _layer(config: BlockHeadConfig, layer: str, *, convolved: bool) -> dict[str, Entry]:
    c = config
    h, attention = c.hidden_size, f"{layer}self_attn."
    entries = {
        "input_norm": plain(f"{layer}input_layernorm.weight", h),
        "q": kernel(f"{attention}q_proj.weight", c.num_attention_heads * c.head_dim, h),
        "kv": _keys_and_values(c, attention),
        "o": kernel(f"{attention}o_proj.weight", h, c.num_attention_heads * c.head_dim),
        "q_norm": plain(f"{attention}q_norm.weight", c.head_dim),
        "k_norm": plain(f"{attention}k_norm.weight", c.head_dim),
        "post_norm": plain(f"{layer}post_attention_layernorm.weight", h),
        **{f"mlp/{name}": entry for name, entry in swiglu(f"{layer}mlp", h, c.intermediate_size).items()},
    }
    rows = 2 * c.conv_taps * h // c.conv_group  # ordered by side, tap and group
    for name in ("attention_conv", "mlp_conv") if convolved else ():
        entries[f"{name}/base"] = plain(f"{layer}{name}.base_kernel", 2, c.conv_taps, h)
        entries[f"{name}/taps"] = kernel(f"{layer}{name}.kernel_projection.weight", rows, h)
    return entries


def _keys_and_values(config: BlockHeadConfig, attention: str) -> Entry:
    """Fuses keys and values [kv_heads * d, H] each -> [H, kv_heads * 2 * d]: a head's key lies beside its value."""
    c = config
    shape = (c.num_key_value_heads * c.head_dim, c.hidden_size)

    def part(index: tuple[slice, ...], *tensors: np.ndarray) -> np.ndarray:
        heads = [x[:].reshape(c.num_key_value_heads, 1, c.head_dim, c.hidden_size) for x in tensors]
        return np.concatenate(heads, axis=1).reshape(-1, c.hidden_size).T[index]

    def split(x: np.ndarray) -> tuple[np.ndarray, ...]:
        heads = x.T.reshape(c.num_key_value_heads, 2, c.head_dim, c.hidden_size)
        return heads[:, 0].reshape(shape), heads[:, 1].reshape(shape)

    return Entry(dict.fromkeys((f"{attention}k_proj.weight", f"{attention}v_proj.weight"), shape), part, split)


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
    layer, nested = values.get("transformer_layer_config") or values, values.get(block_config.NESTED) or {}
    speculation = values.get("speculators_config") or {}
    return {
        "config": config,
        "bos_token_id": layer.get("bos_token_id"),
        "eos_token_id": layer.get("eos_token_id"),
        "target_layers": values.get("num_target_layers", nested.get("num_target_layers")),
        "verifier": speculation.get("verifier") if block_config.SPECULATORS_TYPE in values else None,
    }


def _arranged(tensors: Tensors, values: dict[str, Any]) -> Tensors:
    """Moves neighbours that RoPE rotates into the two halves of a head, in queries and keys alike.

    No product of the two changes, and a head that is written again rotates halves, as every engine has it.
    """
    if not block_config.interleaved(values):
        return tensors
    made = dict(tensors)
    for name, tensor in tensors.items():
        attention, _, part = name.rpartition("self_attn.")
        if part in ("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight"):
            d = len(tensors[f"{attention}self_attn.q_norm.weight"])
            made[name] = tensor.reshape(-1, d // 2, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    return made


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
        table=of(table, network),
        values=of(block_config.write, network),
        engines=compatibility.ENGINES,
        canonical=of(canonical, spellings=SPELLINGS),
        arranged=_arranged,
        on_disk=lambda config, target: block_config.canonical(network, config),
        contradictions=of(block_config.contradictions, network),
        drafts=lambda config: config.block_size - network.first_row,
    )


DFLASH, DSPARK, DFLASH2 = BLOCKS = _kind(DFlash, "dflash"), _kind(DSpark, "dspark"), _kind(DFlash2, "dflash")
