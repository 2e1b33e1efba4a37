"""How a GGUF file spells a head: names of tensors and keys of llama.cpp's loader, and config.json's for them.

Sources: llama.cpp src/models/eagle3.cpp (0274f0f), src/models/dflash.cpp (01b78a1), and the wheel xllamacpp 2026.10.
Aux layers are boundaries there too. RoPE rotates neighbours in `eagle3`, halves in `dflash`. A key of one architecture
alone is named as config.json's, but for two.
"""

from __future__ import annotations

from collections.abc import Mapping

from eagle3_jax.formats.tensors import AUX_LAYERS, EMBEDDINGS, LAYER, LM_HEAD
from eagle3_jax.models.checkpoint.gguf_file import BLOCK_NAMES, SIZES

EAGLE3, DFLASH = "eagle3", "dflash"
D2T = "d2t"  # absolute target ids here, int64
TOKENS, MASK = "tokenizer.ggml.tokens", "tokenizer.ggml.mask_token_id"
_FEATURES = ("target_hidden_size", "norm_before_residual", "norm_before_fc")
_BLOCKS = ("block_size", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_LAYERS = {"target_layers": AUX_LAYERS}
_OWN = {
    EAGLE3: _LAYERS | {name: name for name in _FEATURES},
    DFLASH: _LAYERS
    | {name: name for name in _BLOCKS}
    | {"attention.sliding_window": "sliding_window", "attention.causal": "is_causal"},
}
_TOP = {
    "fc.weight": "fc.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": LM_HEAD,
    "token_embd.weight": EMBEDDINGS,
    D2T: D2T,
}
_EAGLE3_TENSORS = {
    "enc.output_norm.weight": "input_norm.weight",
    "blk.0.attn_norm_2.weight": f"{LAYER}hidden_norm.weight",
}
_DFLASH_TENSORS = {
    "enc.output_norm.weight": "hidden_norm.weight",
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "conf_proj.weight": "confidence_head.proj.weight",
    "conf_proj.bias": "confidence_head.proj.bias",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
}
_CONVOLUTIONS = {"attn": "attention", "ffn": "mlp"}


def keys(architecture: str) -> dict[str, str]:
    """Maps the keys of an architecture, without its name, to those of config.json."""
    return SIZES | _OWN[architecture]


def tensors(architecture: str, layers: int) -> Mapping[str, str]:
    """Maps the names in a file to the canonical ones of a head with so many layers."""
    found = _TOP | (_EAGLE3_TENSORS if architecture == EAGLE3 else _DFLASH_TENSORS)
    for i in range(layers):
        layer = LAYER if architecture == EAGLE3 else f"layers.{i}."
        found |= {f"blk.{i}.{ours}.weight": f"{layer}{name}.weight" for ours, name in BLOCK_NAMES.items()}
        for ours, name in _CONVOLUTIONS.items() if architecture == DFLASH else ():
            found[f"blk.{i}.{ours}_conv_base"] = f"{layer}{name}_conv.base_kernel"
            found[f"blk.{i}.{ours}_conv_proj.weight"] = f"{layer}{name}_conv.kernel_projection.weight"
    return found


def interleaved_by(architecture: str, name: str) -> str | None:
    """Returns config.json's key of the number of heads whose rows a tensor has interleaved; None: as they are."""
    rows = {"q_proj.weight": "num_attention_heads", "k_proj.weight": "num_key_value_heads"}
    return rows.get(name.rpartition(".self_attn.")[2]) if architecture == EAGLE3 else None
