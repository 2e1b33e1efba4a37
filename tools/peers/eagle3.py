"""Parity of EAGLE-3's training: loss, step losses and gradients. See tools/parity.py.

SpecForge's loss on GPUs is a Triton kernel; its own PyTorch reference replaces it here, so that Triton is not needed.
speculators trains with the divergence, which has the gradient of the cross entropy, over all positions in the mask.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx

from eagle3_jax.config import TrainConfig
from eagle3_jax.formats.tensors import canonical, draft_table
from eagle3_jax.models.drafts.eagle3 import DraftHead, DraftHeadConfig
from eagle3_jax.training.losses import ttt_loss
from peers.common import SIZES, Data, Found, difference, found, shape, tensors

LENGTH, STEPS, DECAY = 96, 5, 0.8
CONFIG = DraftHeadConfig(draft_vocab_size=128, **SIZES)
MISTAKES = ("k_proj off by 0.1 %", "mask one position on")

_loss_and_gradient = jax.jit(jax.value_and_grad(ttt_loss, has_aux=True), static_argnums=3)


def ours(head: DraftHead, data: Data, peer: str) -> Found:
    """Computes this package's loss at the peer's settings."""
    settings: dict[str, Any] = {"loss_reduction": "all"}
    if peer == "speculators":
        settings = {"loss_reduction": "mask", "mask_offset": 1, "argmax_mask": False}
    config = TrainConfig(ttt_steps=STEPS, row_length=LENGTH, loss_block=LENGTH, **settings)
    batch = data.batch((data.last_hidden @ data.rows.T).argmax(-1), packed=False)
    (loss, sums), gradient = _loss_and_gradient(head, data.teacher(), batch, config)
    mine = tensors(gradient, draft_table(CONFIG))
    if peer == "speculators":
        steps = np.asarray(sums["divergence"]) / np.asarray(sums["counted"])
        return {"loss": steps @ config.step_decay ** np.arange(STEPS), "steps": steps}, mine
    return {"loss": np.asarray(loss), "steps": np.asarray(sums["cross_entropy"]) / LENGTH}, mine


def specforge(weights: dict[str, torch.Tensor], data: Data, mistake: str) -> Found:
    """Computes loss, step losses and gradients of SpecForge's `OnlineEagle3Model`, the teacher cut to the drafts."""
    from specforge.algorithms.eagle3 import model as eagle3
    from specforge.core import loss as losses
    from specforge.modeling.draft import LlamaForCausalLMEagle3
    from specforge.utils import padding
    from transformers import LlamaConfig

    eagle3.LogSoftmaxLoss = types.SimpleNamespace(apply=losses._compute_loss)
    config: Any = LlamaConfig(**shape(CONFIG))
    config.draft_vocab_size = CONFIG.draft_vocab_size
    model = LlamaForCausalLMEagle3(config, attention_backend="sdpa").float()
    model.load_state_dict(weights)
    model.embed_tokens.weight.requires_grad_(False)
    inputs = data.loss_mask, data.token_ids, data.aux, data.last_hidden
    mask, token_ids, aux, last_hidden = map(torch.from_numpy, inputs)
    if mistake == MISTAKES[1]:
        mask = torch.nn.functional.pad(mask[:, 1:], (0, 1))
    steps, *_ = eagle3.OnlineEagle3Model(model, length=STEPS)(
        input_ids=padding(token_ids.long(), left=False),
        attention_mask=torch.ones(token_ids.shape, dtype=torch.long),
        target=None,
        loss_mask=mask[..., None],
        hidden_states=aux,
        target_hidden_for_compact=padding(last_hidden, left=False),
        target_head_weight=torch.from_numpy(data.rows),
    )
    loss: Any = sum(DECAY**i * step for i, step in enumerate(steps))
    return found(model, loss, steps=np.array([float(x.detach()) for x in steps]))


def speculators(weights: dict[str, torch.Tensor], data: Data, mistake: str) -> Found:
    """Computes loss, step losses and gradients of speculators' `Eagle3DraftModel`, its losses in plain torch."""
    from speculators.losses.eager import kl_div_loss
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from transformers import LlamaConfig

    layer = LlamaConfig(**shape(CONFIG))
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(transformer_layer_config=layer, draft_vocab_size=CONFIG.draft_vocab_size)
    model = Eagle3DraftModel(config).float()
    names = {name: "midlayer." + name.removeprefix("layers.0.") for name in model.state_dict() if "layers.0." in name}
    known = {name: weights[x] for name in model.state_dict() if (x := names.get(name, name)) in weights}
    missing, surplus = model.load_state_dict(known, strict=False)
    assert not surplus and all(name.startswith("verifier_") for name in missing), (missing, surplus)
    model.lm_head.weight.requires_grad_(True)
    model.verifier_norm = torch.nn.Identity()  # the last hidden states are normed already
    model.verifier_lm_head.weight.data = torch.from_numpy(data.rows[data.draft_tokens])
    mask = torch.from_numpy(data.loss_mask).bool()
    if mistake == MISTAKES[1]:
        mask = mask.roll(-1, dims=1)
    _, loss, metrics = model(
        hidden_states=torch.from_numpy(data.aux)[:, :-1],
        input_ids=torch.from_numpy(data.token_ids).long()[:, 1:],
        document_ids=torch.zeros(1, LENGTH - 1, dtype=torch.long),
        loss_mask=mask[:, 1:],
        verifier_last_hidden_states=torch.from_numpy(data.last_hidden)[:, 1:],
        ttt_steps=STEPS,
        ttt_step_loss_decay=DECAY,
        loss_config={"kl_div": (kl_div_loss, 1.0)},
    )
    return found(model, loss, steps=np.array([float(metrics[f"loss_{i}_sum"]) / DECAY**i for i in range(STEPS)]))


PEERS = {"specforge": specforge, "speculators": speculators}


def compare(peer: str, seed: int) -> dict[str, dict[str, float]]:
    """Computes `difference` without a mistake (""), and with each. Requires `make_importable` first."""
    rng = np.random.default_rng(seed)
    mask = (rng.random((1, LENGTH)) < 0.7).astype(np.int32)
    mask[:, -1] = 0  # as SpecForge's loader does
    data = Data.random(rng, mask, CONFIG.draft_vocab_size)
    head = jax.tree.map(lambda x: 5 * x if x.ndim > 1 else x, DraftHead(CONFIG, rngs=nnx.Rngs(seed)))
    mine, differences = ours(head, data, peer), {}
    for mistake in ("", *MISTAKES):
        weights = data.weights(tensors(head, draft_table(CONFIG)))
        if mistake == MISTAKES[0]:
            weights["midlayer.self_attn.k_proj.weight"] *= 1.001
        numbers, gradient = PEERS[peer](weights, data, mistake)
        theirs = numbers, {canonical(name): x for name, x in gradient.items()}
        differences[mistake] = difference(mine, theirs)
    return differences


CASES = {f"{peer} EAGLE-3": functools.partial(compare, peer) for peer in PEERS}
