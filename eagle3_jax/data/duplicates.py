"""Finds duplicates among prompts: exact ones by identity, near ones by shared runs of words.

Two prompts are near duplicates when a band of their MinHash signatures is equal and the Jaccard similarity of their
shingles reaches a threshold. Signatures depend on their prompts alone, so that many workers may compute them.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from eagle3_jax.data import filters

EXACT, NEAR = "exact duplicate", "near duplicate"
_PERMUTATIONS = 128


@dataclasses.dataclass(frozen=True)
class Signature:
    """What is compared of a prompt."""

    # uint64 [n], ascending: a hash of each run of three words of the users' turns. A long system prompt would make all
    # its prompts alike; prompts under different ones share no hash.
    shingles: np.ndarray
    bands: np.ndarray  # uint64 [b], a hash of each band of the MinHash signature, and of the band's number


def signature(messages: filters.Messages, near: float) -> Signature:
    """Computes the signature of a prompt; `near`, the threshold, decides how many bands there are."""
    system, questions = filters.questions(messages)
    runs = filters.shingles(questions, under=system)
    shingles = np.sort(np.frombuffer(b"".join(runs), dtype="<u8"))
    template, count, rows = _minhash(near)
    sketch = template.copy()
    sketch.update_batch((shingles & 0xFFFFFFFF).tolist())
    values = np.ascontiguousarray(sketch.hashvalues, dtype="<u8")
    digests = (
        hashlib.blake2b(values[band * rows : (band + 1) * rows].tobytes(), digest_size=8, key=bytes([band + 1]))
        for band in range(count)
    )
    return Signature(shingles, np.frombuffer(b"".join(digest.digest() for digest in digests), dtype="<u8"))


class Duplicates:
    """Detects duplicates among prompts, near ones from the Jaccard similarity `near` on; the first one stays."""

    def __init__(self, near: float) -> None:
        self._near = near
        self._identities: set[str] = set()
        self._kept: list[np.ndarray] = []  # shingles
        self._bands: dict[int, list[int]] = {}  # of the kept that have this band

    def check(self, identity: str, sign: Callable[[], Signature]) -> str | None:
        """Returns EXACT, NEAR (by the signature that `sign` makes), or None for a prompt, which it then remembers."""
        if identity in self._identities:
            return EXACT
        found = sign()
        bands = found.bands.tolist()
        candidates = {number for band in bands for number in self._bands.get(band, ())}
        if any(_jaccard(found.shingles, self._kept[number]) >= self._near for number in candidates):
            return NEAR
        for band in bands:
            self._bands.setdefault(band, []).append(len(self._kept))
        self._identities.add(identity)
        self._kept.append(found.shingles)
        return None


def _jaccard(a: np.ndarray, b: np.ndarray) -> float:
    both = np.concatenate((a, b))
    both.sort()
    common = int(np.count_nonzero(both[1:] == both[:-1]))
    return common / (both.size - common)


@functools.cache
def _minhash(near: float) -> tuple[Any, int, int]:
    """Returns datasketch's empty MinHash, the number of bands, and the values of each."""
    import datasketch

    # The weights favour recall: surplus candidates cost little, missed ones leave duplicates. The threshold stays
    # below 1, where the bands would be too few.
    index = datasketch.MinHashLSH(threshold=min(near, 0.9), num_perm=_PERMUTATIONS, weights=(0.1, 0.9))
    return datasketch.MinHash(num_perm=_PERMUTATIONS, seed=1, hashfunc=int), index.b, index.r
