"""llama.cpp verifies and accepts, answer by answer, what the files of a head promise that were written for it."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest
import tiny
import tiny_heads
from test_check_vllm import BLOCKS, WHOLE, bare, train, write_answers

from eagle3_jax.config import RunConfig
from eagle3_jax.export import __main__ as export
from eagle3_jax.export import check

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
FORM = ("--export.format", "llama.cpp")
OF_BLOCKS = BLOCKS[: BLOCKS.index("--export.format")]
HEADS = {
    "EAGLE-3": (),
    "EAGLE-3 over the whole vocabulary": WHOLE,
    "DFlash": (*OF_BLOCKS, *WHOLE),
    "DFlash over a draft vocabulary": OF_BLOCKS,
    "DSpark": (*OF_BLOCKS, *WHOLE, "--draft.kind", "dspark"),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_answers(tmp_path_factory.mktemp("llama_cpp") / "run", tiny.CONFIG["num_hidden_layers"])


@pytest.mark.parametrize("name", HEADS)
def test_a_trained_head_counts_as_here(answers, llama_cpp, name):
    counted(train(answers, name, *HEADS[name], *FORM), llama_cpp)


def test_a_dflash2_head_counts_as_here(answers, llama_cpp, tmp_path):
    """With fewer candidates than it was trained for: llama.cpp needs k (k + 1) up to the hidden size."""
    flags = ("--draft.kind", "dflash2", "--draft.selector-rank", "16", "--export.format", "eagle3_jax")
    config = train(answers, "DFlash2", *OF_BLOCKS, *WHOLE, *flags)
    head = bare(config.folder("export"), tmp_path / "head")
    inner = tiny_heads.read(head)[1]["dflash_config"]
    tiny_heads.alter(head, dflash_config=inner | {"selector_top_k": 7})
    export.convert(head, "llama.cpp", tmp_path / "gguf", target=config.target.name)
    counted(
        dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, draft=str(tmp_path / "gguf"))),
        llama_cpp,
    )


def counted(config: RunConfig, llama_cpp: pathlib.Path) -> None:
    """What llama.cpp counts is also the prediction's."""
    report = check.run(config, config.folder("prepare") / "held_out.jsonl", "llama.cpp", llama_cpp)
    column = report["engines"]["llama.cpp"]
    assert min(column["accepted_per_position"][:2]) > 0, "the head is not at work"
    assert sum(accepted for _, accepted in column["drafts"]) == sum(column["accepted_per_position"])
