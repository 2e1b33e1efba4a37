"""Models with their matrices as the kernels read them: in panels on a CPU (`kernels.linear_cpu`), by rows on a TPU."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding

from eagle3_jax.kernels import rows_cpu
from eagle3_jax.kernels.linear_cpu import Panels, pack
from eagle3_jax.kernels.rows_cpu import NormWeight
from eagle3_jax.mesh import mesh_of, replicated
from eagle3_jax.models.draft_model import DraftModel
from eagle3_jax.models.head import Draft, Head
from eagle3_jax.models.target import TargetModel
from eagle3_jax.models.weights import parameter_path

Model = TypeVar("Model", TargetModel, Draft)
Module = TypeVar("Module", TargetModel, Head)

_MATRICES = re.compile(r"\b(qkv|q|q_down|q_up|kv_down|o|gate|up|down|fc)$")
_EXPERTS = re.compile(r"\bexpert_\w+$")
_NORMS = re.compile(r"norm(/\d+)?$")


def for_inference(model: Model) -> Model:
    """A twin that shares what needs no other layout; the model may be dropped then.

    On one CPU device matrices are packed, norms marked for their kernel, a tied LM head becomes one of its own. On TPUs
    some parameters lie row by row (`tpu_formats`). Elsewhere it is the model itself.
    """
    if isinstance(model, Draft):
        head = model.head
        twin = DraftModel(for_inference(head.model)) if isinstance(head, DraftModel) else _twin(head, head.output_rows)
        return Draft(twin, model.token_ids)
    return _twin(model, model.output_rows)


def tpu_formats(module: TargetModel | Head) -> Any:
    """Where and how each parameter lies on a TPU for inference: the module as a pytree of `Sharding`s and `Format`s.

    Row by row lies what a gather reads (a target's embeddings), the kernel that chooses drafts (a head's own LM head),
    or the ragged product of experts. Where the rows' number fills registers of 128 numbers and their length does not
    (gpt-oss, SmolLM2), a TPU's default has the rows in the lanes: each program would copy them before its first round.
    The product of a target's LM head wants it as the default is, and tied embeddings stay that too.

    Args:
        module: of arrays, or of `ShapeDtypeStruct`s with shardings.
    """
    if isinstance(module, TargetModel):
        rows = {"embed"} if hasattr(module, "lm_head") else set()
    else:
        rows = {"embed", "lm_head"}

    def of(path: Any, leaf: Any) -> Sharding | Format:
        name = parameter_path(path)
        by_rows = name in rows or (_EXPERTS.search(name) and len(leaf.shape) == 3)
        return Format(Layout(tuple(range(len(leaf.shape)))), leaf.sharding) if by_rows else leaf.sharding

    return jax.tree_util.tree_map_with_path(of, module)


def _twin(module: Module, output_rows: Any) -> Module:
    if isinstance(output_rows, Panels):
        return module
    devices = output_rows.sharding.device_set
    platforms = {device.platform for device in devices}
    if platforms == {"cpu"} and len(devices) == 1:
        return _packed(module, output_rows)
    return _by_rows(module) if platforms == {"tpu"} else module


def _packed(module: Module, output_rows: jax.Array) -> Module:
    def of(path: Any, leaf: jax.Array) -> Any:
        name = parameter_path(path)
        if _NORMS.search(name) and leaf.shape[0] % rows_cpu.WIDTH == 0:
            return NormWeight(leaf)
        return _placed(leaf) if _MATRICES.search(name) else leaf

    twin = jax.tree_util.tree_map_with_path(of, module)
    twin.lm_head = nnx.Param(_placed(output_rows, transposed=True))
    return twin


def _by_rows(module: Module) -> Module:
    def of(leaf: Any, wanted: Any) -> jax.Array:
        if not isinstance(wanted, Format) or leaf.format.layout.major_to_minor == tuple(range(leaf.ndim)):
            return leaf
        return jax.jit(lambda x: x, out_shardings=wanted)(leaf)

    return jax.tree.map(of, module, tpu_formats(module))


def _placed(matrix: jax.Array, *, transposed: bool = False) -> Panels:
    """Packed where the matrix lies. Committed to its device only if that is: programs are compiled for one or other."""
    panels = pack(matrix.T if transposed else matrix)
    if not matrix.committed:
        return panels
    mesh = mesh_of(matrix)
    return jax.device_put(panels, matrix.sharding if mesh is None else replicated(mesh))
