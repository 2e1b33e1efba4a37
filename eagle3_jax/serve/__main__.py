"""`python -m eagle3_jax.serve`: a server of OpenAI's API over the engine.

It answers /v1/chat/completions, /v1/completions and /v1/models, whole or as a stream; /health and /metrics tell its
state. It listens at once, and answers 503 until it has loaded and warmed up. SIGTERM and Ctrl-C end it once the running
requests are answered, and at once while it starts.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import os
import pathlib
import socket
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from eagle3_jax.config import ConfigError, RunConfig, ServeConfig, run_file
from eagle3_jax.config.kinds import in_target
from eagle3_jax.decoding import data_parallel
from eagle3_jax.decoding.defaults import sampling_defaults
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.hosts.api import follow, lead
from eagle3_jax.decoding.pool import EnginePool
from eagle3_jax.formats import kinds
from eagle3_jax.formats.packaged import AUTO, LOOKUP, chosen_draft
from eagle3_jax.mesh import make_mesh, own_replica, row_processes
from eagle3_jax.models.checkpoint.fetch import keep_programs, load_target
from eagle3_jax.models.drafts.one_pass import OnePassHead
from eagle3_jax.runs import command, machine, processes, progress
from eagle3_jax.runs.command_line import Parser
from eagle3_jax.serve import alike

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_ADAPT = "serve.adapt"
_ENDING = 5.0  # seconds for the engine to end after the stop

# Flag -> field. Flags have the names of SGLang and of vLLM, where these have one.
_FLAGS = {
    "--target": "target.name",
    "--model": "target.name",
    "--model-path": "target.name",
    "--dtype": "target.dtype",
    "--quantization": "target.weights",
    "--served-model-name": "serve.model_name",
    "--tp-size": "mesh.model",
    "--tensor-parallel-size": "mesh.model",
    "--dp-size": "mesh.data",
    "--data-parallel-size": "mesh.data",
    "--draft": "serve.draft",
    "--speculative-draft-model-path": "serve.draft",
    "--speculative-draft-model-quantization": "serve.draft_weights",
    "--generation-config": "serve.generation_config",
    "--host": "serve.host",
    "--port": "serve.port",
    "--mem-fraction": "serve.memory_fraction",
    "--mem-fraction-static": "serve.memory_fraction",
    "--gpu-memory-utilization": "serve.memory_fraction",
    "--max-running-requests": "serve.batch_size",
    "--max-num-seqs": "serve.batch_size",
    "--max-model-len": "serve.max_length",
    "--context-length": "serve.max_length",
    "--speculative-num-steps": "serve.tree.num_steps",
    "--speculative-eagle-topk": "serve.tree.topk",
    "--speculative-num-draft-tokens": "serve.tree.num_draft_tokens",
    "--speculative-token-map": "serve.token_map",
}
# Flags that `--help` explains, beside the fields.
_SHOWN = {
    "--target": "a model's name, hub id or folder",
    "--draft": "a head's folder or name, a smaller model, lookup, mtp, or none",
    "--quantization": "int8, fp8, int4 or stored",
    "--generation-config": "auto, vllm, or a folder",
    "--host": "address to listen on",
    "--port": "its port",
}
# SGLang's algorithm -> the draft where none is named; None keeps the configured one. The checkpoint of a named draft
# tells its kind: a head of EAGLE-2, EAGLE-3, DFlash, DFlash2 or DSpark, or a model.
_ALGORITHM = "--speculative-algorithm"
_STANDALONE = kinds.named("model").algorithm
_ALGORITHMS = {kind.algorithm: kind.name if in_target(kind.name) else None for kind in kinds.every()}
_ALGORITHMS |= {"EAGLE": _ALGORITHMS["NEXTN"], "NGRAM": LOOKUP}
# Sized by one flag, the block with its anchor.
_BLOCKS = tuple(dict.fromkeys(kind.algorithm for kind in kinds.every() if issubclass(kind.network, OnePassHead)))
_WITHOUT_CHECKPOINT = ("NEXTN", "NGRAM")
# Flags of other servers -> the option that replaces them here.
_ELSEWHERE = {
    "--api-key": "--serve.api-key-variable, the name of an environment variable, or --serve.api-key-file",
    "--log-level": "--serve.access-log",
    "--allowed-origins": "--serve.allowed-origins",
}


def configure(argv: Sequence[str] | None = None) -> RunConfig:
    """Reads the command line: a run's YAML or a target's name, SGLang's flags, dotted overrides.

    Exits with status 2 and a sentence when they are refused.
    """
    said = (
        "A server of OpenAI's API over the engine, such as --target smollm2-135m-instruct --port 8000. Other servers'"
    )
    said += f" names of the fields below work too: {', '.join(flag for flag in _FLAGS if flag not in _SHOWN)}."
    parser = Parser("serve", said, ("target", "mesh", "serve"))
    parser.add_argument("--config", help="YAML run file, see configs/; or name a --target")
    for flag, field in _FLAGS.items():
        text = f"{_SHOWN[flag]} ({field})" if flag in _SHOWN else argparse.SUPPRESS
        parser.add_argument(flag, dest=field, metavar="VALUE", help=text)
    parser.add_argument("--adapt", dest=_ADAPT, action="store_const", const={}, help="the head learns while it serves")
    parser.add_argument(_ALGORITHM, dest=_ALGORITHM, metavar="NAME", help=f"SGLang's: {', '.join(_ALGORITHMS)}")
    arguments, rest = parser.parse_known_args(argv)
    given = {field: value for field, value in vars(arguments).items() if value is not None}
    try:
        return _with_flags(given.pop("config", None), rest, given, parser.names)
    except ConfigError as error:
        print(f"eagle3_jax.serve: {error}", file=sys.stderr)
        sys.exit(2)


def _with_flags(path: str | None, overrides: Sequence[str], given: dict[str, Any], names: Collection[str]) -> RunConfig:
    """Reads the configuration and applies the flags. Raises ConfigError.

    Args:
        names: those of the flags, for hints.
    """
    if overrides and not overrides[0].startswith("-"):
        raise ConfigError(f"got {overrides[0]!r} without a flag, expected --target {overrides[0]}")
    for word in overrides:
        if there := _ELSEWHERE.get(word.partition("=")[0]):
            raise ConfigError(f"{word.partition('=')[0]}: no flag of this server, expected {there}")
    if path is not None:
        config = run_file.load(path, overrides, names)
    elif "target.name" not in given:
        raise ConfigError("--config, --target: got neither, expected one of them")
    else:
        alone = {"run_dir": ".", "serve": {"draft": AUTO}}
        config = run_file.with_overrides(alone, overrides, names)
    values = run_file.to_dict(config)
    adapt = given.pop(_ADAPT, None)
    if values["serve"]["adapt"] is None:
        values["serve"]["adapt"] = adapt
    algorithm = given.pop(_ALGORITHM, None)
    if algorithm is not None:
        values["serve"]["draft"] = _drafts_by(algorithm, given.pop("serve.draft", config.serve.draft))
    tree = {field: given.pop(field) for field in list(given) if field.startswith("serve.tree.")}
    if tree:
        steps, tokens = tree.get("serve.tree.num_steps", ""), tree.get("serve.tree.num_draft_tokens", "")
        if len(tree) == 1 and algorithm in _BLOCKS and tokens.isdigit():
            steps = str(int(tokens) - 1)
        if len(tree) == 1 and steps.isdigit():
            chain = {"num_steps": steps, "topk": "1", "num_draft_tokens": str(int(steps) + 1)}
            tree = {f"serve.tree.{name}": value for name, value in chain.items()}
        elif len(tree) < 3:
            raise ConfigError(
                f"--speculative-*: got {len(tree)} of num-steps, eagle-topk and num-draft-tokens, expected all three, "
                f"or num-steps alone for a chain, or num-draft-tokens alone for {' and '.join(_BLOCKS)}"
            )
        values["serve"]["trees"] = [{field.rpartition(".")[2]: value for field, value in tree.items()}]
    for field, value in given.items():
        section, name = field.split(".")
        values[section][name] = value
    return run_file.from_dict(values)


def _drafts_by(algorithm: str, draft: str | None) -> str | None:
    """Returns `serve.draft` under one of SGLang's algorithms. Raises ConfigError.

    Args:
        draft: the configured one.
    """
    if algorithm not in _ALGORITHMS:
        raise ConfigError(f"{_ALGORITHM}: got {algorithm}, expected one of {', '.join(_ALGORITHMS)}")
    own = _ALGORITHMS[algorithm]
    if draft in (None, AUTO):
        if algorithm == _STANDALONE:
            raise ConfigError(
                f"{_ALGORITHM} {algorithm}: got no --speculative-draft-model-path, expected a smaller model"
            )
        return own or draft
    takes_checkpoint = algorithm not in _WITHOUT_CHECKPOINT
    if draft != own and not (takes_checkpoint and draft not in (LOOKUP, "none") and not in_target(draft)):
        expected = "the folder or name of a checkpoint" if takes_checkpoint else f"none: it drafts with {own!r}"
        raise ConfigError(f"{_ALGORITHM} {algorithm}: got the draft {draft}, expected {expected}")
    return draft


def load(config: RunConfig, say: Callable[[str], Any] = lambda _: None) -> EnginePool:
    """Loads an engine for each row of the mesh and warms them up, in the background as soon as they can answer.

    Raises ValueError as `Engine.load` does.

    Args:
        say: receives one line for each stage.
    """
    start = time.monotonic()
    settings, trees = config.serve, config.serve.trees
    alike.check(config)
    if settings.warm_up_folder is None:
        folder = keep_programs(small=True)
    else:
        folder = None if settings.warm_up_folder == "none" else pathlib.Path(settings.warm_up_folder).expanduser()
        machine.keep_programs(folder)  # those that load and pack weights too
    replica = own_replica(make_mesh(config.mesh))
    if settings.adapt is not None and (len(replica.rows) > 1 or processes.count() > 1):
        got = f"{len(replica.rows)} replicas in {processes.count()} processes"
        raise ValueError(f"serve.adapt: got it for {got}, expected one in one, such as --dp-size 1")
    target = load_target(config.target, replica.mesh if replica.mesh.size > 1 else None, progress=say)
    draft = settings.draft
    if draft is None:
        draft, _ = chosen_draft(None, config.folder("export"), target)
    engines = [
        Engine.load(
            row,
            None if draft == "none" else draft,
            trees[0] if len(trees) == 1 else trees or "auto",
            settings.batch_size,
            settings.max_length,
            token_map=settings.token_map,
            memory_fraction=settings.memory_fraction,
            draft_weights=settings.draft_weights,
            adapt=settings.adapt,
        )
        for row in data_parallel.targets(target, replica)
    ]
    pool = EnginePool(engines, settings.queue_limit)
    say(f"loaded after {time.monotonic() - start:.0f} s")
    pool.warm_up(folder, progress=say, background=True)
    say(f"ready after {time.monotonic() - start:.0f} s")
    return pool


def api_keys(settings: ServeConfig) -> list[str]:
    """Reads the API keys that clients may present.

    Raises:
        ValueError: the variable or file has none, a key that no client can send, or the host is not the loopback and
            there is no key.
    """
    keys = []
    if (variable := settings.api_key_variable) is not None:
        found = _keys("serve.api_key_variable", os.environ.get(variable, "").encode(errors="surrogateescape"))
        if not found:
            raise ValueError(f"serve.api_key_variable: got no {variable} in the environment, expected an API key in it")
        keys += found
    if (file := settings.api_key_file) is not None:
        found = _keys("serve.api_key_file", pathlib.Path(file).read_bytes())
        if not found:
            raise ValueError(f"serve.api_key_file: got no key in {file}, expected one a line")
        keys += found
    if not keys and settings.host not in _LOOPBACK:
        raise ValueError(
            f"serve.host: got {settings.host} without keys, expected serve.api_key_variable or serve.api_key_file, or "
            f"{_LOOPBACK[0]}"
        )
    return keys


def _keys(field: str, text: bytes) -> list[str]:
    """Splits a text into keys, one a line, without an editor's byte order mark and empty lines.

    Raises ValueError, without showing a key: a header carries ASCII alone, so no client could send another key.
    """
    lines = [line.strip() for line in text.removeprefix(codecs.BOM_UTF8).splitlines()]
    for number, line in enumerate(lines, start=1):
        if not line.isascii() or not line.decode().isprintable():
            raise ValueError(f"{field}: got other characters in line {number}, expected printable ASCII alone")
    return [line.decode() for line in lines if line]


def bind(settings: ServeConfig) -> socket.socket:
    """Binds the server's socket before anything is loaded. Raises ValueError: in use, or not this machine's address."""
    try:
        family, _, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        place = socket.socket(family)
    except OSError as error:
        raise _not_there(settings, error) from error
    try:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(
            socket, "TCP_USER_TIMEOUT"
        ):  # the kernel drops clients that read nothing; connections inherit the option
            milliseconds = int(1000 * settings.client_timeout)
            place.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        place.bind(address)
    except OSError as error:
        place.close()
        raise _not_there(settings, error) from error
    return place


def _not_there(settings: ServeConfig, error: OSError) -> ValueError:
    return ValueError(f"serve.host, serve.port: got {settings.host}:{settings.port}: {command.sentence(error)}")


def run(config: RunConfig) -> None:
    """Serves until SIGTERM or Ctrl-C; of several processes the first one does."""
    settings = config.serve
    if processes.index() > 0:
        pool = load(config)
        follow(pool.engines, row_processes(make_mesh(config.mesh)))
        return
    keys = api_keys(settings)
    with bind(settings) as place:
        _serve(config, keys, place)


def _serve(config: RunConfig, keys: Sequence[str], place: socket.socket) -> None:
    # These need the extra `serve`, which `--help` does not.
    from eagle3_jax.serve.app import make_app
    from eagle3_jax.serve.opening import Opening, Server, address

    settings, url, pools = config.serve, address(place), []

    def say(stage: str) -> None:
        opening.stage = stage.partition(";")[0]
        print(f"eagle3_jax.serve: {stage}", file=sys.stderr, flush=True)

    def lose(error: Exception) -> None:
        opening.failure = error

    def make() -> Any:
        say(f"loading; {url}/health is 200 when it answers")
        with progress.told("starting"):
            pool = load(config, say)
        defaults = sampling_defaults(settings.generation_config, config.target.name)
        taken = ", ".join(f"{name} {value}" for name, value in defaults.items()) or "temperature 1"
        processes.say(f"eagle3_jax.serve: sampling, where a request leaves it open: {taken}; see --generation-config")
        if processes.count() > 1:
            rows = row_processes(make_mesh(config.mesh))
            engines = led.enter_context(lead(pool.engines, rows, lose))
            pool = EnginePool(engines, settings.queue_limit)
        pools.append(pool)
        return make_app(pool, settings.model_name or config.target.name, settings, keys, defaults)

    opening = Opening(make, lambda: print(f"{url}/v1 answers", flush=True))
    with contextlib.ExitStack() as led:  # ends the other processes
        Server(opening, settings).run(sockets=[place])
        if opening.failure is not None:
            raise opening.failure
        if opening.app is None:
            raise command.Stopped
        (pool,) = pools
        end = time.monotonic() + _ENDING
        while pool.running and time.monotonic() < end:
            time.sleep(0.05)
        if pool.running:  # its thread would keep the process alive for ever
            lost = "eagle3_jax.serve: the device does not answer; what it was asked is lost"
            print(lost, file=sys.stderr, flush=True)
            os._exit(1)
        if pool.compiling is not None:  # nobody waits for a compilation
            raise command.Stopped


def main(argv: Sequence[str] | None = None) -> None:
    config = configure(argv)
    command.require("serve")
    with command.run("serve", resumes=None, stopped=0):
        run(config)


if __name__ == "__main__":
    main()
