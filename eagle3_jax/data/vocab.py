"""The draft vocabulary: the target's most frequent tokens."""

from __future__ import annotations

import io
import zipfile

import numpy as np
from jaxtyping import Int32, Int64, Integer, UInt8

from eagle3_jax.runs import disk

NAME = "vocab.npz"


def count_tokens(
    token_ids: Int32[np.ndarray, " l"], loss_mask: UInt8[np.ndarray, " l"], vocab_size: int
) -> Int64[np.ndarray, " v"]:
    """Counts each token of the target's vocabulary in the loss mask."""
    return np.bincount(token_ids[loss_mask != 0], minlength=vocab_size).astype(np.int64)


def choose_draft_vocabulary(counts: Integer[np.ndarray, " v"], size: int) -> Int32[np.ndarray, " size"]:
    """Chooses the `size` most frequent tokens, ties by the lower id; unseen tokens fill up from the lowest id.

    Returns target ids, ascending: draft id d stands for `result[d]`. Raises ValueError: `size` is not within 1..V.
    """
    if not 1 <= size <= len(counts):
        raise ValueError(f"draft.vocab_size: got {size}, expected 1 to the target's vocabulary, {len(counts)}")
    # A stable sort keeps equal counts in order of id; unseen tokens have count 0 and come last, lowest first.
    most_frequent = np.argsort(-counts.astype(np.int64), kind="stable")[:size]
    return np.sort(most_frequent).astype(np.int32)


def save(folder: disk.Path, token_ids: Int32[np.ndarray, " size"]) -> None:
    """Writes the vocabulary into a folder, atomically. Raises OSError."""
    with disk.atomic(folder / NAME) as temporary, open(temporary, "wb") as stream:
        np.savez(stream, token_ids=token_ids)


def load(folder: disk.Path) -> Int32[np.ndarray, " size"]:
    """Reads the vocabulary. Raises ValueError: damaged; FileNotFoundError."""
    try:
        with np.load(io.BytesIO(disk.read_bytes(folder / NAME)), allow_pickle=False) as arrays:
            return arrays["token_ids"]
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{folder / NAME}: damaged or unreadable ({error})") from error


def coverage(counts: Integer[np.ndarray, " v"], token_ids: Int32[np.ndarray, " size"]) -> float:
    """Returns the share of counted tokens inside the draft vocabulary; 1.0 without counts."""
    total = int(counts.sum())
    return float(counts[token_ids].sum()) / total if total else 1.0
