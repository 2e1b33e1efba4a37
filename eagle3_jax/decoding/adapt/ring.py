"""Rows of the newest requests with what verification computed of them: the batches of a live head."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array, Bool, Int

from eagle3_jax.decoding.rounds.observed import Observed
from eagle3_jax.training.batch import Batch


class Ring:
    """The newest tokens, in rows of `length`: states, `aux` and `hidden` wide, on the device, ids in host memory."""

    def __init__(self, rows: int, length: int, aux: int, hidden: int, sharding: Sharding) -> None:
        self.length, self._end, self._at, self._documents = length, rows * length, 0, 0
        self.written = 0  # tokens since it was made, those overwritten included
        room = self._end + length  # a request's row is copied whole, its padding too
        self._states = jax.device_put(Observed.empty(1, room, aux, hidden), sharding)
        self._token_ids, self._answered, self._document = (np.zeros(room, np.int32) for _ in range(3))

    def keep(self, observed: Observed, slot: int, token_ids: Sequence[int], first: int, answer: int) -> None:
        """Copies a request's states: `observed` has those of all `token_ids` from `first` on, at most `length`.

        The first token is taken for the prompt's, even behind position `answer`: `replay` finds where an answer opens.
        """
        count = len(token_ids) - first
        if self._at + count > self._end:
            self._document[self._at :] = 0
            self._at = 0
        kept, copied = slice(self._at, self._at + count), slice(self._at, self._at + self.length)
        self._states = _copy(
            self._states, observed, jnp.int32(slot), jnp.int32(first), jnp.int32(self._at), self.length
        )
        self._documents += 1
        self._document[copied] = 0
        self._document[kept] = self._documents
        self._token_ids[kept] = token_ids[first:]
        self._answered[kept] = np.arange(first, len(token_ids)) >= max(answer, first + 1)
        self._at += count
        self.written += count

    @property
    def tokens(self) -> int:
        """Tokens in the ring."""
        return int((self._document > 0).sum())

    @property
    def _of_answers(self) -> Bool[np.ndarray, " n"]:
        return (self._document > 0) & (self._answered > 0)

    @property
    def filled(self) -> Int[np.ndarray, " n"]:
        """Indices of the rows that hold tokens of answers."""
        return np.flatnonzero(self._of_answers[: self._end].reshape(-1, self.length).any(axis=1))

    def counts(self, vocab_size: int) -> Int[np.ndarray, " v"]:
        """Counts each of the target's tokens in the answers."""
        return np.bincount(self._token_ids[self._of_answers], minlength=vocab_size)

    def documents(self, rows: Sequence[int]) -> Int[np.ndarray, "b t"]:
        """Returns which request each token of some rows is of, by number; 0 is none."""
        return np.where(np.asarray(rows)[:, None] < 0, 0, self._document[self._places(rows)])

    def batch(self, rows: Sequence[int]) -> Batch:
        """Returns some rows; -1 is an empty one."""
        places, document = self._places(rows), self.documents(rows)
        begins = np.ones(document.shape, bool)
        begins[:, 1:] = document[:, 1:] != document[:, :-1]
        column = np.arange(self.length)
        starts = np.maximum.accumulate(np.where(begins, column, 0), axis=1)
        aux, last_hidden, argmax = _rows(self._states, jnp.asarray(places, jnp.int32))
        return Batch(
            token_ids=self._token_ids[places],
            aux=aux,
            last_hidden=last_hidden,
            argmax=argmax,
            loss_mask=self._answered[places],
            segment_ids=np.where(document > 0, np.cumsum(begins, axis=1), 0).astype(np.int32),
            positions=(column - starts).astype(np.int32),
        )

    def _places(self, rows: Sequence[int]) -> Int[np.ndarray, "b t"]:
        return np.maximum(np.asarray(rows), 0)[:, None] * self.length + np.arange(self.length)


@functools.partial(jax.jit, static_argnames="length", donate_argnames="states")
def _copy(
    states: Observed, observed: Observed, slot: Int[Array, ""], first: Int[Array, ""], at: Int[Array, ""], length: int
) -> Observed:
    source = (first + jnp.arange(length)) % observed.argmax.shape[1]

    def put(held: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(held, new[slot, source][None], at, 1)

    return jax.tree.map(put, states, observed)


@jax.jit
def _rows(states: Observed, places: Int[Array, "b t"]) -> tuple[Array, Array, Array]:
    aux, last_hidden = (bits[0, places].view(jnp.bfloat16) for bits in (states.aux, states.last_hidden))
    return aux, last_hidden, states.argmax[0, places]
