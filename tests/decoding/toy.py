"""A toy target, heads for it, and engines of few shapes: programs of equal shapes are traced once in a process.

The heads are one that often agrees with the target, one of the same shape that knows nothing, and a plain EAGLE-3 one
(grouped queries, pre-norm recurrence) that knows nothing either.
"""

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tiny
import tiny_heads
from flax import nnx

from eagle3_jax.config import DraftConfig, DraftTree
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.rounds.generate import generate, prefill
from eagle3_jax.decoding.rounds.sampling import Sampling
from eagle3_jax.decoding.rounds.state import State
from eagle3_jax.decoding.tier import RoundPlan, Tier
from eagle3_jax.models.cache import Pass
from eagle3_jax.models.drafts.eagle3 import DraftHead, DraftHeadConfig
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.families.llama import Llama

VOCABULARY, HIDDEN = 24, 32
LETTERS = "abcdefghijklmnopqrstuvw"  # token 23 is special
IDS = np.delete(np.arange(VOCABULARY), [4, 22])  # of the draft vocabulary

# Another shape of an engine, or another tree, costs seconds of tracing: it needs a reason.
SMALL: dict[str, Any] = {"batch_size": 2, "max_length": 128, "page_size": 16}
LARGE: dict[str, Any] = {"batch_size": 4, "max_length": 128, "page_size": 16}
CHAIN = DraftTree(num_steps=3, topk=1, num_draft_tokens=4)
TREE = DraftTree(num_steps=3, topk=3, num_draft_tokens=10)


@dataclasses.dataclass(frozen=True)
class Toy:
    target: Llama
    random: Draft
    good: Draft
    plain: Draft

    def with_eos(self, *tokens: int) -> Llama:
        """The target with these end-of-sequence tokens."""
        graph, parameters = nnx.split(self.target)
        twin = nnx.merge(graph, parameters)
        twin.config = dataclasses.replace(twin.config, eos_token_ids=tokens)
        return twin


def make_toy() -> Toy:
    config = tiny.llama_config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        head_dim=16,
        tie_word_embeddings=False,
        max_position_embeddings=512,
        aux_layers=(0, 1, 2),
    )
    target = tiny_heads.initialise(lambda: Llama(config, rngs=nnx.Rngs(0)), 0)
    basis, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(HIDDEN, HIDDEN)))
    target.embed[...] = jnp.asarray(basis[:VOCABULARY], jnp.float32)
    target.lm_head[...] *= 50
    for block in target.blocks:  # strong enough that the context decides too
        block.attention.o[...] *= 10
        block.mlp.down[...] *= 10
    token_ids = jnp.asarray(IDS, jnp.int32)
    draft = DraftConfig(vocab_size=len(token_ids), intermediate_size=40)
    plain = DraftHeadConfig.for_target(draft, config)
    good = _good_head(plain, target, token_ids)
    return Toy(
        target,
        random=Draft(tiny_heads.initialise(lambda: DraftHead(good.config, rngs=nnx.Rngs(0)), 3), token_ids),
        good=Draft(good, token_ids),
        plain=Draft(tiny_heads.initialise(lambda: DraftHead(plain, rngs=nnx.Rngs(0)), 5), token_ids),
    )


def _good_head(config: DraftHeadConfig, target: Llama, token_ids: jax.Array) -> DraftHead:
    """Attends to its own token, adds its embedding to the state, and reads that with the target's LM head."""
    heads = HIDDEN // config.head_dim
    config = dataclasses.replace(config, num_attention_heads=heads, num_key_value_heads=heads, norm_output=True)
    head = tiny_heads.initialise(lambda: DraftHead(config, rngs=nnx.Rngs(0)), 4)
    identity = jnp.eye(HIDDEN).reshape(HIDDEN, heads, config.head_dim)
    embedding_half = jnp.stack([3 * identity, 3 * identity, identity], axis=2).reshape(HIDDEN, -1)
    head.attention.qkv[...] = jnp.concatenate([embedding_half, 0.01 * head.attention.qkv[...][HIDDEN:]], axis=0)
    head.attention.o[...] = 3 * jnp.eye(HIDDEN)
    head.lm_head[...] = target.lm_head[...][token_ids]
    return head


