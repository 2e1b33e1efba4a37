"""EAGLE-3 speculative decoding in JAX: train a draft head for an open LLM, decode with it, export it."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from typing import TYPE_CHECKING, Any

from eagle3_jax.runs import environment

if TYPE_CHECKING:
    from eagle3_jax.config import AdaptConfig as AdaptConfig
    from eagle3_jax.config import DraftTree as DraftTree
    from eagle3_jax.config import MeshConfig as MeshConfig
    from eagle3_jax.config import TargetConfig as TargetConfig
    from eagle3_jax.decoding.engine import Engine as Engine
    from eagle3_jax.decoding.params import SamplingParams as SamplingParams
    from eagle3_jax.decoding.request import Output as Output
    from eagle3_jax.decoding.request import Piece as Piece
    from eagle3_jax.decoding.request import QueueFullError as QueueFullError
    from eagle3_jax.decoding.request import Request as Request
    from eagle3_jax.decoding.structured.params import StructuredOutputsParams as StructuredOutputsParams
    from eagle3_jax.formats.heads import load_draft as load_draft
    from eagle3_jax.models.checkpoint.fetch import load_target as load_target

# Loaded on first use, so that a verb's `--help` does not wait for JAX.
_HOMES = {
    **dict.fromkeys(("AdaptConfig", "DraftTree", "MeshConfig", "TargetConfig"), "eagle3_jax.config"),
    **dict.fromkeys(("Output", "Piece", "QueueFullError", "Request"), "eagle3_jax.decoding.request"),
    "Engine": "eagle3_jax.decoding.engine",
    "SamplingParams": "eagle3_jax.decoding.params",
    "StructuredOutputsParams": "eagle3_jax.decoding.structured.params",
    "load_draft": "eagle3_jax.formats.heads",
    "load_target": "eagle3_jax.models.checkpoint.fetch",
}
__all__ = sorted(_HOMES)

# Versions of jaxlib that are silently wrong on CPUs with YNNPACK. 0.10.2 loses rows of reductions (jax#39103). Since
# then XLA joins products and reductions wrongly; no round or training step has such a call under 0.12.0.1. Those
# between are untested with it.
_WRONG_ON_CPU = frozenset({"0.10.2", "0.11.0", "0.11.1", "0.11.2", "0.12.0"})
_NO_YNNPACK = "--xla_cpu_experimental_ynn_fusion_type="


def _compiles_with_ynnpack() -> bool:
    """Tells it of a process whose backends have started, which is when XLA has read its flags."""
    options = sys.modules["jaxlib._jax"].CompileOptions()  # each owns what it returns, and so has a name
    build = options.executable_build_options
    return f"{_NO_YNNPACK[2:-1]}:" in str(build.debug_options)


def _switch_ynnpack_off(jaxlib: str) -> None:
    """Sets XLA's flag where this jaxlib is wrong on CPUs; raises ImportError where JAX computes on one without it."""
    if jaxlib not in _WRONG_ON_CPU:
        return
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is None or not bridge.backends_are_initialized():
        others = (flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_NO_YNNPACK))
        os.environ["XLA_FLAGS"] = " ".join([_NO_YNNPACK, *others])
    elif bridge.get_backend().platform == "cpu" and _compiles_with_ynnpack():
        raise ImportError(
            f"jaxlib: got {jaxlib}, whose results on CPUs are wrong or unproven (docs/how-it-is-exact.md), expected "
            "0.10.1, or 0.12.0.1 and later; or eagle3_jax imported before JAX starts its backend, which sets "
            f"XLA_FLAGS={_NO_YNNPACK}"
        )


_switch_ynnpack_off(importlib.metadata.version("jaxlib"))
if environment.begins_verb():  # a verb imports JAX before its first line runs
    environment.prepare()
environment.silence_xla()


def __dir__() -> list[str]:
    return ["__doc__", "__version__", *__all__]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("eagle3-jax")
    if name not in _HOMES:
        raise AttributeError(f"module 'eagle3_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
