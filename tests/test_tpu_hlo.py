"""tools/tpu/hlo.py: what travels between devices, along which axes, how often and how many bytes."""

import collections
import functools
import importlib
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eagle3_jax.config import MeshConfig
from eagle3_jax.mesh import make_mesh

ROOT = pathlib.Path(__file__).parents[1]
MESH = {"data": 2, "model": 4}


@pytest.fixture
def hlo(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("tpu.hlo")


def entry(*lines):
    parameter = "%x = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} parameter(0)"
    body = "\n".join(f"  {line}" for line in (parameter, *lines))
    return f"HloModule jit_f, is_scheduled=true\n\nENTRY %main (x: bf16[8,128]) -> bf16[8,128] {{\n{body}\n}}\n"


@pytest.mark.parametrize(
    ("groups", "axes", "group"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", ("model",), (0, 1, 2, 3)),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("data",), (0, 4)),
        ("replica_groups={}", ("data", "model"), tuple(range(8))),
        ("replica_groups=[2,4]<=[8]", ("model",), (0, 1, 2, 3)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ("data",), (0, 4)),
        ("replica_groups=[1,8]<=[8]", ("data", "model"), tuple(range(8))),
        ("replica_groups=mesh['axis_0'=8] {'axis_0'}", ("data", "model"), tuple(range(8))),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", ("data",), (0, 4)),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", ("model",), (0, 1, 2, 3)),
        ("replica_groups=mesh['axis_0'=8] {'axis_0':(2)4}", ("model",), (0, 1, 2, 3)),
        ("replica_groups=mesh['axis_0'=8] {'axis_0':(1)2}", ("data",), (0, 4)),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", ("model",), (0, 1, 2, 3)),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=(0,4,1,5,2,6,3,7) {'b'}", ("data",), (0, 4)),
    ],
)
def test_replica_groups_name_the_axes_in_every_form(groups, axes, group, hlo):
    line = f'ROOT %a = bf16[8,128] all-reduce(%x), {groups}, to_apply=%add, metadata={{op_name="jit(f)/dot"}}'
    (found,) = hlo.collectives(entry(line), MESH)
    assert found == hlo.Collective("all-reduce", 2048, axes, group, 1, False, "jit(f)/dot")


@pytest.mark.parametrize(
    ("lines", "kind", "size"),
    [
        (["ROOT %a = bf16[32,128] all-gather(%x), replica_groups=[2,4]<=[8], dimensions={0}"], "all-gather", 8192),
        (["ROOT %a = bf16[2,128] reduce-scatter(%x), replica_groups=[2,4]<=[8]"], "reduce-scatter", 2048),
        (["ROOT %a = bf16[8,128] all-to-all(%x), replica_groups=[2,4]<=[8]"], "all-to-all", 2048),
        (
            [  # a pair counts once, the context of a start not at all
                "%s = (bf16[8,128]{1,0:T(8,128)}, bf16[8,128]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) "
                "collective-permute-start(%x), source_target_pairs={{0,1},{1,0},{4,5},{5,4}}",
                "ROOT %d = bf16[8,128] collective-permute-done(%s)",
            ],
            "collective-permute",
            2048,
        ),
        (
            [
                "%s = (bf16[8,128], bf16[32,128]) all-gather-start(%x), replica_groups=[2,4]<=[8]",
                "ROOT %d = bf16[32,128] all-gather-done(%s)",
            ],
            "all-gather",
            8192,
        ),
        (
            [
                "%y = (f32[3]{0}, pred[8]{0}) fusion(%x), kind=kLoop, calls=%nothing",
                "%g = f32[3] get-tuple-element(%y), index=0",
                "%h = pred[8] get-tuple-element(%y), index=1",
                "ROOT %a = (bf16[8,128], f32[3], pred[8]) all-reduce(%x, %g, /*index=2*/%h), replica_groups=[2,4]<=[8]",
            ],
            "all-reduce",
            2048 + 12 + 8,
        ),
        (["ROOT %a = bf16[2,128] fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1"], "reduce-scatter", 2048),
        (
            [
                "%s = ((bf16[8,128]), bf16[8,128], u32[]) async-start(%x), calls=%wrapped",
                "%u = ((bf16[8,128]), bf16[8,128], u32[]) async-update(%s), calls=%wrapped",
                "ROOT %d = bf16[8,128] async-done(%u), calls=%wrapped",
            ],
            "all-to-all",
            2048,
        ),
    ],
)
def test_kinds_count_once_with_the_bytes_of_the_whole_array(lines, kind, size, hlo):
    others = """
%nothing (p: bf16[8,128]) -> (f32[3], pred[8]) {
  %p = bf16[8,128] parameter(0)
}

%all-reduce-scatter.1 (p: bf16[8,128]) -> bf16[2,128] {
  %p = bf16[8,128] parameter(0)
  %r = bf16[8,128] all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %s = bf16[2,128] dynamic-slice(%r, %i), dynamic_slice_sizes={2,128}
}

%wrapped (p: bf16[8,128]) -> bf16[8,128] {
  %p = bf16[8,128] parameter(0)
  ROOT %t = bf16[8,128] all-to-all(%p), replica_groups=[2,4]<=[8]
}
"""
    (found,) = hlo.collectives(entry(*lines) + others, MESH)
    assert (found.kind, found.bytes, found.axes, found.times) == (kind, size, ("model",), 1)


