"""A target that is written comes back as it was, in its dtype, in one file or several."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from safetensors import safe_open

from eagle3_jax.config import TargetConfig
from eagle3_jax.export import __main__ as export
from eagle3_jax.export.write_target import write_target
from eagle3_jax.models import chat_template
from eagle3_jax.models.cache import Pass
from eagle3_jax.models.checkpoint import identity
from eagle3_jax.models.checkpoint.fetch import load_target
from eagle3_jax.models.checkpoint.load import INDEX


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
