"""GGUF conversion: permutation, names, and refusal of what is not known."""

import numpy as np
import pytest

from eagle3_jax.models import gguf


def rotate_interleaved(x, angle):
    out = np.empty_like(x)
    out[0::2] = x[0::2] * np.cos(angle) - x[1::2] * np.sin(angle)
    out[1::2] = x[1::2] * np.cos(angle) + x[0::2] * np.sin(angle)
    return out


def rotate_half(x, angle):
    a, b = np.split(x, 2)
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)])


def test_unpermuted_rows_rotate_alike():
    """A query-key product under interleaved RoPE equals the product of un-permuted rows under rotate-half."""
    rng = np.random.default_rng(0)
    q, k, x = rng.normal(size=(8, 6)), rng.normal(size=(8, 6)), rng.normal(size=6)
    angles = rng.normal(size=(2, 4))
    expected = rotate_interleaved(q @ x, angles[0]) @ rotate_interleaved(k @ x, angles[1])
    q2, k2 = gguf.unpermute(q, 1), gguf.unpermute(k, 1)
    np.testing.assert_allclose(rotate_half(q2 @ x, angles[0]) @ rotate_half(k2 @ x, angles[1]), expected)
    both = np.concatenate([q, k])
    np.testing.assert_array_equal(gguf.unpermute(both, 2), np.concatenate([q2, k2]))


def test_not_a_gguf_file(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04 not it at all, but long enough to be read as a header")
    with pytest.raises(ValueError, match="not a GGUF"):
        gguf.convert(path, tmp_path)
