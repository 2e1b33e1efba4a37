"""Prints the command that serves a run's target and head in another engine, with the best measured draft size.

    .venv/bin/python tools/draft_size.py configs/quickstart.yaml vllm|sglang|tpu-inference|sglang-jax

The size is the fastest at the smallest batch among those that SGLang supports. Measurements come from `benchmark tune`,
else from `benchmark decode`; without either, the size is that of `evaluate`. All but SGLang get the best chain: they
draft chains only (sglang-jax: unless its scheduler does not overlap). A block head is served with its whole block,
without a measurement.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shlex
import sys
from typing import Any

from eagle3_jax import DraftTree
from eagle3_jax.config import RunConfig, run_file
from eagle3_jax.formats import engines, files, kinds
from eagle3_jax.formats.files import CONFIG
from eagle3_jax.formats.stored import StoredKind
from eagle3_jax.models.checkpoint.fetch import fetch, packaged_model, read_config, split_revision
from eagle3_jax.models.drafts.dflash import BlockHeadConfig
from eagle3_jax.models.layers import RopeScaling
from eagle3_jax.models.rope import write_rope
from eagle3_jax.models.target_config import ModelConfig
from eagle3_jax.runs import disk


def measured(config: RunConfig) -> list[dict[str, Any]]:
    """Returns sizes with their batch and speed; speeds are comparable within a batch."""
    races, table = (config.folder("benchmark") / name for name in ("tune.json", "decode.jsonl"))
    if races.exists():
        sizes = [(x["batch_size"], size) for x in disk.read_json(races)["batches"] for size in x["sizes"]]
        return [size | {"batch_size": batch, "speed": 1 / size["behind"]} for batch, size in sizes]
    return list(disk.read_jsonl(table)) if table.exists() else []


def best(config: RunConfig, *, chain: bool) -> tuple[int, int, int]:
    """Chooses num_steps, topk and num_draft_tokens."""
    usable = [x for x in measured(config) if x["steps"] and not x["lookup_tokens"] and not (chain and x["topk"] > 1)]
    if usable:
        smallest = min(x["batch_size"] for x in usable)
        fastest = max((x for x in usable if x["batch_size"] == smallest), key=lambda x: x["speed"])
        return fastest["steps"], fastest["topk"], fastest["num_draft_tokens"]
    verbs = "`python -m eagle3_jax.benchmark tune` (or decode)"
    print(f"{config.folder('benchmark')}: no measured size; {verbs} finds the best one", file=sys.stderr)
    tree = config.evaluate.tree if isinstance(config.evaluate.tree, DraftTree) else DraftTree()
    return (tree.num_steps, 1, tree.num_steps + 1) if chain else (tree.num_steps, tree.topk, tree.num_draft_tokens)


def rope_overrides(head: BlockHeadConfig, target: ModelConfig) -> dict[str, Any] | None:
    """Returns vLLM's `--hf-overrides` with which tpu-inference rotates a block head as trained; None: there are none.

    Its draft (models/jax/dflash.py:325, 0.32.0) takes the base from an attribute of the target's config, which
    transformers 5 does not set, and the scaling from the target's section, smoothed by `scale_factor`, or 8 without it
    (layers/jax/rope_interface.py:298). The target itself takes the section's base.
    """
    if head.rope_scaling != target.rope_scaling or not isinstance(head.rope_scaling, RopeScaling | None):
        return None
    section = write_rope(target.rope_theta, target.rope_scaling)["rope_parameters"]
    return {"rope_theta": head.rope_theta, "rope_parameters": {**section, "scale_factor": section.get("factor", 1.0)}}


def command(config: RunConfig, path: str, engine: str) -> list[list[str]]:
    """Returns the command, a list for each of its lines; `path` is the config's."""
    name = config.target.name
    (target, revision), draft = split_revision(name), str(config.folder("export"))
    if packaged_model(name):
        target = f"{config.run_dir}/target"
        first = ["python", "-m", "eagle3_jax.export", "--config", path, "--write-target", target]
        print(f"{name}: not on the hub; first: {shlex.join(first)}", file=sys.stderr)
    pinned = ["--revision", revision] if revision else []
    dtype = ["--dtype", config.export.dtype]  # the head's
    there = pathlib.Path(draft, CONFIG).exists()
    kind = kinds.of_folder(pathlib.Path(draft)) if there else kinds.named("eagle3")
    block = kind.block(pathlib.Path(draft)) if there else None
    sizes = best(config, chain=engine != "sglang") if block is None else (block, 1, block + 1)
    steps, topk, tokens = map(str, sizes)
    rope: list[list[str]] = []
    if isinstance(kind, StoredKind) and engine in engines.VERSIONS:
        forms = [form for form, readers in kind.engines.readers.items() if engine in readers]
        if engine == engines.TPU_INFERENCE and block is not None:
            found = kind.described(pathlib.Path(draft), files.read_config(pathlib.Path(draft)), {}, problems := [])
            assert found is not None, problems  # `block` has read it
            overrides = rope_overrides(found["config"], read_config(fetch(name, whole=False)))
            rope = [["--hf-overrides", json.dumps(overrides)]] * (overrides is not None)
            if overrides is None:
                print(f"{draft}: warning: nothing makes tpu-inference rotate as this head was trained", file=sys.stderr)
        if config.export.format not in forms:
            convert = ["python", "-m", "eagle3_jax.export", "--from", draft, "--to", forms[0], f"{draft}-{forms[0]}"]
            print(f"{draft}: got the form {config.export.format}; first: {shlex.join(convert)}", file=sys.stderr)
            draft = convert[-1]
    if engine in ("vllm", engines.TPU_INFERENCE):
        speculative = {"method": kind.method, "model": draft, "num_speculative_tokens": int(steps)}
        return [["vllm", "serve", target, *pinned], ["--speculative-config", json.dumps(speculative)], dtype, *rope]
    steps, topk = ("1", "1") if block is not None else (steps, topk)
    depth = ["--speculative-num-steps", steps, "--speculative-eagle-topk", topk]
    depth = [] if engine == "sglang" and block is not None else depth
    server = "sglang.launch_server" if engine == "sglang" else "sgl_jax.launch_server"
    return [
        ["python", "-m", server, "--model-path", target, *pinned],
        ["--speculative-algorithm", kind.algorithm, "--speculative-draft-model-path", draft],
        [*depth, "--speculative-num-draft-tokens", tokens],
        dtype,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("engine", choices=("vllm", "sglang", engines.TPU_INFERENCE, engines.SGLANG_JAX))
    arguments = parser.parse_args()
    config = run_file.load(arguments.config)
    print(" \\\n  ".join(map(shlex.join, command(config, arguments.config, arguments.engine))))


if __name__ == "__main__":
    main()