class Tokenizer:
    """A letter a token; the template puts the special token in front of each message and of the answer."""

    chat_template = "read by apply_chat_template"

    def convert_tokens_to_ids(self, name):
        return None

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, **_):
        assert not tokenize
        assert add_generation_prompt
        return "".join("#" + message["content"] for message in messages) + "#"

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [23 if letter == "#" else LETTERS.index(letter) for letter in text]}

    def decode(self, ids, skip_special_tokens):
        return "".join("" if skip_special_tokens and token == 23 else (LETTERS + "#")[token] for token in ids)


PROMPTS = ["hello", [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "d"}], [1, 2, 3], "q", "sun"]
# Ids in, ids out.
NO_TEXT = types.SimpleNamespace(decode=lambda ids, **_: "", convert_tokens_to_ids=lambda _: None, chat_template=None)


def make(toy: Toy, tree: DraftTree | list[DraftTree] | None = CHAIN, target: Any = None, **options: Any) -> Engine:
    """An engine with the good head, `SMALL` unless told otherwise; without a head where `tree` is None."""
    draft = None if tree is None else toy.good
    return Engine(target or toy.target, Tokenizer(), draft, tree or "auto", **SMALL | options)


# --------------------------------------------------------------------------------------- rounds of contiguous sequences
MAX_TOKENS = 24
TEXTS = np.random.default_rng(0).integers(0, VOCABULARY, (4, 9)).astype(np.int32)
LENGTHS = np.array([9, 3, 6, 1], np.int32)


def generated(target: Any, draft: Draft | None, key: int = 0, **options: Any) -> State:
    """Answers to the texts."""
    texts, options = (jnp.asarray(TEXTS), jnp.asarray(LENGTHS)), {"max_tokens": MAX_TOKENS} | options
    return generate(target, draft, *texts, jax.random.key(key), **options)


@jax.jit
def following(target: Any, tokens: Any) -> jax.Array:
    """Logits behind every position of some texts [b, t], by one pass over all of each."""
    positions, none = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), jnp.zeros(len(tokens), jnp.int32)
    this = Pass(positions, none, counts=none + tokens.shape[1])
    return target.logits(target(tokens, this, target.empty_cache(*tokens.shape))[0])


@functools.partial(jax.jit, static_argnames=("tree", "slots", "limit"))
def prefilled(
    target: Any, draft: Draft | None, texts: Any, lengths: Any, tree: Any, slots: int = 128, limit: int = MAX_TOKENS
) -> State:
    """Greedy sequences behind their prompts."""
    batch = len(texts)
    of_requests = Sampling.greedy(batch), jnp.full(batch, limit, jnp.int32), jnp.full((batch, 1), -1)
    sizes: dict[str, Any] = {"cache_length": slots, "max_output": limit, "tree": tree}
    return prefill(target, draft, jnp.asarray(texts), jnp.asarray(lengths), *of_requests, greedy=True, **sizes)


def plan(tree: DraftTree | None, greedy: Any = True) -> RoundPlan:
    """Rounds that the head drafts, or vanilla ones."""
    return RoundPlan(Tier(tree, head=tree is not None), greedy)


def fitting(toy: Toy, **changes: Any) -> dict[str, Any]:
    """What a config of a block head takes from the target."""
    c = toy.target.config
    sizes = {"vocab_size": c.vocab_size, "hidden_size": c.hidden_size, "target_hidden_size": c.hidden_size}
    own = {"draft_vocab_size": len(IDS), "aux_layers": c.aux_layers, "mask_token_id": 4, "max_position_embeddings": 512}
    return sizes | own | changes
