"""What a user imports."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagle3_jax


def test_every_public_name_is_there():
    for name in eagle3_jax.__all__:
        assert getattr(eagle3_jax, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = eagle3_jax.nothing


def test_importing_the_package_does_not_load_jax():
    code = "import sys, eagle3_jax, eagle3_jax.config; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("platforms", ["", "cpu", "cpu,cuda"])
def test_a_jaxlib_that_is_wrong_on_cpus_is_refused(platforms):
    with pytest.raises(ImportError, match=r"jaxlib: got 0\.10\.2, which computes wrong results on CPUs"):
        eagle3_jax._refuse_wrong_results("0.10.2", platforms)


@pytest.mark.parametrize(("jaxlib", "platforms"), [("0.10.2", "tpu,cpu"), ("0.10.1", ""), ("0.12.0.1", "cpu")])
def test_other_versions_and_accelerators_are_not_refused(jaxlib, platforms):
    eagle3_jax._refuse_wrong_results(jaxlib, platforms)


def test_the_import_is_what_refuses():
    code = (
        "import importlib.metadata as m; real = m.version\n"
        "m.version = lambda name: '0.10.2' if name == 'jaxlib' else real(name)\n"
        "import eagle3_jax"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert answer.returncode == 1
    assert "ImportError: jaxlib: got 0.10.2" in answer.stderr


def test_sums_of_many_small_products_are_right():
    """jaxlib 0.10.2 lost the last rows of 32,769 on a CPU."""
    rows = jnp.zeros((32_769, 3)).at[:, 0].set(jnp.arange(32_769))
    matrix = jnp.eye(3)
    squares = jax.jit(jax.vmap(lambda row: jnp.sum((matrix @ row) ** 2)))(rows)
    np.testing.assert_allclose(squares, np.arange(32_769.0) ** 2, rtol=1e-6)
