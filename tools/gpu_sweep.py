"""Measures on a GPU, within a budget, what XLA's flags and a product of its own gain an 8B target's rounds.

    python tools/gpu_sweep.py [--seconds 600]

Rounds are greedy ones of a single request, vanilla and with a tree of 48, of random weights: without flags with all
layers, then by flag with few layers, last with all layers and the flags of the shortest vanilla round. Products of few
rows are XLA's and `gpu/stream_product.py`. A case that fails, or that no time is left for, is a row with its reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

BANDWIDTH = {"NVIDIA H100 80GB HBM3": 3350, "NVIDIA H200": 4800}  # GB/s by `device_kind`; published figures
_ANY, _LOOPS = "--xla_gpu_triton_gemm_any=true", "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL"
# Most promising first: the last ones may be left out.
FLAGS = (
    _ANY,
    _LOOPS,
    f"{_ANY} {_LOOPS}",
    "--xla_gpu_enable_triton_gemm=false",
    f"{_LOOPS} --xla_gpu_graph_min_graph_size=1",
    f"{_LOOPS} --xla_gpu_command_buffer_unroll_loops=true",
    f"{_ANY} --xla_gpu_exhaustive_tiling_search=true",
    "--xla_gpu_enable_command_buffer=",
)
LAYERS, FEW = 32, 8  # of the target: all, and while flags are tried
SHAPES, SMALL = ((4096, 6144), (4096, 14336), (14336, 4096)), ((256, 128),)  # of matrices
# Of `stream_product`, beside its defaults.
TILINGS = {}, {"stages": 6}, {"columns": 128}, {"columns": 32, "depth": 256}, {"depth": 64, "stages": 8}
ROWS, MATRICES = (16, 4, 1), 4  # as many matrices of a shape as no cache holds
TOLERANCE = 2e-2  # of products


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600, help="for all of it: 600")
    parser.add_argument("--small", action="store_true", help="toy sizes, on CPUs too, where the product is interpreted")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    layers, small = arguments.child, arguments.small
    if layers is None:
        sweep(arguments.seconds, ["--small"] * small)
        return
    for found in rounds(layers, small) if layers else products(small):
        print(json.dumps(found), flush=True)


def sweep(seconds: float, options: list[str]) -> None:
    """Runs the cases in turn and prints their rows."""
    end, took = time.monotonic() + seconds, {LAYERS: 0.0, FEW: 0.0, 0: 0.0}  # seconds of the longest case of its kind

    def run(layers: int, flags: str = "", kept: float = 0) -> float:
        """Runs a case, of products without layers; returns its first row's milliseconds. `kept` seconds stay."""
        name = f"{flags or 'no flags'}, {layers} layers" if layers else "products"
        left, begin, words = end - time.monotonic() - kept, time.monotonic(), ""
        if left <= took[layers]:
            show(name, "left out", reason=f"{max(left, 0):.0f} s left, {took[layers]:.0f} needed")
            return math.inf
        command = [sys.executable, __file__, *options, "--child", str(layers)]
        environment = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}"}
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as log:
            try:
                status = subprocess.run(command, env=environment, stdout=out, stderr=log, timeout=left).returncode
            except subprocess.TimeoutExpired:
                status, words = 1, f"no end within {left:.0f} s"
            out.seek(0), log.seek(0)
            rows = [json.loads(line) for line in out if line.startswith("{")]
            words = words or last_words(log.read())
        took[layers] = max(took[layers], time.monotonic() - begin)
        for found in rows:
            show(name, **found)
        if status or not rows:
            show(name, "failed", reason=words)
            return math.inf
        return rows[0]["ms"]

    print("| case | what | ms | of the bandwidth | against vanilla or XLA | |\n|---|---|---|---|---|---|")
    run(LAYERS)
    kept = took[LAYERS]
    found = {"": run(FEW, kept=kept)}
    run(0, kept=kept)
    found |= {flags: run(FEW, flags, kept) for flags in FLAGS}
    run(LAYERS, min(found, key=found.__getitem__))


