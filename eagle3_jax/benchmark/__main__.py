"""`python -m eagle3_jax.benchmark WHAT`: speed on this machine, by `decode`, `tune` and `serve`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from eagle3_jax.benchmark import decode, tune
from eagle3_jax.runs import command, command_line, processes


def main(argv: Sequence[str] | None = None) -> None:
    first, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    what = command_line.benchmark_parser().parse_args([first]).what
    config, asked = command_line.read(f"benchmark {what}", rest)
    command.require("report", *["serve"] * (what == "serve"))
    with command.run("benchmark", resumes=what != "tune"):
        if what == "decode":
            table = decode.table(decode.run(config, asked.prompts, asked.compare))
            files = ["decode.jsonl", "decode.png"]
        elif what == "tune":
            table, files = tune.table(tune.run(config, asked.prompts)), ["tune.json", "tuned.yaml"]
        else:
            from eagle3_jax.benchmark import servers  # needs the extra `report`, which `--help` does not

            others = _named("--compare", asked.compare, "http://HOST:PORT/v1", ("http://", "https://"))
            report = servers.run(config, asked.prompts, others, _keys(asked.compare_key, others))
            table, files = servers.table(report), ("serve.json",)
        if processes.index() == 0:
            print(table, "", *(config.folder("benchmark") / name for name in files), sep="\n")


def _named(flag: str, pairs: Sequence[str], expected: str, beginnings: tuple[str, ...] = ("",)) -> dict[str, str]:
    """Parses the NAME=VALUE pairs of a flag. Raises ValueError."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        if not name or not value or not value.startswith(beginnings) or name in found:
            raise ValueError(f"{flag}: got {pair}, expected NAME={expected}, each name once")
        found[name] = value
    return found


def _keys(pairs: Sequence[str], others: dict[str, str]) -> dict[str, str]:
    """Reads API keys from the environment, since every user of a machine sees its command lines. Raises ValueError."""
    variables = _named("--compare-key", pairs, "VARIABLE")
    for name, variable in variables.items():
        if name not in others:
            raise ValueError(f"--compare-key: got the name {name}, expected one of --compare")
        if not os.environ.get(variable):
            raise ValueError(f"--compare-key: got no {variable} in the environment, expected an API key in it")
    return {name: os.environ[variable] for name, variable in variables.items()}


if __name__ == "__main__":
    main()
