"""What one call of a runner costs as a message to another process: python tools/host_messages.py

Process 0 encodes a call and sends it over TCP on this machine; another process reads and decodes it, by one clock.
A network adds its own latency, some 0.1 ms between hosts of a slice.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import statistics
import time
import types
from typing import Any

from eagle3_jax.decoding import hosts
from eagle3_jax.decoding.choice.tiers import CHAIN, WITH_HEAD
from eagle3_jax.decoding.device.chunk import Chunk
from eagle3_jax.decoding.device.shapes import Sizes

TURNS = 300
SIZES = Sizes.plan(32, 2048, 128, WITH_HEAD)
CALLS: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    "rounds of 32 requests": ("decode", [[3], list(range(32)), 4, 32], {"width": 32, "tier": CHAIN, "greedy": True}),
    "16 x 16 tokens of prompts": ("prefill", [Chunk.of((), 16, 16, SIZES)], {}),
    "1 x 1024 tokens of a prompt": ("prefill", [Chunk.of((), 1, 1024, SIZES)], {}),
}


def answer(port: int) -> None:
    """Reads calls, and says when each was ready."""
    line = hosts._Line(socket.create_connection(("127.0.0.1", port)))
    runner: Any = types.SimpleNamespace(sizes=SIZES, tiers=WITH_HEAD)
    while (said := line.read()) != "end":
        for part in ("args", "options"):
            hosts._typed(said[part], runner)
        line.send(time.monotonic_ns())


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as place:
        child = multiprocessing.get_context("spawn").Process(target=answer, args=(place.getsockname()[1],))
        child.start()
        line = hosts._Line(place.accept()[0])
    for name, (call, args, options) in CALLS.items():
        message = {"row": 0, "number": 1, "call": call, "args": args, "options": options}
        sent, there = [], []
        for _ in range(TURNS):
            start = time.monotonic_ns()
            line.send(message)
            sent.append(time.monotonic_ns() - start)
            there.append(line.read() - start)
        bytes_sent = len(json.dumps(message, default=hosts._plain))
        own, best, median = (value / 1e6 for value in (min(sent), min(there), statistics.median(there)))
        print(f"{name}: {bytes_sent} bytes; ms: sent {own:.3f}, there at best {best:.3f}, at the median {median:.3f}")
    line.send("end")
    child.join()


if __name__ == "__main__":
    main()
