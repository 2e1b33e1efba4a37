"""tools/tpu/price.py: what a hand-counted program costs, and what a collective takes on a topology."""

import importlib
import pathlib
import types

import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture
def tools(monkeypatch):
    """hlo, price, and a chip of easy numbers: 1 TFLOP/s, 1 GB/s of HBM, 1 GHz, links of 1 GB/s."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    hlo, price, topology = (importlib.import_module(f"tpu.{name}") for name in ("hlo", "price", "topology"))
    return hlo, price, topology.Chip("toy", gigahertz=1.0, gigabytes=1.0, teraflops=1.0, link=1.0)


def mesh(data, model):
    """Chips in a row, `data` of them apart along another axis of the topology."""
    places = [types.SimpleNamespace(coords=(row, column, 0)) for row in range(data) for column in range(model)]
    return types.SimpleNamespace(shape={"data": data, "model": model}, devices=types.SimpleNamespace(flat=places))


def priced(tools, lines, others="", on=None, **how):
    hlo, price, chip = tools
    body = "\n".join(f"  {line}" for line in lines)
    text = f"{others}\nENTRY %main (x: f32[1]) -> f32[1] {{\n{body}\n}}\n"
    return price.price(hlo.Program(text), on or mesh(1, 1), chip, **how)


LEAST = 2000 / 1e9
X = "%x = f32[1024,256]{1,0:T(8,128)} parameter(0)"  # 1 MiB: 1.05 ms in and as much out
MIB = 2**20 / 1e9


@pytest.mark.parametrize(
    ("lines", "seconds"),
    [
        ([X, "ROOT %y = f32[1024,256]{1,0} exponential(%x)"], 2 * MIB),
        ([X, "ROOT %y = f32[1024,256]{1,0:T(8,128)S(1)} exponential(%x)"], MIB),  # VMEM takes none
        ([X, "%s = f32[]{:T(128)} constant(3)", "ROOT %n = f32[] multiply(%s, %s)"], 0),
        ([X, "ROOT %y = f32[1,256]{1,0:S(1)} slice(%x), slice={[0:1], [0:256]}"], LEAST),
        ([X, "%i = s32[] constant(1)", "ROOT %y = f32[128,256]{1,0} dynamic-slice(%x, %i, %i)"], 2 * MIB / 8),
        (
            [
                X,
                "%u = f32[128,256]{1,0:S(1)} parameter(1)",
                "%i = s32[] constant(1)",
                "ROOT %y = f32[1024,256]{1,0} dynamic-update-slice(%x, %u, %i, %i)",
            ],
            MIB / 8,
        ),
        (  # read in front of its reader, which pays; nothing else does
            [
                X,
                "%s = (f32[1024,256]{1,0:S(1)}, f32[1024,256]{1,0}, u32[]) copy-start(%x)",
                "%d = f32[1024,256]{1,0:S(1)} copy-done(%s)",
                "ROOT %y = f32[1024,256]{1,0:S(1)} exponential(%d)",
            ],
            MIB,
        ),
    ],
)
def test_a_pass_costs_its_bytes_in_hbm_and_at_least_a_start(lines, seconds, tools):
    found = priced(tools, lines)
    assert found.passes == pytest.approx(seconds, rel=1e-4)  # but for an index
    assert found.products == found.collectives == 0


FUSED = """
%slices (p: f32[1024,256], i: s32[]) -> f32[128,256] {
  %p = f32[1024,256]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %b = f32[1024,256]{1,0} bitcast(%p)
  %a = f32[128,256]{1,0} dynamic-slice(%b, %i, %i), dynamic_slice_sizes={128,256}
  ROOT %e = f32[128,256]{1,0} exponential(%a)
}

%updates (p: f32[1024,256], u: f32[128,256], i: s32[]) -> (f32[1024,256], f32[128,256]) {
  %u = f32[128,256]{1,0} parameter(1)
  %p = f32[1024,256]{1,0} parameter(0)
  %i = s32[] parameter(2)
  %d = f32[1024,256]{1,0} dynamic-update-slice(%p, %u, %i, %i)
  ROOT %t = (f32[1024,256]{1,0}, f32[128,256]{1,0}) tuple(%d, %u)
}

