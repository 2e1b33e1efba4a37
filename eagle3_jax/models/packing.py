"""Models with their matrices as a CPU's kernel reads them (`kernels.linear_cpu`)."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import jax
from flax import nnx

from eagle3_jax.kernels import rows_cpu
from eagle3_jax.kernels.linear_cpu import Panels, pack
from eagle3_jax.kernels.rows_cpu import NormWeight
from eagle3_jax.mesh import mesh_of, replicated
from eagle3_jax.models.draft_model import DraftModel
from eagle3_jax.models.head import Draft, Head
from eagle3_jax.models.target import TargetModel

Model = TypeVar("Model", TargetModel, Draft)
Module = TypeVar("Module", TargetModel, Head)

_MATRICES = re.compile(r"\b(qkv|q|q_down|q_up|kv_down|o|gate|up|down|fc)$")
_NORMS = re.compile(r"norm(/\d+)?$")


def for_cpu(model: Model) -> Model:
    """A twin for inference where the model lies on one CPU device; else the model itself.

    Matrices are packed, norms marked for their kernel, a tied LM head becomes one of its own; all else is shared. The
    model may be dropped then.
    """
    if isinstance(model, Draft):
        head = model.head
        packed = DraftModel(for_cpu(head.model)) if isinstance(head, DraftModel) else _packed(head, head.output_rows)
        return Draft(packed, model.token_ids)
    return _packed(model, model.output_rows)


def _packed(module: Module, output_rows: Any) -> Module:
    if isinstance(output_rows, Panels) or not _is_on_one_cpu(output_rows):
        return module

    def of(path: Any, leaf: jax.Array) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        name = name.removesuffix("/value")
        if _NORMS.search(name) and leaf.shape[0] % rows_cpu.WIDTH == 0:
            return NormWeight(leaf)
        return _placed(leaf) if _MATRICES.search(name) else leaf

    twin = jax.tree_util.tree_map_with_path(of, module)
    twin.lm_head = nnx.Param(_placed(output_rows, transposed=True))
    return twin


def _placed(matrix: jax.Array, *, transposed: bool = False) -> Panels:
    """Packed where the matrix lies. Committed to its device only if that is: programs are compiled for one or other."""
    panels = pack(matrix.T if transposed else matrix)
    if not matrix.committed:
        return panels
    mesh = mesh_of(matrix)
    return jax.device_put(panels, matrix.sharding if mesh is None else replicated(mesh))


def _is_on_one_cpu(array: jax.Array) -> bool:
    (device, *others) = array.sharding.device_set
    return not others and device.platform == "cpu"
