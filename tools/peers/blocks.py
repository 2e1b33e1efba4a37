"""Parity of the block heads' training, DFlash, DSpark and DFlash2: loss and gradients. See tools/parity.py.

Blocks begin at the same anchors: this package draws them, and a patch hands them to the peer. Where the trainers
differ by design, the inputs leave no difference:
- A mask that this package ends at the first untrained token: answers lie more than a block apart.
- Labels: SpecForge's are the text, handed to this package as the target's best tokens; speculators' are the target's.
- speculators' DSpark masks row j by the token that row j reads. Its mask is handed over one token early.
- speculators' sliding window begins at anchor - window for every row. Its window covers the whole row here.
- Normalisers, which have no gradient: `_scale`.
Not comparable: D-PACE of speculators' DSpark and DFlash2, which weighs each term by that term's own loss. SpecForge
0.2.0 does not train DFlash2.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch

from eagle3_jax.formats.blocks.kinds import BLOCKS
from eagle3_jax.formats.tensors import LM_HEAD, Tensors
from eagle3_jax.models.checkpoint.table import plain
from eagle3_jax.models.drafts.dflash import FULL, SLIDING, BlockHeadConfig, DFlash
from eagle3_jax.models.drafts.dflash2 import DFlash2
from eagle3_jax.models.drafts.dspark import DSpark
from eagle3_jax.models.shapes import shapes_of
from eagle3_jax.training.batch import Batch
from eagle3_jax.training.block import Anchors, BlockLossConfig, block_loss, draw_anchors
from peers.common import SIZES, Data, Found, difference, found, shape, tensors

DOCUMENTS, LENGTH, BLOCK, ANCHORS = 2, 64, 8, 32  # anchors of one document
DECAY, ALPHA, WINDOW = 4.0, 0.5, 12


@dataclasses.dataclass(frozen=True)
class Case:
    """A peer's trainer and its settings: a window of the second layer in tokens, the weight of DSpark's L1 distance."""

    peer: str
    kind: type[DFlash]
    loss: BlockLossConfig
    draft_vocab_size: int = 512
    window: int | None = None
    distance: float = 0.9

    @property
    def config(self) -> BlockHeadConfig:
        layers = {"layer_types": (FULL, SLIDING if self.window else FULL), "sliding_window": self.window}
        sizes = {"block_size": BLOCK, "mask_token_id": 511, "markov_rank": 24, "selector_rank": 24}
        return BlockHeadConfig(**SIZES, draft_vocab_size=self.draft_vocab_size, **layers, **sizes)

    @property
    def packed(self) -> bool:
        """True if the documents share a row, else each has one."""
        return self.peer == "speculators"


def random_data(c: BlockHeadConfig, seed: int) -> Data:
    """Draws two documents with two answers each, the first document's up to its end."""
    rng = np.random.default_rng(seed)
    mask = np.zeros((DOCUMENTS, LENGTH), np.int32)
    for row, end in zip(mask, (LENGTH, LENGTH - 12), strict=True):
        first, second = BLOCK + 1 + rng.integers(0, 4), 34 + rng.integers(0, 4)
        row[first : second - BLOCK - 1] = row[second:end] = 1
    return Data.random(rng, mask, c.draft_vocab_size)


def batch_of(case: Case, data: Data) -> Batch:
    best = np.roll(data.token_ids, -1, axis=1)  # the text
    if case.peer == "speculators":
        best = data.draft_tokens[(data.last_hidden @ data.rows[data.draft_tokens].T).argmax(-1)]
    return data.batch(best, packed=case.packed)


def random_head(case: Case, seed: int) -> DFlash:
    """Draws matrices of N(0, 0.1), and norms and kernels around their initial values."""
    head, rng = shapes_of(lambda rngs: case.kind(case.config, rngs=rngs)), np.random.default_rng(seed)
    drawn = jax.tree.map(lambda x: rng.normal(*((1, 0.3) if x.ndim == 1 else (0, 0.1)), x.shape), head)
    return jax.tree.map(functools.partial(jnp.asarray, dtype=jnp.float32), drawn)


def tensors_of(head: DFlash) -> Tensors:
    """Converts a head, or its gradient, to the checkpoint's names and layout."""
    c, kind = head.config, next(kind for kind in BLOCKS if kind.network is type(head))
    return tensors(head, kind.table(c) | {"lm_head": plain(LM_HEAD, c.draft_vocab_size, c.hidden_size)})


_loss_and_gradient = jax.jit(jax.value_and_grad(block_loss, has_aux=True), static_argnums=4)
_draw_anchors = jax.jit(draw_anchors, static_argnums=2)


