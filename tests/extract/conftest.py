"""A tiny target, and runs whose conversations exist, as `regenerate` leaves them."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import tiny

from eagle3_jax.config import RunConfig, run_file
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.runs import manifest


@pytest.fixture(scope="session")
def target() -> Target:
    special = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    tokenizer = tiny.make_byte_tokenizer(tiny.CHAT_TEMPLATE, **special)
    return tiny.make_target(tiny.llama_config(vocab_size=len(tokenizer) + 6, max_position_embeddings=512), tokenizer)


@pytest.fixture(scope="session")
def run_of() -> Callable[..., RunConfig]:
    def make(folder: pathlib.Path, train: list[Any], held_out: list[Any], **extract: Any) -> RunConfig:
        values = {"run_dir": str(folder), "draft": {"vocab_size": 20}, "mesh": {"data": 1}, "extract": extract}
        config = run_file.from_dict(values)
        conversations = config.folder("regenerate")
        manifest.begin(conversations, {"target": {"weights": "w", "tokenizer": "t", "chat_template": "c"}})
        for split, lines in (("train", train), ("held_out", held_out)):
            (conversations / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        manifest.finish(conversations, files=("train.jsonl", "held_out.jsonl"))
        return config

    return make
