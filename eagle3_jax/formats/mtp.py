"""Draft heads inside a target's checkpoint: layers that predict a further token (MTP, SGLang's NEXTN)."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import safe_open

from eagle3_jax.models import mimo_mtp
from eagle3_jax.models.head import Draft
from eagle3_jax.models.mimo import MimoConfig
from eagle3_jax.models.registry import Target
from eagle3_jax.models.weights import WeightsError, locate, parameter_path

MTP: Final = "mtp"


def load(target: Target, dtype: Any) -> Draft:
    """The first such layer, with the target's embeddings and LM head.

    Raises:
        ValueError: a target of another family. WeightsError: tensors that are missing or misshapen.
    """
    shape, rows = target.model.config, target.model.output_rows
    if not isinstance(shape, MimoConfig) or not isinstance(rows, jax.Array):
        raise ValueError(f"draft: got 'mtp', expected a head's folder: {shape.architecture} has no such layer")
    config, table = mimo_mtp.MimoMtpConfig(shape), mimo_mtp.table(shape)
    files = locate(target.folder)
    expected = {name: size for entry in table.values() for name, size in entry.tensors.items()}
    problems = [f"missing tensor {name} {list(size)}" for name, size in expected.items() if name not in files]
    tensors: dict[str, np.ndarray] = {}
    for name in expected.keys() & files.keys():
        with safe_open(files[name], framework="numpy") as handle:
            tensors[name] = handle.get_tensor(name)
        if tensors[name].shape != expected[name]:
            problems.append(f"{name}: got shape {list(tensors[name].shape)}, expected {list(expected[name])}")
    if problems:
        raise WeightsError(f"{target.folder}: no layer to draft with ('mtp'):\n  " + "\n  ".join(sorted(problems)))

    def read(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = parameter_path(path)
        if name == "lm_head":
            return rows.astype(leaf.dtype)
        value = table[name].whole(*(tensors[tensor] for tensor in table[name].tensors))
        return jnp.asarray(np.ascontiguousarray(value).astype(leaf.dtype))

    abstract = nnx.eval_shape(lambda: mimo_mtp.MimoMtp(config, dtype=dtype, rngs=nnx.Rngs(0)))
    return Draft(jax.tree_util.tree_map_with_path(read, abstract), jnp.arange(shape.vocab_size, dtype=jnp.int32))
