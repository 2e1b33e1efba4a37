"""Versions, chips and memory."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

from eagle3_jax.runs import machine, processes
from tpu.first_run.lines import OK, Line, right, skipped

# Shares of a chip's HBM: what the runtime gives to programs at least, and what may be in use before anything ran.
LEAST_LIMIT, MOST_USED = 0.85, 0.05


def device(*_: Any) -> Iterator[Line]:
    versions = machine.versions() | {"libtpu": "none"}
    versions |= {x.name: x.version for x in importlib.metadata.distributions(name="libtpu")}
    for name in ("python", "jax", "jaxlib", "libtpu", "eagle3_jax"):
        yield Line(name, versions[name], "-", OK)
    chips = jax.local_devices()
    platform = "tpu" if machine.has_tpu() else chips[0].platform
    yield right("platform", chips[0].platform, platform, versions=versions, device_kind=chips[0].device_kind)
    each = jax.device_count() // jax.process_count()
    yield right("chips of this host", len(chips), each, processes=processes.count(), devices=jax.device_count())
    for chip in chips:
        yield memory(chip)


def memory(chip: jax.Device) -> Line:
    """Makes the line of a device's memory, against the HBM that programs are planned for."""
    name, stats = f"{chip.device_kind} {chip.id}, at {getattr(chip, 'coords', None)}", chip.memory_stats()
    if not stats or chip.platform != "tpu":
        return skipped(name, "does not tell its memory")
    hbm, limit, used = pltpu.get_tpu_info().hbm_capacity_bytes, stats["bytes_limit"], stats["bytes_in_use"]
    ok = LEAST_LIMIT * hbm <= limit <= hbm and used <= MOST_USED * hbm
    got = f"{limit / 2**30:.2f} GiB, {used / 2**30:.2f} in use"
    expected = f"{LEAST_LIMIT * hbm / 2**30:.1f} to {hbm / 2**30:.1f} GiB, at most {MOST_USED:.0%} in use"
    return right(name, got, expected, ok=ok, limit=limit, in_use=used, hbm=hbm)
