"""Published figures of chips."""

from __future__ import annotations

# `device_kind` -> 1e12 dense bfloat16 operations a second of one JAX device. Sources: Google's page of each TPU version
# (a TPU v7x chip is two devices), NVIDIA's data sheets.
TERAFLOPS = {
    "TPU v5 lite": 197,
    "TPU v5": 459,
    "TPU v6 lite": 918,
    "TPU7x": 1155,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H200": 989,
}

# `device_kind` -> 1e9 bytes a second around a ring of chips, both directions together. Source: "How to Scale Your
# Model" (Google DeepMind, 2025), part 2, which has no TPU v7x: its links are taken to be v5p's.
RING_GIGABYTES = {"TPU v5 lite": 90, "TPU v5": 180, "TPU v6 lite": 180, "TPU7x": 180}