%product (p: bf16[256,1024], w: bf16[1024,512]) -> bf16[256,512] {
  %p = bf16[256,1024]{1,0} parameter(0)
  %w = bf16[1024,512]{1,0} parameter(1)
  ROOT %c = bf16[256,512]{1,0} convolution(%p, %w), dim_labels=bf_io->bf
}
"""


def test_a_fusion_reads_the_slice_and_writes_the_update(tools):
    lines = [X, "%i = s32[] constant(1)"]
    sliced = "ROOT %y = f32[128,256]{1,0} fusion(%x, %i), kind=kLoop, calls=%slices"
    assert priced(tools, [*lines, sliced], FUSED).passes == pytest.approx(2 * MIB / 8 + 4e-9)
    updated = [
        "%u = f32[128,256]{1,0} parameter(1)",
        "ROOT %y = (f32[1024,256]{1,0}, f32[128,256]{1,0:S(1)}) fusion(%x, %u, %i), kind=kLoop, calls=%updates",
    ]
    assert priced(tools, [*lines, *updated], FUSED).passes == pytest.approx(2 * MIB / 8 + 4e-9)


@pytest.mark.parametrize(
    ("aliasing", "seconds"),
    [("", 3 * MIB), (", output_to_operand_aliasing={{1}: (0, {})}", 2 * MIB)],
)
def test_a_kernel_writes_little_where_it_updates_in_place(aliasing, seconds, tools):
    call = (
        f'(f32[1024,256]{{1,0}}, f32[1024,256]{{1,0}}) custom-call(%x), custom_call_target="tpu_custom_call"{aliasing}'
    )
    assert priced(tools, [X, f"ROOT %y = {call}"]).passes == pytest.approx(seconds)


ARRAYS = [
    "%a = bf16[256,1024]{1,0:S(1)} parameter(0)",
    "%w = bf16[1024,512]{1,0:S(1)} parameter(1)",
    "%v = bf16[1024,512]{1,0} parameter(2)",
]
WORK = 2 * 256 * 1024 * 512 / 1e12


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
        ("ROOT %y = bf16[256,512]{1,0:S(1)} fusion(%a, %w), kind=kOutput, calls=%product", WORK),
        (
            "ROOT %y = bf16[256,512]{1,0:S(1)} fusion(%a, %v), kind=kOutput, calls=%product",
            MIB,
        ),  # its weights take longer
    ],
)
def test_a_product_takes_its_operations_or_its_bytes(line, seconds, tools):
    found = priced(tools, [*ARRAYS, line], FUSED)
    assert found.products == pytest.approx(seconds)
    assert found.passes == found.collectives == 0


@pytest.mark.parametrize(
    ("operation", "count"),
    [
        ("f32[8,16] convolution(%a, %b), dim_labels=bf_io->bf, operand_precision={highest,highest}", 6 * 8 * 32 * 16),
        ("f32[8,16] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}", 8 * 32 * 16),
        # Four products of a batch; two contracted dimensions; a batch as a window whose taps meet one input each.
        ("f32[4,8,16] convolution(%c, %d), window={size=1}, dim_labels=0bf_0io->0bf", 0),
        ("f32[8,16,1] convolution(%c, %d), window={size=4}, dim_labels=0bf_0io->bf0", 4 * 8 * 32 * 16),
        (
            "f32[4,8,16] convolution(%c, %d), window={size=4 stride=3 pad=0_0 lhs_dilate=4}, dim_labels=0bf_0io->0bf",
            4 * 8 * 32 * 16,
        ),
        ("f32[8,16] add(%a, %b)", None),
    ],
)
def test_operations_of_a_product_are_those_whose_input_exists(operation, count, tools):
    hlo, price, _ = tools
    lines = [
        "%a = f32[8,32] parameter(0)",
        "%b = f32[32,16] parameter(1)",
        "%c = bf16[4,8,32] parameter(2)",
        "%d = bf16[4,32,16] parameter(3)",
        f"ROOT %y = {operation}",
    ]
    if count == 0:  # one kernel for all of the batch
        lines[3] = "%d = bf16[1,32,16] parameter(3)"
        count = 4 * 8 * 32 * 16
    program = hlo.Program("ENTRY %main () -> f32[] {\n" + "\n".join(f"  {line}" for line in lines) + "\n}\n")
    root = program.computations["main"]["y"]
    assert price._operations(program, "main", root) == 2 * (count or 0)


GIGABYTE = "%x = f32[250000000]{0} parameter(0)"  # a second of a link


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
        # Four chips in a row, without a link from the last to the first: a ring's neighbours are 1.5 links apart.
        ("ROOT %y = f32[250000000] all-reduce(%x), replica_groups=[2,4]<=[8]", 2 * 3e-6 + 2 * 0.75 * 1.5),
        ("ROOT %y = f32[1000000000] all-gather(%x), replica_groups=[2,4]<=[8]", 3e-6 + 4 * 0.75 * 1.5),
        ("ROOT %y = f32[62500000] reduce-scatter(%x), replica_groups=[2,4]<=[8]", 3e-6 + 0.75 * 1.5),
        ("ROOT %y = f32[250000000] all-to-all(%x), replica_groups=[2,4]<=[8]", 3e-6 + 1 * 1.5),
        # Two chips: neighbours.
        ("ROOT %y = f32[250000000] all-reduce(%x), replica_groups=[4,2]<=[2,4]T(1,0)", 2e-6 + 2 * 0.5),
        # One direction, two links away, both of which it takes.
        ("ROOT %y = f32[250000000] collective-permute(%x), source_target_pairs={{0,2},{4,6}}", 2 * (1e-6 + 2)),
    ],
)
def test_a_collective_takes_its_way_and_its_bytes(line, seconds, tools):
    found = priced(tools, [GIGABYTE, line], on=mesh(2, 4))
    assert found.collectives == pytest.approx(seconds)
    assert found.products == found.passes == 0


def test_what_runs_while_something_travels_hides_it(tools):
    """Half a second of a pass, between the start and the end of a second's way."""
    lines = [
        GIGABYTE,
        "%s = (f32[250000000], f32[250000000], u32[]) all-gather-start(%x), replica_groups=[4,2]<=[2,4]T(1,0)",
        "%a = f32[62500000]{0:S(1)} slice(%x), slice={[0:62500000]}",
        "%b = f32[62500000]{0} exponential(%a)",
        "%d = f32[500000000]{0} all-gather-done(%s)",
        "ROOT %c = f32[62500000]{0:S(1)} exponential(%b)",
    ]
    found = priced(tools, lines, on=mesh(2, 4))
    assert found.passes == pytest.approx(0.75)
    assert found.collectives == pytest.approx(1e-6 + 1 - 0.5)


