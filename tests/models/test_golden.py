"""The default target against llama.cpp's values (tests/golden/smollm2.json, made by the file beside it).

llama.cpp reads the GGUF by itself: metadata, layout of queries and keys, tokenizer, chat template. Its weights were
converted to float32 first, since llama.cpp otherwise rounds activations to 8 bits. A wrong RoPE base or
epsilon, mixed-up heads, or another pre-tokenizer in the conversion shows here, and nowhere where both sides read the
converted folder.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.models.cache import Pass
from eagle3_jax.models.chat_template import prompt_ids
from eagle3_jax.models.checkpoint import fetch

pytestmark = pytest.mark.slow

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden/smollm2.json").read_text())["conversations"]
NAME = "smollm2-135m-instruct"


def test_prompts_have_the_same_tokens():
    tokenizer = fetch.load_tokenizer(NAME)
    for conversation in GOLDEN:
        assert prompt_ids(tokenizer, conversation["messages"]) == conversation["token_ids"], conversation["text"]


@pytest.mark.long
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.long)])
def test_log_probabilities_and_greedy_tokens_are_the_same(every):
    """Each token of an answer is our argmax too, and the most probable tokens have the same log-probabilities."""
    model = fetch.load_target(NAME).model
    size = 32 * -(-max(len(c["token_ids"]) + len(c["answer"]) for c in GOLDEN) // 32)

    @jax.jit
    def log_probabilities(model, tokens, start):
        positions = jnp.arange(size)[None]
        hidden, _, _ = model(tokens[None], Pass(positions, jnp.zeros(1, jnp.int32)), model.empty_cache(1, size))
        return jax.nn.log_softmax(model.logits(jax.lax.dynamic_slice_in_dim(hidden[0], start, 32)))

    compared = 0
    for conversation in GOLDEN[::every]:
        ids, answer = conversation["token_ids"], conversation["answer"]
        tokens = np.zeros(size, np.int32)
        tokens[: len(ids) + len(answer)] = ids + answer
        got = np.asarray(log_probabilities(model, jnp.asarray(tokens), len(ids) - 1))[: len(answer)]
        assert got.argmax(axis=-1).tolist() == answer, conversation["text"]
        if len(conversation["top"]) < len(answer):
            continue  # characters of several tokens: llama.cpp's server says only the last one's
        compared += len(answer)
        for row, step in zip(got, conversation["top"], strict=False):
            expected = dict(step)
            np.testing.assert_allclose(row[list(expected)], list(expected.values()), atol=2e-3)
    assert compared > 1500 // every
