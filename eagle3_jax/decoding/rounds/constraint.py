"""Constraints of answers in a round: automata over tokens as tables, see `structured.compile.Table`.

Every node of a tree has the state that its own path leads to. State 0 is no constraint: everything is allowed.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.decoding.rounds.lookup import PROBABILITIES, Copied
from eagle3_jax.decoding.rounds.sampling import Rows, entry
from eagle3_jax.decoding.structured.compile import Table, mask_words


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ConstraintRows:
    """The table of each request's constraint: where its parts lie among all tables' words; 0 without one.

    Attributes:
        start: the first state.
        columns: number of classes of tokens.
    """

    start: Int[Rows, " b"]
    columns: Int[Rows, " b"]
    records: Int[Rows, " b"]
    classes: Int[Rows, " b"]
    transitions: Int[Rows, " b"]
    masks: Int[Rows, " b"]

    @classmethod
    def of(cls, table: Table | None, place: int) -> ConstraintRows:
        """Makes one row, on the host, of a table whose words begin at `place`."""
        parts = (0,) * 6
        if table is not None:
            parts = table.start, table.columns, place, *(place + part for part in table.parts)
        return cls(*(entry(part, np.int32) for part in parts))


@dataclasses.dataclass(frozen=True)
class Constraints:
    """The constraints of a batch, while a program is traced.

    Attributes:
        words: of all tables; the first mask allows everything.
        states: those behind the tokens so far.
        vocabulary: number of tokens.
    """

    words: Int[Array, " words"]
    rows: ConstraintRows
    states: Int[Array, " b"]
    vocabulary: int

    @property
    def bind(self) -> Bool[Array, ""]:
        """Whether a request has one."""
        return (self.states > 0).any()

    def step(self, states: Int[Array, "b n"], tokens: Int[Array, "b n"]) -> Int[Array, "b n"]:
        """Returns the states behind tokens: 0 behind the end of an answer and behind forbidden ones."""
        column = self._half(self.rows.classes, tokens)
        return jnp.where(states > 0, self._half(self.rows.transitions, states * self.rows.columns[:, None] + column), 0)

    def along(self, tokens: Int[Array, "b n"], parents: Int[Array, "b n"], depth: int) -> Int[Array, "b n"]:
        """Returns the state behind each node of a tree, whose root is the last of the tokens so far."""
        root, states = self.states[:, None], jnp.broadcast_to(self.states[:, None], tokens.shape)
        for _ in range(depth):
            states = self.step(jnp.take_along_axis(states, jnp.maximum(parents, 0), axis=1), tokens)
            states = jnp.concatenate([root, states[:, 1:]], axis=1)
        return states

    def allowed(self, states: Int[Array, "b n"], token_ids: Int[Array, " dv"] | None = None) -> Bool[Array, "b n v"]:
        """Tells which tokens are allowed in each state: of the vocabulary, or of a draft vocabulary."""
        width = mask_words(self.vocabulary)
        start = self._mask(states)
        row = jax.vmap(jax.vmap(lambda at: jax.lax.dynamic_slice_in_dim(self.words, at, width)))(start)
        if token_ids is not None and len(token_ids) < self.vocabulary:
            return (row[..., token_ids % width] >> (token_ids // width)[None, None]) & 1 == 1
        bits = (row[..., None, :] >> jnp.arange(32)[None, None, :, None]) & 1
        return bits.reshape(*states.shape, -1)[..., : self.vocabulary] == 1

    def masked(self, logits: Float[Array, "b n v"], states: Int[Array, "b n"]) -> Float[Array, "b n v"]:
        """Takes away all probability of forbidden tokens; reads no mask where no request has a constraint."""
        return jax.lax.cond(self.bind, lambda: jnp.where(self.allowed(states), logits, -jnp.inf), lambda: logits)

    def forced(self, states: Int[Array, " b"]) -> Int[Array, " b"]:
        """Returns the token along the only way on, or -1."""
        return jnp.where(states > 0, self.words[self.rows.records + 2 * states + 1], -1)

    def narrowed(self, copied: Copied) -> Copied:
        """Cuts copied tokens in front of a forbidden one; forced tokens take their place."""
        at, above, lost = self.states, jnp.zeros(self.states.shape), jnp.zeros(self.states.shape, bool)
        tokens, scores = [], []
        for i in range(copied.tokens.shape[1]):
            forced, token, score = self.forced(at), copied.tokens[:, i], copied.scores[:, i]
            known = forced >= 0
            lost |= known & (forced != token)
            token = jnp.where(known, forced, token)
            held = known | (self._allows(at, token) & ~lost)
            above = jnp.where(
                held, jnp.where(known, above + math.log(PROBABILITIES[-1]), jnp.minimum(score, above)), -jnp.inf
            )
            tokens.append(token)
            scores.append(above)
            at = self.step(at[:, None], token[:, None])[:, 0]
        return Copied(jnp.stack(tokens, axis=1), jnp.stack(scores, axis=1))

    def _allows(self, states: Int[Array, " b"], tokens: Int[Array, " b"]) -> Bool[Array, " b"]:
        width = mask_words(self.vocabulary)
        words = self.words[self._mask(states[:, None])[:, 0] + tokens % width]
        return (words >> tokens // width) & 1 == 1

    def _mask(self, states: Int[Array, "b n"]) -> Int[Array, "b n"]:
        number = self.words[self.rows.records[:, None] + 2 * states]
        return jnp.where(states > 0, self.rows.masks[:, None] + number * mask_words(self.vocabulary), 0)

    def _half(self, starts: Int[Array, " b"], place: Int[Array, "b n"]) -> Int[Array, "b n"]:
        return (self.words[starts[:, None] + place // 2] >> 16 * (place % 2)) & 0xFFFF
