"""Parity of EAGLE-3's training: loss, step losses and gradients. See parity.py.

SpecForge's loss on GPUs is a Triton kernel; its own PyTorch reference replaces it here, so that Triton is not needed.
speculators trains with the divergence, which has the gradient of the cross entropy, over all positions in the mask.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import peers
import torch
from flax import nnx

from eagle3_jax.config import TrainConfig
from eagle3_jax.formats.tensors import Tensors, canonical, draft_table
from eagle3_jax.mesh import parameter_path
from eagle3_jax.models.drafts.eagle3 import DraftHead, DraftHeadConfig
from eagle3_jax.training.batch import Batch, Teacher
from eagle3_jax.training.losses import ttt_loss

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


def ours(head: DraftHead, data: Data, peer: str) -> peers.Found:
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
        return {"loss": steps @ config.step_decay ** np.arange(STEPS), "steps": steps}, tensors(gradient)
    return {"loss": np.asarray(loss), "steps": np.asarray(sums["cross_entropy"]) / LENGTH}, tensors(gradient)


def gradients(model: Any) -> Tensors:
    return {canonical(name): gradient for name, gradient in peers.gradients(model).items()}


def from_zero(positions: torch.Tensor) -> torch.Tensor:
    """Shifts positions to start at 0, so that every step has those of the first: the mistake in RoPE."""
    return positions - positions[:, :1]


def specforge_model(c: DraftHeadConfig, weights: dict[str, torch.Tensor]) -> Any:
    """Makes SpecForge's draft model with its loss in plain torch and frozen embeddings."""
    from specforge.algorithms.eagle3 import model as eagle3
    from specforge.core import loss as losses
    from specforge.modeling.draft import LlamaForCausalLMEagle3
    from transformers import LlamaConfig

    eagle3.LogSoftmaxLoss = types.SimpleNamespace(apply=losses._compute_loss)
    config: Any = LlamaConfig(**peers.shape(c))
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
    from specforge.algorithms.eagle3.model import OnlineEagle3Model
    from specforge.utils import padding

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


def specforge(weights: dict[str, torch.Tensor], data: Data, mistake: str) -> peers.Found:
    """Computes SpecForge's loss, step losses and gradients."""
    from specforge.modeling.draft import llama3_eagle

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
    steps = np.array([float(step.detach()) for step in step_losses])
    return {"loss": loss.detach().numpy(), "steps": steps}, gradients(model)


def speculators(weights: dict[str, torch.Tensor], data: Data, mistake: str) -> peers.Found:
    """Computes loss, step losses and gradients of speculators' `Eagle3DraftModel`, its losses in plain torch."""
    from speculators.losses.eager import kl_div_loss
    from speculators.models.eagle3 import (
        Eagle3DraftModel,
        Eagle3SpeculatorConfig,
    )
    from transformers import LlamaConfig

    layer = LlamaConfig(**peers.shape(CONFIG))
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
    return {"loss": loss.detach().numpy(), "steps": steps}, gradients(model)


PEERS: dict[str, Callable[[dict[str, torch.Tensor], Data, str], peers.Found]] = {
    "specforge": specforge,
    "speculators": speculators,
}


def compare(peer: str, seed: int) -> dict[str, dict[str, float]]:
    """Computes `peers.difference` without a mistake (""), and with each. Requires `make_importable` first."""
    data, head = Data.random(seed), DraftHead(CONFIG, rngs=nnx.Rngs(seed))
    head = jax.tree.map(lambda x: 5 * x if x.ndim > 1 else x, head)
    mine, found = ours(head, data, peer), {}
    for mistake in ("", *MISTAKES):
        weights = peers.torch_weights(tensors(head), data.embed, data.draft_tokens)
        if mistake == MISTAKES[1]:
            weights["midlayer.self_attn.k_proj.weight"] *= 1.001
        found[mistake] = peers.difference(mine, PEERS[peer](weights, data, mistake))
    return found


CASES = {f"{peer} EAGLE-3": functools.partial(compare, peer) for peer in PEERS}
