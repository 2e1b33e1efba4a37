"""Checks training parity: loss and gradients against SpecForge's and speculators' own code, for each kind of head.

    .venv/bin/pip install --no-deps --require-hashes --requirement tools/peers.txt --target runs/peers
    .venv/bin/python tools/parity.py runs/peers

A random head and random features go through both, on a CPU in float32. Each case has a control with one mistake in the
peer's computation, to show that the comparison detects it by a wide margin.

Where the trainers differ by design, the inputs leave no difference:
- SpecForge's EAGLE-3 loss on GPUs is a Triton kernel; its own PyTorch reference replaces it.
- speculators trains EAGLE-3 with the divergence, which has the gradient of the cross entropy, over the whole mask.
- Blocks begin at the same anchors: this package draws them, and a patch hands them to the peer.
- A block's mask that this package ends at the first untrained token: answers lie more than a block apart.
- Labels of blocks: SpecForge's are the text, handed to this package as the target's best tokens.
- speculators' DSpark masks row j by the token that row j reads. Its mask is handed over one token early.
- speculators' sliding window begins at anchor - window for every row. Its window covers the whole row here.
- Normalisers, which have no gradient: `_scale`.
Not comparable: D-PACE of speculators' DSpark and DFlash2, which weighs each term by that term's own loss. SpecForge
0.2.0 does not train DFlash2.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import itertools
import os
import pathlib
import sys
import types
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch._dynamo  # before `make_importable` replaces triton

from eagle3_jax.config import TrainConfig
from eagle3_jax.formats.blocks.kinds import BLOCKS
from eagle3_jax.formats.tensors import LM_HEAD, Tensors, canonical, draft_table
from eagle3_jax.mesh import parameter_path
from eagle3_jax.models.checkpoint.table import plain
from eagle3_jax.models.drafts.dflash import FULL, SLIDING, BlockHeadConfig, DFlash
from eagle3_jax.models.drafts.dflash2 import DFlash2
from eagle3_jax.models.drafts.dspark import DSpark
from eagle3_jax.models.drafts.eagle3 import DraftHead, DraftHeadConfig
from eagle3_jax.models.shapes import shapes_of
from eagle3_jax.training.batch import Batch, Teacher
from eagle3_jax.training.block import Anchors, BlockLossConfig, block_loss, draw_anchors
from eagle3_jax.training.losses import Loss, states_loss
from eagle3_jax.training.ttt import training_time_test

TOLERANCE = 1e-5  # relative, float32
SEEN = 50 * TOLERANCE  # smallest difference of a control
LENGTH, STEPS, STEP_DECAY = 96, 5, 0.8  # of EAGLE-3
DOCUMENTS, BLOCK, ANCHORS = 2, 8, 32  # of blocks; anchors of one document
DECAY, WINDOW = 4.0, 12
VOCABULARY, HIDDEN = 512, 64
# Of every head and its target, by the names that transformers has too.
SHAPE: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 160, "head_dim": 16}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 256}
BASE, AUX = 1e4, (1, 2, 3)
# The loss, and the gradient under the checkpoint's names.
Found = tuple[np.ndarray, Tensors]


@dataclasses.dataclass(frozen=True)
class Case:
    """A peer's trainer and its settings.

    Attributes:
        shift: of EAGLE-3's mask, a mistake of a position.
        loss: of a block head, with `window`: tokens that its second layer sees, and `distance`: weight of DSpark's L1.
    """

    peer: str
    kind: Any
    drafted: int = VOCABULARY
    loss: BlockLossConfig = dataclasses.field(default_factory=BlockLossConfig)
    window: int | None = None
    distance: float = 0.9
    shift: int = 0

    @property
    def config(self) -> Any:
        sizes = SHAPE | {"target_hidden_size": HIDDEN, "rope_theta": BASE, "aux_layers": AUX}
        sizes |= {"draft_vocab_size": self.drafted}
        if self.kind is DraftHead:
            return DraftHeadConfig(**sizes)
        layers = {"layer_types": (FULL, SLIDING if self.window else FULL), "sliding_window": self.window}
        block = {"block_size": BLOCK, "mask_token_id": VOCABULARY - 1, "markov_rank": 24, "selector_rank": 24}
        return BlockHeadConfig(**sizes, **layers, **block)

    @property
    def packed(self) -> bool:
        """True if the documents share a row, else each has one."""
        return self.peer == "speculators" and self.kind is not DraftHead


PACE = BlockLossConfig(alpha=0.5, on_path=False, block=16)
DECAYED = BlockLossConfig(weights="decay", decay=DECAY, on_path=False, block=16)
SOFT = dataclasses.replace(DECAYED, soft=True)
OTHER_DECAY = {"loss": dataclasses.replace(DECAYED, decay=1.01 * DECAY)}
# Each with what its control mistakes.
CASES = {
    "specforge EAGLE-3": (Case("specforge", DraftHead, 128), {"shift": 1}),
    "speculators EAGLE-3": (Case("speculators", DraftHead, 128), {"shift": 1}),
    "specforge DFlash, D-PACE": (Case("specforge", DFlash, loss=PACE, window=WINDOW), {"window": WINDOW + 1}),
    "specforge DFlash, decay": (Case("specforge", DFlash, loss=DECAYED), OTHER_DECAY),
    "specforge DSpark": (Case("specforge", DSpark, loss=DECAYED, window=WINDOW), {"distance": 0.45}),
    "speculators DFlash, D-PACE": (
        Case("speculators", DFlash, loss=PACE, window=128),
        {"loss": dataclasses.replace(PACE, alpha=0.55)},
    ),
    "speculators DFlash, divergence": (
        Case("speculators", DFlash, 128, loss=SOFT),
        {"loss": dataclasses.replace(SOFT, decay=1.01 * DECAY)},
    ),
    "speculators DSpark": (Case("speculators", DSpark, 128, loss=DECAYED), {"distance": 0.45}),
    "speculators DFlash2": (Case("speculators", DFlash2, loss=DECAYED), OTHER_DECAY),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, help="where the peers are installed")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    if missing := [peer for peer in ("specforge", "speculators") if not (arguments.folder / peer).is_dir()]:
        parser.error(f"folder: got {arguments.folder}, expected one that holds the packages {' and '.join(missing)}")
    make_importable(arguments.folder)
    print(f"{'largest relative difference':34}{'seed':6}{'loss':>8}{'gradients':>11}{'with a mistake':>22}")
    for (name, (case, mistake)), seed in itertools.product(CASES.items(), range(arguments.seeds)):
        exact, control = compare(case, mistake, seed)
        cells = (f"{loss:8.1e}{gradient:11.1e}" for loss, gradient in (exact, control))
        print(f"{name:34}{seed:<6}{'   '.join(cells)}", flush=True)
        if max(exact) > TOLERANCE or max(control) < SEEN:
            sys.exit(f"{name}: expected at most {TOLERANCE:.0e}, and with a mistake at least {SEEN:.1e}")


def make_importable(folder: pathlib.Path) -> None:
    """Puts the peers on the path, and mocks for their unused imports."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    language: Any = types.ModuleType("triton.language")
    language.constexpr = int
    triton: Any = types.ModuleType("triton")
    triton.jit, triton.language = lambda kernel: kernel, language
    sys.modules |= {"triton": triton, "triton.language": language}
    for name in ("openai", "openai.types", "openai.types.chat", "openai.types.completion", "datasets", "hs_connectors"):
        sys.modules.setdefault(name, mock.MagicMock(__path__=[], __spec__=None))
    sys.path.insert(0, str(folder))


