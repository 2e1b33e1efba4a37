"""The tensors of a draft head, and their mapping to its parameters.

Names are SGLang's and SafeAILab's (`midlayer.*`); projections are [out, in], as in torch. The draft vocabulary is
`d2t`, int64 offsets (target id - draft id), and `t2d`, bool over target ids; both stay numpy arrays, as JAX would cast
them to int32. A head over the whole vocabulary has neither: vLLM refuses its `d2t` (models/llama_eagle3.py, 0.32.0).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Int64

from eagle3_jax.models.checkpoint.table import Entry, kernel, llama_layer, not_floats, plain, tensor_problems
from eagle3_jax.models.drafts.eagle3 import DraftHeadConfig

LM_HEAD, EMBEDDINGS = "lm_head.weight", "embed_tokens.weight"
LAYER = "midlayer."
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"  # the boundaries, in config.json
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
    c, h = config, config.hidden_size
    table = llama_layer(c, LAYER[:-1], 2 * h) | {
        "fc": kernel("fc.weight", h, c.num_aux_layers * c.target_hidden_size),
        "input_norm": plain(f"{LAYER}input_layernorm.weight", h),
        "hidden_norm": plain(f"{LAYER}hidden_norm.weight", h),
        "norm": plain("norm.weight", h),
        "lm_head": plain(LM_HEAD, c.draft_vocab_size, h),
    }
    if c.norm_before_fc:
        table["aux_norm"] = plain("input_norm.weight", c.num_aux_layers * c.target_hidden_size)
    if c.fc_norm:
        table |= {f"fc_norm/{i}": plain(f"fc_norm.{i}.weight", c.target_hidden_size) for i in range(c.num_aux_layers)}
    if c.qk_norm:
        table |= {name: plain(f"{LAYER}self_attn.{name}.weight", c.head_dim) for name in ("q_norm", "k_norm")}
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
    """
    expected = {name: shape for entry in table.values() for name, shape in entry.tensors.items() if name != LM_HEAD}
    optional = {"t2d": (config.vocab_size,), LM_HEAD: (config.draft_vocab_size, config.hidden_size)}
    own = config.target_hidden_size != config.hidden_size
    (expected if own else optional)[EMBEDDINGS] = (config.vocab_size, config.hidden_size)
    whole = config.draft_vocab_size == config.vocab_size
    (optional if whole else expected)["d2t"] = (config.draft_vocab_size,)
    problems = tensor_problems(tensors, expected, optional, _other_dtype)
    if "d2t" in tensors and not any(line.startswith(("d2t: ", "t2d: ")) for line in problems):
        problems += mapping_problems(tensors["d2t"].astype(np.int64), tensors.get("t2d"), config)
    return problems


def _other_dtype(name: str, dtype: Any) -> str | None:
    if name == "d2t":
        return None if np.issubdtype(dtype, np.integer) else "integer offsets"
    return not_floats(name, dtype) if name != "t2d" else None if dtype == np.bool_ else "bool"


def vocabulary_tensors(ids: Int64[np.ndarray, " dv"], vocab_size: int) -> dict[str, np.ndarray]:
    """Makes the tensors of a draft vocabulary from ascending target ids; none for the whole vocabulary."""
    if len(ids) == vocab_size:
        return {}
    t2d = np.zeros(vocab_size, np.bool_)
    t2d[ids] = True
    return {"d2t": ids - np.arange(len(ids), dtype=np.int64), "t2d": t2d}


def ids_problems(ids: np.ndarray, config: Any) -> list[str]:
    """Lists why these target ids cannot be a draft vocabulary; empty when they can."""
    if ids.shape != (config.draft_vocab_size,):
        return [f"token ids: got shape {list(ids.shape)}, expected {[config.draft_vocab_size]}"]
    if ids[0] < 0 or ids[-1] >= config.vocab_size or (np.diff(ids) <= 0).any():
        span = f"{ids.min()}..{ids.max()}"
        return [f"token ids: got {span}, expected ascending, distinct, within 0..{config.vocab_size - 1}"]
    return []


def mapping_problems(d2t: np.ndarray, t2d: np.ndarray | None, config: Any) -> list[str]:
    """Lists why the offsets are not a draft vocabulary, or not that of `t2d`; empty when they are."""
    if t2d is not None and len(d2t) > 1 and np.array_equal(np.flatnonzero(t2d), d2t):
        return ["d2t: got absolute target ids, expected offsets (target id - draft id)"]
    found = ids_problems(d2t + np.arange(len(d2t)), config)
    if found:
        return [f"d2t: as offsets (target id - draft id): {problem}" for problem in found]
    if t2d is not None:
        if not np.array_equal(np.flatnonzero(t2d), d2t + np.arange(len(d2t))):
            return ["t2d: got other tokens than d2t selects"]
    elif len(d2t) > 1 and (np.diff(d2t) > 0).all():
        # Offsets rise at every step only if no two draft tokens are neighbours in the target's vocabulary.
        return ["d2t: rises at every step as absolute ids do, expected offsets (target id - draft id); no t2d to tell"]
    return []
