"""Static cycles of the TPU kernels, without a TPU: compiled ahead of time, simulated by libtpu's scheduler.

    .venv/bin/python tools/tpu_profile.py [--chips v6e,v5e] [--json FILE] [--baseline FILE]

Each row is one program, compiled in a process of its own (what the simulator cannot model ends the process). Lengths
are baked in, because the simulator takes loops and branches over run-time values for nothing. Its model of the memory
is optimistic: reads and writes do not contend, and a copy may run above the chip's bandwidth. The microseconds here are
therefore the larger of cycles / clock and bytes / bandwidth; the clocks are assumed, and nothing was ever compared with
a real TPU. Good for comparing kernels with each other and a kernel with itself.

With --baseline, rows are compared with those of an earlier --json; one that takes 3 % more cycles is an error.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

FLAG = "--xla_jf_dump_static_llo_profile_to"
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
MOST_MORE = 1.03


@dataclasses.dataclass(frozen=True)
class Chip:
    """One JAX device. Bandwidth and operations are published figures; the clock is assumed.

    Attributes:
        gigahertz: clock. gigabytes: HBM bandwidth a second. teraflops: bfloat16, a second.
    """

    topology: str
    gigahertz: float
    gigabytes: float
    teraflops: float


CHIPS = {
    "v5e": Chip("v5e:1x1", 1.5, 819, 197),
    "v5p": Chip("v5p:1x1x1", 1.75, 2460, 459),
    "v6e": Chip("v6e:1x1", 1.75, 1638, 918),
    "tpu7x": Chip("tpu7x:1x1x1", 2.2, 3700, 1155),  # one of a chip's two cores
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Attention of `nodes` new tokens of each sequence over `keys` slots, their own included; bfloat16."""

    kernel: str
    nodes: int = 64
    query_heads: int = 32
    kv_heads: int = 8
    batch: int = 4
    head_dim: int = 128
    keys: int = 4096
    dtype: str = "bfloat16"


