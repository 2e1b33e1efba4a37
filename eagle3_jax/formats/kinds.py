"""The registry of the kinds of drafts (`config.kinds.KINDS`), and the kind of a name, a folder, or a head in memory."""

from __future__ import annotations

import pathlib
import pkgutil

from eagle3_jax.config.kinds import KINDS
from eagle3_jax.formats import files
from eagle3_jax.formats.kind import DraftKind
from eagle3_jax.models.drafts.head import Head
from eagle3_jax.runs import disk


def named(name: str) -> DraftKind:
    """Returns the record of a kind."""
    return pkgutil.resolve_name(KINDS[name].record)


def every() -> list[DraftKind]:
    """Lists the records of all kinds."""
    return [named(name) for name in KINDS]


def of_folder(folder: pathlib.Path) -> DraftKind:
    """Tells what kind of draft a folder holds. Raises DraftFormatError: its config.json cannot be read."""
    values = files.read_config(folder) if (folder / files.CONFIG).exists() else {}
    return next(kind for kind in reversed(every()) if kind.is_mine(folder, values))


def of_head(head: Head) -> DraftKind:
    """Tells the kind of a head in memory."""
    kinds = {kind.network: kind for kind in every()}
    return next(kinds[network] for network in type(head).__mro__ if network in kinds)


def token_map_digest(token_map: str) -> str:
    """Returns the sha256 of a token map, in hex. Raises ValueError: there is none."""
    return disk.digest(next(kind.token_map for kind in every() if kind.token_map)(token_map))
