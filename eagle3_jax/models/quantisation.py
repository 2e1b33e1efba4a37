"""Which parameters a model holds in few bits: matrices and experts, and embeddings and LM head by choice."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import jax

from eagle3_jax.kernels.linear.api import quantise
from eagle3_jax.kernels.linear.layouts import PanelForm, Quantised, QuantisedPanels
from eagle3_jax.kernels.linear.quantised import Quantization
from eagle3_jax.mesh import parameter_path

# Paths of the parameters that `linear` multiplies, of experts' matrices, and of rows of a vocabulary.
MATRICES = re.compile(r"\b(qkv|q|kv|q_down|q_up|kv_down|selector|o|gate|up|gate_up|down|fc|project)$")
EXPERTS = re.compile(r"\bexpert_\w+(?<!_bias)$")
GROUP = 32  # values that share a scale under `int4`, as in GGUF's blocks
VOCABULARY = re.compile(r"^(embed|embed_per_layer|lm_head)$")


def is_quantised(leaf: Any) -> bool:
    """Tells whether a node of a model is a quantised matrix: `is_leaf` of a walk over parameters."""
    return isinstance(leaf, Quantised)


def axis_of(name: str, *, vocabulary: bool) -> int | None:
    """Returns the axis along which a parameter's products are summed; None: the parameter is not quantised.

    `vocabulary`: whether embeddings and LM head are.
    """
    if MATRICES.search(name) or EXPERTS.search(name):
        return -2
    return -1 if vocabulary and VOCABULARY.search(name) else None


def quantised(name: str, leaf: Any, weights: Quantization, *, vocabulary: bool) -> Any:
    """Quantises a target's parameter on its devices (of a `ShapeDtypeStruct` the shapes); returns others unchanged.

    Under `int4` embeddings and LM head have 8 bits and a scale for each row, and matrices one for `GROUP` values, as
    GGUF's have. No group spans two devices.
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


def quantised_model(model: Any, weights: Quantization | None, *, vocabulary: bool) -> Any:
    """Quantises the parameters of a whole model of arrays or `ShapeDtypeStruct`s; None leaves all as they are."""
    if weights is None:
        return model
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: quantised(parameter_path(path), leaf, weights, vocabulary=vocabulary), model
    )


def few_bits(model: Any) -> dict[str, Any]:
    """Returns the form of each matrix that a model holds in few bits, by its path: what `quantised_as` makes again."""
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=lambda x: isinstance(x, Quantised | QuantisedPanels))
    held = {parameter_path(path): leaf for path, leaf in leaves if isinstance(leaf, Quantised | QuantisedPanels)}
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), held)


def quantised_as(held: Mapping[str, Any], model: Any) -> Any:
    """Quantises a model of floats as another one of its architecture is, whose `few_bits` are `held`.

    Raises ValueError for a matrix in a form of its checkpoint that `quantise` does not make.
    """

    def of(path: Any, leaf: jax.Array) -> Any:
        name = parameter_path(path)
        if (wanted := held.get(name)) is None:
            return leaf
        axis = axis_of(name, vocabulary=True)
        if axis is not None and isinstance(wanted, Quantised) and (kind := _KINDS.get(wanted.values.dtype.name)):
            group = leaf.shape[axis] // wanted.scale.shape[axis]
            make = functools.partial(quantise, kind=kind, axis=axis, group=group)
            if _form(jax.eval_shape(make, leaf)) == _form(wanted):
                return make(leaf)
        if isinstance(wanted, QuantisedPanels) and (made := _OF_PANELS.get(wanted.form._replace(scale=""))):
            return quantise(leaf, made[0], group=made[1])
        raise ValueError(
            f"weights: got floats for {name}, which is in few bits of its checkpoint's own kind (weights='stored'), "
            "expected an engine whose weights are 'int8', 'fp8', 'int4' or floats"
        )

    return jax.tree_util.tree_map_with_path(of, model)


_KINDS: dict[str, Quantization] = {"int8": "int8", "float8_e4m3fn": "fp8", "int4": "int4"}  # dtype of values -> kind
_OF_PANELS: dict[PanelForm, tuple[Quantization, int | None]] = {
    PanelForm(8, 0, "", parts=1, group=0): ("int8", None),
    PanelForm(4, 0, "", parts=2, group=GROUP): ("int4", GROUP),
}


def _form(matrix: Any) -> Any:
    return jax.tree.structure(matrix), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(matrix)]
