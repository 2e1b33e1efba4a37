"""Checks training parity: loss, step losses and gradients against SpecForge's and speculators' own code.

    .venv/bin/pip install --no-deps --require-hashes --requirement tools/peers.txt --target runs/peers
    .venv/bin/python tools/parity.py runs/peers

A random head and random features of one document go through both, on a CPU. SpecForge's loss on GPUs is a Triton
kernel; its own PyTorch reference replaces it here, so that Triton is not needed. speculators trains with the
divergence, which has the gradient of the cross entropy, over all positions in the mask. Each control makes one mistake,
to show that the comparison detects it by a wide margin.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch._dynamo  # before `make_importable` replaces triton
from flax import nnx

from eagle3_jax.config import TrainConfig
from eagle3_jax.formats.tensors import canonical, draft_table
from eagle3_jax.models.checkpoint.load import parameter_path
from eagle3_jax.models.drafts.eagle3 import DraftHead, DraftHeadConfig
from eagle3_jax.training.batch import Batch, Teacher
from eagle3_jax.training.losses import ttt_loss

TOLERANCE = 1e-5  # relative, float32
LENGTH, STEPS, DECAY = 96, 5, 0.8
CONFIG = DraftHeadConfig(
    vocab_size=512,
    draft_vocab_size=128,
    hidden_size=64,
    target_hidden_size=64,
    intermediate_size=160,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position_embeddings=256,
    aux_layers=(1, 2, 3),
)
Tensors = dict[str, np.ndarray]
Found = tuple[float, np.ndarray, Tensors]  # loss, loss of each step, gradient
SEEN = 50 * TOLERANCE  # smallest difference of a control
MISTAKES = ("RoPE without the step's +k", "k_proj off by 0.1 %", "mask one position on")


@dataclasses.dataclass(frozen=True)
class Data:
    """One document for both trainers: tokens [T], features, loss mask, and the target's two matrices [V, H]."""

    token_ids: np.ndarray
    aux: np.ndarray
    last_hidden: np.ndarray
    loss_mask: np.ndarray
    embed: np.ndarray
    rows: np.ndarray
    draft_tokens: np.ndarray

    @classmethod
    def random(cls, seed: int) -> Data:
        c, rng = CONFIG, np.random.default_rng(seed)

        def normal(*shape: int) -> np.ndarray:
            return rng.normal(size=shape).astype(np.float32)

        mask = (rng.random(LENGTH) < 0.7).astype(np.int32)
        mask[-1] = 0  # as SpecForge's loader does
        return cls(
            rng.integers(0, c.vocab_size, LENGTH).astype(np.int32),
            normal(LENGTH, 3 * c.hidden_size),
            normal(LENGTH, c.hidden_size),
            mask,
            normal(c.vocab_size, c.hidden_size),
            0.2 * normal(c.vocab_size, c.hidden_size),
            np.sort(rng.permutation(c.vocab_size)[: c.draft_vocab_size]).astype(np.int32),
        )


