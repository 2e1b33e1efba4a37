"""Which draft size is fastest here, and what a server gives its clients.

`python -m eagle3_jax.benchmark decode` times every draft size at every batch size within one engine, `tune` finds the
fastest with as few turns as it takes; `serve` times servers under traffic: latency and throughput against concurrency.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from eagle3_jax import command, processes
from eagle3_jax import config as configuration
from eagle3_jax.benchmarking import decode, serving, tune
from eagle3_jax.config import RunConfig

_PROMPTS = "JSONL file of prompts: messages, conversations or prompt; id and category are optional"


def main(argv: Sequence[str] | None = None) -> None:
    first, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    parser = argparse.ArgumentParser(prog="python -m eagle3_jax.benchmark", description=(__doc__ or "").strip())
    parser.add_argument("what", choices=["decode", "tune", "serve"])
    what = parser.parse_args([first]).what
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    if what == "decode":
        options.add_argument("--compare", choices=["transformers"])
        said = "Times every draft size at every batch size. --compare transformers measures that too."
    elif what == "tune":
        said = "Finds the fastest draft size at every batch size, and writes a config with it."
    else:
        options.add_argument("--compare", action="append", default=[], metavar="NAME=URL")
        said = "Times servers under traffic. --compare NAME=http://HOST:PORT/v1 measures one that runs already."
    compare = None
    if not {"-h", "--help"} & set(rest):
        asked, rest = options.parse_known_args(rest)
        compare = getattr(asked, "compare", None)
    config, arguments = configuration.from_command_line(f"benchmark {what}", said, rest, prompts=_PROMPTS)
    with command.run("benchmark"):
        if what == "decode":
            _decode(config, arguments.prompts, compare)
        elif what == "tune":
            _tune(config, arguments.prompts)
        else:
            _serve(config, arguments.prompts, compare or [])


def _decode(config: RunConfig, prompts: str, compare: str | None) -> None:
    report, folder = decode.run(config, prompts, compare), config.folder("benchmark")
    if processes.index() == 0:
        print(f"{decode.table(report)}\n\n{folder / 'decode.jsonl'}\n{folder / 'decode.png'}")


def _tune(config: RunConfig, prompts: str) -> None:
    report, folder = tune.run(config, prompts), config.folder("benchmark")
    if processes.index() == 0:
        print(f"{tune.table(report)}\n\n{folder / 'tune.jsonl'}\n{folder / 'tuned.yaml'}")


def _serve(config: RunConfig, prompts: str, compare: Sequence[str]) -> None:
    others = {}
    for pair in compare:
        name, _, url = pair.partition("=")
        if not name or not url.startswith(("http://", "https://")) or name in others:
            raise ValueError(f"--compare: got {pair}, expected NAME=http://HOST:PORT/v1, each name once")
        others[name] = url
    report, folder = serving.run(config, prompts, others), config.folder("benchmark")
    print(f"{serving.table(report)}\n{folder / 'serve.json'}\n{folder / 'serve.html'}")


if __name__ == "__main__":
    main()
