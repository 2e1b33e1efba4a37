"""A tiny target, a random head for it, and prompts."""

import pathlib
from typing import Any

import jax.numpy as jnp
import pytest
import tiny
from flax import nnx

from eagle3_jax.config import RunConfig, TargetConfig, run_file
from eagle3_jax.formats.heads import save_draft
from eagle3_jax.models.checkpoint.fetch import Target, load_target
from eagle3_jax.models.drafts.eagle3 import DraftHead, DraftHeadConfig
from eagle3_jax.models.drafts.head import Draft

CHAIN = {"num_steps": 2, "num_draft_tokens": 3}
TREE = {"num_steps": 2, "topk": 2, "num_draft_tokens": 4}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A random target in a Hugging Face folder, which PyTorch can read too."""
    folder = tiny.write_target(tmp_path_factory.mktemp("models"))
    return load_target(TargetConfig(name=str(folder), aux_layers=(1, 2, 3)))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, target: Target) -> RunConfig:
    folder = tmp_path_factory.mktemp("run")
    values: dict[str, Any] = {
        "run_dir": str(folder),
        "draft": {"vocab_size": 9},
        "benchmark": {
            "draft": str(folder / "head"),
            "batch_sizes": [1, 2],
            "trees": [CHAIN, TREE],
            "max_tokens": 6,
            "requests": 3,
            "turns": 1,
        },
    }
    config = run_file.from_dict(values)
    head = DraftHead(DraftHeadConfig.for_target(config.draft, target.model.config), rngs=nnx.Rngs(1))
    save_draft(folder / "head", Draft(head, jnp.arange(60, 69)), target=target.model.config, dtype="float32")
    return config


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny.write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", 4)
