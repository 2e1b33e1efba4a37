"""The environment variables of a verb's process; of a program that imports the package, XLA's log level alone."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator

from eagle3_jax.runs import machine


def begins_verb() -> bool:
    """Tells whether Python imports the package for `python -m eagle3_jax.VERB`; argv[0] is "-m" until then."""
    return sys.argv[:1] == ["-m"] and any("eagle3_jax" in word for word in sys.orig_argv)


def prepare() -> None:
    """Sets the variables that the user left open; call it before JAX is imported, which reads them."""
    silence_xla()
    os.environ.setdefault(*_NO_ADVICE)
    plugin = "PJRT_NAMES_AND_LIBRARY_PATHS" in os.environ or importlib.util.find_spec("jax_plugins")
    if not (machine.has_tpu() or plugin or importlib.metadata.entry_points(group="jax_plugins")):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # an installed libtpu takes time, and warns without a TPU


_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


def silence_xla() -> None:
    """Sets the level of XLA's log, unless it is set, or jaxlib, which reads it once, is imported.

    XLA logs two long errors for every program from a CPU's compilation cache, about "features" of machines.
    """
    if "jaxlib" in sys.modules:
        return
    if machine.has_tpu():  # warnings of libtpu, of its links and of the coordinator say why a host fails or hangs
        os.environ.setdefault(_LOG_LEVEL, "1")
        os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "1")
    os.environ.setdefault(_LOG_LEVEL, "3")


def xla_is_silent() -> bool:
    """Tells whether XLA logs no errors."""
    return os.environ.get(_LOG_LEVEL, "") >= "3"


# transformers warns at its import that there is no PyTorch, which no verb needs; Presidio imports it too.
_NO_ADVICE = ("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


@contextlib.contextmanager
def importing_transformers() -> Iterator[None]:
    """Silences transformers' warning while it is imported, in any program."""
    name, value = _NO_ADVICE
    given = name in os.environ
    os.environ.setdefault(name, value)
    try:
        yield
    finally:
        if not given:
            del os.environ[name]