def test_what_stays_on_a_device_is_none(hlo):
    assert hlo.collectives(entry("ROOT %a = bf16[8,128] all-reduce(%x), replica_groups=[8,1]<=[8]"), MESH) == []
    with pytest.raises(ValueError, match="mesh_shape: got .*, expected one of more than 7 devices"):
        hlo.collectives(entry("ROOT %a = bf16[8,128] all-reduce(%x), replica_groups=[2,4]<=[8]"), {"data": 4})
    with pytest.raises(ValueError, match="got 0 entries, expected the text of one program"):
        hlo.Program("")


def summed(found):
    """(axes, in a loop) -> how many collectives run, and their bytes on a device."""
    total = collections.defaultdict(lambda: (0, 0))
    for x in found:
        count, size = total[x.axes, x.in_loop]
        total[x.axes, x.in_loop] = count + x.times, size + x.times * x.bytes
    return total


LOOPS = """
%condition (p: (s32[], bf16[8,128])) -> pred[] {
  %end = s32[]{:T(128)} constant(10)
  %p = (s32[]{:T(128)}, bf16[8,128]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %less = pred[] compare(%i, %end), direction=LT
}

%body (p: (s32[], bf16[8,128])) -> (s32[], bf16[8,128]) {
  %step = s32[] constant(3)
  %p = (s32[], /*index=1*/bf16[8,128]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %y = bf16[8,128] get-tuple-element(%p), index=1
  %j = s32[] add(%i, %step)
  %a = bf16[8,128] all-reduce(%y), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add
  %inner = (s32[], bf16[8,128]) while(%q), condition=%unknown, body=%again, BACKEND
  %b = bf16[8,128] conditional(%t, %y, %y), branch_computations={%few, %many}
  ROOT %r = (s32[], bf16[8,128]) tuple(%j, %a)
}

%unknown (p: (s32[], bf16[8,128])) -> pred[] {
  %p = (s32[], bf16[8,128]{1,0}) parameter(0)
  ROOT %other = pred[] get-tuple-element(%p), index=0
}

%again (p: (s32[], bf16[8,128])) -> (s32[], bf16[8,128]) {
  %p = (s32[], bf16[8,128]{1,0}) parameter(0)
  %y = bf16[8,128] get-tuple-element(%p), index=1
  %g = bf16[16,128] all-gather(%y), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
  ROOT %r = (s32[], bf16[8,128]) tuple(%i, %y)
}

%few (p: bf16[8,128]) -> bf16[8,128] {
  ROOT %p = bf16[8,128] parameter(0)
}

%many (p: bf16[8,128]) -> bf16[8,128] {
  %p = bf16[8,128] parameter(0)
  ROOT %a = bf16[8,128] all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add
}
"""


