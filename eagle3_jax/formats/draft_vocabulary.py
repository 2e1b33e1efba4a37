"""The draft vocabulary on disk: `d2t`, int64 offsets (target id - draft id), and `t2d`, bool over target ids.

Both stay numpy arrays, since JAX would cast them to int32. A head over the whole vocabulary has neither: vLLM refuses
its `d2t` (models/llama_eagle3.py, 0.32.0). `config` is a head's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Int64


def write(ids: Int64[np.ndarray, " dv"], vocab_size: int) -> dict[str, np.ndarray]:
    """Makes the tensors of a draft vocabulary from ascending target ids; none for the whole vocabulary."""
    if len(ids) == vocab_size:
        return {}
    t2d = np.zeros(vocab_size, np.bool_)
    t2d[ids] = True
    return {"d2t": ids - np.arange(len(ids), dtype=np.int64), "t2d": t2d}


def read(d2t: np.ndarray | None, config: Any) -> Int64[np.ndarray, " dv"]:
    """Returns the target ids of the draft tokens; without `d2t` the draft ids themselves."""
    ids = np.arange(config.draft_vocab_size, dtype=np.int64)
    return ids if d2t is None else ids + d2t


def problems(ids: np.ndarray, config: Any) -> list[str]:
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
    found = problems(d2t + np.arange(len(d2t)), config)
    if found:
        return [f"d2t: as offsets (target id - draft id): {problem}" for problem in found]
    if t2d is not None:
        if not np.array_equal(np.flatnonzero(t2d), d2t + np.arange(len(d2t))):
            return ["t2d: got other tokens than d2t selects"]
    elif len(d2t) > 1 and (np.diff(d2t) > 0).all():
        # Offsets rise at every step only if no two draft tokens are neighbours in the target's vocabulary.
        return ["d2t: rises at every step as absolute ids do, expected offsets (target id - draft id); no t2d to tell"]
    return []
