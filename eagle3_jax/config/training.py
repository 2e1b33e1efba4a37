"""The config section of train."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from eagle3_jax.config.checks import Count, Fraction, Positive, require, section
from eagle3_jax.config.models import MeshConfig


@section("train")
class TrainConfig:
    """features -> draft head (EAGLE-3, arXiv 2503.01840, section 3.2).

    Attributes:
        warm_start: exported head whose weights and draft vocabulary training begins with, as for a new domain; `mtp` is
            the layer in the target's checkpoint, for `draft.kind: mtp`. A training that was interrupted goes on without
            it, an `assistant`'s excepted, whose shape it has.
        features: `stored` reads the states that `extract` wrote; `online` has the target compute them before each step.
        ttt_steps: steps of the training-time test.
        step_decay: weighs step i by step_decay ** i.
        loss: `lk` maximises the share of accepted drafts (arXiv 2602.23881), with cross entropy where that is small.
        lk_from: share of all steps with cross entropy before `lk` begins.
        mesh: devices of the training, where they are not `mesh`'s.
        batch_size: packed rows per step.
        accumulate: parts of a batch whose gradients are computed in turn and summed.
        row_length: tokens per row.
        sequence: devices over which a row is split along its length, for rows too long for one; a divisor of the mesh's
            data axis, which is then divided by it for `batch_size`.
        anchors: blocks per row, for block heads.
        block_weights: weights of the drafts in a block: `d-pace` (arXiv 2605.18810; `dpace` of SpecForge and
            speculators), or `decay`, exp(-(d - 1) / loss_decay_gamma) for draft d (SpecForge's `dflash`, speculators'
            `fixed-exp-decay`).
        loss_decay_gamma: see `block_weights`. DFlash's authors take 7, 5 and 4 for blocks of 16, 10 and 8 rows.
        dpace_alpha: a draft of probability q counts as (1 - dpace_alpha) q + dpace_alpha for those behind it.
        epochs: passes over the features.
        max_steps: last step, where `epochs` has more; None is no limit.
        optimizer: `muon` updates matrices by Muon, the LM head and the norms by AdamW, all at `learning_rate`.
        learning_rate: peak rate, after the warm-up.
        warmup_ratio: share of all steps in which the learning rate rises to its peak.
        mask_offset: the loss mask that counts for the prediction of token t+2 is mask[t + mask_offset].
        loss_reduction: divide by all positions ("all", the paper's code) or by those that count ("mask").
        argmax_mask: drop positions whose teacher argmax is outside the draft vocabulary.
        loss_block: positions per block of the vocabulary-wide part of the loss, on each shard of the data axis.
        remat: keep matrix products and attention of each step, and recompute the rest in the backward pass.
        wandb: project of Weights & Biases that gets the metrics too; needs the package `wandb` and its login.
        log_every: steps between two lines of metrics.
        eval_every: steps between two evaluations on the held-out features.
        eval_batches: most batches of an evaluation.
        checkpoint_every: steps between two checkpoints.
        decode_every: steps between two measurements in which the engine answers `decode_prompts` held-out prompts with
            the head, in a chain of `ttt_steps`; `export` then takes the checkpoint with the longest acceptance. None
            measures never.
        decode_prompts: see `decode_every`.
    """

    warm_start: str | None = None
    features: Literal["stored", "online"] = "stored"
    ttt_steps: Count = 7
    step_decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    loss: Literal["cross_entropy", "lk"] = "cross_entropy"
    lk_from: Fraction = 0.8
    mesh: MeshConfig | None = None
    batch_size: Count = 4
    accumulate: Count = 1
    row_length: Count = 2048
    sequence: Count = 1
    anchors: Count = 256
    block_weights: Literal["d-pace", "decay"] = "d-pace"
    loss_decay_gamma: Positive = 4.0
    dpace_alpha: Fraction = 0.5
    epochs: Positive = 1.0
    max_steps: Count | None = None
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: Positive = 1e-4
    warmup_ratio: Fraction = 0.015
    mask_offset: Literal[0, 1, 2] = 0
    loss_reduction: Literal["all", "mask"] = "all"
    argmax_mask: bool = True
    loss_block: Count = 512
    remat: bool = False
    wandb: str | None = None
    log_every: Count = 10
    eval_every: Count = 200
    eval_batches: Count = 16
    checkpoint_every: Count = 500
    decode_every: Count | None = None
    decode_prompts: Count = 32

    def __post_init__(self) -> None:
        row, pieces, steps = self.row_length, self.sequence, self.ttt_steps
        piece, of = row // pieces, " / train.sequence" * (pieces > 1)
        fits = pieces == 1 or (row % pieces == 0 and piece > steps)
        expected = f"a divisor of train.row_length = {row}, with more than train.ttt_steps = {steps} tokens for each"
        require(fits, "sequence", pieces, expected)
        divides = piece % min(self.loss_block, piece) == 0
        require(divides, "loss_block", self.loss_block, f"a divisor of train.row_length{of} = {piece}")
