"""The command line of each verb: its own flags, its sections of the config, and its `--help`, which needs no extra."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from eagle3_jax.config import ConfigError, RunConfig, flags, run_file
from eagle3_jax.runs import disk

_PROMPTS = (
    "JSONL file of prompts: messages, conversations or prompt; id and category are optional. Or .txt, a line each"
)


class Parser(argparse.ArgumentParser):
    """The parser of a verb ("benchmark decode"), whose help lists the `sections` of the config that it reads."""

    def __init__(self, verb: str, says: str, sections: Sequence[str]) -> None:
        super().__init__(prog=f"python -m eagle3_jax.{verb}", description=says, allow_abbrev=False)
        self.verb, self.sections = verb, sections

    @property
    def names(self) -> list[str]:
        """The verb's own flags."""
        return list(self._option_string_actions)

    def format_help(self) -> str:
        about = "The run's YAML holds these fields, or they are given here; the defaults hold where neither names one. "
        about += "Fields of other sections are taken too. Lists of sources and of trees stand in the YAML alone."
        fields = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS, description=about)
        flags.add_to_help(fields, self.sections)
        return f"{super().format_help()}\n{fields.format_help()}"


def _export(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("run the exported head, instead of exporting")
    engines = ("numbers", "vllm", "llama.cpp", "sglang")
    engine.add_argument("--check", choices=engines, help="`numbers` predicts what engines count")
    engine.add_argument("--prompts", metavar="FILE", help=_PROMPTS)
    for flag, name in (("vllm", "vLLM"), ("llama-cpp", "llama.cpp")):
        text = f"of {name}'s environment; .venv-{flag}/bin/python without it"
        engine.add_argument(f"--{flag}", metavar="PYTHON", help=text)
    engine.add_argument("--sglang", metavar="URL", help="a running server")
    engine.add_argument("--expect", metavar="REPORT", help="an earlier check, whose counters must be the same")
    target = parser.add_argument_group("write the target, instead of exporting")
    target.add_argument("--write-target", metavar="DIR", help="a new folder, in Hugging Face's form")
    hub = parser.add_argument_group("publish the exported head with a model card")
    hub.add_argument("--push-to-hub", metavar="USER/NAME", help="repository of the hub")
    hub.add_argument("--upload", action="store_true", help="do it; without, only print what would be done")
    convert = parser.add_argument_group("bring a head of any form into another; without --config")
    convert.add_argument("--from", metavar="DIR", help="folder of the head")
    convert.add_argument("--to", nargs=2, metavar=("FORM", "DIR"), help="form and new folder")


def _evaluate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", required=True, metavar="FILE", help="JSON file for the report")
    parser.add_argument("--replace", action="store_true", help="what another measurement has at --output gives way")


def _serve(parser: argparse.ArgumentParser) -> None:
    several = functools.partial(parser.add_argument, action="append", default=[])
    several("--compare", metavar="NAME=URL", help="a running OpenAI server (http://HOST:PORT/v1), measured as well")
    several("--compare-key", metavar="NAME=VARIABLE", help="the environment variable that holds its API key")


@dataclasses.dataclass(frozen=True)
class _Verb:
    """A verb's command line, see `Parser`; `alone`: it measures on `--prompts`, also a `--target` without a run."""

    says: str
    sections: tuple[str, ...]
    add_flags: Callable[[argparse.ArgumentParser], object] = lambda _: None
    alone: bool = False


_MODELS = ("target", "mesh")
# A configuration without a run.
_ALONE: dict[str, Any] = {"run_dir": ".", **{key: {"draft": "auto"} for key in ("evaluate", "benchmark", "serve")}}
VERBS = {
    "prepare": _Verb("Reads, cleans and splits the prompts.", (*_MODELS, "prepare")),
    "regenerate": _Verb("Lets the target answer the prompts itself.", (*_MODELS, "regenerate")),
    "extract": _Verb(
        "Conversations -> features of the target, and the draft vocabulary.", (*_MODELS, "draft", "extract")
    ),
    "train": _Verb("Features -> a trained draft head.", (*_MODELS, "draft", "train")),
    "export": _Verb(
        "The best or newest checkpoint -> a draft head that SGLang and vLLM serve, read back and compared.",
        ("target", "draft", "export", "evaluate", "card"),
        _export,
    ),
    "evaluate": _Verb(
        "Acceptance, losslessness, and speed against vanilla decoding of the same engine.",
        (*_MODELS, "evaluate"),
        _evaluate,
        alone=True,
    ),
    "report": _Verb(
        "All that a run measured: report.json, a table, and a picture.",
        (),
        lambda parser: parser.add_argument("--data", action="store_true", help="prints tables of what it learns from"),
    ),
    "benchmark decode": _Verb(
        "Times every draft size at every batch size.",
        (*_MODELS, "benchmark"),
        lambda parser: parser.add_argument("--compare", choices=["transformers"], help="is measured as well"),
        alone=True,
    ),
    "benchmark tune": _Verb(
        "Finds the fastest draft size at every batch size, and writes a config with it.",
        (*_MODELS, "benchmark"),
        alone=True,
    ),
    "benchmark serve": _Verb("Times servers under traffic.", (*_MODELS, "serve", "traffic"), _serve, alone=True),
}


def parser_of(verb: str) -> Parser:
    """Builds the verb's parser; the arguments it does not know are overrides of the config."""
    known = VERBS[verb]
    parser = Parser(verb, known.says, known.sections)
    text = "YAML run file, see configs/" + "; or name a --target, for this package's head" * known.alone
    parser.add_argument("--config", required=not known.alone, metavar="FILE", help=text)
    if known.alone:
        parser.add_argument("--target", metavar="NAME", help="target.name")
        parser.add_argument("--prompts", required=True, metavar="FILE", help=_PROMPTS)
    known.add_flags(parser)
    return parser


def read(verb: str, argv: Sequence[str] | None = None) -> tuple[RunConfig, argparse.Namespace]:
    """Parses `python -m eagle3_jax.<verb> --config FILE [--flag VALUE ...] [--section.field VALUE ...]`.

    Without a run its folder is the working directory, and drafts are those of the packaged head. Exits with status 2
    and a sentence when the configuration is refused, or a bucket that it names.
    """
    parser = parser_of(verb)
    arguments, rest = parser.parse_known_args(argv)
    try:
        if getattr(arguments, "target", None) is not None:
            rest += ["--target.name", arguments.target]
        if arguments.config is not None:
            config = run_file.load(arguments.config, rest, parser.names)
            disk.check_address("run_dir", config.run_dir)
        elif any(word.partition("=")[0] == "--target.name" for word in rest):
            config = run_file.with_overrides(_ALONE, rest, parser.names)
        else:
            raise ConfigError("--config, --target: got neither, expected one of them")
        disk.check_address("target.name", config.target.name, writable=False)
        return config, arguments
    except (ConfigError, disk.AddressError) as error:
        print(f"eagle3_jax.{verb}: {error}", file=sys.stderr)
        sys.exit(2)


def help_of(module: str, argv: Sequence[str]) -> str | None:
    """Returns the help that `python -m eagle3_jax.<module> <argv>` asks for; None where it asks for none."""
    if not {"-h", "--help"} & set(argv):
        return None
    verb = f"{module} {argv[0]}" if module == "benchmark" else module
    return parser_of(verb).format_help() if verb in VERBS else benchmark_parser().format_help()


def benchmark_parser() -> argparse.ArgumentParser:
    """Builds the parser of the word behind `benchmark`."""
    verbs = {name.partition(" ")[2]: verb.says for name, verb in VERBS.items() if name.startswith("benchmark ")}
    parser = argparse.ArgumentParser(
        prog="python -m eagle3_jax.benchmark",
        description="Which draft size is fastest here, and what a server gives its clients.",
        epilog="\n".join(f"{f'{what} --help':16}{says}" for what, says in verbs.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=verbs)
    return parser
