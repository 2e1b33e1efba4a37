"""The room of tables on the device: which constraint lies where, and which is given up for another."""

from __future__ import annotations

from eagle3_jax.decoding.structured.compile import Table, mask_words

CHUNK = 2**16  # words that one call writes; places are multiples of it


class TablePool:
    """Room for `words` words, whose first chunks have the mask of no constraint, over `vocabulary` tokens."""

    def __init__(self, words: int, vocabulary: int) -> None:
        self._size, self._first = (words, vocabulary), -(-mask_words(vocabulary) // CHUNK)
        self._chunks = words // CHUNK
        self._held: dict[Table, list[int]] = {}  # place and number of chunks, and requests; the longest unused first

    @property
    def most(self) -> int:
        """Words of the largest table that fits."""
        return (self._chunks - self._first) * CHUNK

    def empty(self) -> TablePool:
        """Makes a pool of this size without tables."""
        return TablePool(*self._size)

    def hold(self, table: Table) -> tuple[int, bool] | None:
        """Keeps a table for one more request: its first word, and whether it has to be written.

        Tables that no request needs go, the longest unused first. Returns None: there is no room now.
        """
        count, fresh = -(-table.words.size // CHUNK), table not in self._held
        if fresh:
            while (place := self._gap(count)) is None:
                idle = next((held for held, (_, _, requests) in self._held.items() if not requests), None)
                if idle is None:
                    return None
                del self._held[idle]
            self._held[table] = [place, count, 0]
        held = self._held[table] = self._held.pop(table)
        held[2] += 1
        return held[0] * CHUNK, fresh

    def release(self, table: Table) -> None:
        """Ends a request's need."""
        self._held[table][2] -= 1

    def _gap(self, count: int) -> int | None:
        place = self._first
        for start, size, _ in sorted(self._held.values()):
            if start - place >= count:
                break
            place = start + size
        return place if self._chunks - place >= count else None