def show(name: str, what: str, ms: Any = None, share: Any = None, against: Any = None, reason: str = "") -> None:
    numbers = [form.format(x) if x else "" for form, x in (("{:.3f}", ms), ("{:.0%}", share), ("{:.2f}", against))]
    print(f"| {' | '.join([name, what, *numbers, reason.replace('|', '/')])} |", flush=True)


def last_words(log: str) -> str:
    """Returns the last line of a failed process' log that names an error, else the last one."""
    lines = [line.strip() for line in reversed(log.splitlines()) if line.strip()] or ["no word"]
    return next((line for line in lines if re.match(r"F\d{4} |[\w.]*(Error|Exception)\b", line)), lines[0])[:200]


def row(what: str, seconds: float, read: float, least: float) -> dict[str, Any]:
    """Makes a row: milliseconds, the share of the card's bandwidth, and the ratio to `least` seconds."""
    import jax

    bandwidth = BANDWIDTH.get(jax.devices()[0].device_kind)
    share = bandwidth and read / seconds / bandwidth / 1e9
    return {"what": what, "ms": 1e3 * seconds, "share": share, "against": seconds / least}


def rounds(layers: int, small: bool) -> Iterator[dict[str, Any]]:
    import jax
    from tpu.first_run import sizes

    from eagle3_jax.config import MeshConfig
    from eagle3_jax.mesh import make_mesh

    run = sizes.sized(make_mesh(MeshConfig(data=1, model=1), jax.devices()[:1]), small=small)
    shape, vanilla = run.shape, 0.0
    if layers < shape.num_hidden_layers:
        shape = dataclasses.replace(shape, num_hidden_layers=layers, aux_layers=(0, 1, 2))
    for line in sizes.rounds_of(dataclasses.replace(run, shape=shape), sizes.TREES[-1:]):
        seconds = line.numbers["seconds"]
        vanilla = vanilla or seconds
        yield row(line.name.rpartition(": ")[2], seconds, line.numbers["bytes_read"], vanilla)


def products(small: bool) -> Iterator[dict[str, Any]]:
    """Multiplies 16 rows by XLA and by every tiling of `stream_product`, fewer rows by XLA and its fastest tiling."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from gpu.stream_product import stream_product

    from eagle3_jax.kernels.linear.api import linear, quantise
    from eagle3_jax.kernels.linear.few_rows import multiply
    from eagle3_jax.runs import timing

    interpret = jax.devices()[0].platform == "cpu"
    streams = {f"streamed {x or ''}": functools.partial(stream_product, **x, interpret=interpret) for x in TILINGS}
    for (k, n), kind in itertools.product(SMALL if small else SHAPES, ("bfloat16", "int8")):
        keys = jax.random.split(jax.random.key(0), MATRICES)
        matrices: list[Any] = [0.02 * jax.random.normal(key, (k, n), jnp.bfloat16) for key in keys]
        matrices = [quantise(matrix, "int8") for matrix in matrices] if kind == "int8" else matrices
        read, ways = sum(leaf.nbytes for leaf in jax.tree.leaves(matrices[0])), {"XLA": linear} | streams
        for rows in ROWS:
            x, works = jax.random.normal(keys[0], (rows, k), jnp.bfloat16), {}
            what = f"{k} x {n}, {kind}, {rows} rows, "
            for name, way in ways.items():
                call = functools.partial(multiply, matrices, x[0], rows=rows, product=way)
                try:
                    got, expected = (np.asarray(f(x, matrices[0]), np.float32) for f in (way, linear))
                    np.testing.assert_allclose(got, expected, rtol=TOLERANCE, atol=TOLERANCE)
                    works[name] = lambda call=call: call().block_until_ready()
                except Exception as error:
                    yield {"what": what + name, "reason": " ".join(f"{type(error).__name__}: {error}".split())[:200]}
            taken = dict(zip(works, timing.in_turns(list(works.values()), lambda: None), strict=True))
            for name, seconds in taken.items():
                yield row(what + name, seconds / MATRICES, read, taken["XLA"] / MATRICES)
            ways = {name: ways[name] for name in ("XLA", *sorted(taken.keys() - {"XLA"}, key=taken.__getitem__)[:1])}


if __name__ == "__main__":
    main()
