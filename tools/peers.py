"""Other trainers' packages, SpecForge and speculators: imports, weights, gradients, differences.

They are installed without dependencies (`tools/peers.txt`) and run on a CPU. Modules that they import and do not use
here are replaced by mocks.
"""

from __future__ import annotations

import os
import pathlib
import sys
import types
from typing import Any
from unittest import mock

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import numpy as np
import torch
import torch._dynamo  # before `make_importable` replaces triton

from eagle3_jax.formats.tensors import Tensors
from eagle3_jax.models.drafts.dflash import BlockHeadConfig
from eagle3_jax.models.drafts.eagle3 import DraftHeadConfig

PACKAGES = ("specforge", "speculators")
# Numbers by name ("loss", and others that both sides have), and the gradient under the checkpoint's names.
Found = tuple[dict[str, np.ndarray], Tensors]


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


def shape(c: DraftHeadConfig | BlockHeadConfig, layers: int = 1) -> dict[str, Any]:
    """Writes a head's shape in transformers' fields."""
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.rms_norm_eps,
        "max_position_embeddings": c.max_position_embeddings,
        "num_hidden_layers": layers,
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
    }


def torch_weights(weights: Tensors, embed: np.ndarray, draft_tokens: np.ndarray) -> dict[str, torch.Tensor]:
    """Makes torch tensors of the head, the target's embeddings, and the draft vocabulary."""
    return {name: torch.from_numpy(np.array(x)) for name, x in weights.items()} | {
        "embed_tokens.weight": torch.from_numpy(embed),
        "t2d": torch.from_numpy(np.isin(np.arange(len(embed)), draft_tokens)),
        "d2t": torch.from_numpy(draft_tokens - np.arange(len(draft_tokens))),
    }


def gradients(model: Any) -> Tensors:
    return {name: parameter.grad.numpy() for name, parameter in model.named_parameters() if parameter.grad is not None}


def difference(one: Found, other: Found) -> dict[str, float]:
    """Computes the largest relative difference of each number, and of the gradient's tensors by norm ("gradients")."""
    assert one[1].keys() == other[1].keys(), one[1].keys() ^ other[1].keys()
    apart = [np.linalg.norm(x - other[1][name]) / np.linalg.norm(other[1][name]) for name, x in one[1].items()]
    numbers = {name: float(np.abs(x / other[0][name] - 1).max()) for name, x in one[0].items()}
    return numbers | {"gradients": float(max(apart))}
