"""The tensors of a draft head, and their mapping to its parameters.

Names are SGLang's and SafeAILab's (`midlayer.*`); projections are [out, in], as in torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from eagle3_jax.formats import draft_vocabulary
from eagle3_jax.models.checkpoint.table import Entry, kernel, not_floats, plain, qkv, tensor_problems
from eagle3_jax.models.drafts.eagle3 import DraftHeadConfig

LM_HEAD, EMBEDDINGS = "lm_head.weight", "embed_tokens.weight"
LAYER = "midlayer."
# Other spelling -> canonical one. SGLang accepts all (models/llama_eagle3.py, 0.5.23), vLLM `layers.0.` without prefix.
_SPELLINGS = (
    ("layers.0.", LAYER),
    ("aux_norm_low.", "fc_norm.0."),
    ("aux_norm_mid.", "fc_norm.1."),
    ("aux_norm_high.", "fc_norm.2."),
)

Tensors = dict[str, np.ndarray]


def draft_table(config: DraftHeadConfig) -> dict[str, Entry]:
    """Maps each parameter path in `DraftHead` to its tensors."""
    c = config
    h, f = c.hidden_size, c.intermediate_size
    attention, mlp = f"{LAYER}self_attn", f"{LAYER}mlp"
    table = {
        "fc": kernel("fc.weight", h, c.num_aux_layers * c.target_hidden_size),
        "input_norm": plain(f"{LAYER}input_layernorm.weight", h),
        "hidden_norm": plain(f"{LAYER}hidden_norm.weight", h),
        "attention/qkv": qkv(c, attention, 2 * h),
        "attention/o": kernel(f"{attention}.o_proj.weight", h, c.num_attention_heads * c.head_dim),
        "post_norm": plain(f"{LAYER}post_attention_layernorm.weight", h),
        "mlp/gate": kernel(f"{mlp}.gate_proj.weight", f, h),
        "mlp/up": kernel(f"{mlp}.up_proj.weight", f, h),
        "mlp/down": kernel(f"{mlp}.down_proj.weight", h, f),
        "norm": plain("norm.weight", h),
        "lm_head": plain(LM_HEAD, c.draft_vocab_size, h),
    }
    if c.norm_before_fc:
        table["aux_norm"] = plain("input_norm.weight", c.num_aux_layers * c.target_hidden_size)
    if c.fc_norm:
        table |= {f"fc_norm/{i}": plain(f"fc_norm.{i}.weight", c.target_hidden_size) for i in range(c.num_aux_layers)}
    return table


def canonical(name: str, spellings: Iterable[tuple[str, str]] = _SPELLINGS) -> str:
    """Translates a tensor's name to the one in the table, by pairs of prefixes (other, canonical)."""
    name = name.removeprefix("model.")
    for other, canonical_prefix in spellings:
        if name.startswith(other):
            return canonical_prefix + name.removeprefix(other)
    return name


def head_problems(tensors: Tensors, table: Mapping[str, Entry], config: Any) -> list[str]:
    """Lists every tensor that is missing, surplus, of a wrong shape or dtype, or not finite, by name.

    Optional: the LM head and embeddings of the target's width (then the target's are used), `t2d`, and `d2t` of the
    whole vocabulary.

    Args:
        table: parameter path -> its tensors. config: the head's.
    """
    expected = {name: shape for entry in table.values() for name, shape in entry.tensors.items() if name != LM_HEAD}
    optional = {"t2d": (config.vocab_size,), LM_HEAD: (config.draft_vocab_size, config.hidden_size)}
    own = config.target_hidden_size != config.hidden_size
    (expected if own else optional)[EMBEDDINGS] = (config.vocab_size, config.hidden_size)
    whole = config.draft_vocab_size == config.vocab_size
    (optional if whole else expected)["d2t"] = (config.draft_vocab_size,)
    problems = tensor_problems(tensors, expected, optional, _other_dtype)
    if "d2t" in tensors and not any(line.startswith(("d2t: ", "t2d: ")) for line in problems):
        problems += draft_vocabulary.mapping_problems(tensors["d2t"].astype(np.int64), tensors.get("t2d"), config)
    return problems


def _other_dtype(name: str, dtype: Any) -> str | None:
    if name == "d2t":
        return None if np.issubdtype(dtype, np.integer) else "integer offsets"
    if name == "t2d":
        return None if dtype == np.bool_ else "bool"
    return not_floats(name, dtype)
