"""Addresses of objects: `gs://bucket/path`, and their paths."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any, Final

from eagle3_jax.runs.bucket import clients

# A path of either store: `etils.epath` has pathlib's methods, apart from `stat().st_size` (`size`) and `rglob`.
if TYPE_CHECKING:
    Path = pathlib.Path
else:
    Path = pathlib.PurePath

_SCHEME: Final = "gs://"


def is_address(path: Any) -> bool:
    """Tells whether a path or text is the address of a bucket."""
    return str(path).startswith(_SCHEME)


def path_of(address: Any) -> Path:
    """Makes a path from an address."""
    clients.configure()
    from etils import epath

    found: Any = epath.Path(str(address))
    return found


def split(address: Any) -> tuple[str, str]:
    """Splits an address into bucket and object name."""
    bucket, _, name = str(address).removeprefix(_SCHEME).partition("/")
    return bucket, name