def compare(case: Case, mistake: dict[str, Any], seed: int) -> list[tuple[float, float]]:
    """Computes the largest relative differences of loss and gradient tensors, by norm: without and with the mistake."""
    data, head = Data.random(case, seed), random_head(case, seed)
    batch = data.batch(case)
    drawn = jax.jit(draw_anchors, static_argnums=2)(jax.random.key(seed), batch, ANCHORS * (1 + case.packed))
    valid = drawn.valid & (drawn.at < batch.token_ids.shape[1] - BLOCK) if case.packed else drawn.valid
    anchors = Anchors(jnp.where(valid, drawn.at, 0), jnp.where(valid, drawn.first, 0), valid)
    peer = PEERS[case.peer, case.kind is DraftHead]
    loss, gradient = ours(case, head, data, batch, anchors)
    differences = []
    for used in (case, dataclasses.replace(case, **mistake)):
        theirs, other = peer(used, data.weights(tensors_of(head)), data, batch, anchors)
        assert gradient.keys() == other.keys(), gradient.keys() ^ other.keys()
        apart = [np.linalg.norm(x - other[name]) / np.linalg.norm(other[name]) for name, x in gradient.items()]
        differences.append((float(np.abs(loss / theirs - 1)), float(max(apart))))
    return differences


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
    def random(cls, case: Case, seed: int) -> Data:
        """Draws one document for EAGLE-3; for blocks two with two answers each, the first document's up to its end."""
        rng = np.random.default_rng(seed)
        if case.kind is DraftHead:
            mask = (rng.random((1, LENGTH)) < 0.7).astype(np.int32)
            mask[:, -1] = 0  # as SpecForge's loader does
        else:
            mask = np.zeros((DOCUMENTS, 64), np.int32)
            for row, end in zip(mask, (64, 52), strict=True):
                first, second = BLOCK + 1 + rng.integers(0, 4), 34 + rng.integers(0, 4)
                row[first : second - BLOCK - 1] = row[second:end] = 1

        def normal(*shape: int) -> np.ndarray:
            return rng.normal(size=shape).astype(np.float32)

        ids = rng.integers(0, VOCABULARY, mask.shape).astype(np.int32)
        states, table = (normal(*mask.shape, 3 * HIDDEN), normal(*mask.shape, HIDDEN)), normal(VOCABULARY, HIDDEN)
        drafts = np.sort(rng.permutation(VOCABULARY)[: case.drafted]).astype(np.int32)
        return cls(ids, *states, mask, table, 0.25 * normal(VOCABULARY, HIDDEN), drafts)

    def batch(self, case: Case) -> Batch:
        """Makes this package's batch: a row for each document, or one with all."""
        best = (self.last_hidden @ self.rows.T).argmax(-1)
        if case.kind is not DraftHead:
            best = self.draft_tokens[(self.last_hidden @ self.rows[self.draft_tokens].T).argmax(-1)]
            best = best if case.packed else np.roll(self.token_ids, -1, axis=1)
        ones = np.ones_like(self.token_ids)
        segments = np.cumsum(ones, axis=0) if case.packed else ones
        fields = (self.token_ids, self.aux, self.last_hidden, best, self.loss_mask, segments, ones.cumsum(axis=1) - 1)
        laid = (x.reshape(1 if case.packed else len(ones), -1, *x.shape[2:]) for x in fields)
        return Batch(*(jnp.asarray(x, jnp.int32 if x.dtype.kind == "i" else jnp.float32) for x in laid))

    def weights(self, weights: Tensors) -> dict[str, torch.Tensor]:
        """Makes torch tensors of a head, the target's embeddings, and the draft vocabulary."""
        return {name: torch_of(x) for name, x in weights.items()} | {
            "embed_tokens.weight": torch_of(self.embed),
            "t2d": torch_of(np.isin(np.arange(VOCABULARY), self.draft_tokens)),
            "d2t": torch_of(self.draft_tokens - np.arange(len(self.draft_tokens))),
        }


