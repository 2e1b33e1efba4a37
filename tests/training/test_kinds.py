"""Kinds of heads in training: MTP layers against plain PyTorch, block heads by the same calls, and what is refused."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_families

from eagle3_jax.config import DraftConfig, MeshConfig, RunConfig, TrainConfig
from eagle3_jax.config.kinds import trained
from eagle3_jax.mesh import make_mesh, parameter_path
from eagle3_jax.models.families import FAMILIES
from eagle3_jax.training.batch import Batch, Teacher
from eagle3_jax.training.kinds.kind import kind_of
from eagle3_jax.training.metrics import summarise
from eagle3_jax.training.state import init_state, make_eval_step, make_optimizer, make_train_step

# Those that learn of any states; Gemma 4's assistant needs its target (test_assistant.py).
KINDS = [name for name in trained() if name != "assistant"]
STEPS, VOCAB, HIDDEN = 3, 60, 32
RUN = TrainConfig(ttt_steps=STEPS, batch_size=2, row_length=16, loss_block=16, anchors=6, learning_rate=1e-2)


def family(name: str):
    return next(x for x in FAMILIES if x.config.architecture == name)


def batch_of(hidden: int, lengths=((7, 8), (12,)), row_length: int = 16) -> Batch:
    """Packed random documents; every token but the first two is an answer's."""
    rng, size = np.random.default_rng(0), (len(lengths), row_length)
    segments, positions = np.zeros(size, np.int32), np.zeros(size, np.int32)
    for row, documents in enumerate(lengths):
        start = 0
        for number, length in enumerate(documents, start=1):
            segments[row, start : start + length] = number
            positions[row, start : start + length] = np.arange(length)
            start += length
    tokens = rng.integers(0, VOCAB, size).astype(np.int32)
    return Batch(
        token_ids=jnp.asarray(tokens),
        aux=jnp.asarray(rng.normal(size=(*size, 3 * hidden)), jnp.float32),
        last_hidden=jnp.asarray(rng.normal(size=(*size, hidden)), jnp.float32),
        argmax=jnp.asarray(rng.integers(0, VOCAB, size).astype(np.int32)),
        loss_mask=jnp.asarray(((positions >= 2) & (segments > 0)).astype(np.int32)),
        segment_ids=jnp.asarray(segments),
        positions=jnp.asarray(positions),
    )


def run_config(kind: str, **changes: Any) -> RunConfig:
    draft: dict[str, Any] = {
        "kind": kind,
        "vocab_size": 24,
        "num_layers": 2,
        "block_size": 4,
        "mask_token_id": 59,
    } | changes
    return RunConfig(run_dir="run", draft=DraftConfig(**draft), train=RUN)


def test_a_window_that_hides_a_step_s_own_key_is_refused() -> None:
    target = tiny.llama_config(vocab_size=VOCAB, aux_layers=(0, 1, 2))
    kind_of(run_config("eagle3", sliding_window=STEPS), target)
    with pytest.raises(ValueError, match=r"sliding_window: got 2, expected at least ttt_steps = 3"):
        kind_of(run_config("eagle3", sliding_window=STEPS - 1), target)


