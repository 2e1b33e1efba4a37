"""The frame of every verb's command line: an error is one sentence, SIGTERM an orderly stop.

A TPU VM that is preempted, a scheduler and `docker stop` send SIGTERM and kill half a minute later. A verb asks
`stop_asked`, or passes a `stop_point`, wherever what it has done so far is on disk.
"""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from eagle3_jax import processes

STOPPED = 75  # EX_TEMPFAIL: the exit status of work that SIGTERM left unfinished

_asked = False


class Stopped(Exception):
    """SIGTERM came, and what was done so far is on disk."""


@contextlib.contextmanager
def run(verb: str, *, resumes: bool = True, stopped: int = STOPPED) -> Iterator[None]:
    """The body of a verb's `main`. Joins the other processes of the run, where there are any; what ends one ends all.

    Exits with status 1 and one sentence for what a user can cause (ValueError) and what a machine can (OSError: disk
    full, no permission), with status `stopped` after a stop by SIGTERM. A second SIGTERM ends the process at once.

    Args:
        resumes: whether a verb that is run again after a stop goes on; else it begins anew.
    """
    global _asked
    _asked = False

    def note(*_: Any) -> None:
        global _asked
        _asked = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    prefix = f"eagle3_jax.{verb}: "
    try:
        processes.start_distributed()
        processes.watch(prefix)
        signal.signal(signal.SIGTERM, note)  # for good: a SIGTERM behind the end of the work finds nothing to stop
        yield
        processes.leave()
    except Stopped:
        said = f"{prefix}stopped by SIGTERM; run it again, and it {'goes on from here' if resumes else 'begins anew'}"
        processes.end_all(said, stopped)
        print(said, file=sys.stderr)
        sys.exit(stopped)
    except (ValueError, OSError) as error:
        said = f"{prefix}{sentence(error)}"
        processes.end_all(said, 1, error)
        sys.exit(said)
    except Exception as error:
        processes.end_all("".join(traceback.format_exception(error)), 1, error)
        raise


# One module of each package in an extra.
EXTRAS = {
    "train": (
        "array_record",
        "datasketch",
        "grain",
        "matplotlib",
        "optax",
        "orbax",
        "presidio_analyzer",
        "tensorboardX",
        "tensorflow_datasets",
        "tldextract",
    ),
    "serve": ("prometheus_client", "starlette", "uvicorn"),
}


def require(extra: str) -> None:
    """Ends a verb in one sentence, or raises ImportError in another program, where an extra is missing."""
    missing = [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]
    if not missing:
        return
    message = f"got no {', '.join(missing)}, expected the extra `{extra}`: pip install 'eagle3-jax[{extra}]'"
    started = getattr(sys.modules["__main__"], "__spec__", None)  # set by `python -m`
    if started is not None and started.name.startswith("eagle3_jax."):
        sys.exit(f"{started.name}: {message}")
    raise ImportError(f"eagle3_jax: {message}")


def stop_asked() -> bool:
    """Whether SIGTERM came."""
    return _asked


def stop_point() -> None:
    """Ends the verb here when SIGTERM came. Raises Stopped."""
    if _asked:
        raise Stopped


def sentence(error: Exception) -> str:
    """What an error says to a user: "runs/a/shard: No space left on device" without its number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as text: the first column to the left, numbers to the right, a line under the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    texts = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return [texts[0], "-" * len(texts[0]), *texts[1:]]