def random_head(case: Case, seed: int) -> Any:
    """Draws matrices of N(0, 0.1), and norms and kernels around their initial values."""
    head, rng = shapes_of(lambda rngs: case.kind(case.config, rngs=rngs)), np.random.default_rng(seed)
    drawn = jax.tree.map(lambda x: rng.normal(*((1, 0.3) if x.ndim == 1 else (0, 0.1)), x.shape), head)
    return jax.tree.map(functools.partial(jnp.asarray, dtype=jnp.float32), drawn)


def tensors_of(head: Any) -> Tensors:
    """Converts a head, or its gradient, to the checkpoint's names and layout."""
    c, found = head.config, Tensors()
    if isinstance(head, DraftHead):
        table = draft_table(c)
    else:
        kind = next(kind for kind in BLOCKS if kind.network is type(head))
        table = kind.table(c) | {"lm_head": plain(LM_HEAD, c.draft_vocab_size, HIDDEN)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(head):
        entry = table[parameter_path(path)]
        found |= dict(zip(entry.tensors, entry.split(np.asarray(leaf)), strict=True))
    return found


def ttt_loss(head: DraftHead, teacher: Teacher, batch: Batch, config: TrainConfig) -> Loss:
    states = training_time_test(head, teacher.embed, batch, config.ttt_steps)
    return states_loss(head.lm_head[...], states, teacher, batch, config)


def ours(case: Case, head: Any, data: Data, batch: Batch, anchors: Anchors) -> Found:
    """Computes this package's loss at the peer's settings, over the peer's normaliser."""
    teacher = Teacher.of(*map(jnp.asarray, (data.embed, data.rows, data.draft_tokens)))
    if case.kind is not DraftHead:
        taught = jax.jit(jax.value_and_grad(block_loss, has_aux=True), static_argnums=4)
        (loss, sums), gradient = taught(head, teacher, batch, anchors, case.loss)
        scale = _scale(case, np.asarray(sums["compared"], np.float64))
        return np.asarray(loss) * scale, {name: x * scale for name, x in tensors_of(gradient).items()}
    settings: dict[str, Any] = {"loss_reduction": "all"}
    if case.peer == "speculators":
        settings = {"loss_reduction": "mask", "mask_offset": 1, "argmax_mask": False}
    config = TrainConfig(ttt_steps=STEPS, row_length=LENGTH, loss_block=LENGTH, **settings)
    taught = jax.jit(jax.value_and_grad(ttt_loss, has_aux=True), static_argnums=3)
    (loss, sums), gradient = taught(head, teacher, batch, config)
    if case.peer == "speculators":
        loss = np.asarray(sums["divergence"]) / np.asarray(sums["counted"]) @ config.step_decay ** np.arange(STEPS)
    return np.asarray(loss), tensors_of(gradient)


def _scale(case: Case, compared: np.ndarray) -> float:
    """Divides this package's normaliser of a block's loss by the peer's.

    SpecForge divides by the sum of the decayed weights, or with D-PACE by the rows; speculators by the trained drafts.
    """
    drafts, decayed = compared.sum(), compared @ np.exp(-np.arange(len(compared)) / DECAY)
    mine = decayed if case.kind is DSpark else drafts
    if case.peer == "speculators":
        return float(mine / drafts)
    return float(mine / (DOCUMENTS if case.loss.weights == "d-pace" else decayed))


# ------------------------------------------------------------------------------------------------------------ the peers
def found(model: Any, loss: Any) -> Found:
    """Returns a torch model's loss, and its gradients, which it computes."""
    loss.backward()
    return loss.detach().numpy(), {name: x.grad.numpy() for name, x in model.named_parameters() if x.grad is not None}


def torch_of(x: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(x))


def transformers_config(name: str, layers: int = 1, **more: Any) -> Any:
    more |= {"num_hidden_layers": layers, "rope_parameters": {"rope_type": "default", "rope_theta": BASE}}
    config = getattr(importlib.import_module("transformers"), name)(**SHAPE, pad_token_id=0, **more)
    config._attn_implementation = "eager"
    return config


def layer_config(case: Case) -> Any:
    layers = list(case.config.layer_types)
    sliding = {"use_sliding_window": case.window is not None, "sliding_window": case.window}
    return transformers_config("Qwen3Config", len(layers), layer_types=layers, **sliding)


def specforge_eagle3(case: Case, weights: Any, data: Data, *_: Any) -> Found:
    """Trains SpecForge's `OnlineEagle3Model`, the teacher cut to the drafts."""
    from specforge.algorithms.eagle3 import model as eagle3
    from specforge.core import loss as losses
    from specforge.modeling.draft import LlamaForCausalLMEagle3
    from specforge.utils import padding

    eagle3.LogSoftmaxLoss = types.SimpleNamespace(apply=losses._compute_loss)
    config = transformers_config("LlamaConfig")
    config.draft_vocab_size = case.drafted
    model = LlamaForCausalLMEagle3(config, attention_backend="sdpa").float()
    model.load_state_dict(weights)
    model.embed_tokens.weight.requires_grad_(False)
    steps = eagle3.OnlineEagle3Model(model, length=STEPS)(
        input_ids=padding(torch_of(data.token_ids).long(), left=False),
        attention_mask=torch.ones(data.token_ids.shape, dtype=torch.long),
        target=None,
        loss_mask=torch_of(np.roll(data.loss_mask, -case.shift, axis=1))[..., None],
        hidden_states=torch_of(data.aux),
        target_hidden_for_compact=padding(torch_of(data.last_hidden), left=False),
        target_head_weight=torch_of(data.rows),
    )[0]
    return found(model, sum(STEP_DECAY**i * step for i, step in enumerate(steps)))


def speculators_eagle3(case: Case, weights: Any, data: Data, *_: Any) -> Found:
    """Trains speculators' `Eagle3DraftModel`, its losses in plain torch."""
    from speculators.losses.eager import kl_div_loss
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    layer = transformers_config("LlamaConfig")
    config = Eagle3SpeculatorConfig(transformer_layer_config=layer, draft_vocab_size=case.drafted)
    model = Eagle3DraftModel(config).float()
    names = {name: "midlayer." + name.removeprefix("layers.0.") for name in model.state_dict() if "layers.0." in name}
    known = {name: weights[x] for name in model.state_dict() if (x := names.get(name, name)) in weights}
    missing, surplus = model.load_state_dict(known, strict=False)
    assert not surplus and all(name.startswith("verifier_") for name in missing), (missing, surplus)
    model.lm_head.weight.requires_grad_(True)
    model.verifier_norm = torch.nn.Identity()  # the last hidden states are normed already
    model.verifier_lm_head.weight.data = torch_of(data.rows[data.draft_tokens])
    _, loss, _ = model(
        hidden_states=torch_of(data.aux)[:, :-1],
        input_ids=torch_of(data.token_ids).long()[:, 1:],
        document_ids=torch.zeros(1, LENGTH - 1, dtype=torch.long),
        loss_mask=torch_of(np.roll(data.loss_mask, -case.shift, axis=1)).bool()[:, 1:],
        verifier_last_hidden_states=torch_of(data.last_hidden)[:, 1:],
        ttt_steps=STEPS,
        ttt_step_loss_decay=STEP_DECAY,
        loss_config={"kl_div": (kl_div_loss, 1.0)},
    )
    loss, gradient = found(model, loss)
    return loss, {canonical(name): x for name, x in gradient.items()}


def specforge_block(case: Case, weights: Any, data: Data, batch: Batch, anchors: Anchors) -> Found:
    """Trains SpecForge's `OnlineDFlashModel` or `OnlineDSparkModel`."""
    from specforge.algorithms.common import dflash_family_model as family
    from specforge.modeling import draft as drafts

    c, spark = case.config, case.kind is DSpark
    config = layer_config(case)
    config.block_size, config.num_target_layers = BLOCK, 8
    config.dflash_config = {"target_layer_ids": [i - 1 for i in AUX], "mask_token_id": c.mask_token_id}
    if spark:
        config.dflash_config |= dict.fromkeys(("enable_confidence_head", "confidence_head_with_markov"), True)
        config.dflash_config["markov_rank"] = c.markov_rank
    draft = (drafts.DSparkDraftModel if spark else drafts.DFlashDraftModel)(config).float()
    draft.load_state_dict({name: x for name, x in weights.items() if name in draft.state_dict()})
    embed = torch.nn.Embedding.from_pretrained(weights["embed_tokens.weight"])
    lm_head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False).requires_grad_(False)
    lm_head.weight.data = torch_of(data.rows)
    options = {"loss_type": {"d-pace": "dpace", "decay": "dflash"}[case.loss.weights], "dpace_alpha": case.loss.alpha}
    options = {"dspark_l1_loss_alpha": case.distance} if spark else options
    options |= {"attention_backend": "eager", "loss_decay_gamma": case.loss.decay}
    online = family.OnlineDSparkModel if spark else family.OnlineDFlashModel
    model = online(draft, lm_head, embed, c.mask_token_id, BLOCK, **options)
    model._sample_anchor_positions = lambda *_: (torch_of(anchors.at).long(), torch_of(anchors.valid))
    inputs = map(torch_of, (data.aux, data.loss_mask, *[data.last_hidden] * spark))
    loss, *_ = model(torch_of(data.token_ids).long(), *inputs)
    return found(draft, loss)


