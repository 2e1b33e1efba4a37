"""Puts a model's matrices into the layouts of the kernels: panels on a CPU (`kernels.linear`), row-major on a TPU."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding

from eagle3_jax.kernels.dispatch import default_implementation
from eagle3_jax.kernels.linear import few_rows
from eagle3_jax.kernels.linear.api import linear, pack, xla_is_faster
from eagle3_jax.kernels.linear.layouts import Padded, Panels, Quantised
from eagle3_jax.kernels.linear.quantised import Quantization
from eagle3_jax.kernels.vocabulary.api import vocabulary_logits
from eagle3_jax.mesh import mesh_of, parameter_path, replicated
from eagle3_jax.models.drafts.head import Draft, Head
from eagle3_jax.models.drafts.model import DraftModel
from eagle3_jax.models.quantisation import EXPERTS, MATRICES, few_bits, is_quantised, quantised_model
from eagle3_jax.models.target import TargetModel

Matrix = jax.Array | Quantised
Model = TypeVar("Model", TargetModel, Draft)
Module = TypeVar("Module", TargetModel, Head)


class Product(NamedTuple):
    """A kind of product with matrices of one shape; whether these have a row for each token of the vocabulary."""

    shape: tuple[int, ...]
    vocabulary: bool

    def times(self, matrices: Sequence[Matrix], rows: int) -> jax.Array:
        """Multiplies `rows` rows with each matrix in turn, to be timed."""
        x = jnp.ones(self.shape[-1 if self.vocabulary else 0], matrices[0].dtype)
        return few_rows.multiply(
            matrices[: few_rows.SAMPLE], x, rows=rows, product=vocabulary_logits if self.vocabulary else linear
        )


def weights_beside(target: TargetModel) -> Quantization | None:
    """Returns the kind of weights that a head has beside this target: few bits beside few bits, else floats (None).

    Every pass of the head reads them; drafts that few bits make worse are refused, and the tokens stay the target's.
    """
    return "int8" if few_bits(target) else None


def for_inference(model: Model, weights: Quantization | None = None) -> Model:
    """Returns a twin in the kernels' layouts. It shares the arrays that stay as they are; the model may be dropped.

    On a single CPU device matrices are packed, and a tied LM head gets a matrix of its own. On TPUs some parameters are
    stored row-major (`tpu_formats`). Elsewhere the twin is the model itself.

    Args:
        weights: quantises float matrices and vocabulary first; None leaves them.
    """
    return _each(model, functools.partial(_twin, weights=weights))


def for_many_rows(model: TargetModel) -> TargetModel:
    """Returns a twin for passes over thousands of rows: `for_inference`'s, or the model where XLA is faster."""
    leaves = jax.tree.leaves(model, is_leaf=is_quantised)
    arrays = all(isinstance(leaf, jax.Array) and xla_is_faster(leaf.dtype) for leaf in leaves)
    on_cpu = arrays and all(device.platform == "cpu" for device in leaves[0].sharding.device_set)
    return model if on_cpu else for_inference(model)


def products(*models: TargetModel | Draft | None) -> dict[Product, list[Matrix]]:
    """Collects the matrices that `padded` takes, of all models together."""
    found: dict[Product, list[Matrix]] = collections.defaultdict(list)

    def collect(module: Any) -> Any:
        for path, leaf in jax.tree_util.tree_leaves_with_path(module, is_leaf=is_quantised):
            if MATRICES.search(parameter_path(path)):
                found[Product(leaf.shape, vocabulary=False)].append(leaf)
        found[Product(module.output_rows.shape, vocabulary=True)].append(module.output_rows)
        return module

    for model in models:
        if model is not None:
            _each(model, collect)
    return dict(found)


