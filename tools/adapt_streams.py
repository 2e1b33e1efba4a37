"""A live head beside a static one on a stream of one domain: acceptance by thirds, speed, and equal tokens.

    python tools/adapt_streams.py code multilingual --requests 90
    python tools/adapt_streams.py path/to/questions.jsonl --field question

A stream is the name of a packaged category, or a JSONL file. Both engines answer the same requests in turns, a few at a
time, so that both meet the same load of the machine. Prints a Markdown table, one row a third of each stream.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import pathlib
import time

import eagle3_jax
from eagle3_jax import AdaptConfig, DraftTree, Engine, Output, SamplingParams, load_target
from eagle3_jax.acceptance import AcceptanceCounts
from eagle3_jax.decoding.prompt import Prompt
from eagle3_jax.runs import disk

PACKAGED = pathlib.Path(eagle3_jax.__file__).parent / "data" / "prompts"
TURN = 6  # requests of one engine before the other's turn


@dataclasses.dataclass
class Answers:
    """The answers of one engine, and their seconds."""

    engine: Engine
    outputs: list[Output] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)

    def answer(self, prompts: list[Prompt], params: list[SamplingParams]) -> None:
        start = time.monotonic()
        self.outputs += self.engine.generate(prompts, params)
        self.seconds += [(time.monotonic() - start) / len(prompts)] * len(prompts)

    def tau(self, part: slice) -> float:
        return AcceptanceCounts.total(output.stats.counts for output in self.outputs[part]).tau

    def rate(self, part: slice) -> float:
        return sum(len(output.token_ids) for output in self.outputs[part]) / sum(self.seconds[part])


def prompts_of(stream: str, field: str, count: int) -> list[Prompt]:
    """Reads the first prompts of a packaged category or of a JSONL file."""
    path = PACKAGED / f"{stream}.jsonl"
    packaged = path.exists()
    rows = disk.read_jsonl(path if packaged else pathlib.Path(stream))
    return [row["messages" if packaged else field] for row in itertools.islice(rows, count)]


def run(stream: str, asked: argparse.Namespace) -> None:
    target = load_target(asked.target)
    tree = DraftTree(num_steps=3, topk=1, num_draft_tokens=4)
    options = {"batch_size": asked.batch_size, "max_length": asked.max_length, "sample_drafts": False}
    adapt = AdaptConfig(share=asked.share, learning_rate=asked.learning_rate)
    static, live = (Answers(Engine.load(target, tree=tree, **options, adapt=each)) for each in (None, adapt))
    prompts = prompts_of(stream, asked.field, asked.requests)
    params = [
        SamplingParams(max_tokens=asked.max_tokens, temperature=asked.temperature, seed=i) for i in range(len(prompts))
    ]
    for each in (live, static):
        each.engine.warm_up(progress=False, greedy_alone=not asked.temperature)
    third = -(-len(prompts) // 3)
    for at in range(0, len(prompts), third):
        part = slice(at, min(at + third, len(prompts)))
        for turn in range(part.start, part.stop, TURN):
            some = slice(turn, min(turn + TURN, part.stop))
            for each in (static, live):
                each.answer(prompts[some], params[some])
        taus, ratio = (static.tau(part), live.tau(part)), live.rate(part) / static.rate(part)
        learnt = live.engine.stats().adapt
        assert learnt is not None
        row = f"| {stream} | {part.start + 1}-{part.stop} | {taus[0]:.2f} | {taus[1]:.2f} | {ratio:.2f} "
        print(f"{row}| {learnt.steps} | {learnt.new_tokens} |", flush=True)
    same = sum(x.token_ids == y.token_ids for x, y in zip(static.outputs, live.outputs, strict=True))
    whole = live.rate(slice(None)) / static.rate(slice(None))
    print(f"| {stream} | all | | | {whole:.2f} | | |", flush=True)
    print(f"{same}/{len(prompts)} identical; {live.engine.stats().adapt}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("streams", nargs="+")
    parser.add_argument("--field", default="prompt", help="of a JSONL file")
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--share", type=float, default=AdaptConfig().share)
    parser.add_argument("--learning-rate", type=float, default=AdaptConfig().learning_rate)
    asked = parser.parse_args()
    print(
        "| stream | requests | tau, static | tau, live | tokens/s, live over static | steps | new tokens |\n"
        "|---|---|---|---|---|---|---|",
        flush=True,
    )
    for stream in asked.streams:
        run(stream, asked)


if __name__ == "__main__":
    main()
