"""Draft heads inside a target's checkpoint: its multi-token prediction layers (MTP; NEXTN in SGLang)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle3_jax.kernels.linear.layouts import dense
from eagle3_jax.mesh import parameter_path
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.models.checkpoint.load import WeightsError, locate, misfits, reader
from eagle3_jax.models.checkpoint.table import Entry
from eagle3_jax.models.drafts import deepseek_mtp, mimo_mtp
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.drafts.mtp import MtpHead
from eagle3_jax.models.families.deepseek_v3 import DeepseekV3Config
from eagle3_jax.models.families.mimo import MimoConfig
from eagle3_jax.models.target import ModelConfig

MTP: Final = "mtp"
# Family -> its head, and the function that maps each parameter path of the head to tensors of the checkpoint.
_LAYERS: dict[type[ModelConfig], tuple[type[MtpHead], Callable[[Any], dict[str, Entry]]]] = {
    MimoConfig: (mimo_mtp.MimoMtp, mimo_mtp.table),
    DeepseekV3Config: (deepseek_mtp.DeepseekMtp, deepseek_mtp.table),
}


def head_of(shape: ModelConfig, field: str = "draft") -> type[MtpHead]:
    """Returns the class of a target's MTP layer. Raises ValueError, by `field`, for a family without one."""
    if type(shape) not in _LAYERS:
        raise ValueError(f"{field}: got 'mtp', expected a head's folder: {shape.architecture} has no such layer")
    return _LAYERS[type(shape)][0]


def abstract(shape: ModelConfig, dtype: Any, field: str = "draft") -> MtpHead:
    """Makes the abstract head (shapes only) of a target. Raises ValueError, by `field`, for a family without one."""
    head = head_of(shape, field)
    return nnx.eval_shape(lambda: head(shape, dtype=dtype, rngs=nnx.Rngs(0)))


def load(target: Target, dtype: Any) -> Draft:
    """Loads the first MTP layer, with the target's embeddings and LM head.

    Raises:
        ValueError: the target's family has none. WeightsError: missing or wrongly shaped tensors.
    """
    shape, rows = target.model.config, dense(target.model.output_rows)
    head = abstract(shape, dtype)
    assert isinstance(rows, jax.Array), "the target is loaded, and not packed yet"
    table = _LAYERS[type(shape)][1](shape)
    files = locate(target.folder)
    if problems := misfits(table, files):
        raise WeightsError(f"{target.folder}: no MTP layer to draft with ('mtp'):\n  " + "\n  ".join(problems))
    tensor = reader(files)

    def read(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = parameter_path(path)
        if name == "lm_head":
            return rows.astype(leaf.dtype)
        value = table[name].part((slice(None),) * len(leaf.shape), *map(tensor, table[name].tensors))
        return jnp.asarray(np.ascontiguousarray(value).astype(leaf.dtype))

    return Draft(jax.tree_util.tree_map_with_path(read, head), jnp.arange(shape.vocab_size, dtype=jnp.int32))
