"""Products from quantised panels: right, the same to the bit for any number of rows, on other machines too."""

import dataclasses
import re

import arm
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples import examples
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given
from hypothesis import strategies as st
from llvmlite import ir

from eagle3_jax.kernels.linear import api, quantised_cpu
from eagle3_jax.kernels.linear.layouts import PanelForm, Quantised, QuantisedPanels
from eagle3_jax.kernels.linear.quantised import quantise
from eagle3_jax.kernels.linear.quantised_cpu import ANY, AVX2, SDOT, VNNI, pack, product

run = run_gated = jax.jit(product)
# Values, rows that share a scale (None: all), scales that float16 holds or that are too small for it, offsets.
KINDS = {
    "Q8_0": ("int8", 32, True, False),
    "Q4_0": ("int4", 32, True, False),
    "Q4_1": ("uint4", 32, True, True),
    "Q6_K": ("int8", 16, True, False),
    "Q2_K": ("int8", 16, False, True),
    "int8": ("int8", None, False, False),
    "int4": ("int4", 64, False, True),
}
LEAST = {"int8": -128, "int4": -8, "uint4": 0}


def matrix_of(kind, k, n, seed=0, extreme=False):
    """Numbers at random, or each value the least or the greatest of its type."""
    dtype, group, half, offset = KINDS[kind]
    rng, least = np.random.default_rng(seed), LEAST[dtype]
    most = least + 2 ** (8 if dtype == "int8" else 4) - 1
    values = rng.choice([least, most], (k, n)) if extreme else rng.integers(least, most + 1, (k, n))
    shape = (1 if group is None else k // group, n)
    scale, moved = (rng.normal(size=shape).astype(np.float16).astype(np.float32) for _ in range(2))
    if not half:
        scale, moved = scale * np.float32(1e-6), moved * np.float32(1e-6)
    return Quantised(
        jnp.asarray(values, dtype), jnp.asarray(scale), jnp.asarray(moved) if offset else None, jnp.float32
    )


def rows_of(m, k, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(m, k)), jnp.float32)


def rounded(x):
    """The rows as the kernel sees them, in float64."""
    groups = np.pad(np.asarray(x, np.float32), ((0, 0), (0, -x.shape[1] % 32))).reshape(len(x), -1, 32)
    most = np.abs(groups).max(-1, keepdims=True)
    steps = np.rint(groups * (np.float32(127) / np.where(most > 0, most, 1)))
    return (steps * (most.astype(np.float64) / 127)).reshape(len(x), -1)[:, : x.shape[1]]


def close(got, x, matrix):
    multiplied_out = np.asarray(matrix.array(), np.float64)
    x = rounded(x)
    bound = 1e-6 * (np.abs(x) @ np.abs(multiplied_out)) * np.sqrt(len(multiplied_out))
    assert (np.abs(got - x @ multiplied_out) <= bound).all()


@pytest.mark.slow
@examples(25)
@given(st.integers(1, 20), st.integers(1, 5), st.integers(1, 80), st.sampled_from(sorted(KINDS)), st.booleans())
def test_it_is_the_product_of_the_rounded_rows(m, k, n, kind, extreme):
    x, matrix = rows_of(m, 64 * k), matrix_of(kind, 64 * k, n, extreme=extreme)
    close(run(x, pack(matrix)), x, matrix)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "Q4_1" else pytest.mark.slow) for kind in KINDS]
)
def test_a_row_is_the_same_whatever_stands_beside_it(kind):
    """Alone or among others, plain and gated."""
    x, matrix = rows_of(21, 192), matrix_of(kind, 192, 80)
    panels = pack(matrix)
    assert isinstance(panels, QuantisedPanels)
    together, gated = run(x, panels), run_gated(x, panels, panels)
    close(together, x, matrix)
    for first, count in ((0, 1), (3, 7), (4, 17)):
        rows = x[first : first + count]
        np.testing.assert_array_equal(run(rows, panels), together[first : first + count])
        np.testing.assert_array_equal(run_gated(rows, panels, panels), gated[first : first + count])
    np.testing.assert_allclose(gated, jax.nn.silu(together) * together, rtol=2e-5, atol=1e-5)


