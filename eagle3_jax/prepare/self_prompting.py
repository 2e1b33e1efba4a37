"""Self-prompting: the target writes prompts like those that it was trained on.

The target continues the opening of its template's user turn; with several turns it also answers in between. The
replicas of the mesh share every chunk of conversations, a line of a log that an interrupted run reads back.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import tqdm

from eagle3_jax.config import RunConfig, SelfSource
from eagle3_jax.data import chat
from eagle3_jax.models import chat_template
from eagle3_jax.runs import command, disk, processes

# For the index of each source of kind `self`, its conversations: the user's turns, and the finish_reason of the first,
# which is complete only after "stop".
Written = dict[int, list[tuple[list[str], str]]]

# Most tries for each requested prompt, since a target may never end its prompts.
_TRIES = 4
# Batches of a chunk, the unit of resumption.
_CHUNK = 16
# Most tokens that a template writes around a turn.
_TEMPLATE_TOKENS = 32


def write(config: RunConfig, source: SelfSource, log: disk.Path) -> list[tuple[list[str], str]]:
    """Generates conversations until enough of them ended; a line of `log` for each chunk is read again by a rerun."""
    chunks: list[list[tuple[list[str], str]]] = disk.read_log(log)
    done = [(turns, reason) for outputs in chunks for turns, reason in outputs]
    processes.barrier()  # the log grows from here on
    ended = sum(reason == "stop" for _, reason in done)
    if ended >= source.count:
        return done
    from eagle3_jax.decoding import data_parallel  # late: loads JAX and the target
    from eagle3_jax.decoding.engine import Engine, SamplingParams
    from eagle3_jax.mesh import make_mesh, own_replica
    from eagle3_jax.models.checkpoint import fetch

    batch, openings = config.prepare.batch_size, source.openings or ("",)
    tokenizer = fetch.load_tokenizer(config.target.name)
    beginning = max(len(chat.user_opening_ids(tokenizer, _system(source), opening)) for opening in openings)
    length = beginning + source.max_tokens + (source.turns - 1) * 2 * (source.max_tokens + _TEMPLATE_TOKENS)
    replica = own_replica(make_mesh(config.mesh))
    rows = data_parallel.targets(fetch.load_target(config.target, replica.mesh), replica)
    engines = [Engine.load(row, None, batch_size=batch, max_length=length) for row in rows]
    generate = functools.partial(data_parallel.generate, engines)
    shown = {"desc": "self-prompting", "disable": processes.index() > 0}
    with disk.Log(log) as stream, tqdm.tqdm(initial=ended, total=source.count, **shown) as bar:

        def progress(ended: bool) -> None:
            command.stop_point()
            bar.update(ended)

        while ended < source.count and len(done) < _TRIES * source.count:
            size = batch * min(_CHUNK, math.ceil((source.count - ended) / batch))
            # Openings repeat, so each conversation has a seed of its own.
            params = [
                SamplingParams(temperature=source.temperature, max_tokens=source.max_tokens, seed=seed)
                for seed in _seeds(f"{config.seed}/{log.stem}/{len(chunks)}", size)
            ]
            begun = [openings[(len(done) + row) % len(openings)] for row in range(size)]
            own = slice(replica.index, None, replica.count)
            outputs = _converse(generate, tokenizer, source, begun[own], params[own], length, progress)
            parts = processes.gather({"replica": replica.index, "outputs": outputs})
            shares = {part["replica"]: part["outputs"] for part in parts}
            outputs = [shares[row % replica.count][row // replica.count] for row in range(size)]
            if processes.index() == 0:
                stream.append(outputs)
            chunks.append(outputs)
            done += [(turns, reason) for turns, reason in outputs]
            ended += sum(reason == "stop" for _, reason in outputs)
    return done


def _converse(
    generate: Callable[..., None],
    tokenizer: Any,
    source: SelfSource,
    openings: Sequence[str],
    params: Sequence[Any],
    length: int,
    progress: Callable[[bool], None],
) -> list[tuple[list[str], str]]:
    """Generates a conversation for each opening, turn by turn for all; a truncated turn ends its conversation."""
    talks = [_system(source) for _ in openings]

    def ask(prompts: dict[int, list[int]], progress: Callable[[bool], None] = lambda _: None) -> dict[int, Any]:
        rows = [row for row, ids in prompts.items() if len(ids) + source.max_tokens <= length]
        answers: dict[int, Any] = dict.fromkeys(rows)

        def on_output(index: int, output: Any) -> None:
            answers[rows[index]] = output
            progress(output.finish_reason == "stop")

        generate([prompts[row] for row in rows], [params[row] for row in rows], on_output)
        return answers

    beginnings = {row: chat.user_opening_ids(tokenizer, talks[row], opening) for row, opening in enumerate(openings)}
    first = ask(beginnings, progress)
    for row, answer in first.items():
        talks[row].append({"role": "user", "content": openings[row] + answer.text})
    rows = [row for row, answer in first.items() if answer.finish_reason == "stop"]
    speakers = ("assistant", chat_template.prompt_ids), ("user", chat.user_opening_ids)
    for role, prompt_ids in (source.turns - 1) * speakers:
        answers = ask({row: prompt_ids(tokenizer, talks[row]) for row in rows})
        rows = [row for row in answers if answers[row].finish_reason == "stop" and answers[row].text.strip()]
        for row in rows:
            talks[row].append({"role": role, "content": answers[row].text})
    users = [[message["content"] for message in talk if message["role"] == "user"] for talk in talks]
    return [(texts, first[row].finish_reason) for row, texts in enumerate(users)]


def _system(source: SelfSource) -> list[dict[str, str]]:
    return [] if source.system is None else [{"role": "system", "content": source.system}]


def _seeds(name: str, count: int) -> list[int]:
    digests = (hashlib.sha256(f"{name}/{row}".encode()).digest() for row in range(count))
    return [int.from_bytes(digest[:4], "little") >> 1 for digest in digests]
