"""A target that is written comes back as it was, in its dtype, in one file or several, or as llama.cpp's file."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_families
from gguf import GGUFReader
from safetensors import safe_open

from eagle3_jax.config import TargetConfig
from eagle3_jax.export import __main__ as export
from eagle3_jax.export.write_target import write_gguf, write_target
from eagle3_jax.models import chat_template
from eagle3_jax.models.cache import Pass
from eagle3_jax.models.checkpoint import identity
from eagle3_jax.models.checkpoint.fetch import load_target
from eagle3_jax.models.checkpoint.load import INDEX
from eagle3_jax.models.families import FAMILIES


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "shard_bytes"), [("float32", 10**9), ("bfloat16", 50_000)])
def test_a_written_target_is_the_same_target(tmp_path, dtype, shard_bytes):
    folder = tiny.write_target(tmp_path / "target")
    target = load_target(TargetConfig(name=str(folder), dtype=dtype, aux_layers=(1, 2, 3)))
    write_target(target, tmp_path / "written", shard_bytes)
    again = load_target(TargetConfig(name=str(tmp_path / "written"), dtype=dtype, aux_layers=(1, 2, 3)))
    assert again.model.config == target.model.config
    for got, expected in zip(*(jax.tree.leaves(x.model) for x in (again, target)), strict=True):
        np.testing.assert_array_equal(got, expected)
    kept = [field for field in identity.FIELDS if field != "weights"]  # these are files' digests
    assert [again.identity[field] for field in kept] == [target.identity[field] for field in kept]
    files = sorted(path.name for path in (tmp_path / "written").glob("*.safetensors"))
    assert (len(files) > 1) == (shard_bytes < 10**9) == (tmp_path / "written" / INDEX).exists()
    with safe_open(tmp_path / "written" / files[0], framework="numpy") as held:
        assert held.metadata() == {"format": "pt"}
        assert {held.get_slice(name).get_dtype() for name in held.keys()} == {{"float32": "F32"}.get(dtype, "BF16")}


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_computes_what_the_packaged_target_does_here(tmp_path, dtype):
    """Dequantised GGUF, in the dtype that is written; both compute in float32 with these values."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = load_target(TargetConfig(name="smollm2-135m-instruct", dtype=dtype))
    write_target(target, tmp_path / "written")
    messages = [{"role": "user", "content": "Name three rivers, and say in a sentence each where they end."}]
    ids = chat_template.prompt_ids(AutoTokenizer.from_pretrained(tmp_path / "written"), messages)
    assert ids == chat_template.prompt_ids(target.tokenizer, messages)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "written", dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()

    @jax.jit
    def logits(model, tokens):
        model = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), model)
        cache = model.empty_cache(1, tokens.shape[1])
        hidden, _, _ = model(tokens, Pass(jnp.arange(tokens.shape[1])[None], jnp.zeros(1, jnp.int32)), cache)
        return model.logits(hidden[0])

    got = logits(target.model, jnp.asarray([ids], jnp.int32))
    assert np.abs(expected).max() > 5
    # Logits to 28, summed in another order on each machine: 1.1e-4 was seen. An eps of 1e-6, not 1e-5, moves them by
    # 6.7e-3.
    np.testing.assert_allclose(got, expected, atol=4e-4, rtol=0)


def test_the_command_writes_the_run_s_target(tmp_path, capsys):
    config = tiny.write_run(tmp_path)
    arguments = ["--config", str(config), "--target.name", str(tmp_path / "target"), "--target.dtype", "bfloat16"]
    export.main([*arguments, "--write-target", str(tmp_path / "written")])
    assert json.loads((tmp_path / "written/config.json").read_text())["torch_dtype"] == "bfloat16"
    with pytest.raises(SystemExit, match="written: exists already, expected a new folder"):
        export.main([*arguments, "--write-target", str(tmp_path / "written")])


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"rope_scaling": LLAMA3}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 16}),
    ],
)
def test_llama_cpps_file_holds_the_same_target(tmp_path, name, changes):
    family = next(family for family in FAMILIES if family.config.model_type == name)
    target = tiny_families.write(tmp_path / "target", family, **changes)
    (tmp_path / "again").mkdir()
    write_gguf(target, tmp_path / "again/model.gguf")
    for path in (tmp_path / "target").glob("*.json"):
        shutil.copy(path, tmp_path / "again")
    again = load_target(TargetConfig(name=str(tmp_path / "again"), aux_layers=tiny_families.AUX_LAYERS))
    for got, expected in zip(*(jax.tree.leaves(x.model) for x in (again, target)), strict=True):
        np.testing.assert_array_equal(got, expected)
    reader, c = GGUFReader(tmp_path / "again/model.gguf"), target.model.config
    said = {key.removeprefix(f"{name}."): x.contents() for key, x in reader.fields.items() if key.startswith(name)}
    assert said == {
        "context_length": 64,
        "embedding_length": 32,
        "block_count": 4,
        "feed_forward_length": 48,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": pytest.approx(c.rms_norm_eps),
        "rope.dimension_count": c.head_dim,
        "rope.freq_base": pytest.approx(c.rope_theta),
    }
    factors = [tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight"]
    if "rope_scaling" in changes:  # the longest waves are stretched by the whole factor, the shortest by none
        assert (factors[0][0], factors[0][-1]) == (1, 8)
    assert len(factors) == len(changes.keys() & {"rope_scaling"})
    assert len(reader.fields["tokenizer.ggml.tokens"].data) == c.vocab_size


def test_what_llama_cpp_would_compute_otherwise_is_refused(tmp_path):
    families = {family.config.model_type: family for family in FAMILIES}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    for name, changes, message in (
        ("gemma3_text", {}, "target.name: got a gemma3_text, expected one of llama, qwen2, qwen3 for llama.cpp"),
        ("llama", {"rope_scaling": yarn}, r"rope_scaling: got YarnScaling.*, expected none for llama.cpp, or Ll"),
        ("qwen2", {"rope_scaling": LLAMA3}, r"rope_scaling: got RopeScaling\(.*, expected none for llama.cpp"),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 2}, "sliding_window: got 4096, expected none: ll"),
    ):
        target = tiny_families.write(tmp_path / f"{name}-{len(changes)}", families[name], **changes)
        with pytest.raises(ValueError, match=message):
            write_gguf(target, tmp_path / "model.gguf")
    eight = TargetConfig(name=str(tmp_path / "llama-1"), weights="int8", aux_layers=tiny_families.AUX_LAYERS)
    with pytest.raises(ValueError, match="target.weights: got quantised matrices, expected None"):
        write_gguf(load_target(eight), tmp_path / "model.gguf")
