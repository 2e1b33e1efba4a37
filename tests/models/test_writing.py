"""A target that is written comes back as it was, in its dtype, in one file or several."""

import json

import jax
import numpy as np
import pytest
import tiny
from safetensors import safe_open

from eagle3_jax import export
from eagle3_jax.config import TargetConfig
from eagle3_jax.models import identity
from eagle3_jax.models.registry import load_target
from eagle3_jax.models.weights import INDEX
from eagle3_jax.models.writing import write_target


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shard_bytes", [10**9, 50_000])
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


def test_the_command_writes_the_run_s_target(tmp_path, capsys):
    config = tiny.write_run(tmp_path)
    arguments = ["--config", str(config), "--target.name", str(tmp_path / "target"), "--target.dtype", "bfloat16"]
    export.main([*arguments, "--write-target", str(tmp_path / "written")])
    assert json.loads((tmp_path / "written/config.json").read_text())["torch_dtype"] == "bfloat16"
    with pytest.raises(SystemExit, match="written: exists already, expected a new folder"):
        export.main([*arguments, "--write-target", str(tmp_path / "written")])
