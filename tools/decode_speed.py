"""Times one vanilla decode step of the default target against transformers, on the same cores, in one run.

    .venv/bin/python tools/decode_speed.py [--threads 2]

Both decode greedily in float32 at batch 1 from the same prompt; engines take turns and the median of the turns counts.
Needs the extra `reference` (PyTorch).
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from eagle3_jax.decoding.engine import Engine, SamplingParams
from eagle3_jax.models.registry import load_target


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch; JAX takes all cores")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    target = load_target("smollm2-135m-instruct")
    engine = Engine.load(target)
    reference: Any = AutoModelForCausalLM.from_pretrained(target.folder, dtype=torch.float32).eval()
    prompt = engine.encode("Write a short story about a lighthouse.")
    count = arguments.tokens

    def ours(tokens: int) -> list[int]:
        return engine.generate([prompt], SamplingParams(max_tokens=tokens, ignore_eos=True))[0].token_ids

    def theirs(tokens: int) -> list[int]:
        with torch.inference_mode():
            ids = reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
                do_sample=False,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
            )
        return ids[0, len(prompt) :].tolist()

    def step(generate: Callable[[int], list[int]], tokens: int) -> float:
        """Seconds a token: a long answer less a short one, so that the prefill drops out."""
        marks = []
        for length in (1, tokens):
            start = time.perf_counter()
            generate(length)
            marks.append(time.perf_counter() - start)
        return (marks[1] - marks[0]) / (tokens - 1)

    same = ours(count) == theirs(count)
    for generate in (ours, theirs):
        generate(1)
    turns = [(step(ours, count), step(theirs, count)) for _ in range(arguments.turns)]
    mine, other = (statistics.median(column) * 1e3 for column in zip(*turns, strict=True))
    print(f"tokens identical: {same}")
    print(f"eagle3_jax {mine:.1f} ms a step, transformers {other:.1f} ms a step, ratio {other / mine:.2f}")


if __name__ == "__main__":
    main()
