"""What a user imports."""

import subprocess
import sys

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