def padded(model: Model, rows: Mapping[Product, tuple[int, ...]]) -> Model:
    """Returns a twin on the same arrays whose products pad rows to those of the product, see `layouts.Padded`."""

    def of(leaf: Matrix, *, vocabulary: bool = False) -> Any:
        known = rows.get(Product(leaf.shape, vocabulary))
        return Padded(leaf, known) if known else leaf

    def twin(module: Any) -> Any:
        output_rows = of(module.output_rows, vocabulary=True)
        new = jax.tree_util.tree_map_with_path(
            lambda path, leaf: of(leaf) if MATRICES.search(parameter_path(path)) else leaf, module, is_leaf=is_quantised
        )
        if isinstance(output_rows, Padded):
            new.lm_head = nnx.Param(output_rows)
        return new

    return _each(model, twin) if any(rows.values()) else model


def _each(model: Any, of: Callable[[Any], Any]) -> Any:
    """Applies `of` to the model's module."""
    if not isinstance(model, Draft):
        return of(model)
    head = model.head
    return Draft(DraftModel(of(head.model)) if isinstance(head, DraftModel) else of(head), model.token_ids)


def tpu_formats(module: TargetModel | Head) -> Any:
    """Chooses each parameter's sharding and layout for inference on a TPU: a pytree of `Sharding`s and `Format`s.

    Row-major are the parameters that a gather reads (a target's embeddings), the draft kernel (a head's own LM head),
    or the ragged product of experts. If their rows are a multiple of 128 and the rows' length is not (gpt-oss,
    SmolLM2), a TPU's default layout has the rows in the lanes. Each program would then copy the parameters before its
    first round. The product of a target's LM head reads the default layout, so tied embeddings keep it.

    Args:
        module: with arrays, or with `ShapeDtypeStruct`s that have shardings.
    """
    if isinstance(module, TargetModel):
        rows = {"embed"} if hasattr(module, "lm_head") else set()
    else:
        rows = set(module.gathered)

    def of(path: Any, leaf: Any) -> Sharding | Format:
        name = parameter_path(path)
        by_rows = name in rows or (EXPERTS.search(name) and len(leaf.shape) == 3)
        return Format(Layout(tuple(range(len(leaf.shape)))), leaf.sharding) if by_rows else leaf.sharding

    return jax.tree_util.tree_map_with_path(of, module)


def _twin(module: Module, weights: Quantization | None) -> Module:
    output_rows: Any = module.output_rows
    if isinstance(output_rows, Panels):
        return module
    first, *others = output_rows.sharding.device_set
    module = quantised_model(module, weights, vocabulary=True)
    if not others and default_implementation(first) == "cpu":
        return _packed(module, module.output_rows)
    return _by_rows(module) if first.platform == "tpu" else module


def _packed(module: Module, output_rows: Any) -> Module:
    def of(path: Any, leaf: Matrix) -> Any:
        return _placed(leaf) if MATRICES.search(parameter_path(path)) else leaf

    twin = jax.tree_util.tree_map_with_path(of, module, is_leaf=is_quantised)
    if hasattr(twin, "packed_rows"):
        panels = twin.packed_rows[...]
        del twin.packed_rows
    else:
        panels = _placed(jax.tree.map(lambda x: x.T, output_rows))
    if isinstance(panels, Panels):
        twin.lm_head = nnx.Param(panels)
    return twin


def _by_rows(module: Module) -> Module:
    def of(leaf: Any, wanted: Any) -> jax.Array:
        if not isinstance(wanted, Format) or leaf.format.layout.major_to_minor == tuple(range(leaf.ndim)):
            return leaf
        return jax.jit(lambda x: x, out_shardings=wanted)(leaf)

    return jax.tree.map(of, module, tpu_formats(module))


def _placed(matrix: Matrix) -> Panels | Quantised:
    """Packs a matrix on its device; committed panels if the matrix is, since compiled programs depend on it."""
    panels = pack(matrix)
    if not matrix.committed:
        return panels
    mesh = mesh_of(matrix)
    return jax.device_put(panels, matrix.sharding if mesh is None else replicated(mesh))
