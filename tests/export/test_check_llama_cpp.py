"""llama.cpp verifies and accepts, answer by answer, what the files of a head promise that were written for it."""

from __future__ import annotations

import pathlib

import pytest
import tiny
from test_check_vllm import BLOCKS, WHOLE, train, write_answers

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
    config = train(answers, name, *HEADS[name], *FORM)
    report = check.run(config, config.folder("prepare") / "held_out.jsonl", "llama.cpp", llama_cpp)
    column = report["engines"]["llama.cpp"]
    assert min(column["accepted_per_position"][:2]) > 0, "the head is not at work"
    assert sum(accepted for _, accepted in column["drafts"]) == sum(column["accepted_per_position"])
