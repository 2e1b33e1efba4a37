"""Which parameters of a model are held in few bits: matrices and experts, and embeddings and LM head by choice."""

from __future__ import annotations

import math
import re
from typing import Any

import jax

from eagle3_jax.kernels.linear.api import quantise
from eagle3_jax.kernels.linear.layouts import Quantised
from eagle3_jax.kernels.linear.quantised import Kind
from eagle3_jax.mesh import parameter_path

# Paths of the parameters that `linear` multiplies, of experts' matrices, and of rows of a vocabulary.
MATRICES = re.compile(r"\b(qkv|q|kv|q_down|q_up|kv_down|selector|o|gate|up|down|fc)$")
EXPERTS = re.compile(r"\bexpert_\w+(?<!_bias)$")
GROUP = 32  # values that share a scale under `int4`, as in GGUF's blocks
VOCABULARY = re.compile(r"^(embed|lm_head)$")


def is_quantised(leaf: Any) -> bool:
    """Tells whether a node of a model is a quantised matrix: `is_leaf` of a walk over parameters."""
    return isinstance(leaf, Quantised)


def axis_of(name: str, *, vocabulary: bool) -> int | None:
    """Returns the axis along which a parameter's products are summed; None: the parameter is not quantised.

    Args:
        vocabulary: whether embeddings and LM head are.
    """
    if MATRICES.search(name) or EXPERTS.search(name):
        return -2
    return -1 if vocabulary and VOCABULARY.search(name) else None


def quantised(name: str, leaf: Any, weights: Kind, *, vocabulary: bool) -> Any:
    """Quantises a target's parameter, on its devices; returns other parameters as they are.

    Under `int4` embeddings and LM head have 8 bits and a scale for each row, and matrices one for `GROUP` values, as
    GGUF's have. No group spans two devices.

    Args:
        name: path of the parameter.
        leaf: an array, or a `ShapeDtypeStruct`, whose quantised twin has shapes alone.
    """
    axis = axis_of(name, vocabulary=vocabulary)
    if axis is None:
        return leaf
    kind = "int8" if axis == -1 and weights == "int4" else weights
    sharding = getattr(leaf, "sharding", None)
    shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)

    def of(matrix: jax.Array) -> Quantised:
        return quantise(matrix, kind, axis=axis, group=math.gcd(shape[axis], GROUP) if kind == "int4" else None)

    return jax.eval_shape(of, leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else of(leaf)


def quantised_model(model: Any, weights: Kind | None, *, vocabulary: bool) -> Any:
    """Quantises the parameters of a whole model of arrays or `ShapeDtypeStruct`s; None leaves all as they are."""
    if weights is None:
        return model
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: quantised(parameter_path(path), leaf, weights, vocabulary=vocabulary), model
    )