@pytest.mark.parametrize(("known", "times"), [("", 1), ('backend_config={"known_trip_count":{"n":"7"}}', 7)])
def test_a_loop_multiplies_and_a_conditional_takes_one_branch(known, times, hlo):
    """From 1 in steps of 3 to 10: three passes; in the loop within, as often as is known."""
    text = entry(
        "%one = s32[] constant(1)",
        "%first = (s32[], bf16[8,128]) tuple(%one, %x)",
        "%loop = (s32[], bf16[8,128]) while(%first), condition=%condition, body=%body",
        "ROOT %y = bf16[8,128] get-tuple-element(%loop), index=1",
    ) + LOOPS.replace("BACKEND", known)
    found = hlo.collectives(text, MESH)
    assert [(x.kind, x.axes, x.times, x.in_loop) for x in found] == [
        ("all-reduce", ("data",), 3, True),
        ("all-gather", ("data",), 3 * times, True),
        ("all-reduce", ("model",), 3, True),
    ]
    assert summed(found) == {
        (("data",), True): (3 + 3 * times, 3 * 2048 + 3 * times * 4096),
        (("model",), True): (3, 3 * 2048),
    }
    one = hlo.collectives(text, MESH, one_pass=True, branch=min)
    assert [(x.kind, x.times, x.in_loop) for x in one] == [("all-reduce", 1, False), ("all-gather", times, True)]


def looped(mesh):
    """Lowers a program whose loop of 5 sums 16 x 128 numbers over `model`, and one sum over `data` behind it."""

    def place(*axes):
        return NamedSharding(mesh, P(*axes))

    def program(x, w, v):
        def body(x, _):
            return jax.lax.with_sharding_constraint((x @ w) @ v, place("data")), None

        x, _ = jax.lax.scan(body, x, None, length=5)
        return x, x.T @ x

    def array(*shape, axes):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place(*axes))

    arguments = array(32, 128, axes=("data",)), array(128, 512, axes=(None, "model")), array(512, 128, axes=("model",))
    return jax.jit(program, out_shardings=(place("data"), place())).lower(*arguments)


def check(hlo, text):
    found = hlo.collectives(text, MESH)
    assert summed(found) == {(("model",), True): (5, 5 * 16 * 128 * 4), (("data",), False): (1, 128 * 128 * 4)}
    assert all(x.kind == "all-reduce" and "dot_general" in x.where for x in found)


def test_a_real_program_of_cpus(hlo):
    mesh = make_mesh(MeshConfig(**MESH))
    check(hlo, looped(mesh).compile().as_text())


def for_a_tpu(topology):
    devices = importlib.import_module("tpu.topology").topology_devices(topology)
    return looped(make_mesh(MeshConfig(**MESH), devices))


@pytest.mark.parametrize("topology", ["v6e:2x4", "v5p:2x2x2"])
def test_a_real_program_of_tpus(topology, hlo):
    """Its devices follow the topology, its partitions the mesh."""
    pytest.importorskip("libtpu")
    check(hlo, for_a_tpu(topology).compile().as_text())


@pytest.mark.slow
def test_a_program_is_compiled_until_its_text_is_written(hlo, capfd):
    pytest.importorskip("libtpu")
    check(hlo, hlo.optimised_alone(functools.partial(for_a_tpu, "v6e:2x4")))
    with pytest.raises(RuntimeError, match="a program was not compiled: its process ended with status 1"):
        hlo.optimised_alone(functools.partial(for_a_tpu, "v6e:5x5"))
    assert "--topology: got 'v6e:5x5'" in capfd.readouterr().err
