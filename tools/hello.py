"""Streams answers without drafts and with them, marks the accepted drafts, and prints what is fastest here.

The packaged target answers from its 4 bits and in float32: without drafts, with a chain of three, and with what the
engine chooses by measured costs. Each way answers all prompts, in turns, and all answers must agree.

    .venv/bin/python tools/hello.py                                  # drafts of this package's head
    .venv/bin/python tools/hello.py --draft lookup                   # drafts copied from the text, without a head
    .venv/bin/python tools/hello.py --draft runs/quickstart/export   # drafts of your own head

On a terminal accepted drafts are coloured by depth; elsewhere, and under NO_COLOR, those of a round are in brackets.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from eagle3_jax.runs import environment

environment.prepare()

from eagle3_jax import Engine, SamplingParams, load_target
from eagle3_jax.acceptance import AcceptanceCounts
from eagle3_jax.chat import Marker, in_colours
from eagle3_jax.config import DraftTree, TargetConfig
from eagle3_jax.decoding.tier import Tier
from eagle3_jax.formats.packaged import AUTO, LOOKUP, packaged_head
from eagle3_jax.models.checkpoint.fetch import Target, packaged_model
from eagle3_jax.runs import command, machine, progress

# What a model of 135M parameters can do. The first ones are shown.
PROMPTS = (
    "Write the numbers from 1 to 20, separated by commas.",
    "Explain this function in two sentences:\n\n```python\ndef add(a, b):\n    return a + b\n```",
    "What is a program?",
    "Name five animals that live in the sea.",
    "Rewrite in the past tense: I walk to the shop, buy bread and go home.",
    "Write a short email that thanks a colleague for her help.",
    "How does a bicycle stay upright?",
    "List the days of the week, one on each line.",
)
SHOWN = 3
SECONDS = 12.0  # of measured turns, if more than one fits
MAX_TOKENS, MAX_LENGTH = 48, 512
# Sizes that the engine chooses from, beside none: more of them would take most of the time, to be compiled.
SIZES = (DraftTree(num_steps=3, num_draft_tokens=4), DraftTree(num_steps=1, num_draft_tokens=2))
PLAIN, CHOSEN = "without drafts", "the engine's choice"


@dataclasses.dataclass(frozen=True)
class Streamed:
    """A streamed answer; `counts` of its rounds, `drafted`: accepted drafts in it."""

    token_ids: list[int]
    counts: AcceptanceCounts
    drafted: int
    seconds: float


Turns = dict[str, list[list[Streamed]]]  # by way: the answers of each turn


def stream(engine: Engine, prompt: str, tier: Tier | None, show: Callable[[str], object], *, colours: bool) -> Streamed:
    """Answers a prompt with drafts of a tier; None: of the engine's choice."""
    engine.tiers.pinned = tier
    marker, drafted, start = Marker(engine.tokenizer, colours=colours), 0, time.perf_counter()
    request = engine.submit(prompt, SamplingParams(max_tokens=MAX_TOKENS))
    for piece in request:
        show(marker.mark(piece.token_ids, piece.depths, last=piece.finish_reason is not None))
        drafted += sum(depth > 0 for depth in piece.depths)
    seconds, output = time.perf_counter() - start, request.result()
    return Streamed(output.token_ids, output.stats.counts, drafted, seconds)


