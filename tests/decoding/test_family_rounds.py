"""Every family of targets in the engine: with trees of drafts, in a batch, the greedy tokens of one plain pass.

Prompts are longer than a local layer's window, and answers go on beyond it.
"""

import random
from typing import Any

import jax.numpy as jnp
import pytest
import tiny_families
from flax import nnx
from toy import NO_TEXT, following

from eagle3_jax.config import DraftConfig, DraftTree
from eagle3_jax.decoding.engine import Engine, SamplingParams
from eagle3_jax.models.drafts.eagle3 import DraftHead, DraftHeadConfig
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.drafts.model import DraftModel
from eagle3_jax.models.families import FAMILIES
from eagle3_jax.models.target import TargetModel

VOCABULARY, LENGTH, ANSWER = 60, 64, 12


def plain(model: TargetModel, prompt: list[int], length: int = LENGTH) -> list[int]:
    """Token after token, each from a pass over everything before it."""
    tokens = list(prompt)
    for _ in range(ANSWER):
        padded = jnp.asarray(tokens + [0] * (length - len(tokens)))[None]
        tokens.append(int(jnp.argmax(following(model, padded)[0, len(tokens) - 1])))
    return tokens[len(prompt) :]


# Keys and values, and states of both kinds: every day. The others only in `tools/test.sh long`.
DAILY = {"qwen3_5_text"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [pytest.param(x, marks=() if x.config.model_type in DAILY else pytest.mark.long) for x in FAMILIES],
    ids=lambda family: family.config.model_type,
)
def test_drafts_change_no_token(family):
    model = tiny_families.make(family, num_hidden_layers=3)
    # DeepSeek's cache gives a head no sizes; the others' are these.
    draft = DraftConfig(vocab_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    head = DraftHead(DraftHeadConfig.for_target(draft, model.config), rngs=nnx.Rngs(1))
    # The head's drafts are right now and then: it has the target's own embeddings as its LM head.
    head.lm_head[...] = model.output_rows[:40]
    draw = random.Random(0)
    prompts = [[draw.randrange(VOCABULARY) for _ in range(size)] for size in (3, 11, 24, 17)]
    params = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    tree = DraftTree(num_steps=3, topk=2, num_draft_tokens=6)
    size: dict[str, Any] = {"batch_size": 3, "max_length": LENGTH, "page_size": 16}
    drafting = Engine(model, NO_TEXT, Draft(head, jnp.arange(40)), tree, **size)
    answers = drafting.generate(prompts, params)
    assert [answer.token_ids for answer in answers] == [plain(model, prompt) for prompt in prompts]
    copying = Engine(model, NO_TEXT, "lookup", DraftTree(num_steps=3, num_draft_tokens=4), **size)
    (copied,) = copying.generate([prompts[2] * 2], params)
    assert copied.token_ids == plain(model, prompts[2] * 2)


@pytest.mark.slow
def test_a_state_is_its_sequence_s_own():
    """Prompts in several stretches and in rows of one pass; slots that others have left; a beginning read before."""
    family = next(family for family in FAMILIES if family.config.model_type == "qwen3_5_text")
    model = tiny_families.make(family, num_hidden_layers=3, max_position_embeddings=512)
    for block in model.blocks:
        if block.linear:
            block.delta.decay[...] = jnp.full_like(block.delta.decay[...], -9.0)  # a state that forgets nothing
    draw = random.Random(0)
    long = [draw.randrange(VOCABULARY) for _ in range(300)]
    prompts = [long[:290], long[:5], [*long[:200], 7], long[50:150], long[:290]]
    size: dict[str, Any] = {"batch_size": 2, "max_length": 320, "page_size": 16}
    engine = Engine(model, NO_TEXT, "lookup", DraftTree(num_steps=3, num_draft_tokens=4), **size)
    for _ in range(2):
        answers = engine.generate(prompts, SamplingParams(max_tokens=ANSWER, ignore_eos=True))
        assert [answer.token_ids for answer in answers] == [plain(model, prompt, 320) for prompt in prompts]
    assert engine.stats().cached_tokens == 3 * 256  # of the prompt that comes four times


# A window, attention sinks, chunks: what a draft model's own scratch must respect.
@pytest.mark.long
@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "GptOssForCausalLM", "Llama4ForCausalLM"])
def test_what_it_drafts_for_itself_is_accepted(architecture):
    """In chains that are longer than a window, of sequences that are longer too."""
    family = next(family for family in FAMILIES if family.config.architecture == architecture)
    model = tiny_families.make(family, num_hidden_layers=3).observed_at(())
    draw = random.Random(1)
    prompts = [[draw.randrange(VOCABULARY) for _ in range(size)] for size in (3, 11, 33)]
    chain = DraftTree(num_steps=9, num_draft_tokens=10)
    draft, size = Draft(DraftModel(model), jnp.arange(VOCABULARY)), {"batch_size": 3, "max_length": LENGTH}
    engine = Engine(model, NO_TEXT, draft, chain, page_size=16, **size)
    for answer in engine.generate(prompts, SamplingParams(max_tokens=21, ignore_eos=True)):
        assert answer.stats.accepted_per_position == [answer.stats.rounds] * 9