# ------------------------------------------------------------------------------- MTP layers, one document, plain torch
class Plain:
    """The loss of one row of MTP layers, draft by draft: no packing, no masks, no shared passes."""

    def __init__(self, torch: Any, shape: Any, weights: dict[str, Any]) -> None:
        self.torch, self.c, self.w = torch, shape, weights

    def norm(self, x, weight, eps=None):
        eps = self.c.rms_norm_eps if eps is None else eps
        return x / self.torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight

    def turned(self, x, position, neighbours):
        """RoPE of [heads, d] at a position."""
        torch, d = self.torch, x.shape[-1]
        if neighbours:
            x = torch.cat([x[..., ::2], x[..., 1::2]], -1)
        angles = position * self.c.rope_theta ** (-torch.arange(d // 2, dtype=x.dtype) * 2 / d)
        first, second = x[..., : d // 2], x[..., d // 2 :]
        cos, sin = torch.cos(angles), torch.sin(angles)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def attended(self, queries, keys, values, scale):
        """Queries [n, d] over lists of keys [n, d] and values [n, v]."""
        torch = self.torch
        scores = torch.einsum("nd,snd->ns", queries, torch.stack(keys)) * scale
        return torch.einsum("ns,snv->nv", torch.softmax(scores, -1), torch.stack(values))

    def silu_mlp(self, x, path):
        gate, up, down = (self.w[f"{path}/{name}"] for name in ("gate", "up", "down"))
        return (self.torch.nn.functional.silu(x @ gate) * (x @ up)) @ down


class PlainMimo(Plain):
    def pair(self, token, feature, position):
        token = token * (position > 0)
        x = [self.norm(feature, self.w["hidden_norm"]), self.norm(token, self.w["token_norm"])]
        return self.torch.cat(x) @ self.w["fc"]

    def entry(self, x, position):
        c, k = self.c, self.c.num_key_value_heads
        group = c.num_attention_heads // k
        fused = self.norm(x, self.w["block/input_norm"]) @ self.w["block/attention/qkv"] + self.w["block/qkv_bias"]
        heads = fused.reshape(k, group + 2, c.head_dim)
        queries = self.turned(heads[:, :group].reshape(-1, c.head_dim), position, False)
        key = self.turned(heads[:, group], position, False).repeat_interleave(group, 0)
        return queries, key, heads[:, group + 1].repeat_interleave(group, 0)

    def layer(self, x, queries, keys, values):
        attended = self.attended(queries, keys, values, self.c.head_dim**-0.5).reshape(-1)
        x = x + attended @ self.w["block/attention/o"]
        return x + self.silu_mlp(self.norm(x, self.w["block/post_norm"]), "block/mlp")


class PlainQwen35(Plain):
    """Norms have an offset from 1."""

    def norm(self, x, weight, eps=None):
        return super().norm(x, 1 + weight, eps)

    def pair(self, token, feature, position):
        x = [self.norm(token, self.w["token_norm"]), self.norm(feature, self.w["hidden_norm"])]
        return self.torch.cat(x) @ self.w["fc"]

    def part(self, x, weight, position):
        """The norm of heads, and RoPE of their first dimensions."""
        x, d = self.norm(x, weight), self.c.rope_dim
        return self.torch.cat([self.turned(x[:, :d], position, False), x[:, d:]], -1)

    def entry(self, x, position):
        c, k, a = self.c, self.c.num_key_value_heads, "block/attention"
        group = c.num_attention_heads // k
        heads = (self.norm(x, self.w["block/input_offset"]) @ self.w[f"{a}/qkv"]).reshape(k, -1, c.head_dim)
        queries = self.part(heads[:, : 2 * group : 2].reshape(-1, c.head_dim), self.w[f"{a}/q_offset"], position)
        gates = heads[:, 1 : 2 * group : 2].reshape(-1)
        key = self.part(heads[:, 2 * group], self.w[f"{a}/k_offset"], position).repeat_interleave(group, 0)
        return (queries, gates), key, heads[:, 2 * group + 1].repeat_interleave(group, 0)

    def layer(self, x, queries, keys, values):
        queries, gates = queries
        attended = self.attended(queries, keys, values, self.c.head_dim**-0.5).reshape(-1)
        x = x + (attended * self.torch.sigmoid(gates)) @ self.w["block/attention/o"]
        return x + self.silu_mlp(self.norm(x, self.w["block/post_offset"]), "block/mlp")


class PlainDeepseek(Plain):
    def pair(self, token, feature, position):
        x = [self.norm(token, self.w["token_norm"]), self.norm(feature, self.w["hidden_norm"])]
        return self.torch.cat(x) @ self.w["fc"]

    def entry(self, x, position):
        """Keys and values of every head by themselves, nothing absorbed."""
        c, a, torch = self.c, "block/attention", self.torch
        x = self.norm(x, self.w["block/input_norm"])
        queries = self.norm(x @ self.w[f"{a}/q_down"], self.w[f"{a}/q_norm"], 1e-6) @ self.w[f"{a}/q_up"]
        queries = queries.reshape(c.num_attention_heads, -1)
        plain, turned = queries[:, : c.qk_nope_head_dim], queries[:, c.qk_nope_head_dim :]
        queries = torch.cat([plain, self.turned(turned, position, c.rope_interleave)], -1)
        down = x @ self.w[f"{a}/kv_down"]
        latent = self.norm(down[: c.kv_lora_rank], self.w[f"{a}/kv_norm"], 1e-6)
        shared = self.turned(down[None, c.kv_lora_rank :], position, c.rope_interleave)
        both = torch.einsum("ndr,r->nd", self.w[f"{a}/kv_up"], latent)
        key = torch.cat([both[:, : c.qk_nope_head_dim], shared.expand(c.num_attention_heads, -1)], -1)
        return queries, key, both[:, c.qk_nope_head_dim :]

    def layer(self, x, queries, keys, values):
        c, torch = self.c, self.torch
        scale = (c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5
        x = x + self.attended(queries, keys, values, scale).reshape(-1) @ self.w["block/attention/o"]
        y = self.norm(x, self.w["block/post_norm"])
        scores = torch.sigmoid(y @ self.w["block/mlp/router"])
        biased = (scores + self.w["block/mlp/router_bias"]).detach().reshape(c.n_group, -1)
        best = biased.topk(2, -1).values.sum(-1).topk(c.topk_group).indices
        allowed = torch.full_like(biased, -torch.inf)
        allowed[best] = biased[best]
        chosen = allowed.reshape(-1).topk(c.num_experts_per_tok).indices
        weights = scores[chosen] / scores[chosen].sum() if c.norm_topk_prob else scores[chosen]
        out = self.silu_mlp(y, "block/mlp/shared")
        for weight, expert in zip(weights, chosen, strict=True):
            gate, up, down = (self.w[f"block/mlp/experts/expert_{name}"][expert] for name in ("gate", "up", "down"))
            hidden = torch.nn.functional.silu(y @ gate) * (y @ up)
            out = out + weight * c.routed_scaling_factor * (hidden @ down)
        return x + out


PLAIN = [
    ("MiMoForCausalLM", PlainMimo),
    pytest.param("DeepseekV3ForCausalLM", PlainDeepseek, marks=pytest.mark.long),
    ("Qwen3_5ForCausalLM", PlainQwen35),
]


def plain_loss(plain: Any, embed, rows, batch: dict[str, np.ndarray]) -> Any:
    """Drafts `STEPS` tokens from every prefix of every document, and sums what the teacher says of them."""
    torch, total, tokens = plain.torch, 0.0, int((batch["segment_ids"] > 0).sum())
    hidden = torch.tensor(batch["last_hidden"], dtype=torch.float64)
    for row, segments in enumerate(batch["segment_ids"]):
        for number in range(1, segments.max() + 1):
            at = np.flatnonzero(segments == number)
            length, ids, feature = len(at), batch["token_ids"][row, at], hidden[row, at]
            mask = batch["loss_mask"][row, at]
            teacher = torch.softmax(feature @ rows.T, -1)
            first, state = [], None
            for t in range(length - 1):
                x = plain.pair(embed[ids[t + 1]], feature[t], t)
                first.append((x, *plain.entry(x, t)))
            for t in range(length - 1):
                keys, values = [k for _, _, k, _ in first[: t + 1]], [v for _, _, _, v in first[: t + 1]]
                x, queries = first[t][:2]
                for step in range(STEPS):
                    u = t + 1 + step  # the teacher's position
                    if u >= length:
                        break
                    if step:
                        x = plain.pair(embed[ids[u]], state, t + step)
                        queries, key, value = plain.entry(x, t + step)
                        keys, values = [*keys, key], [*values, value]
                    state = plain.norm(plain.layer(x, queries, keys, values), plain.w["norm"])
                    # The mask of teacher position u is that of u - 1; a document's last entry counts for nothing.
                    if mask[u - 1]:
                        drafted = torch.log_softmax(state @ rows.T, -1)
                        total = total - 0.8**step * (teacher[u] * drafted).sum() / tokens
    return total


@pytest.mark.slow
@pytest.mark.parametrize("name, plain", PLAIN)
def test_loss_and_gradients_of_an_mtp_layer_are_plain_torch_s(name, plain):
    torch = pytest.importorskip("torch")
    target = tiny_families.make(family(name))
    kind = kind_of(run_config("mtp"), target.config)
    rng = np.random.default_rng(1)
    shapes = kind.abstract()
    assert "lm_head" not in {parameter_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)}
    head = jax.tree.map(lambda x: jnp.asarray(rng.normal(x.ndim == 1, 0.3, x.shape), jnp.float32), shapes)
    rows, embed = target.lm_head[...], target.embed[...]
    teacher = Teacher.of(embed, rows, jnp.arange(VOCAB))
    batch = batch_of(HIDDEN)
    run = jax.jit(jax.value_and_grad(kind.loss, has_aux=True))
    (loss, _), gradients = run(head, teacher, batch, jnp.int32(0))
    weights = {
        parameter_path(path): torch.tensor(np.asarray(leaf, np.float64), requires_grad=True)
        for path, leaf in jax.tree_util.tree_leaves_with_path(head)
    }
    fixed = [torch.tensor(np.asarray(x, np.float64)) for x in (embed, rows)]
    arrays = {field.name: np.asarray(getattr(batch, field.name)) for field in dataclasses.fields(batch)}
    expected = plain_loss(plain(torch, target.config, weights), fixed[0], fixed[1], arrays)
    expected.backward()
    assert float(loss) == pytest.approx(expected.item(), rel=1e-5)
    for path, got in jax.tree_util.tree_leaves_with_path(gradients):
        want = weights[parameter_path(path)].grad
        want = np.zeros(got.shape) if want is None else want.numpy()
        scale = max(np.abs(want).max(), 1e-3)
        np.testing.assert_allclose(got / scale, want / scale, atol=2e-5, err_msg=parameter_path(path))


# ------------------------------------------------------------------------------------------------------ every kind
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("eagle3", "mtp") else pytest.mark.long) for name in KINDS]
)
def test_every_kind_learns_and_its_rounds_are_replayed(name):
    """Twelve steps on one batch, whose teacher says what the text says: the loss falls, more drafts are accepted."""
    target = tiny_families.make(family("MiMoForCausalLM"))
    kind = kind_of(run_config(name), target.config)
    token_ids = kind.vocabulary(np.arange(24, dtype=np.int32))
    teacher = Teacher.of(target.embed[...], target.lm_head[...], jnp.asarray(token_ids))
    batch = batch_of(HIDDEN)
    batch = dataclasses.replace(batch, token_ids=batch.token_ids % 24)
    batch = dataclasses.replace(
        batch,
        argmax=jnp.roll(batch.token_ids, -1, axis=1),
        last_hidden=target.lm_head[...][jnp.roll(batch.token_ids, -1, axis=1)] * 3,
    )
    optimizer, mesh = make_optimizer(RUN, 100), make_mesh(MeshConfig(data=1, model=1))
    state = init_state(lambda rows: kind.new(0, rows), teacher.rows, optimizer, mesh)
    step, evaluate = make_train_step(kind, optimizer, mesh), make_eval_step(kind, mesh)
    before = summarise([evaluate(state.head, teacher, batch)])
    for _ in range(12):
        state, sums = step(state, teacher, batch)
    trained, after = summarise([sums]), summarise([evaluate(state.head, teacher, batch)])
    assert after["loss"] < before["loss"] and after["tau"] > before["tau"]
    assert len(after["alpha"]) == len(trained["accuracy"]) == kind.num_drafts
    assert trained["gradient_norm"] > 0


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        ("mtp", {}, "draft.kind: got 'mtp', expected .*: LlamaForCausalLM has no such layer"),
        ("dflash", {"mask_token_id": None}, "draft.mask_token_id: got None, expected a token .* below 60"),
        ("dspark", {"mask_token_id": 60}, "draft.mask_token_id: got 60, expected a token .* below 60"),
        ("dflash2", {"vocab_size": 61}, "draft.vocab_size: got 61, expected at most 60"),
        ("dflash", {"layer_types": ("full_attention",)}, "layer_types: got .*, expected draft.num_layers = 2 of them"),
        ("dflash", {"layer_types": ("sliding_attention",) * 2}, "sliding_window: got None, expected the window of"),
        ("dflash", {"sliding_window": 8}, "sliding_window: got 8, expected null: draft.layer_types has no sliding"),
    ],
)
def test_a_head_that_does_not_fit_the_target_is_refused(kind, changes, message):
    with pytest.raises(ValueError, match=message):
        kind_of(run_config(kind, **changes), tiny.llama_config(vocab_size=60))


