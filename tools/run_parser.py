"""The argument parser of tools that take a run's config."""

from __future__ import annotations

import argparse


def run_parser(documentation: str | None) -> argparse.ArgumentParser:
    """Makes a parser with `--config`; arguments that `parse_known_args` does not know are overrides for `config.load`.

    Args:
        documentation: the tool's docstring, whose first line `--help` shows.
    """
    parser = argparse.ArgumentParser(
        description=(documentation or "").splitlines()[0],
        epilog="Every field of the config can be overridden: --section.field VALUE",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, help="YAML run file, see configs/")
    return parser