def speculators_block(case: Case, weights: Any, data: Data, batch: Batch, anchors: Anchors) -> Found:
    """Trains speculators' draft model, its losses in plain torch."""
    from speculators.losses import eager
    from speculators.models.dflash import core

    c, name, spark = case.config, case.kind.__name__, case.kind is DSpark
    package = importlib.import_module(f"speculators.models.{name.lower()}")
    fields = {"DSpark": ["markov_rank"], "DFlash2": ["selector_rank", "selector_top_k"]}.get(name, [])
    config = getattr(package, f"{name}SpeculatorConfig")(
        transformer_layer_config=layer_config(case),
        aux_hidden_state_layer_ids=list(AUX),
        **{field: getattr(c, field) for field in ("draft_vocab_size", "block_size", "mask_token_id", *fields)},
    )
    model = getattr(package, f"{name}DraftModel")(config).float()
    rows = torch_of(data.rows[data.draft_tokens])
    weights = {"lm_head.weight": rows, "verifier_lm_head.weight": rows} | weights
    missing, _ = model.load_state_dict({x: weights[x] for x in model.state_dict() if x in weights}, strict=False)
    assert missing == ["verifier_norm.weight"], missing
    model.verifier_norm = torch.nn.Identity()  # the last hidden states are normed already
    model.lm_head.weight.requires_grad_(case.drafted < VOCABULARY)

    def soft_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        wanted = torch.log_softmax(targets, dim=-1)  # the divergence and the target's entropy
        return eager.kl_div_loss(logits, targets) - (wanted.exp() * wanted).sum(dim=-1)

    terms = {"kl_div": (soft_cross_entropy, 1.0)} if case.loss.soft else {"ce": (eager.ce_loss, 1.0)}
    mask = data.loss_mask.reshape(1, -1)
    if spark:
        terms = {"ce": (eager.ce_loss, 0.1), "tv": (eager.tv_loss, 2 * case.distance)}
        mask = np.pad(mask[:, 1:], ((0, 0), (0, 1)))
    ids, segments, positions = (torch_of(x).long() for x in (batch.token_ids, batch.segment_ids, batch.positions))
    drawn = torch_of(anchors.at)[0].long(), torch_of(anchors.valid)[0]
    inputs = torch_of(batch.aux), ids, torch_of(mask), torch_of(batch.last_hidden), segments, positions
    options: dict[str, Any] = {} if case.kind is DFlash else {"tv_loss_fn": eager.tv_loss}
    options |= {"loss_config": terms, "gamma": case.loss.decay, "dpace_alpha": case.loss.alpha}
    options["per_position_loss_weight"] = {"d-pace": "dpace", "decay": "fixed-exp-decay"}[case.loss.weights]
    with mock.patch.object(core, "select_anchors", lambda *_: drawn):
        _, loss, _ = model(*inputs, max_anchors=anchors.at.shape[1], **options)
    return found(model, loss)


PEERS = {("specforge", True): specforge_eagle3, ("specforge", False): specforge_block}
PEERS |= {("speculators", True): speculators_eagle3, ("speculators", False): speculators_block}


if __name__ == "__main__":
    main()