def table(measured: Mapping[str, Turns]) -> str:
    """Formats a row for each kind of weights and way, and a sentence on the fastest. Raises ValueError: answers differ.

    Seconds are those of the median turn.
    """
    rows, speeds = [("", "", "tokens/s", "speed-up", "tau", "drafted")], dict[str, float]()
    for weights, turns in measured.items():
        texts = [answer.token_ids for answer in turns[PLAIN][0]]
        for way, turn in ((way, turn) for way, of_way in turns.items() for turn in of_way):
            for prompt, expected, got in zip(PROMPTS, texts, turn, strict=True):
                if got.token_ids != expected:
                    raise ValueError(f"{weights}, {way}, {prompt!r}: got another answer, expected that without drafts")
        tokens = sum(map(len, texts))
        for way, of_way in turns.items():
            speed = tokens / statistics.median(sum(x.seconds for x in turn) for turn in of_way)
            speeds[f"{weights}, {way}"] = speed
            tau = AcceptanceCounts.total(x.counts for x in of_way[-1]).tau
            drafted = sum(x.drafted for x in of_way[-1]) / tokens
            gain = speed / speeds[f"{weights}, {PLAIN}"]
            rows.append((weights, way, f"{speed:.1f}", f"{gain:.2f}x", f"{tau:.2f}", f"{drafted:.0%}"))
    fastest = max(speeds, key=lambda name: speeds[name])
    return "\n".join([*command.aligned(rows), f"Fastest here: {fastest}. All answers are those without drafts."])


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m-instruct", help="a name, a hub id, or a Hugging Face folder")
    parser.add_argument("--draft", help="a head's folder, or lookup; the default is the target's own head, else lookup")
    arguments = parser.parse_args(argv)
    colours = in_colours()
    with command.run("hello", resumes=False):
        print(f"Loading {arguments.target} onto {where()} ...", flush=True)
        with beating("loading"):
            target = load_target(arguments.target)
        draft = arguments.draft or (AUTO if packaged_head(target) else LOOKUP)
        measured = dict[str, Turns]()
        if packaged_model(arguments.target) is not None:
            print("A model of 135M parameters: watch the speed, not the wit.", flush=True)
            with beating("loading its 4 bits"):
                stored = load_target(TargetConfig(name=arguments.target, weights="stored"))
            measured["4 bits"] = run(stored, draft, colours=colours)
            print("\nThe same in float32:", flush=True)
        measured[target.model.embed[...].dtype.name] = run(target, draft, colours=colours, quiet=bool(measured))
        print(f"\n{table(measured)}")
        print("tau: tokens a round. drafted: share of the answers' tokens that were accepted drafts.")


def where() -> str:
    """Names the device. Raises ValueError: JAX does not see the TPU of this machine, and would use its CPU."""
    hardware = machine.hardware()
    if machine.has_tpu() and hardware["accelerator"] is None:
        raise ValueError("devices: got a CPU, expected this machine's TPU: pip install 'eagle3-jax[tpu]'")
    return hardware["accelerator"] or hardware["cpu"]


def beating(what: str) -> contextlib.AbstractContextManager[None]:
    """Tells a log that work goes on; a terminal has bars."""
    return contextlib.nullcontext() if sys.stderr.isatty() else progress.told(what)


def run(target: Target, draft: str, *, colours: bool, quiet: bool = False) -> Turns:
    """Answers all prompts in every way, in turns, for a while; shows the first ones unless `quiet`."""
    start = time.monotonic()
    print("Compiling, and measuring what drafts cost here ...", flush=True)
    with beating("compiling and measuring"):
        sizes = "auto" if draft == LOOKUP else SIZES
        engine = Engine.load(target, draft, sizes, max_length=MAX_LENGTH, prefix_cache=False)
        engine.warm_up(progress=sys.stderr.isatty(), greedy_alone=True)
    print(f"Ready after {time.monotonic() - start:.0f} s.", flush=True)
    plain, fixed = engine.tiers.tiers[0], engine.tiers.default
    ways: dict[str, Tier | None] = {PLAIN: plain, fixed.name: fixed, CHOSEN: None}

    def say(text: str) -> None:
        print(text, end="", flush=True)

    marked = "coloured, a colour for each depth" if colours else "in [brackets]"
    sources = {LOOKUP: "copied from the text", AUTO: "of the head that comes with the package"}
    for prompt in PROMPTS[: 0 if quiet else SHOWN]:
        say(f"\n== {prompt}\n\n-- {PLAIN}\n")
        stream(engine, prompt, plain, say, colours=colours)
        say(f"\n\n-- with drafts {sources.get(draft, f'of the head {draft}')}; the accepted ones are {marked}\n")
        stream(engine, prompt, fixed, say, colours=colours)
        say("\n")
    turns: Turns = {name: [] for name in ways}
    with beating(f"{len(PROMPTS)} prompts in every way, in turns"):
        start, number = time.monotonic(), 0
        while (time.monotonic() - start) * (number + 1) <= SECONDS * number or not number:
            number += 1
            for name in random.Random(number).sample(list(ways), len(ways)):
                turns[name].append([stream(engine, prompt, ways[name], len, colours=False) for prompt in PROMPTS])
    return turns


if __name__ == "__main__":
    main()
