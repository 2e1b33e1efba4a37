"""TPU topologies for compilation ahead of time by libtpu, on machines without a TPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
from typing import Any

from eagle3_jax.runs.machine import RING_GIGABYTES, TERAFLOPS

# libtpu's settings without a TPU and with several compiling processes, to be set before JAX is imported.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclasses.dataclass(frozen=True)
class Chip:
    """One JAX device: an assumed clock; published HBM bandwidth in GB/s, and operations in bfloat16; GB/s around a ring
    of chips, both directions together; and how many devices a chip has, which topologies and prices count."""

    topology: str
    gigahertz: float
    gigabytes: float
    teraflops: float
    link: float
    devices: int = 1

    def seconds(self, read: float = 0, operations: float = 0) -> float:
        """Returns the least time of one device: the larger of bytes over bandwidth and operations over the peak."""
        return max(read / (self.gigabytes * 1e9), operations / (self.teraflops * 1e12))


CHIPS = {
    "v5e": Chip("v5e:1x1", 1.5, 819, TERAFLOPS["TPU v5 lite"], RING_GIGABYTES["TPU v5 lite"]),
    "v5p": Chip("v5p:1x1x1", 1.75, 2460, TERAFLOPS["TPU v5"], RING_GIGABYTES["TPU v5"]),
    "v6e": Chip("v6e:1x1", 1.75, 1638, TERAFLOPS["TPU v6 lite"], RING_GIGABYTES["TPU v6 lite"]),
    # One of a chip's two cores.
    "tpu7x": Chip("tpu7x:1x1x1", 2.2, 3700, TERAFLOPS["TPU7x"], RING_GIGABYTES["TPU7x"], devices=2),
}
# Seconds a hop from chip to chip whatever the bytes, about: "How to Scale Your Model", part 3.
HOP = 1e-6


def topology_devices(name: str) -> list[Any]:
    """Returns the devices of a topology such as "v5e:2x2". Raises ValueError: no such topology, or no libtpu."""
    import jax
    from jax.experimental import topologies

    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("libtpu: got none, expected the TPUs' compiler, which needs no TPU: pip install libtpu")
    sizes = [int(size) for size in re.findall(r"\d+", name.partition(":")[2])]
    # libtpu 0.0.41 knows a slice smaller than a host of 2 x 2 chips only where that is declared as the host.
    host = {"chips_per_host_bounds": [*sizes, 1][:3]} if sizes and math.prod(sizes) < 4 else {}
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **host).devices
    except jax.errors.JaxRuntimeError as error:
        expected = "a TPU topology such as v5e:2x2, v6e:4x4, v5p:2x2x1, tpu7x:2x2x1"
        raise ValueError(f"--topology: got {name!r}, expected {expected} ({error})") from error
