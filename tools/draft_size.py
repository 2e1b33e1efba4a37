"""Target, head and the best draft size of a run, in one line, for the scripts that print how to serve it.

    .venv/bin/python tools/draft_size.py configs/quickstart.yaml [--chain]

The size is the fastest at the smallest batch, of those that SGLang has too: as `benchmark tune` raced them, or else as
`benchmark decode` measured them; where neither was run, the one that `evaluate` measures. With `--chain`, as vLLM
drafts, the best chain.
"""

import argparse
import sys
from typing import Any

from eagle3_jax import DraftTree, manifest
from eagle3_jax import config as configuration
from eagle3_jax.config import RunConfig
from eagle3_jax.models.registry import REGISTERED


def measured(config: RunConfig) -> list[dict[str, Any]]:
    """Sizes with their batch and a speed; speeds of one batch can be compared."""
    folder = config.folder("benchmark")
    if (folder / "tune.json").exists():
        batches = manifest.read_json(folder / "tune.json")["batches"]
        return [
            size | {"batch_size": batch["batch_size"], "speed": 1 / size["behind"]}
            for batch in batches
            for size in batch["sizes"]
        ]
    path = folder / "decode.jsonl"
    return list(manifest.read_jsonl(path)) if path.exists() else []


def best(config: RunConfig, *, chain: bool) -> tuple[int, int, int]:
    """num_steps, topk, num_draft_tokens."""
    usable = [x for x in measured(config) if x["steps"] and not x["lookup_tokens"] and not (chain and x["topk"] > 1)]
    if usable:
        smallest = min(x["batch_size"] for x in usable)
        fastest = max((x for x in usable if x["batch_size"] == smallest), key=lambda x: x["speed"])
        return fastest["steps"], fastest["topk"], fastest["num_draft_tokens"]
    verbs = "`python -m eagle3_jax.benchmark tune` (or decode)"
    print(f"{config.folder('benchmark')}: no measured size; {verbs} finds the best one", file=sys.stderr)
    tree = config.evaluate.tree if isinstance(config.evaluate.tree, DraftTree) else DraftTree()
    return (tree.num_steps, 1, tree.num_steps + 1) if chain else (tree.num_steps, tree.topk, tree.num_draft_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--chain", action="store_true")
    arguments = parser.parse_args()
    config = configuration.load(arguments.config)
    target = config.target.name
    if target in REGISTERED:
        written = f"{config.run_dir}/target"
        command = f"python -m eagle3_jax.export --config {arguments.config} --write-target {written}"
        print(f"{target}: not on the hub; first: {command}", file=sys.stderr)
        target = written
    print(target, config.folder("export"), *best(config, chain=arguments.chain))


if __name__ == "__main__":
    main()
