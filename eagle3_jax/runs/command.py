"""The frame of every verb's command line: one sentence for an error, an orderly stop on SIGTERM and Ctrl-C.

A verb asks `stop_asked`, or passes a `stop_point`, wherever its work so far is on disk. Before the first stop point it
has only loaded and compiled, so a signal ends it at once. A second signal ends it anywhere.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
import traceback
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NoReturn

from eagle3_jax.runs import processes, watchdog

STOPPED = 75  # EX_TEMPFAIL: the exit status of work that SIGTERM left unfinished; Ctrl-C ends by SIGINT itself

_asked: signal.Signals | None = None  # the signal that came
_came_to_stop_points = False


class Stopped(Exception):
    """SIGTERM or Ctrl-C came, and the work so far is on disk."""


@contextlib.contextmanager
def run(verb: str, *, resumes: bool | None = True, stopped: int = STOPPED) -> Iterator[None]:
    """Runs the body of a verb's `main`, joined with the run's other processes; an end of one ends all.

    A user's error (ValueError) or a machine's (OSError) ends it with one sentence and status 1. A stop ends it with
    status `stopped`, after Ctrl-C by SIGINT unless that is 0, so that a shell ends the loop around it. `resumes`: run
    again, the verb goes on where it was, or begins anew; None: it has no work of its own (a server).
    """
    global _asked, _came_to_stop_points
    _asked, _came_to_stop_points = None, False
    prefix = f"eagle3_jax.{verb}: "

    def stop_message() -> str:
        again = "" if resumes is None else f"; run it again, and it {'goes on from here' if resumes else 'begins anew'}"
        return f"{prefix}stopped by {'Ctrl-C' if _asked == signal.SIGINT else 'SIGTERM'}{again}"

    def note(number: int, _: Any) -> None:
        global _asked
        before, _asked = _asked, signal.Signals(number)
        if before is not None or not _came_to_stop_points:
            watchdog.end_all(stop_message(), stopped)
            _end(stop_message(), _asked, stopped)
        if _asked == signal.SIGINT and resumes is not None:
            write(f"{prefix}stops as soon as what it did is on disk; Ctrl-C again ends it at once")

    at_ctrl_c = signal.getsignal(signal.SIGINT)
    try:
        processes.start_distributed()
        watchdog.begin(prefix)
        signal.signal(signal.SIGTERM, note)  # never restored: a SIGTERM after the work finds nothing to stop
        signal.signal(signal.SIGINT, note)
        yield
        processes.barrier()
        watchdog.end()
        processes.leave()
        _came_to_stop_points = True  # no work is left to stop
    except Stopped:
        watchdog.end_all(stop_message(), stopped)
        if _asked is not None:
            _end(stop_message(), _asked, stopped)
        print(stop_message(), file=sys.stderr)  # another process of the run was asked
        sys.exit(stopped)
    except (ValueError, OSError) as error:
        message = f"{prefix}{sentence(error)}"
        watchdog.end_all(message, 1, error)
        sys.exit(message)
    except Exception as error:
        watchdog.end_all("".join(traceback.format_exception(error)), 1, error)
        raise
    finally:
        signal.signal(signal.SIGINT, at_ctrl_c)


def _end(message: str, asked: signal.Signals, status: int) -> NoReturn:
    """Ends the process without Python's finalisation and C's static destructors: both crash threads that compile.

    Of 20 processes with one compiling thread each, `sys.exit` ended 20 by SIGABRT, C's `exit` alone 2 by SIGSEGV,
    `os._exit` none.
    """
    with contextlib.suppress(OSError, RuntimeError):  # a closed pipe, or a signal in the middle of a flush
        sys.stdout.flush()
        sys.stderr.flush()
    write(message)
    if asked == signal.SIGINT and status:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


def write(line: str) -> None:
    """Writes to stderr past its buffer, which a signal may have interrupted."""
    behind = "\n" * os.isatty(2)  # "^C", or a bar
    with contextlib.suppress(OSError):
        os.write(2, f"{behind}{line}\n".encode())


# One module of each package in an extra of pyproject.toml.
EXTRAS = {
    "prepare": ("datasketch", "presidio_analyzer", "tensorflow_datasets", "tldextract"),
    "beam": ("apache_beam",),
    "train": ("array_record", "grain", "optax", "orbax", "tensorboardX"),
    "report": ("httpx2", "matplotlib"),
    "serve": ("prometheus_client", "starlette", "uvicorn"),
}


def require(*extras: str, unused: Collection[str] = ()) -> None:
    """Checks that the extras are installed, apart from modules in `unused`; raises ImportError.

    A verb ends with one sentence instead; its `--help`, which needs no extra, is printed all the same.
    """
    missing = {
        extra: [name for name in EXTRAS[extra] if name not in unused and importlib.util.find_spec(name) is None]
        for extra in extras
    }
    if not (modules := ", ".join(name for names in missing.values() for name in names)):
        return
    extra = ",".join(extra for extra, names in missing.items() if names)
    message = f"got no {modules}, expected the extra `{extra}`: pip install 'eagle3-jax[{extra}]'"
    started = getattr(sys.modules["__main__"], "__spec__", None)  # set by `python -m`
    name = "" if started is None else started.name.removesuffix(".__main__")
    if name.startswith("eagle3_jax."):
        from eagle3_jax.runs import command_line

        if (text := command_line.help_of(name.partition(".")[2], sys.argv[1:])) is not None:
            print(text, end="")
            sys.exit()
        sys.exit(f"{name}: {message}")
    raise ImportError(f"eagle3_jax: {message}")


def stop_asked() -> bool:
    """Returns True once SIGTERM or Ctrl-C came."""
    global _came_to_stop_points
    _came_to_stop_points = True
    return _asked is not None


def stop_point() -> None:
    """Ends the verb here when SIGTERM or Ctrl-C came. Raises Stopped."""
    if stop_asked():
        raise Stopped


def sentence(error: Exception) -> str:
    """Formats an error for a user: "runs/a/shard: No space left on device", without its number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligns rows as text: the first column to the left, numbers to the right, a line under the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    texts = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return [texts[0], "-" * len(texts[0]), *texts[1:]]