CASES = [
    Case("tree_attention"),
    Case("tree_attention causal"),
    Case("tree_attention", nodes=16),
    Case("tree_attention causal", nodes=1),
    Case("tree_attention", query_heads=8, kv_heads=1),  # 70B over 8 chips
    Case("jax flash_attention, dense bias"),
    Case("xla, dense mask"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chips", default=",".join(CHIPS), help="of " + ", ".join(CHIPS))
    parser.add_argument("--kernels", default="", help="only kernels whose name begins so")
    parser.add_argument("--json", type=pathlib.Path, help="file for the rows")
    parser.add_argument("--baseline", type=pathlib.Path, help="rows to compare with")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        compile_case(CHIPS[arguments.child[0]], Case(**json.loads(arguments.child[1])))
        return
    chips = arguments.chips.split(",")
    if unknown := set(chips) - CHIPS.keys():
        parser.error(f"--chips: got {', '.join(sorted(unknown))}, expected some of {', '.join(CHIPS)}")
    rows = []
    print(f"{'kernel':34}{'chip':>6}{'nodes':>6}{'heads':>7}{'cycles':>9}{'us':>8}{'floor':>8}{'share':>7}")
    for chip in chips:
        for case in CASES:
            if case.kernel.startswith(arguments.kernels):
                rows.append(row := measure(chip, case))
                print(line(row), flush=True)
    if arguments.json:
        partial = arguments.json.with_suffix(".partial")
        partial.write_text(json.dumps(rows, indent=1) + "\n")
        partial.replace(arguments.json)
    if arguments.baseline:
        slower = regressions(rows, json.loads(arguments.baseline.read_text()))
        sys.exit("\n".join(slower) if slower else 0)


def measure(name: str, case: Case) -> dict[str, Any]:
    """One row; cycles are None where the simulator has no model of the program."""
    chip, cycles = CHIPS[name], static_cycles(name, case)
    element = 2
    cache = 2 * case.batch * case.kv_heads * case.keys * case.head_dim * element
    queries = 2 * case.batch * case.query_heads * case.nodes * case.head_dim * element
    operations = 4 * case.batch * case.query_heads * case.nodes * case.keys * case.head_dim
    floor = (cache + queries) / chip.gigabytes / 1e3
    microseconds = None if cycles is None else max(cycles / chip.gigahertz / 1e3, floor)
    return dataclasses.asdict(case) | {
        "chip": name,
        "cycles": cycles,
        "microseconds": microseconds,
        "floor_microseconds": floor,
        "compute_floor_microseconds": operations / chip.teraflops / 1e6,
        "share": None if microseconds is None else floor / microseconds,
    }


def line(row: dict[str, Any]) -> str:
    heads = f"{row['query_heads']}/{row['kv_heads']}"
    begin = f"{row['kernel']:34}{row['chip']:>6}{row['nodes']:>6}{heads:>7}"
    if row["cycles"] is None:
        return f"{begin}{'not modelled':>17}{row['floor_microseconds']:8.1f}"
    figures = (row["microseconds"], row["floor_microseconds"])
    return f"{begin}{row['cycles']:9}" + "".join(f"{x:8.1f}" for x in figures) + f"{row['share']:7.0%}"


def regressions(rows: list[dict[str, Any]], baseline: list[dict[str, Any]]) -> list[str]:
    """Rows that take more cycles than they did; those that the baseline does not know are left alone."""
    keys = [field.name for field in dataclasses.fields(Case)] + ["chip"]
    before = {tuple(row[key] for key in keys): row["cycles"] for row in baseline}
    found = []
    for row in rows:
        was, now = before.get(tuple(row[key] for key in keys)), row["cycles"]
        if was is not None and (now is None or now > MOST_MORE * was):
            found.append(f"{row['kernel']} on {row['chip']}, {row['nodes']} nodes: got {now} cycles, expected {was}")
    return found


def static_cycles(chip: str, case: Case) -> int | None:
    """Cycles of the program's operations, but for copies of its arguments into the layouts that it wants."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | ENVIRONMENT | {"LIBTPU_INIT_ARGS": f"{FLAG}={folder}"}
        command = [sys.executable, __file__, "--child", chip, json.dumps(dataclasses.asdict(case))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        if done.returncode > 0:  # an exception; the simulator's own failures are signals
            sys.exit(done.stderr)
        if done.returncode < 0:
            return None
        total = 0
        for path in pathlib.Path(folder).glob("*.textproto"):
            for operation in path.read_text().split("hlo_op_estimate {")[1:]:
                name = re.search(r'hlo_op_name: "([^"]+)"', operation)
                cycles = re.search(r"estimated_cycles: (-?\d+)", operation)
                if name and cycles and not re.fullmatch(r"copy[.\d]*", name[1]):
                    total += int(cycles[1])
        return total or None


def compile_case(chip: Chip, case: Case) -> None:
    """Compiles one program; runs in the child, where libtpu leaves its profile."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = topologies.get_topology_desc(platform="tpu", topology_name=chip.topology).devices
    mesh = Mesh(np.array(devices[:1]), ("model",))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        build = {"tree_attention": _ours, "jax flash_attention": _flash, "xla": _xla}[
            case.kernel.split(",")[0].removesuffix(" causal")
        ]
        function, shapes = build(case)
        place = NamedSharding(mesh, PartitionSpec())
        arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in shapes]
        jax.jit(function).lower(*arguments).compile()


def _ours(case: Case) -> tuple[Any, list[Any]]:
    """The kernel itself, on queries that are folded already."""
    import jax.numpy as jnp

    from eagle3_jax.kernels import tree_attention, tree_attention_tpu

    c, page = case, 256
    cache = (c.batch * c.keys // page, c.kv_heads, page, c.head_dim)
    shape = tree_attention.plan(
        (c.batch, c.nodes, c.query_heads, c.head_dim),
        cache,
        (jnp.dtype(c.dtype), jnp.dtype(c.dtype)),
        tail=c.nodes,
        pages=c.keys // page,
        length=c.keys - c.nodes,
    )
    shapes = [
        ((c.batch, c.kv_heads, shape.group * shape.nodes, c.head_dim), c.dtype),
        (cache, c.dtype),
        (cache, c.dtype),
        ((c.batch, shape.pages), "int32"),
        ((c.batch,), "int32"),
    ]
    if "causal" not in c.kernel:
        shapes.append(((c.batch, shape.nodes, shape.words), "int32"))

    def attend(q: Any, k: Any, v: Any, table: Any, lengths: Any, *bits: Any) -> Any:
        return tree_attention_tpu.attend(shape, q, k, v, table, lengths, *bits, vmem_limit=tree_attention.VMEM_LIMIT)

    return attend, shapes


def _flash(case: Case) -> tuple[Any, list[Any]]:
    """JAX's own kernel, query heads folded into rows as ours has them, the tree as a bias."""
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    c = case
    rows = c.query_heads // c.kv_heads * c.nodes
    sizes = flash.BlockSizes(block_q=min(rows, 256), block_k_major=1024, block_k=1024, block_b=1)
    q, kv = (c.batch, c.kv_heads, rows, c.head_dim), (c.batch, c.kv_heads, c.keys, c.head_dim)

    def attend(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return flash.flash_attention(q, k, v, bias, sm_scale=c.head_dim**-0.5, block_sizes=sizes)

    return attend, [(q, c.dtype), (kv, c.dtype), (kv, c.dtype), ((c.batch, c.kv_heads, rows, c.keys), "float32")]


def _xla(case: Case) -> tuple[Any, list[Any]]:
    """Plain operations under a mask of every slot."""
    import jax
    import jax.numpy as jnp

    c = case
    rows = c.query_heads // c.kv_heads * c.nodes
    q, kv = (c.batch, c.kv_heads, rows, c.head_dim), (c.batch, c.kv_heads, c.keys, c.head_dim)

    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        scores = jnp.einsum("bkrd,bksd->bkrs", q, k, preferred_element_type=jnp.float32) * c.head_dim**-0.5
        weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30), axis=-1)
        return jnp.einsum("bkrs,bksd->bkrd", weights.astype(v.dtype), v)

    return attend, [(q, c.dtype), (kv, c.dtype), (kv, c.dtype), ((c.batch, rows, c.keys), "bool")]


if __name__ == "__main__":
    main()