@pytest.mark.slow
def test_gate_and_up_of_different_kinds():
    """As in GGUF's mixtures."""
    x, gate, up = rows_of(5, 192), pack(matrix_of("Q4_1", 192, 80)), pack(matrix_of("Q6_K", 192, 80, seed=3))
    expected = jax.nn.silu(run(x, gate)) * run(x, up)
    np.testing.assert_allclose(run_gated(x, gate, up), expected, rtol=2e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_greatest_sums_do_not_overflow(kind):
    """Each value and each number of x is at its limit, of either sign: sums of 16 bits would wrap beyond these."""
    matrix, sign = matrix_of(kind, 128, 32, extreme=True), np.random.default_rng(2).choice([-1.0, 1.0], (3, 128))
    values = np.asarray(matrix.values.astype(jnp.int32))
    towards = np.where(values[:, :3].T > 0, 1.0, -1.0)  # every product positive in a column
    x = jnp.asarray(np.concatenate([sign, towards, -towards, np.ones((1, 128))]), jnp.float32)
    close(run(x, pack(matrix)), x, matrix)


@pytest.mark.slow
def test_rows_of_bfloat16_and_a_length_that_is_no_multiple_of_32():
    x, matrix = rows_of(5, 50).astype(jnp.bfloat16), matrix_of("int8", 50, 40)
    close(run(x, pack(matrix)), x.astype(jnp.float32), matrix)


@pytest.mark.parametrize("number", [jnp.nan, jnp.inf, -jnp.inf])
def test_what_is_not_finite_stays_so_in_its_row_alone(number):
    x, panels = rows_of(4, 64), pack(matrix_of("Q4_1", 64, 16))
    got = run(x.at[2, 40].set(number), panels)
    assert not np.isfinite(got[2]).any()
    np.testing.assert_array_equal(np.delete(got, 2, 0), np.delete(run(x, panels), 2, 0))


def test_rows_of_zeros_give_zeros():
    assert not run(jnp.zeros((2, 64)), pack(matrix_of("Q4_1", 64, 16))).any()


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_the_values_and_their_scales(kind):
    """As in a GGUF file: 34 for 32 values of Q8_0, 18 of Q4_0, 20 of Q4_1; Q6_K's have 8 bits here."""
    panels = pack(matrix_of(kind, 640, 64)).panels
    expected = {"Q8_0": 34 * 20, "Q4_0": 18 * 20, "Q4_1": 20 * 20, "int8": 640 + 4, "int4": 24 * 20} | {
        "Q6_K": 36 * 20,
        "Q2_K": 48 * 20,
    }
    assert panels.size == expected[kind] * 64


@pytest.mark.parametrize(("kind", "made"), [("Q4_1", "int4"), ("Q8_0", "int8")])
def test_a_gguf_file_s_numbers_are_packed_as_it_has_them(kind, made):
    """Values, scales and offsets to the bit, from the matrix that they stand for."""
    kind, columns, groups = GGMLQuantizationType[kind], 96, 3
    weights = np.random.default_rng(0).normal(size=(columns, 32 * groups)).astype(np.float32)
    stored = quantize(weights, kind)
    packed = pack(quantise(jnp.asarray(dequantize(stored, kind).T), made, group=32))
    width, scales = quantised_cpu.dots().width, 4 if made == "int4" else 2
    blocks = stored.reshape(columns // width, width, groups, -1)

    def side_by_side(part, size):
        part = part.reshape(*part.shape[:3], -1, size).transpose(0, 2, 3, 1, 4)
        return part.reshape(len(part), groups, -1)

    expected = [side_by_side(blocks[..., :scales], 2), side_by_side(blocks[..., scales:], 4)]
    np.testing.assert_array_equal(packed.panels, np.concatenate(expected, -1).reshape(len(blocks), -1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_machines_without_these_instructions(kind, monkeypatch):
    """The same integers, so the same numbers to the bit."""
    x, matrix = rows_of(7, 128), matrix_of(kind, 128, 48)
    expected = run(x, pack(matrix))
    monkeypatch.setattr(quantised_cpu, "dots", lambda: ANY)
    np.testing.assert_array_equal(jax.jit(lambda x, panels: product(x, panels))(x, pack(matrix)), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", [PanelForm(4, 0, "float16", 2, 32), PanelForm(8, 0, "float16", 1, 16), PanelForm(8, 0, "float32", 1, 0)]
)
@pytest.mark.parametrize(
    ("ways", "where", "instruction"),
    [
        (VNNI, ("x86_64-unknown-linux-gnu", "icelake-server"), r"vpdpbusd\t\S+, %zmm\d+, %zmm\d+"),
        (AVX2, ("x86_64-unknown-linux-gnu", "haswell"), r"vpmaddubsw\t\S+, %ymm\d+, %ymm\d+"),
        (SDOT, ("aarch64-unknown-linux-gnu", "neoverse-n1"), r"sdot\tv\d+\.4s, v\d+\.16b, v\d+\.16b"),
        (ANY, ("aarch64-unknown-linux-gnu", "cortex-a72"), r"mla\tv\d+\.4s, v\d+\.4s, v\d+\.4s"),
    ],
    ids=lambda x: getattr(x, "kind", ""),
)
def test_they_compile_for_other_machines(ways, where, instruction, form):
    """To the instructions that they are written for, one for each step, row and register of every block at least."""
    ways, module = ways._replace(rows=2), ir.Module("other")
    quantised_cpu.write_product(module, "other", ways, "float32", (form,))
    registers, rows = ways.width // ways.lanes, 1 + 2
    assert len(re.findall(instruction, arm.assembly(module, *where))) >= 8 * registers * rows


def test_other_matrices_stay_as_they_are():
    """Scales of fewer rows than 16, floats in 8 bits, experts."""
    eight = matrix_of("int8", 64, 16)
    few = Quantised(eight.values, jnp.ones((8, 16)), None, jnp.float32)
    floats = Quantised(eight.values.astype(jnp.float8_e4m3fn), eight.scale, None, jnp.float32)
    experts = Quantised(eight.values[None], eight.scale[None], None, jnp.float32)
    assert all(api.pack(matrix) is matrix for matrix in (few, floats, experts))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", *KINDS])
def test_a_vocabulary_that_is_packed_in_pieces_is_packed_as_a_whole(monkeypatch, kind):
    """One row's numbers or scales are of a wider dtype than the others' would need."""
    monkeypatch.setattr(api, "_COLUMNS", 64)
    if kind in KINDS:
        matrix = matrix_of(kind, 64, 150)
        matrix = dataclasses.replace(matrix, scale=matrix.scale.at[:, 70].multiply(1e-6))
    else:
        matrix = jnp.asarray(np.random.default_rng(0).normal(size=(64, 150)), kind).at[:, :70].set(0.5)
    whole, pieces = api.pack(matrix), list(api.pack_rows(jax.tree.map(lambda x: x.T, matrix)))
    assert not isinstance(whole, Quantised)
    assert len(pieces) == 3 and {jax.tree.structure(piece) for piece in pieces} == {jax.tree.structure(whole)}
    joined = np.concatenate([np.asarray(piece.panels) for piece in pieces])
    assert joined.dtype == whole.panels.dtype
    np.testing.assert_array_equal(joined, whole.panels)
