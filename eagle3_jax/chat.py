"""`eagle3-jax chat` and `eagle3-jax generate PROMPT`: answers in a terminal, with their accepted drafts in colours.

One verb with two names: it answers each prompt behind it, and without any it chats. A chat reads a line for each turn,
from a terminal or a pipe. Each answer ends with its speed, on stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from typing import get_args

from eagle3_jax.config import TargetConfig, Weights
from eagle3_jax.config.kinds import KINDS, in_target
from eagle3_jax.decoding.defaults import sampling_defaults
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.decoding.prompt import Prompt
from eagle3_jax.decoding.text import Detokenizer
from eagle3_jax.formats.packaged import AUTO, LOOKUP
from eagle3_jax.models.checkpoint.fetch import load_target, packaged_model
from eagle3_jax.runs import command

_MAX_LENGTH = 4096  # tokens of a conversation
# Colours of depth 1, 2, ... out of a terminal's 256, yellow to green to blue; deeper drafts have the last one.
_COLOURS = (220, 190, 154, 118, 84, 49, 45, 39)
_PLAIN = "\033[0m"


class Marker:
    """Detokenises an answer and marks its accepted drafts, by colours or by brackets around those of a round."""

    def __init__(self, tokenizer: object, *, colours: bool) -> None:
        self.colours, self._detokenizer = colours, Detokenizer(tokenizer)

    def mark(self, ids: Sequence[int], depths: Sequence[int], *, last: bool) -> str:
        """Returns the marked text of tokens; a depth of 0 is not a draft."""
        marked = ""
        for place, (token, depth) in enumerate(zip(ids, depths, strict=True)):
            text = self._detokenizer.add([token], last=last and place == len(ids) - 1)
            if self.colours:
                colour = _COLOURS[min(depth, len(_COLOURS)) - 1]
                marked += f"\033[38;5;{colour}m{text}{_PLAIN}" if depth and text else text
                continue
            following = depths[place + 1] if place + 1 < len(depths) else 0
            marked += "[" * (depth == 1) + text + "]" * (depth > 0 and following != depth + 1)
        return marked


def in_colours() -> bool:
    """Tells whether stdout shows colours: on a terminal, without NO_COLOR (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def answer(engine: Engine, prompt: Prompt, params: SamplingParams) -> str:
    """Answers a prompt: the text goes to stdout as it arrives, its speed to stderr. Returns the text."""
    marker = Marker(engine.tokenizer, colours=True) if in_colours() else None
    drafted, start = 0, time.perf_counter()
    request = engine.submit(prompt, params)
    for piece in request:
        last = piece.finish_reason is not None
        print(marker.mark(piece.token_ids, piece.depths, last=last) if marker else piece.text, end="", flush=True)
        drafted += sum(depth > 0 for depth in piece.depths)
    output, seconds = request.result(), time.perf_counter() - start
    print(flush=True)
    count = len(output.token_ids)
    rates = f"{count} tokens, {count / seconds:.1f} tokens/s, {output.stats.acceptance_length or 1:.2f} tokens a round"
    print(f"[{rates}, {drafted / max(count, 1):.0%} drafted]", file=sys.stderr, flush=True)
    return output.text


def turns() -> Iterator[str]:
    """Yields the lines of stdin that say something; a terminal is asked for them."""
    asks = sys.stdin.isatty()
    if asks:
        print("Type, and end with Ctrl-D. Accepted drafts are coloured, a colour for each depth.")
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # `input` edits lines by it
    while True:
        try:
            line = input("> " if asks else "")
        except EOFError:
            return
        if line.strip():
            yield line


def make_parser() -> argparse.ArgumentParser:
    """Builds the parser of the command line."""
    parser = argparse.ArgumentParser(prog="eagle3-jax chat", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="is answered alone; without any it chats")
    parser.add_argument("--target", default="smollm2-135m-instruct", help="a name, a hub id, or a Hugging Face folder")
    own = ", ".join(filter(in_target, KINDS))
    drafts = f"a head's folder or name, a smaller model, {LOOKUP}, {own}, or none; the default is the packaged head"
    parser.add_argument("--draft", default=AUTO, help=drafts)
    weights = [value for kind in get_args(Weights) for value in get_args(kind) or [kind]]
    parser.add_argument("--weights", choices=weights, help="fewer bits, see docs/quantised-targets.md")
    parser.add_argument("--max-tokens", type=int, default=512, help="of an answer (default: 512)")
    parser.add_argument("--temperature", type=float, help="0 is greedy; the default is the target's own")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    asked = make_parser().parse_args(argv)
    with command.run("chat", resumes=False):
        given = {"max_tokens": asked.max_tokens, "seed": secrets.randbits(32), "temperature": asked.temperature}
        given = sampling_defaults("auto", asked.target) | {n: value for n, value in given.items() if value is not None}
        params = SamplingParams(**given)
        weights = asked.weights or ("stored" if packaged_model(asked.target) else None)
        target = load_target(TargetConfig(name=asked.target, weights=weights), for_engine=True)
        length = min(_MAX_LENGTH, target.model.config.max_position_embeddings)
        engine = Engine.load(target, None if asked.draft == "none" else asked.draft, max_length=length)
        engine.generate(["Hello!"], SamplingParams(max_tokens=8))  # compiles
        for prompt in asked.prompts:
            answer(engine, prompt, params)
        messages: list[dict[str, str]] = []
        for line in [] if asked.prompts else turns():
            messages.append({"role": "user", "content": line})
            try:
                messages.append({"role": "assistant", "content": answer(engine, messages, params)})
            except ValueError as error:  # too long
                print(f"{error}; the conversation begins anew", file=sys.stderr, flush=True)
                messages.clear()


if __name__ == "__main__":
    main()
