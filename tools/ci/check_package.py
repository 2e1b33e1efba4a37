"""Checks the installed wheel in an otherwise empty environment: its size, its data files, and that it decodes.

`tools/ci/test_package.sh` runs this script next to the wheel and a copy of tests/tiny.py.
"""

import importlib.resources
import json
import pathlib
import sys
import tempfile

import jax
import numpy as np
import tiny
from flax import nnx

import eagle3_jax
from eagle3_jax import DraftTree, Engine, SamplingParams, load_target
from eagle3_jax.config import DraftConfig, TargetConfig
from eagle3_jax.formats.heads import save_draft
from eagle3_jax.models.drafts.eagle3 import DraftHead, DraftHeadConfig
from eagle3_jax.models.drafts.head import Draft

MOST_BYTES = 25e6  # every release counts towards what an index stores of a project


def main() -> None:
    (wheel,) = pathlib.Path().glob("*.whl")
    assert wheel.stat().st_size <= MOST_BYTES, f"{wheel}: got {wheel.stat().st_size} bytes, expected <= {MOST_BYTES}"
    package = pathlib.Path(eagle3_jax.__file__).parent
    assert sys.prefix in str(package), f"{package}: expected the installed package, below {sys.prefix}"
    files = importlib.resources.files("eagle3_jax")
    listed = (path for path in (files / "data/prompts").iterdir() if ".jsonl" in path.name)
    prompts = {path.name: path.read_text(encoding="utf-8").count("\n") for path in listed}
    assert len(prompts) == 5 and min(prompts.values()) > 0, f"packaged prompts: got {prompts}"
    assert json.loads((files / "kernels/tree_attention/blocks.json").read_text())["default"]
    for name in ("py.typed", "export/card.md", "serve/page.html"):
        assert (files / name).is_file(), name

    with tempfile.TemporaryDirectory() as name:
        folder = tiny.write_target(pathlib.Path(name) / "target")
        target = load_target(TargetConfig(name=str(folder), aux_layers=(1, 2, 3)))
        config = DraftHeadConfig.for_target(DraftConfig(vocab_size=48), target.model.config)
        draft = Draft(DraftHead(config, rngs=nnx.Rngs(0)), jax.numpy.asarray(np.arange(3, 51, dtype=np.int32)))
        save_draft(pathlib.Path(name) / "draft", draft, target=target.model.config, dtype="float32")
        requests = ["apple bird cloud", [{"role": "user", "content": "river snow"}], [5, 6, 7]]
        params = SamplingParams(temperature=0.0, max_tokens=16)
        vanilla = Engine.load(target, None, max_length=128).generate(requests, params)
        tree = DraftTree(num_steps=2, topk=2, num_draft_tokens=5)
        engine = Engine.load(target, draft=str(pathlib.Path(name) / "draft"), tree=tree, max_length=128)
        drafted = engine.generate(requests, params)
        assert [out.token_ids for out in drafted] == [out.token_ids for out in vanilla]
        assert all(out.token_ids for out in drafted)
    print(f"eagle3_jax of {package} reads {sum(prompts.values())} prompts and decodes, jax {jax.__version__}")


if __name__ == "__main__":
    main()
