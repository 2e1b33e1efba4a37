"""Training parity: loss, steps and gradients of the training-time test against SpecForge's own code, on a CPU.

    .venv/bin/pip install --no-deps --target runs/specforge specforge==0.2.0
    .venv/bin/python tools/parity.py runs/specforge

A random head and random features of one document go through both. SpecForge's loss on GPUs is a Triton kernel; here
the reference stands in for it that it has beside it, so that Triton need not be there. The controls make one mistake
each, to show that the comparison would see it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import sys
import types
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch._dynamo  # before the name triton stands for nothing
from flax import nnx

from eagle3_jax.config import TrainConfig
from eagle3_jax.formats.tensors import draft_table
from eagle3_jax.models.draft import DraftHead, DraftHeadConfig
from eagle3_jax.models.weights import parameter_path
from eagle3_jax.training.batch import Batch, Teacher
from eagle3_jax.training.losses import ttt_loss

TOLERANCE = 1e-5  # relative, float32
LENGTH, STEPS = 96, 5
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


@dataclasses.dataclass(frozen=True)
class Data:
    """A document as both read it: tokens [T], features, loss mask, and the target's two matrices [V, H]."""

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
        mask[-1] = 0  # as SpecForge does on loading
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
    """A head, or its gradient, by the names and in the layout of a checkpoint."""
    table, found = draft_table(CONFIG), {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(head):
        entry = table[parameter_path(path)]
        found |= dict(zip(entry.tensors, entry.split(np.asarray(leaf)), strict=True))
    return found


def ours(head: DraftHead, data: Data) -> tuple[float, np.ndarray, Tensors]:
    """Loss, cross entropy of each step (a mean over positions), gradient."""
    config = TrainConfig(ttt_steps=STEPS, loss_reduction="all", row_length=LENGTH, loss_block=LENGTH)
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
    run = jax.jit(jax.value_and_grad(ttt_loss, has_aux=True), static_argnums=3)
    (loss, sums), gradient = run(head, teacher, batch, config)
    return float(loss), np.asarray(sums["cross_entropy"]) / LENGTH, tensors(gradient)


def specforge(weights: Tensors, data: Data, mistake: str) -> tuple[float, np.ndarray, Tensors]:
    """The same from SpecForge's `OnlineEagle3Model`."""
    from specforge.algorithms.eagle3 import model as eagle3  # pyright: ignore[reportMissingImports]
    from specforge.core import loss as losses  # pyright: ignore[reportMissingImports]
    from specforge.modeling.draft import LlamaForCausalLMEagle3  # pyright: ignore[reportMissingImports]
    from specforge.utils import padding  # pyright: ignore[reportMissingImports]
    from transformers import LlamaConfig

    eagle3.LogSoftmaxLoss = types.SimpleNamespace(apply=losses._compute_loss)
    c = CONFIG
    config: Any = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        rms_norm_eps=1e-6 if mistake == "epsilon of 1e-6" else c.rms_norm_eps,
        max_position_embeddings=c.max_position_embeddings,
        num_hidden_layers=1,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
    )
    config.draft_vocab_size = c.draft_vocab_size
    model = LlamaForCausalLMEagle3(config, attention_backend="sdpa").float()
    given = {name: torch.from_numpy(np.array(x)) for name, x in weights.items()}
    if mistake == "k_proj off by 0.1 %":
        given["midlayer.self_attn.k_proj.weight"] *= 1.001
    given["embed_tokens.weight"] = torch.from_numpy(data.embed)
    t2d = np.isin(np.arange(c.vocab_size), data.draft_tokens)
    given |= {
        "t2d": torch.from_numpy(t2d),
        "d2t": torch.from_numpy(data.draft_tokens - np.arange(c.draft_vocab_size)),
    }
    model.load_state_dict(given)
    model.embed_tokens.weight.requires_grad_(False)
    logits = torch.from_numpy(data.last_hidden @ data.rows.T)[None]
    mask = torch.from_numpy(data.loss_mask)[None, :, None]
    if mistake == "mask one position on":
        mask = padding(mask, left=False)
    step_losses, *_ = eagle3.OnlineEagle3Model(model, length=STEPS)(
        input_ids=padding(torch.from_numpy(data.token_ids).long()[None], left=False),
        attention_mask=torch.ones(1, LENGTH),
        target=padding(logits, left=False),
        loss_mask=mask,
        hidden_states=torch.from_numpy(data.aux)[None],
    )
    loss: Any = sum(0.8**i * step for i, step in enumerate(step_losses))
    loss.backward()
    gradient = {
        name: parameter.grad.numpy() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    return float(loss.detach()), np.array([float(step.detach()) for step in step_losses]), gradient


def difference(
    one: tuple[float, np.ndarray, Tensors], other: tuple[float, np.ndarray, Tensors]
) -> tuple[float, float, float]:
    """Relative: of the loss, of the steps at most, of the gradients (by norm, the tensor that differs most)."""
    assert one[2].keys() == other[2].keys(), one[2].keys() ^ other[2].keys()
    gradients = [np.linalg.norm(x - other[2][name]) / np.linalg.norm(other[2][name]) for name, x in one[2].items()]
    return abs(one[0] / other[0] - 1), float(np.abs(one[1] / other[1] - 1).max()), float(max(gradients))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, help="where SpecForge is")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    if not (arguments.folder / "specforge").is_dir():
        parser.error(f"folder: got {arguments.folder}, expected one that holds the package specforge")
    language: Any = types.ModuleType("triton.language")
    language.constexpr = int
    triton: Any = types.ModuleType("triton")
    triton.jit, triton.language = lambda kernel: kernel, language
    sys.modules |= {"triton": triton, "triton.language": language}
    sys.path.insert(0, str(arguments.folder))

    worst = 0.0
    print(f"{'seed':6}{'mistake':24}{'loss':>10}{'steps':>10}{'gradients':>11}")
    for seed in range(arguments.seeds):
        data, head = Data.random(seed), DraftHead(CONFIG, rngs=nnx.Rngs(seed))
        head = jax.tree.map(lambda x: 5 * x if x.ndim > 1 else x, head)
        mine = ours(head, data)
        for mistake in ("", "epsilon of 1e-6", "k_proj off by 0.1 %", "mask one position on"):
            found = difference(mine, specforge(tensors(head), data, mistake))
            loss, steps, gradients = found
            print(f"{seed:<6}{mistake:24}{loss:10.1e}{steps:10.1e}{gradients:11.1e}", flush=True)
            if not mistake:
                worst = max(worst, *found)
            elif max(found) < TOLERANCE:
                sys.exit(f"{mistake}: not seen")
    if worst > TOLERANCE:
        sys.exit(f"differences: got {worst:.1e}, expected at most {TOLERANCE:.0e}")


if __name__ == "__main__":
    main()
