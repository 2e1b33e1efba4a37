"""The command line of a tool that takes a run's config."""

from __future__ import annotations

import argparse


def run_parser(documentation: str | None) -> argparse.ArgumentParser:
    """A parser with `--config`; what `parse_known_args` leaves over are overrides for `config.load`.

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