@pytest.mark.parametrize("kind", ["dflash", "dspark", "dflash2"])
def test_a_head_that_no_export_could_hold_is_refused(kind):
    target = tiny.llama_config(vocab_size=60, aux_layers=(0, 1, 3))
    with pytest.raises(ValueError, match=rf"draft.kind '{kind}' for this target: aux layers .*: got \[0, 1, 3\]"):
        kind_of(run_config(kind), target)
    kind_of(run_config("eagle3"), target)


@pytest.mark.slow
def test_weights_of_a_block_s_drafts_are_the_config_s():
    target = tiny_families.make(family("MiMoForCausalLM"))
    teacher = Teacher.of(target.embed[...], target.lm_head[...], jnp.arange(24))
    batch = batch_of(HIDDEN)
    tokens = batch.token_ids % 24
    batch = dataclasses.replace(batch, token_ids=tokens, argmax=jnp.roll(tokens, -1, axis=1))
    decay: dict[str, Any] = {"block_weights": "decay"}
    losses = set()
    options: dict[str, Any]
    for options in ({}, {"dpace_alpha": 0.9}, decay, decay | {"loss_decay_gamma": 1.0}):
        config = dataclasses.replace(run_config("dflash"), train=dataclasses.replace(RUN, **options))
        kind = kind_of(config, target.config)
        losses.add(float(kind.loss(kind.new(0, teacher.rows), teacher, batch, jnp.int32(0))[0]))
    assert len(losses) == 4


def test_a_warm_start_that_a_kind_has_not_is_refused():
    target: Any = tiny.make_target(tiny.llama_config(vocab_size=60, aux_layers=(1, 2, 3)))
    block = kind_of(run_config("dflash"), target.model.config)
    with pytest.raises(ValueError, match="train.warm_start: got 'mtp', expected null for draft.kind 'dflash'"):
        block.warm("mtp", target)
    with pytest.raises(ValueError, match="train.warm_start: got 'mtp', expected the folder of a head, or null"):
        kind_of(run_config("eagle3"), target.model.config).warm("mtp", target)
    layer = kind_of(run_config("mtp"), tiny_families.make(family("MiMoForCausalLM")).config)
    with pytest.raises(ValueError, match="train.warm_start: got 'a/head', expected 'mtp', the target's own layer"):
        layer.warm("a/head", target)
