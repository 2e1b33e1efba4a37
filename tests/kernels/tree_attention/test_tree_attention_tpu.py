"""The kernel compiled for TPUs without a TPU: it compiles, and moves no more bytes than it must."""

import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eagle3_jax.kernels.tree_attention.api import tree_attention
from eagle3_jax.kernels.tree_attention.packed_heads import cache_rows
from eagle3_jax.kernels.tree_attention.plan import BLOCKS, plan

pytest.importorskip("libtpu")

CHIPS = {"v5e": "v5e:1x1", "v5p": "v5p:1x1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}
# (query heads, KV heads) on one device.
MODELS = {"llama31-8b, qwen3-8b": (32, 8), "llama33-70b over 8": (8, 1)}
SLOTS = 4096


def one(chip):
    """A mesh of one device."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip]).devices
    return Mesh(np.array(devices[:1]), ("model",))


def call(
    chip,
    heads=(32, 8),
    *,
    batch=4,
    nodes=64,
    page_size=None,
    causal=False,
    dtype=jnp.bfloat16,
    head_dim=128,
    times=1,
    slots=SLOTS,
    window=None,
    sinks=False,
):
    """The call, contiguous as the engine's or paged, so many times in a loop; its arguments; the mesh."""
    mesh = one(chip)

    def argument(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    compute = jnp.float32 if dtype == jnp.float32 else jnp.bfloat16
    queries = argument((batch, nodes, heads[0], head_dim), compute)
    new = argument((batch, nodes, heads[1], head_dim), compute)
    count, size = (batch, slots) if page_size is None else (batch * slots // page_size, page_size)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        rows, width = cache_rows(heads[1], head_dim)
    cache = argument((count, rows, size, width), dtype)
    lengths, mask = argument((batch,), jnp.int32), argument((batch, nodes, nodes), jnp.bool_)
    table = None if page_size is None else argument((batch, slots // page_size), jnp.int32)
    logits = argument(heads[:1], jnp.float32) if sinks else None

    def attend(q, new_k, new_v, k, v, lengths, mask, table, logits):
        first = None if window is None else jnp.maximum(lengths[:, None] + jnp.arange(nodes)[None] - window + 1, 0)

        def one(_, carry):
            q, k, v = carry
            return tree_attention(q, new_k, new_v, k, v, lengths, mask, page_table=table, first=first, sinks=logits)

        return one(0, (q, k, v)) if times == 1 else jax.lax.fori_loop(0, times, one, (q, k, v))

    return attend, (queries, new, new, cache, cache, lengths, None if causal else mask, table, logits), mesh


def compiled(*args, **options) -> Any:
    function, arguments, mesh = call(*args, **options)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function, donate_argnums=(3, 4)).lower(*arguments).compile()


def check(chip, heads, **options):
    """Compiles; written in place: room for the other operands' layouts, and none for a copy of a cache."""
    program = compiled(chip, heads, **options)
    assert "tpu_custom_call" in program.as_text()
    cache = call(chip, heads, **options)[1][3]
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * cache.size * cache.dtype.itemsize
    assert memory.temp_size_in_bytes < cache.size * cache.dtype.itemsize // 2


@pytest.mark.parametrize(
    ("chip", "heads"),
    [
        pytest.param(
            chip,
            heads,
            marks=pytest.mark.smoke if (chip, heads) == ("v5e", (8, 1)) else pytest.mark.long,
            id=f"{chip}, {model}",
        )
        for chip in CHIPS
        for model, heads in MODELS.items()
    ],
)
def test_compiles(chip, heads):
    check(chip, heads)


FORMS = [
    {"nodes": 1, "causal": True},
    {"nodes": 1, "window": 128, "sinks": True, "page_size": 128},
    {"nodes": 1, "dtype": jnp.float32},
    {"nodes": 1, "dtype": jnp.float8_e4m3fn, "head_dim": 64},
    {"batch": 1},  # on v5p the KV heads lie apart, for both cores
    {"dtype": jnp.float32},
    {"dtype": jnp.float8_e4m3fn},
    {"head_dim": 256},
    {"page_size": 256},
    {"page_size": 128},
    {"page_size": 16},
    {"page_size": 16, "batch": 1},
    {"window": 1024},
    {"sinks": True},
    {"window": 128, "sinks": True, "page_size": 128},
]
# A chip and the number of a form: one node with all options, and small pages.
DAILY = {("v6e", 1), ("v5p", 11)}


@pytest.mark.parametrize(
    ("chip", "options"),
    [
        pytest.param(
            chip,
            options,
            marks=pytest.mark.slow if (chip, j) in DAILY else pytest.mark.long,
            id=f"{chip} {options}",
        )
        for i, chip in enumerate(CHIPS)
        for j, options in enumerate(FORMS)
    ],
)
def test_compiles_in_every_form(chip, options):
    check(chip, (8, 2), **options)


@pytest.mark.long
@pytest.mark.parametrize("chip", CHIPS)
def test_compiles_for_several_tiles_of_queries(chip):
    """Prefill: XLA writes the new entries, in a pass of its own."""
    assert "tpu_custom_call" in compiled(chip, (8, 2), nodes=300, causal=True).as_text()


@pytest.mark.long
@pytest.mark.parametrize(
    ("chip", "head_dim"),
    [
        pytest.param(
            chip, head_dim, marks=[] if (chip, head_dim) == ("v5e", 64) else pytest.mark.long, id=f"{chip}, {head_dim}"
        )
        for chip in CHIPS
        for head_dim in (64, 80, 96, 128)
    ],
)
def test_no_cache_is_copied_in_a_loop(chip, head_dim):
    """No copy before the loop either: heads of 64 numbers (gpt-oss) are packed into whole registers."""
    check(chip, (6, 2), head_dim=head_dim, nodes=16, times=3, slots=4096)
    text = compiled(chip, (6, 2), head_dim=head_dim, nodes=16, times=3, slots=4096).as_text()
    bodies = [text_of for text_of in re.split(r"\n(?=%|ENTRY)", text) if "custom-call" in text_of]
    body = next(text_of for text_of in bodies if "tpu_custom_call" in text_of)
    assert not body.startswith("ENTRY")
    assert not re.search(r"\[4,[12],4096,128\]\S* (?:copy|transpose|fusion)", body)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "heads", "page_size", "grid", "rows"),
    [
        (4, (8, 2), None, 2, 4),
        (1, (8, 2), None, 2, 2),
        (3, (8, 2), None, 2, 6),
        (1, (8, 2), 256, 2, 2),
        (1, (8, 1), None, 1, 1),
    ],
)
def test_both_cores_of_a_device_work(batch, heads, page_size, grid, rows):
    """Cores share the sequences, else the KV heads of each; one head of one sequence cannot be shared."""
    function, arguments, mesh = call("v5p", heads, batch=batch, page_size=page_size)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jaxpr = jax.make_jaxpr(function)(*arguments)
    calls = [equation for equation in jax.tree.leaves(list(equations(jaxpr.jaxpr))) if is_kernel(equation)]
    assert [equation.params["grid_mapping"].grid for equation in calls] == [(grid,)]
    assert calls[0].outvars[0].aval.shape[0] == rows


def equations(jaxpr):
    """Of a program and those within it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns") and not is_kernel(equation):
                yield from equations(inner)


def is_kernel(equation):
    return equation.primitive.name == "pallas_call"


@pytest.mark.parametrize("chip", CHIPS)
def test_each_chip_has_block_sizes_that_fit(chip):
    """Its own row of the table, which is kept; what it makes of these shapes, `plan` would refuse beyond VMEM."""
    mesh = one(chip)
    row = BLOCKS[mesh.devices.flat[0].device_kind]
    assert row.keys() == BLOCKS["default"].keys() == {"keys_per_step", "keys_per_head", "scores_per_item", "rows"}
    for (n, k), nodes, dtype in itertools.product(MODELS.values(), (16, 64), (jnp.bfloat16, jnp.float32)):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            shape = plan((4, nodes, n, 128), (64, k, 256, 128), (dtype, dtype), tail=nodes, pages=16)
        assert shape.block <= min(row["keys_per_head"], row["keys_per_step"] // k)
        assert shape.rows <= row["rows"]
        assert shape.width <= max(512, row["scores_per_item"] // shape.rows)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [pytest.param([960, 960], marks=pytest.mark.long), [500, 3], [0, 700]], ids=str)
def test_copies_hardly_more_than_it_must(lengths, monkeypatch):
    """Every copy between HBM and VMEM that the interpreter makes, counted: each page that holds a token once, the new
    entries and the tiles of rows that they go to, queries, masks and results."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    copied = []

    class Counted(interpret_pallas_call.DMA):
        def execute_write(self):
            copied.append(self.data_size)
            super().execute_write()

    monkeypatch.setattr(interpret_pallas_call, "DMA", Counted)
    batch, nodes, n, k, d, slots, page = 2, 16, 4, 2, 128, 1024, 256
    rng = np.random.default_rng(0)
    queries = jnp.asarray(rng.normal(size=(batch, nodes, n, d)), jnp.bfloat16)
    new = jnp.asarray(rng.normal(size=(batch, nodes, k, d)), jnp.bfloat16)
    cache = jnp.asarray(rng.normal(size=(batch, k, slots, d)), jnp.bfloat16)
    mask = jnp.asarray(np.broadcast_to(np.tril(np.ones((nodes, nodes), bool)), (batch, nodes, nodes)))
    got = tree_attention(
        queries,
        new,
        new,
        cache,
        cache,
        jnp.asarray(lengths, jnp.int32),
        mask,
        implementation="pallas",
        interpret=pltpu.InterpretParams(),
    )
    jax.block_until_ready(got)
    row, ends = 2 * k * d * 2, np.asarray(lengths) + nodes  # keys and values of a slot
    pages = int((-(-ends // page)).sum()) * page * row
    touched = int((-(-ends // 16) - np.asarray(lengths) // 16).sum()) * 16 * row
    streamed = (
        2 * queries.size * 2 + 2 * new.size * 2 + batch * nodes * 4
    )  # queries, results, new entries, ancestor bits
    assert pages < sum(copied) <= pages + touched + streamed