def tensors(head: DraftHead) -> Tensors:
    """Converts a head, or its gradient, to a checkpoint's names and layout."""
    table, found = draft_table(head.config), {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(head):
        entry = table[parameter_path(path)]
        found |= dict(zip(entry.tensors, entry.split(np.asarray(leaf)), strict=True))
    return found


_loss_and_gradient = jax.jit(jax.value_and_grad(ttt_loss, has_aux=True), static_argnums=3)


def ours(head: DraftHead, data: Data, peer: str) -> Found:
    """Computes this package's loss at the peer's settings."""
    settings: dict[str, Any] = {"loss_reduction": "all"}
    if peer == "speculators":
        settings = {"loss_reduction": "mask", "mask_offset": 1, "argmax_mask": False}
    config = TrainConfig(ttt_steps=STEPS, row_length=LENGTH, loss_block=LENGTH, **settings)
    one = np.ones((1, LENGTH), np.int32)
    batch = Batch(
        jnp.asarray(data.token_ids[None]),
        jnp.asarray(data.aux[None]),
        jnp.asarray(data.last_hidden[None]),
        jnp.asarray((data.last_hidden @ data.rows.T).argmax(-1).astype(np.int32)[None]),
        jnp.asarray(data.loss_mask[None]),
        jnp.asarray(one),
        jnp.asarray(np.arange(LENGTH, dtype=np.int32)[None]),
    )
    teacher = Teacher.of(jnp.asarray(data.embed), jnp.asarray(data.rows), jnp.asarray(data.draft_tokens))
    (loss, sums), gradient = _loss_and_gradient(head, teacher, batch, config)
    if peer == "speculators":
        steps = np.asarray(sums["divergence"]) / np.asarray(sums["counted"])
        return float(steps @ config.step_decay ** np.arange(STEPS)), steps, tensors(gradient)
    return float(loss), np.asarray(sums["cross_entropy"]) / LENGTH, tensors(gradient)


def shape(c: DraftHeadConfig) -> dict[str, Any]:
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
        "num_hidden_layers": 1,
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
    return {
        canonical(name): parameter.grad.numpy()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def from_zero(positions: torch.Tensor) -> torch.Tensor:
    """Shifts positions to start at 0, so that every step has those of the first: the mistake in RoPE."""
    return positions - positions[:, :1]


def specforge_model(c: DraftHeadConfig, weights: dict[str, torch.Tensor]) -> Any:
    """Makes SpecForge's draft model with its loss in plain torch and frozen embeddings."""
    from specforge.algorithms.eagle3 import model as eagle3  # pyright: ignore[reportMissingImports]
    from specforge.core import loss as losses  # pyright: ignore[reportMissingImports]
    from specforge.modeling.draft import LlamaForCausalLMEagle3  # pyright: ignore[reportMissingImports]
    from transformers import LlamaConfig

    eagle3.LogSoftmaxLoss = types.SimpleNamespace(apply=losses._compute_loss)
    config: Any = LlamaConfig(**shape(c))
    config.draft_vocab_size = c.draft_vocab_size
    model = LlamaForCausalLMEagle3(config, attention_backend="sdpa").float()
    model.load_state_dict(weights)
    model.embed_tokens.weight.requires_grad_(False)
    return model


def specforge_loss(
    model: Any,
    token_ids: torch.Tensor,
    aux: torch.Tensor,
    last_hidden: torch.Tensor,
    rows: torch.Tensor,
    mask: torch.Tensor,
    steps: int,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Computes the loss of SpecForge's `OnlineEagle3Model`, the teacher cut to the draft vocabulary, and step losses.

    Arguments are as in `Batch`; rows: the target's LM head [v, h].
    """
    from specforge.algorithms.eagle3.model import OnlineEagle3Model  # pyright: ignore[reportMissingImports]
    from specforge.utils import padding  # pyright: ignore[reportMissingImports]

    step_losses, *_ = OnlineEagle3Model(model, length=steps)(
        input_ids=padding(token_ids.long(), left=False),
        attention_mask=torch.ones(token_ids.shape, dtype=torch.long),
        target=None,
        loss_mask=mask[..., None],
        hidden_states=aux,
        target_hidden_for_compact=padding(last_hidden, left=False),
        target_head_weight=rows,
    )
    loss: Any = sum(DECAY**i * step for i, step in enumerate(step_losses))
    return loss, step_losses


def specforge(weights: dict[str, torch.Tensor], data: Data, mistake: str) -> Found:
    """Computes SpecForge's loss, step losses and gradients."""
    from specforge.modeling.draft import llama3_eagle  # pyright: ignore[reportMissingImports]

    model = specforge_model(CONFIG, weights)
    mask = torch.from_numpy(data.loss_mask)[None]
    if mistake == MISTAKES[2]:
        mask = torch.nn.functional.pad(mask[:, 1:], (0, 1))
    token_ids, aux, last_hidden = (torch.from_numpy(x)[None] for x in (data.token_ids, data.aux, data.last_hidden))
    rotate = llama3_eagle.apply_rotary_pos_emb

    def rotate_as_in_step_0(q: Any, k: Any, cos: Any, sin: Any, positions: torch.Tensor) -> Any:
        return rotate(q, k, cos, sin, from_zero(positions))

    used = rotate_as_in_step_0 if mistake == MISTAKES[0] else rotate
    with mock.patch.object(llama3_eagle, "apply_rotary_pos_emb", used):
        loss, step_losses = specforge_loss(model, token_ids, aux, last_hidden, torch.from_numpy(data.rows), mask, STEPS)
        loss.backward()
    return float(loss.detach()), np.array([float(step.detach()) for step in step_losses]), gradients(model)


def speculators(weights: dict[str, torch.Tensor], data: Data, mistake: str) -> Found:
    """Computes loss, step losses and gradients of speculators' `Eagle3DraftModel`, its losses in plain torch."""
    from speculators.losses.eager import kl_div_loss  # pyright: ignore[reportMissingImports]
    from speculators.models.eagle3 import (  # pyright: ignore[reportMissingImports]
        Eagle3DraftModel,
        Eagle3SpeculatorConfig,
    )
    from transformers import LlamaConfig

    layer = LlamaConfig(**shape(CONFIG))
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(transformer_layer_config=layer, draft_vocab_size=CONFIG.draft_vocab_size)
    model = Eagle3DraftModel(config).float()
    names = {name: "midlayer." + name.removeprefix("layers.0.") for name in model.state_dict() if "layers.0." in name}
    missing, surplus = model.load_state_dict(
        {name: weights[names.get(name, name)] for name in model.state_dict() if names.get(name, name) in weights},
        strict=False,
    )
    assert not surplus and all(name.startswith("verifier_") for name in missing), (missing, surplus)
    model.lm_head.weight.requires_grad_(True)
    model.verifier_norm = torch.nn.Identity()  # the last hidden states are normed already
    model.verifier_lm_head.weight.data = torch.from_numpy(data.rows[data.draft_tokens])
    mask = torch.from_numpy(data.loss_mask).bool()
    if mistake == MISTAKES[2]:
        mask = mask.roll(-1)
    if mistake == MISTAKES[0]:
        rotate = model.rotary_emb.forward
        model.rotary_emb.forward = lambda x, positions: rotate(x, from_zero(positions))
    following = torch.from_numpy(data.last_hidden)
    _, loss, metrics = model(
        hidden_states=torch.from_numpy(data.aux)[None, :-1],
        input_ids=torch.from_numpy(data.token_ids).long()[None, 1:],
        document_ids=torch.zeros(1, LENGTH - 1, dtype=torch.long),
        loss_mask=mask[None, 1:],
        verifier_last_hidden_states=following[None, 1:],
        ttt_steps=STEPS,
        ttt_step_loss_decay=DECAY,
        loss_config={"kl_div": (kl_div_loss, 1.0)},
    )
    loss.backward()
    steps = np.array([float(metrics[f"loss_{i}_sum"]) / DECAY**i for i in range(STEPS)])
    return float(loss.detach()), steps, gradients(model)


PEERS: dict[str, Callable[[dict[str, torch.Tensor], Data, str], Found]] = {
    "specforge": specforge,
    "speculators": speculators,
}


def difference(one: Found, other: Found) -> tuple[float, float, float]:
    """Computes relative differences: of the loss, largest of the steps, largest by norm of the gradients' tensors."""
    assert one[2].keys() == other[2].keys(), one[2].keys() ^ other[2].keys()
    apart = [np.linalg.norm(x - other[2][name]) / np.linalg.norm(other[2][name]) for name, x in one[2].items()]
    return abs(one[0] / other[0] - 1), float(np.abs(one[1] / other[1] - 1).max()), float(max(apart))


def compare(peer: str, seed: int) -> dict[str, tuple[float, float, float]]:
    """Computes `difference` without a mistake (""), and with each. Requires `make_importable` first."""
    data, head = Data.random(seed), DraftHead(CONFIG, rngs=nnx.Rngs(seed))
    head = jax.tree.map(lambda x: 5 * x if x.ndim > 1 else x, head)
    mine, found = ours(head, data, peer), {}
    for mistake in ("", *MISTAKES):
        weights = torch_weights(tensors(head), data.embed, data.draft_tokens)
        if mistake == MISTAKES[1]:
            weights["midlayer.self_attn.k_proj.weight"] *= 1.001
        found[mistake] = difference(mine, PEERS[peer](weights, data, mistake))
    return found


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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, help="where the peers are installed")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    if missing := [peer for peer in PEERS if not (arguments.folder / peer).is_dir()]:
        parser.error(f"folder: got {arguments.folder}, expected one that holds the packages {' and '.join(missing)}")
    make_importable(arguments.folder)
    worst = 0.0
    print(f"{'peer':14}{'seed':6}{'mistake':28}{'loss':>10}{'steps':>10}{'gradients':>11}")
    for peer, seed in itertools.product(PEERS, range(arguments.seeds)):
        for mistake, found in compare(peer, seed).items():
            loss, steps, apart = found
            print(f"{peer:14}{seed:<6}{mistake:28}{loss:10.1e}{steps:10.1e}{apart:11.1e}", flush=True)
            if not mistake:
                worst = max(worst, *found)
            elif max(found) < SEEN:
                sys.exit(f"{peer}: {mistake}: got differences of {max(found):.1e}, expected at least {SEEN:.1e}")
    if worst > TOLERANCE:
        sys.exit(f"differences: got {worst:.1e}, expected at most {TOLERANCE:.0e}")


if __name__ == "__main__":
    main()
