"""The server's flags, those of SGLang and vLLM among them: a command line -> a run's configuration."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from typing import Any

from eagle3_jax.config import ConfigError, RunConfig, run_file
from eagle3_jax.config.kinds import in_target
from eagle3_jax.formats import kinds
from eagle3_jax.formats.packaged import AUTO, LOOKUP
from eagle3_jax.models.drafts.one_pass import OnePassHead
from eagle3_jax.runs.command_line import Parser

_ADAPT = "serve.adapt"

# Field -> its flags, which have the names of SGLang and of vLLM where these have one.
_FIELDS = {
    "target.name": "--target --model --model-path",
    "target.dtype": "--dtype",
    "target.weights": "--quantization",
    "mesh.model": "--tp-size --tensor-parallel-size",
    "mesh.data": "--dp-size --data-parallel-size",
    "serve.model_name": "--served-model-name",
    "serve.draft": "--draft --speculative-draft-model-path",
    "serve.draft_weights": "--speculative-draft-model-quantization",
    "serve.generation_config": "--generation-config",
    "serve.tool_call_parser": "--tool-call-parser",
    "serve.host": "--host",
    "serve.port": "--port",
    "serve.memory_fraction": "--mem-fraction --mem-fraction-static --gpu-memory-utilization",
    "serve.batch_size": "--max-running-requests --max-num-seqs",
    "serve.max_length": "--max-model-len --context-length",
    "serve.tree.num_steps": "--speculative-num-steps",
    "serve.tree.topk": "--speculative-eagle-topk",
    "serve.tree.num_draft_tokens": "--speculative-num-draft-tokens",
    "serve.token_map": "--speculative-token-map",
}
_FLAGS = {flag: field for field, flags in _FIELDS.items() for flag in flags.split()}
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
_ALGORITHMS = {kind.algorithm: kind.name if in_target(kind.name) else None for kind in kinds.every()}
_ALGORITHMS |= {"EAGLE": _ALGORITHMS["NEXTN"], "NGRAM": LOOKUP}
# Sized by one flag, the block with its anchor.
_BLOCKS = tuple(dict.fromkeys(kind.algorithm for kind in kinds.every() if issubclass(kind.network, OnePassHead)))
# Flags of other servers -> the option that replaces them here.
_ELSEWHERE = {
    "--api-key": "--serve.api-key-variable, the name of an environment variable, or --serve.api-key-file",
    "--log-level": "--serve.access-log",
    "--allowed-origins": "--serve.allowed-origins",
    "--enable-auto-tool-choice": "none: requests with tools may always call them",
}


def configure(argv: Sequence[str] | None = None) -> RunConfig:
    """Reads the command line: a run's YAML or a target's name, SGLang's flags, dotted overrides.

    Exits with status 2 and a sentence when they are refused.
    """
    about = "A server of OpenAI's API over the engine, such as --target smollm2-135m-instruct --port 8000. Other "
    about += f"servers' names of the fields below work too: {', '.join(flag for flag in _FLAGS if flag not in _SHOWN)}."
    parser = Parser("serve", about, ("target", "mesh", "serve"))
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
    """Reads the configuration and applies the flags, whose names hints may need. Raises ConfigError."""
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
        config = run_file.with_overrides({"run_dir": ".", "serve": {"draft": AUTO}}, overrides, names)
    values = run_file.to_dict(config)
    adapt = given.pop(_ADAPT, None)
    values["serve"]["adapt"] = values["serve"]["adapt"] or adapt
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
    """Returns `serve.draft`, configured as `draft`, under one of SGLang's algorithms. Raises ConfigError."""
    if algorithm not in _ALGORITHMS:
        raise ConfigError(f"{_ALGORITHM}: got {algorithm}, expected one of {', '.join(_ALGORITHMS)}")
    own = _ALGORITHMS[algorithm]
    if draft in (None, AUTO):
        if algorithm == kinds.named("model").algorithm:
            got = "got no --speculative-draft-model-path"
            raise ConfigError(f"{_ALGORITHM} {algorithm}: {got}, expected a smaller model")
        return own or draft
    takes_checkpoint = algorithm not in ("NEXTN", "NGRAM")
    if draft != own and not (takes_checkpoint and draft not in (LOOKUP, "none") and not in_target(draft)):
        expected = "the folder or name of a checkpoint" if takes_checkpoint else f"none: it drafts with {own!r}"
        raise ConfigError(f"{_ALGORITHM} {algorithm}: got the draft {draft}, expected {expected}")
    return draft
