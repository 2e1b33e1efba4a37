"""The tensors of a block head, and their mapping to its parameters.

Names are those of z-lab's and DeepSpec's checkpoints; projections are [out, in], as in torch. SGLang (models/dflash.py,
dspark.py, 0.5.23) drops a tensor that it does not know without a message.
"""

from __future__ import annotations

import numpy as np

from eagle3_jax.models.checkpoint.table import Entry, kernel, plain
from eagle3_jax.models.drafts.dflash import BlockHeadConfig, DFlash

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
        layer = _layer(c, f"layers.{i}.") | (
            _convolutions(c, f"layers.{i}.") if network.corrector == "selector" else {}
        )
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


def _layer(config: BlockHeadConfig, layer: str) -> dict[str, Entry]:
    c = config
    h, f, attention = c.hidden_size, c.intermediate_size, f"{layer}self_attn."
    return {
        "input_norm": plain(f"{layer}input_layernorm.weight", h),
        "q": kernel(f"{attention}q_proj.weight", c.num_attention_heads * c.head_dim, h),
        "kv": _keys_and_values(c, attention),
        "o": kernel(f"{attention}o_proj.weight", h, c.num_attention_heads * c.head_dim),
        "q_norm": plain(f"{attention}q_norm.weight", c.head_dim),
        "k_norm": plain(f"{attention}k_norm.weight", c.head_dim),
        "post_norm": plain(f"{layer}post_attention_layernorm.weight", h),
        "mlp/gate": kernel(f"{layer}mlp.gate_proj.weight", f, h),
        "mlp/up": kernel(f"{layer}mlp.up_proj.weight", f, h),
        "mlp/down": kernel(f"{layer}mlp.down_proj.weight", h, f),
    }


def _convolutions(config: BlockHeadConfig, layer: str) -> dict[str, Entry]:
    """Maps the convolutions of one layer; rows of the projection are ordered by side, tap and group."""
    c = config
    entries = {}
    for name in ("attention_conv", "mlp_conv"):
        rows = 2 * c.conv_taps * c.hidden_size // c.conv_group
        entries[f"{name}/base"] = plain(f"{layer}{name}.base_kernel", 2, c.conv_taps, c.hidden_size)
        entries[f"{name}/taps"] = kernel(f"{layer}{name}.kernel_projection.weight", rows, c.hidden_size)
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
