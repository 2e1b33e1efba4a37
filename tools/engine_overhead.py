"""Measures the cost of the engine's host side, and the cost of drafting before the first token.

    .venv/bin/python tools/engine_overhead.py [--batch 8]

Gap: time of a dispatch in the engine (queue, page tables, reading the tokens) minus that of the same program run back
to back, as a share of one round. First token: of single prompts in turn, with a draft and without. The head is
untrained, so no draft is accepted and all dispatches are alike.
"""

import argparse
import statistics
import time

import jax.numpy as jnp
from flax import nnx

from eagle3_jax.config import DraftConfig, DraftTree
from eagle3_jax.decoding.device import shapes
from eagle3_jax.decoding.engine import Engine, SamplingParams
from eagle3_jax.models.checkpoint.fetch import load_target
from eagle3_jax.models.drafts.eagle3 import DraftHead, DraftHeadConfig
from eagle3_jax.models.drafts.head import Draft

CHAIN = DraftTree(num_steps=3, topk=1, num_draft_tokens=4)
DISPATCHES = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    target = load_target("smollm2-135m-instruct")
    config = DraftHeadConfig.for_target(DraftConfig(vocab_size=8192), target.model.config)
    draft = Draft(DraftHead(config, rngs=nnx.Rngs(0)), jnp.arange(8192))
    size = {"batch_size": arguments.batch, "max_length": 1024, "prefix_cache": False}
    engines = {
        "vanilla": Engine(target.model, target.tokenizer, **size),
        "chain": Engine(target.model, target.tokenizer, draft, CHAIN, **size),
    }
    prompts = [engines["chain"].encode(f"Write a story about {i} lighthouses.") for i in range(arguments.batch)]
    for engine in engines.values():
        engine.warm_up()
    for name, engine in engines.items():
        gaps = [gap(engine, prompts) for _ in range(arguments.turns)]
        print(f"{name}: the gap between dispatches is {100 * statistics.median(gaps):.2f} % of a round")
    first = {name: [] for name in engines}
    for turn in range(4 * arguments.turns):
        for name in sorted(engines, reverse=turn % 2 == 0):
            (answer,) = engines[name].generate(prompts[:1], SamplingParams(max_tokens=4))
            first[name].append(answer.stats.seconds_to_first_token)
    vanilla, chain = (statistics.median(first[name]) * 1e3 for name in ("vanilla", "chain"))
    print(f"first token: {chain:.1f} ms with a draft, {vanilla:.1f} without, ratio {chain / vanilla:.3f}")


def gap(engine: Engine, prompts: list[list[int]]) -> float:
    """Computes (time of a dispatch in the engine - that of its program alone) / time of a round."""
    answer = DISPATCHES * shapes.ROUNDS + 1

    def whole(tokens: int) -> float:
        start = time.perf_counter()
        engine.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))
        return time.perf_counter() - start

    def alone(dispatches: int) -> float:
        for i in range(len(prompts)):  # equal prompts in equal places, ready to decode
            engine.submit(prompts[i], SamplingParams(max_tokens=answer, ignore_eos=True))
        while any(request is None or request.read < len(request.ids) for request in engine._scheduler._slots):
            engine._scheduler.turn()
        engine._runner.wait()
        width = engine.batch_size
        start = time.perf_counter()
        for _ in range(dispatches):
            engine._runner.decode(
                (), range(width), shapes.ROUNDS, width, width=width, tier=engine.tiers.default, greedy=True
            )
        engine._runner.wait()
        seconds = time.perf_counter() - start
        for request in filter(None, list(engine._scheduler._slots)):
            request.abort()
        engine.generate(prompts[:1], SamplingParams(max_tokens=1))  # empties the queue
        return seconds

    in_engine = (whole(answer) - whole(1)) / DISPATCHES
    program = (alone(DISPATCHES - 2) - alone(1)) / (DISPATCHES - 3)
    return (in_engine - program) / (program / shapes.ROUNDS)


if __name__ == "__main__":
    main()