def ours(case: Case, head: DFlash, data: Data, anchors: Anchors) -> Found:
    """Computes this package's loss, over the peer's normaliser."""
    batch = batch_of(case, data)
    (loss, sums), gradient = _loss_and_gradient(head, data.teacher(), batch, anchors, case.loss)
    scale = _scale(case, np.asarray(sums["compared"], np.float64))
    return {"loss": np.asarray(loss) * scale}, {name: x * scale for name, x in tensors_of(gradient).items()}


def _scale(case: Case, compared: np.ndarray) -> float:
    """Divides this package's normaliser by the peer's.

    SpecForge divides by the sum of the decayed weights, or with D-PACE by the rows; speculators by the trained drafts.
    """
    drafts, decayed = compared.sum(), compared @ np.exp(-np.arange(len(compared)) / DECAY)
    mine = decayed if case.kind is DSpark else drafts
    if case.peer == "speculators":
        return float(mine / drafts)
    return float(mine / (DOCUMENTS if case.loss.weights == "d-pace" else decayed))


def specforge(case: Case, weights: dict[str, torch.Tensor], data: Data, anchors: Anchors) -> Found:
    """Computes loss and gradients of SpecForge's `OnlineDFlashModel` or `OnlineDSparkModel`."""
    from specforge.algorithms.common import dflash_family_model as family
    from specforge.modeling import draft as drafts

    c, spark = case.config, case.kind is DSpark
    config = layer_config(case)
    config.block_size, config.num_target_layers = BLOCK, 8
    config.dflash_config = {"target_layer_ids": [i - 1 for i in c.aux_layers], "mask_token_id": c.mask_token_id}
    if spark:
        config.dflash_config |= dict.fromkeys(("enable_confidence_head", "confidence_head_with_markov"), True)
        config.dflash_config["markov_rank"] = c.markov_rank
    draft = (drafts.DSparkDraftModel if spark else drafts.DFlashDraftModel)(config).float()
    draft.load_state_dict({name: x for name, x in weights.items() if name in draft.state_dict()})
    embed = torch.nn.Embedding.from_pretrained(weights["embed_tokens.weight"])
    lm_head = torch.nn.Linear(c.hidden_size, c.vocab_size, bias=False).requires_grad_(False)
    lm_head.weight.data = torch.from_numpy(data.rows)
    options = {"loss_type": {"d-pace": "dpace", "decay": "dflash"}[case.loss.weights], "dpace_alpha": case.loss.alpha}
    options = {"dspark_l1_loss_alpha": case.distance} if spark else options
    options |= {"attention_backend": "eager", "loss_decay_gamma": case.loss.decay}
    online = family.OnlineDSparkModel if spark else family.OnlineDFlashModel
    model = online(draft, lm_head, embed, c.mask_token_id, BLOCK, **options)
    model._sample_anchor_positions = lambda *_: (torch_of(anchors.at).long(), torch_of(anchors.valid))
    last_hidden = [data.last_hidden] if spark else []
    inputs = map(torch_of, (data.aux, data.loss_mask, *last_hidden))
    loss, *_ = model(torch_of(data.token_ids).long(), *inputs)
    return found(draft, loss)


def speculators(case: Case, weights: dict[str, torch.Tensor], data: Data, anchors: Anchors) -> Found:
    """Computes loss and gradients of speculators' draft model, its losses in plain torch."""
    from speculators.losses import eager
    from speculators.models.dflash import core

    c, name = case.config, case.kind.__name__
    package = importlib.import_module(f"speculators.models.{name.lower()}")
    fields = {"DSpark": ["markov_rank"], "DFlash2": ["selector_rank", "selector_top_k"]}.get(name, [])
    config = getattr(package, f"{name}SpeculatorConfig")(
        transformer_layer_config=layer_config(case),
        aux_hidden_state_layer_ids=list(c.aux_layers),
        **{field: getattr(c, field) for field in ("draft_vocab_size", "block_size", "mask_token_id", *fields)},
    )
    model = getattr(package, f"{name}DraftModel")(config).float()
    rows = torch.from_numpy(data.rows[data.draft_tokens])
    weights = {"lm_head.weight": rows, "verifier_lm_head.weight": rows} | weights
    missing, _ = model.load_state_dict({x: weights[x] for x in model.state_dict() if x in weights}, strict=False)
    assert missing == ["verifier_norm.weight"], missing
    model.verifier_norm = torch.nn.Identity()  # the last hidden states are normed already
    model.lm_head.weight.requires_grad_(c.draft_vocab_size < c.vocab_size)

    def soft_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        wanted = torch.log_softmax(targets, dim=-1)  # the divergence and the target's entropy
        return eager.kl_div_loss(logits, targets) - (wanted.exp() * wanted).sum(dim=-1)

    terms = {"kl_div": (soft_cross_entropy, 1.0)} if case.loss.soft else {"ce": (eager.ce_loss, 1.0)}
    options: dict[str, Any] = {} if case.kind is DFlash else {"tv_loss_fn": eager.tv_loss}
    if case.kind is DSpark:
        terms = {"ce": (eager.ce_loss, 0.1), "tv": (eager.tv_loss, 2 * case.distance)}
    mask = data.loss_mask.reshape(1, -1)
    if case.kind is DSpark:
        mask = np.pad(mask[:, 1:], ((0, 0), (0, 1)))
    batch = batch_of(case, data)
    ids, segments, positions = (torch_of(x).long() for x in (batch.token_ids, batch.segment_ids, batch.positions))
    drawn = torch_of(anchors.at)[0].long(), torch_of(anchors.valid)[0]
    inputs = torch_of(batch.aux), ids, torch_of(mask), torch_of(batch.last_hidden), segments, positions
    options |= {"loss_config": terms, "gamma": case.loss.decay, "dpace_alpha": case.loss.alpha}
    options["per_position_loss_weight"] = {"d-pace": "dpace", "decay": "fixed-exp-decay"}[case.loss.weights]
    with mock.patch.object(core, "select_anchors", lambda *_: drawn):
        _, loss, _ = model(*inputs, max_anchors=anchors.at.shape[1], **options)
    return found(model, loss)


