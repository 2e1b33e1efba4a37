"""Heads of EAGLE and EAGLE-2 on disk, as SafeAILab publishes them: read only, never written.

config.json is a `LlamaConfig`; fc has a bias if the tensor is present. Embeddings in the checkpoint must equal the
target's, which are used. The LM head is the target's, reduced to the rows of a token map if there is one.
"""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.formats import engines, fields, files
from eagle3_jax.formats.compatibility import Engines
from eagle3_jax.formats.eagle2 import token_maps
from eagle3_jax.formats.files import DraftFormatError
from eagle3_jax.formats.kinds import DraftKind, Path
from eagle3_jax.formats.stored import filled, stale
from eagle3_jax.formats.tensors import EMBEDDINGS, LAYER
from eagle3_jax.kernels.linear.layouts import dense
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.models.checkpoint.table import Entry, kernel, llama_layer, plain, tensor_problems
from eagle3_jax.models.drafts.eagle2 import Eagle2Config, Eagle2Head
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.rope import read_rope
from eagle3_jax.models.target_config import ModelConfig

# The architecture's names in SafeAILab's code, SGLang and vLLM.
_ARCHITECTURES = ("LlamaForCausalLM", "LlamaForCausalLMEagle", "EagleLlamaForCausalLM")
# What other engines do with such a head, see docs/engines.md (SGLang's and vLLM's models/llama_eagle.py).
ENGINES = Engines(
    {"SGLang": "0.5.23", "vLLM": "0.32.0", **engines.VERSIONS},
    {"EAGLE-2": ("0.5.23", "0.32.0")},
    {},
    lambda head, form: iter(()),
    columns=engines.EAGLE2,
)
ONLY_EAGLE3 = (f"{LAYER}hidden_norm.weight", "norm.weight", "d2t")
_FIXED = {"hidden_act": "silu", "num_hidden_layers": 1, "attention_bias": False, "mlp_bias": False}


def may_be_eagle2(values: dict[str, Any]) -> bool:
    """Tells whether a config.json fits such a head; other heads that it fits have the tensors `ONLY_EAGLE3`."""
    return fields.architecture(values) in _ARCHITECTURES and "draft_vocab_size" not in values


def read_shape(folder: pathlib.Path, target: ModelConfig) -> Eagle2Config:
    """Reads the shape of a head over the target's whole vocabulary from config.json alone. Raises DraftFormatError."""
    problems: list[str] = []
    values = files.read_config(folder)
    config = read_config(values, target.num_hidden_layers, target.vocab_size, values.get("bias", True), problems)
    if config is None:
        raise DraftFormatError(f"{folder} does not describe a draft head (EAGLE-2):\n  " + "\n  ".join(problems))
    return config


def read_config(
    values: dict[str, Any], target_layers: int, draft_vocab_size: int, fc_bias: bool, problems: list[str]
) -> Eagle2Config | None:
    """Reads the head's shape from a config.json; None, with the reasons appended to `problems`, if that fails."""
    known = len(problems)
    problems += [
        f"{key}: got {values[key]!r}, expected {expected!r}"
        for key, expected in _FIXED.items()
        if values.get(key, expected) != expected
    ]
    found = fields.sizes(fields.LLAMA, values, problems)
    theta, scaling = read_rope(values, problems)
    if len(problems) > known:
        return None
    own: dict[str, Any] = dict(draft_vocab_size=draft_vocab_size, target_layers=target_layers, fc_bias=fc_bias)
    return Eagle2Config(**found, rope_theta=theta, rope_scaling=scaling, **own)


def table(config: Eagle2Config) -> dict[str, Entry]:
    """Maps each parameter path in `Eagle2Head` to its tensors; the LM head has none."""
    h = config.hidden_size
    entries = llama_layer(config, LAYER[:-1], h) | {"fc": kernel("fc.weight", h, 2 * h)}
    return entries | ({"fc_bias": plain("fc.bias", h)} if config.fc_bias else {})


def _is_mine(folder: pathlib.Path, values: dict[str, Any]) -> bool:
    if not may_be_eagle2(values):
        return False
    tensors, _ = files.read_tensors(folder)
    return not any(name in tensors for name in ONLY_EAGLE3)


class _Eagle2(DraftKind):
    def load(self, folder: pathlib.Path | None, target: Target, dtype: Any, token_map: Path | None = None) -> Draft:
        """See `DraftKind`. Raises DraftFormatError with every problem at once."""
        assert folder is not None
        tensors, problems = files.read_tensors(folder)
        values, shape = files.read_config(folder), target.model.config
        ids = np.arange(shape.vocab_size) if token_map is None else token_maps.read(token_map, shape.vocab_size)
        config = read_config(values, shape.num_hidden_layers, len(ids), "fc.bias" in tensors, problems)
        if config is not None:
            for field in ("vocab_size", "hidden_size"):
                got, wanted = getattr(config, field), getattr(shape, field)
                problems += [] if got == wanted else [f"{field}: got {got}, expected {wanted}, the target's"]
            expected = {name: shape for entry in table(config).values() for name, shape in entry.tensors.items()}
            problems += tensor_problems(tensors, expected, {EMBEDDINGS: (shape.vocab_size, shape.hidden_size)})
        problems += stale(tensors, EMBEDDINGS, target.model.embed[...], "the target's embeddings")
        rows = dense(target.model.output_rows)
        if not isinstance(rows, jax.Array):
            problems.append("the target's LM head: not loaded, expected a target that is loaded whole")
        if problems or config is None:
            expected = f"does not hold a usable draft head ({self.label})"
            raise DraftFormatError(f"{folder} {expected}:\n  " + "\n  ".join(problems))
        assert isinstance(rows, jax.Array)
        rows = rows if token_map is None else rows[ids]
        return Draft(filled(self.network, config, dtype, table(config), tensors, rows), jnp.asarray(ids, jnp.int32))


EAGLE2 = _Eagle2(
    name="eagle2",
    label="EAGLE-2",
    network=Eagle2Head,
    method="eagle",
    algorithm="EAGLE",
    is_mine=_is_mine,
    needs_weights=True,
    token_map=token_maps.locate,
)
