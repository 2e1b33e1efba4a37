"""What the gated delta rule reads of tokens."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float


class Tokens(NamedTuple):
    """Tokens in order, or nodes of a tree, float32.

    Attributes:
        queries, keys: of unit length, queries scaled.
        decays: the logarithm g, at most 0. A token with a decay of 0 and a beta of 0 changes no state.
    """

    queries: Float[Array, "b t k d_k"]
    keys: Float[Array, "b t k d_k"]
    values: Float[Array, "b t n d_v"]
    decays: Float[Array, "b t n"]
    betas: Float[Array, "b t n"]