def layer_config(case: Case) -> Any:
    from transformers import Qwen3Config

    c = case.config
    sliding = {"use_sliding_window": case.window is not None, "sliding_window": case.window}
    config: Any = Qwen3Config(**shape(c, len(c.layer_types)), layer_types=list(c.layer_types), **sliding)
    config._attn_implementation = "eager"
    return config


def torch_of(x: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(x))


PACE = BlockLossConfig(alpha=ALPHA, on_path=False, block=16)
DECAYED = BlockLossConfig(weights="decay", decay=DECAY, on_path=False, block=16)
TRAINERS = {
    "specforge DFlash, D-PACE": Case("specforge", DFlash, PACE, window=WINDOW),
    "specforge DFlash, decay": Case("specforge", DFlash, DECAYED),
    "specforge DSpark": Case("specforge", DSpark, DECAYED, window=WINDOW),
    "speculators DFlash, D-PACE": Case("speculators", DFlash, PACE, window=DOCUMENTS * LENGTH),
    "speculators DFlash, divergence": Case("speculators", DFlash, dataclasses.replace(DECAYED, soft=True), 128),
    "speculators DSpark": Case("speculators", DSpark, DECAYED, 128),
    "speculators DFlash2": Case("speculators", DFlash2, DECAYED),
}
SCALED = "v_proj off by 0.1 %"  # a scale of the keys is lost in their norm


def mistakes(case: Case) -> dict[str, Case]:
    """Makes the peer's settings with one mistake each."""
    name, loss = "decay off by 1 %", dataclasses.replace(case.loss, decay=1.01 * DECAY)
    if case.loss.weights == "d-pace":
        name, loss = "alpha off by 10 %", dataclasses.replace(case.loss, alpha=1.1 * ALPHA)
    made = {SCALED: case, name: dataclasses.replace(case, loss=loss)}
    if case.window == WINDOW:
        made["window one token longer"] = dataclasses.replace(case, window=WINDOW + 1)
    if case.kind is DSpark:
        made["half the distance"] = dataclasses.replace(case, distance=case.distance / 2)
    return made


PEERS = {"specforge": specforge, "speculators": speculators}


def compare(case: Case, seed: int) -> dict[str, dict[str, float]]:
    """Computes `difference` without a mistake (""), and with each. Requires `make_importable` first."""
    data, head = random_data(case.config, seed), random_head(case, seed)
    batch = batch_of(case, data)
    drawn = _draw_anchors(jax.random.key(seed), batch, ANCHORS * (DOCUMENTS if case.packed else 1))
    valid = drawn.valid & (drawn.at < batch.token_ids.shape[1] - BLOCK) if case.packed else drawn.valid
    anchors = Anchors(jnp.where(valid, drawn.at, 0), jnp.where(valid, drawn.first, 0), valid)
    mine, differences = ours(case, head, data, anchors), {}
    for mistake, used in ({"": case} | mistakes(case)).items():
        weights = data.weights(tensors_of(head))
        if mistake == SCALED:
            (name,) = (name for name in weights if name.endswith("layers.0.self_attn.v_proj.weight"))
            weights[name] *= 1.001
        differences[mistake] = difference(mine, PEERS[case.peer](used, weights, data, anchors))
    return differences


CASES = {name: functools.partial(compare, case) for name, case in TRAINERS.items()}
