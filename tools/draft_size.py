"""Target, head and the best draft size of a run, in one line, for the scripts that print how to serve it.

    .venv/bin/python tools/draft_size.py configs/quickstart.yaml [--chain]

The size is the fastest that `benchmark decode` measured at the smallest batch, of those that SGLang has too; where
nothing was measured, the one that `evaluate` measures. With `--chain`, as vLLM drafts, the best chain.
"""

import argparse
import json
import sys

from eagle3_jax import DraftTree
from eagle3_jax import config as configuration
from eagle3_jax.config import RunConfig
from eagle3_jax.models.registry import REGISTERED


def best(config: RunConfig, *, chain: bool) -> tuple[int, int, int]:
    """num_steps, topk, num_draft_tokens."""
    path = config.folder("benchmark") / "decode.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    usable = [x for x in records if x["steps"] and not x["lookup_tokens"] and not (chain and x["topk"] > 1)]
    if usable:
        smallest = min(x["batch_size"] for x in usable)
        fastest = max((x for x in usable if x["batch_size"] == smallest), key=lambda x: x["speed"])
        return fastest["steps"], fastest["topk"], fastest["num_draft_tokens"]
    print(f"{path}: no measured size; `python -m eagle3_jax.benchmark decode` finds the best one", file=sys.stderr)
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
