"""Blocks of GGUF files against the package gguf's own reading of them."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from eagle3_jax.models.checkpoint.gguf_blocks import KINDS, multiplied_out


def blocks_of(name: str, rows: int, blocks: int) -> np.ndarray:
    """Random blocks; their float16 scales are finite."""
    kind, rng = KINDS[name], np.random.default_rng(0)
    data = rng.integers(0, 256, (rows, blocks, kind.bytes), np.uint8)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    places |= {"Q4_1": (0, 2), "Q5_1": (0, 2)}
    for place in places.get(name, (0,)):
        scales = rng.normal(0, 1, (rows, blocks, 1)).astype(np.float16)
        data[..., place : place + 2] = scales.view(np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("name", KINDS)
def test_values_scales_and_offsets_stand_for_what_ggml_says(name):
    data, kind = blocks_of(name, 3, 4), KINDS[name]
    values, scale, offset = kind.read(data)
    assert values.shape == (3, 4 * kind.size) and scale.shape == (3, 4 * kind.size // kind.group)
    assert kind.bits == 8 or (values.min() >= -8 and values.max() <= 7)
    expected = dequantize(data, GGMLQuantizationType[name])
    np.testing.assert_allclose(multiplied_out(values, scale, offset), expected, rtol=1e-6, atol=1e-5)
