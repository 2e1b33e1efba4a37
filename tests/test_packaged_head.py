"""The packaged heads: their files, and their acceptance on their target."""

import pytest

from eagle3_jax.acceptance import AcceptanceCounts
from eagle3_jax.config import DraftTree, TargetConfig
from eagle3_jax.decoding.engine import Engine, SamplingParams
from eagle3_jax.formats import draft_models, heads
from eagle3_jax.models.checkpoint.fetch import load_target
from eagle3_jax.runs import manifest

NAME = "smollm2-135m-instruct"
FOR_LLAMA_CPP = "smollm2-135m-llama-cpp"


def test_its_files_are_whole_small_and_silent_about_where_they_were_made():
    assert draft_models.packaged_heads() == [NAME, FOR_LLAMA_CPP]
    folder = draft_models.HEADS / NAME
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "config.json",
        "manifest.json",
        "model.safetensors",
    ]
    manifest.read(folder, made_by="export")  # compares digests
    assert sum(path.stat().st_size for path in folder.iterdir()) < 25e6
    stored = heads.read(folder)
    assert {str(tensor.dtype) for tensor in stored.tensors.values()} == {"bfloat16"}
    for path in folder.glob("*.*"):
        if path.suffix != ".safetensors":
            assert not any(place in path.read_text() for place in ("/home/", "/root/", "/tmp/", "/work/"))


def test_the_one_for_llama_cpp_is_one_file_that_goes_by_its_name():
    folder = draft_models.resolve(FOR_LLAMA_CPP)
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "head.gguf", "manifest.json"]
    manifest.read(folder, made_by="export")
    assert sum(path.stat().st_size for path in folder.iterdir()) < 8e6
    config = heads.read(folder).config
    assert (config.norm_before_residual, config.fc_norm, config.norm_output) == (True, False, False)


@pytest.mark.long
def test_a_tree_changes_no_bit():
    """Each token's log-probability is vanilla decoding's, from few bits too: there a rounding error moves a token."""
    target = load_target(TargetConfig(name=NAME, weights="stored"))
    params, sizes = SamplingParams(max_tokens=48, logprobs=0), {"max_length": 256, "prefix_cache": False}
    prompts = ["Why is the sky blue? Answer in three sentences.", "Write a Python function that sorts three numbers."]
    tree = DraftTree(num_steps=3, topk=3, num_draft_tokens=8)
    drafted = Engine.load(target, tree=tree, **sizes, batch_size=2).generate(prompts, params)
    plain = Engine.load(target, None, **sizes).generate(prompts, params)
    for one, other in zip(drafted, plain, strict=True):
        assert one.token_ids == other.token_ids
        assert [x.logprob for x in one.logprobs or ()] == [x.logprob for x in other.logprobs or ()]
    assert AcceptanceCounts.total(x.stats.counts for x in drafted).tau > 2.4  # 2.68


@pytest.mark.long
@pytest.mark.parametrize(("draft", "tau"), [("auto", 2.4), (FOR_LLAMA_CPP, 1.9)])  # 2.75, 2.2
def test_it_drafts_and_changes_no_token(draft, tau):
    """Unseen prompts of a sort that it was trained on; the acceptance is what was measured, less a margin."""
    target = load_target(NAME)
    prompts = [
        "What makes bread rise? Answer in three sentences.",
        "Write a Python function that returns the median of a list.",
        "A box holds 12 eggs. How many eggs are in 9 boxes? Explain step by step.",
        "Write a short email to a neighbour about a lost cat.",
    ]
    params = SamplingParams(max_tokens=64)
    chain = DraftTree(num_steps=4, topk=1, num_draft_tokens=5)
    drafting = Engine.load(target, draft, chain, batch_size=4, max_length=256)
    drafted = drafting.generate(prompts, params)
    plain = Engine.load(target, None, batch_size=4, max_length=256).generate(prompts, params)
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
    assert AcceptanceCounts.total(output.stats.counts for output in drafted).tau > tau