def test_layers_stand_for_several(tools):
    """In a loop of 3, a layer's pass and sum count for 5 layers each; what is outside of layers counts once."""
    loop = """
%condition (p: s32[]) -> pred[] {
  %end = s32[] constant(3)
  %p = (s32[], f32[1024,256]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %less = pred[] compare(%i, %end), direction=LT
}

%body (p: (s32[], f32[1024,256])) -> (s32[], f32[1024,256]) {
  %p = (s32[], f32[1024,256]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %y = f32[1024,256]{1,0} get-tuple-element(%p), index=1
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
  %e = f32[1024,256]{1,0} exponential(%y), metadata={op_name="jit(f)/while/body/jit(_decoder_layer)/exp"}
  %a = f32[1024,256]{1,0} all-reduce(%e), replica_groups=[1,2]<=[2], metadata={op_name="jit(_decoder_layer)/sum"}
  %s = f32[1024,256]{1,0} sine(%a)
  ROOT %r = (s32[], f32[1024,256]) tuple(%j, %s)
}
"""
    lines = [
        X,
        "%zero = s32[] constant(0)",
        "%t = (s32[], f32[1024,256]) tuple(%zero, %x)",
        "ROOT %w = (s32[], f32[1024,256]) while(%t), condition=%condition, body=%body",
    ]
    found = priced(tools, lines, loop, on=mesh(1, 2), layers=5.0)
    assert found.passes == pytest.approx(3 * (5 + 1) * 2 * MIB)
    assert found.collectives == pytest.approx(3 * 5 * (2e-6 + MIB))
    once = priced(tools, lines, loop, on=mesh(1, 2), one_pass=True)
    assert once.passes == pytest.approx(2 * 2 * MIB)
    assert found.total == pytest.approx(found.passes + found.collectives)
