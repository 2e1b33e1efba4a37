"""What the comparisons with SpecForge and speculators share: their imports, random documents, weights, differences.

Both are installed without dependencies (`tools/peers.txt`) and run on a CPU. Modules that they import and do not use
here are replaced by mocks.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
import types
from collections.abc import Mapping
from typing import Any
from unittest import mock

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch._dynamo  # before `make_importable` replaces triton

from eagle3_jax.formats.tensors import Tensors
from eagle3_jax.mesh import parameter_path
from eagle3_jax.models.drafts.dflash import BlockHeadConfig
from eagle3_jax.models.drafts.eagle3 import DraftHeadConfig
from eagle3_jax.training.batch import Batch, Teacher

PACKAGES = ("specforge", "speculators")
# Numbers by name ("loss", and others that both sides have), and the gradient under the checkpoint's names.
Found = tuple[dict[str, np.ndarray], Tensors]
# Of every head and its target.
SIZES: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "target_hidden_size": 64, "intermediate_size": 160}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 1e4}
SIZES |= {"max_position_embeddings": 256, "aux_layers": (1, 2, 3)}


def make_importable(folder: pathlib.Path) -> None:
    """Puts the peers on the path, and mocks for their unused imports."""
    language: Any = types.ModuleType("triton.language")
    language.constexpr = int
    triton: Any = types.ModuleType("triton")
    triton.jit, triton.language = lambda kernel: kernel, language
    sys.modules |= {"triton": triton, "triton.language": language}
    for name in ("openai", "openai.types", "openai.types.chat", "openai.types.completion", "datasets", "hs_connectors"):
        sys.modules.setdefault(name, mock.MagicMock(__path__=[], __spec__=None))
    sys.path.insert(0, str(folder))


@dataclasses.dataclass(frozen=True)
class Data:
    """Documents: tokens [D, T], features, last hidden states, loss mask; the target's two matrices [V, H]."""

    token_ids: np.ndarray
    aux: np.ndarray
    last_hidden: np.ndarray
    loss_mask: np.ndarray
    embed: np.ndarray
    rows: np.ndarray
    draft_tokens: np.ndarray

    @classmethod
    def random(cls, rng: np.random.Generator, mask: np.ndarray, drafted: int) -> Data:
        """Draws documents of this loss mask, and a draft vocabulary of so many tokens."""
        vocabulary, hidden = SIZES["vocab_size"], SIZES["hidden_size"]

        def normal(*shape: int) -> np.ndarray:
            return rng.normal(size=shape).astype(np.float32)

        ids = rng.integers(0, vocabulary, mask.shape).astype(np.int32)
        states, table = (normal(*mask.shape, 3 * hidden), normal(*mask.shape, hidden)), normal(vocabulary, hidden)
        rows, drafts = 0.25 * normal(vocabulary, hidden), np.sort(rng.permutation(vocabulary)[:drafted])
        return cls(ids, *states, mask, table, rows, drafts.astype(np.int32))

    def batch(self, best: np.ndarray, *, packed: bool) -> Batch:
        """Makes this package's batch: a row for each document, or one with all; `best`: the target's tokens, [D, T]."""
        ones = np.ones_like(self.token_ids)
        segments = np.cumsum(ones, axis=0) if packed else ones
        fields = (self.token_ids, self.aux, self.last_hidden, best, self.loss_mask, segments, ones.cumsum(axis=1) - 1)
        laid = (x.reshape(1 if packed else len(ones), -1, *x.shape[2:]) for x in fields)
        return Batch(*(jnp.asarray(x, jnp.int32 if x.dtype.kind == "i" else jnp.float32) for x in laid))

    def teacher(self) -> Teacher:
        return Teacher.of(*map(jnp.asarray, (self.embed, self.rows, self.draft_tokens)))

    def weights(self, weights: Tensors) -> dict[str, torch.Tensor]:
        """Makes torch tensors of a head, the target's embeddings, and the draft vocabulary."""
        return {name: torch.from_numpy(np.array(x)) for name, x in weights.items()} | {
            "embed_tokens.weight": torch.from_numpy(self.embed),
            "t2d": torch.from_numpy(np.isin(np.arange(len(self.embed)), self.draft_tokens)),
            "d2t": torch.from_numpy(self.draft_tokens - np.arange(len(self.draft_tokens))),
        }


def shape(c: DraftHeadConfig | BlockHeadConfig, layers: int = 1) -> dict[str, Any]:
    """Writes a head's shape in transformers' fields."""
    same = {name: getattr(c, name) for name in SIZES.keys() - {"target_hidden_size", "rope_theta", "aux_layers"}}
    rope = {"rope_type": "default", "rope_theta": c.rope_theta}
    return same | {"num_hidden_layers": layers, "pad_token_id": 0, "rope_parameters": rope}


def tensors(head: Any, table: Mapping[str, Any]) -> Tensors:
    """Converts a head, or its gradient, to a checkpoint's names and layout."""
    found: Tensors = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(head):
        entry = table[parameter_path(path)]
        found |= dict(zip(entry.tensors, entry.split(np.asarray(leaf)), strict=True))
    return found


def found(model: Any, loss: Any, **numbers: Any) -> Found:
    """Returns a torch model's loss, other numbers, and gradients, which it computes."""
    loss.backward()
    gradient = {name: x.grad.numpy() for name, x in model.named_parameters() if x.grad is not None}
    return {"loss": loss.detach().numpy()} | numbers, gradient


def difference(one: Found, other: Found) -> dict[str, float]:
    """Computes the largest relative difference of each number, and of the gradient's tensors by norm ("gradients")."""
    assert one[1].keys() == other[1].keys(), one[1].keys() ^ other[1].keys()
    apart = [np.linalg.norm(x - other[1][name]) / np.linalg.norm(other[1][name]) for name, x in one[1].items()]
    numbers = {name: float(np.abs(x / other[0][name] - 1).max()) for name, x in one[0].items()}
    return numbers | {"gradients": float(max(apart))}
