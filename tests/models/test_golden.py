"""The default target against llama.cpp's values (tests/golden/smollm2.json, made by tools/golden.py).

llama.cpp reads the GGUF's tokenizer and chat template by itself: another pre-tokenizer or template in the conversion
shows here, and nowhere where both sides read the converted folder. The file holds log-probabilities and greedy answers
too.
"""

import json
import pathlib

import pytest

from eagle3_jax.models import registry
from eagle3_jax.models.chat_template import prompt_ids

pytestmark = pytest.mark.slow

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden/smollm2.json").read_text())["conversations"]
NAME = "smollm2-135m-instruct"


def test_prompts_have_the_same_tokens():
    tokenizer = registry.load_tokenizer(NAME)
    for conversation in GOLDEN:
        assert prompt_ids(tokenizer, conversation["messages"]) == conversation["token_ids"], conversation["text"]
