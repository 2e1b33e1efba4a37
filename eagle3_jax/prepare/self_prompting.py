"""Self-prompting: the target writes prompts of the sort that it was trained on.

It continues from the opening of its template's user turn; for several turns it answers in between, as it would a user.
The replicas of the mesh share every chunk of conversations, which is appended to a log as one line. After an
interruption those lines are read back instead of generated.
"""

from __future__ import annotations

import hashlib
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import tqdm

from eagle3_jax import config as configs
from eagle3_jax.data import chat
from eagle3_jax.models import chat_template
from eagle3_jax.runs import command, disk, processes

# The user's turns, and the finish_reason of the first: only after "stop" it is whole.
Written = tuple[list[str], str]

# The target may never end its prompts; then it is given up after this many tries per prompt that was asked for.
_TRIES = 4
# Kept on disk after this many batches: the unit of resumption.
_CHUNK = 16
# What a template writes around a turn, at most.
_TEMPLATE_TOKENS = 32


def write(config: configs.RunConfig, source: configs.SelfSource, log: pathlib.Path) -> list[Written]:
    """What the target writes, until enough of it ended.

    Args:
        log: one line a chunk; an interrupted run's is read first.
    """
    done: list[list[Written]] = disk.read_log(log)
    processes.barrier()  # from here on the log grows
    ended = sum(reason == "stop" for outputs in done for _, reason in outputs)
    if ended >= source.count:
        return [(turns, reason) for outputs in done for turns, reason in outputs]
    from eagle3_jax.decoding.engine import Engine, SamplingParams  # only now: JAX and the target are loaded by it
    from eagle3_jax.mesh import make_mesh, own_replica
    from eagle3_jax.models.checkpoint import fetch

    batch, openings = config.prepare.batch_size, source.openings or ("",)
    tokenizer = fetch.load_tokenizer(config.target.name)
    beginning = max(len(chat.user_opening_ids(tokenizer, _system(source), opening)) for opening in openings)
    length = beginning + source.max_tokens + (source.turns - 1) * 2 * (source.max_tokens + _TEMPLATE_TOKENS)
    replica = own_replica(make_mesh(config.mesh))
    target = fetch.load_target(config.target, replica.decoding_mesh)
    engine = Engine.load(target, None, batch_size=batch, max_length=length)
    with (
        log.open("a", encoding="utf-8") as stream,
        tqdm.tqdm(
            desc="self-prompting",
            initial=ended,
            total=source.count,
            unit=" prompts",
            disable=processes.index() > 0,
        ) as bar,
    ):

        def progress(ended: bool) -> None:
            command.stop_point()
            bar.update(ended)

        tried = sum(map(len, done))
        while ended < source.count and tried < _TRIES * source.count:
            size = batch * min(_CHUNK, math.ceil((source.count - ended) / batch))
            # Many openings are alike, so each conversation needs a seed of its own.
            params = [
                SamplingParams(temperature=source.temperature, max_tokens=source.max_tokens, seed=seed)
                for seed in _seeds(f"{config.seed}/{log.stem}/{len(done)}", size)
            ]
            begun = [openings[(tried + row) % len(openings)] for row in range(size)]
            own = slice(replica.index, None, replica.count)
            outputs = _converse(engine, tokenizer, source, begun[own], params[own], length, progress)
            shares = {
                part["replica"]: part["outputs"]
                for part in processes.gather({"replica": replica.index, "outputs": outputs})
            }
            outputs = [shares[row % replica.count][row // replica.count] for row in range(size)]
            if processes.index() == 0:
                disk.append(stream, outputs)
            done.append(outputs)
            tried += size
            ended += sum(reason == "stop" for _, reason in outputs)
    return [(turns, reason) for outputs in done for turns, reason in outputs]


def _converse(
    engine: Any,
    tokenizer: Any,
    source: configs.SelfSource,
    openings: Sequence[str],
    params: Sequence[Any],
    length: int,
    progress: Callable[[bool], None],
) -> list[Written]:
    """One conversation for each opening, all turns of a kind together; it ends early with a turn that is cut off."""
    talks = [_system(source) for _ in openings]

    def ask(prompts: dict[int, list[int]], on_output: Any = None) -> dict[int, Any]:
        """What follows on the prompts, by row; nothing where there is no room."""
        fitting = {row: ids for row, ids in prompts.items() if len(ids) + source.max_tokens <= length}
        answers = engine.generate(list(fitting.values()), [params[row] for row in fitting], on_output)
        return dict(zip(fitting, answers, strict=True))

    beginnings = {row: chat.user_opening_ids(tokenizer, talks[row], opening) for row, opening in enumerate(openings)}
    first = ask(beginnings, lambda _, output: progress(output.finish_reason == "stop"))
    for row, answer in first.items():
        talks[row].append({"role": "user", "content": openings[row] + answer.text})
    rows = [row for row, answer in first.items() if answer.finish_reason == "stop"]
    for role, prompt_ids in (source.turns - 1) * (
        ("assistant", chat_template.prompt_ids),
        ("user", chat.user_opening_ids),
    ):
        answers = ask({row: prompt_ids(tokenizer, talks[row]) for row in rows})
        rows = [row for row in answers if answers[row].finish_reason == "stop" and answers[row].text.strip()]
        for row in rows:
            talks[row].append({"role": role, "content": answers[row].text})
    users = [[message["content"] for message in talk if message["role"] == "user"] for talk in talks]
    return [(said, first[row].finish_reason) for row, said in enumerate(users)]


def _system(source: configs.SelfSource) -> list[dict[str, str]]:
    return [] if source.system is None else [{"role": "system", "content": source.system}]


def _seeds(name: str, count: int) -> list[int]:
    """Distinct-looking 31-bit seeds that depend on nothing but the name."""
    digests = (hashlib.sha256(f"{name}/{row}".encode()).digest() for row in range(count))
    return [int.from_bytes(digest[:4], "little") >> 1 for digest in digests]
