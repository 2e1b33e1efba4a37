"""What is kept of a program for a TPU is found by what was lowered: another program is compiled."""

from typing import Any

import compilation_cache
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding


def lowered(times: float) -> Any:
    pytest.importorskip("libtpu")
    place = SingleDeviceSharding(topologies.get_topology_desc("v5e:1x1", "tpu").devices[0])
    argument = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=place)
    return jax.jit(lambda x: times * (x @ x)).lower(argument)


@pytest.mark.slow
def test_a_program_for_a_tpu_is_compiled_once(tmp_path, monkeypatch):
    monkeypatch.setenv(compilation_cache.FOLDER, str(tmp_path))
    first = lowered(2.0).compile()
    assert isinstance(first, compilation_cache.KeptProgram)
    assert first.memory_analysis().argument_size_in_bytes == 256 * 256 * np.dtype(np.float32).itemsize
    assert "HloModule" in first.as_text()
    assert first.output_shardings.device_set  # not kept: asked of the program itself

    def compiled_again(*_, **__):
        raise AssertionError("compiled again")

    found_or_compiled: Any = jax.stages.Lowered.compile
    monkeypatch.setattr(found_or_compiled.__wrapped__, "__code__", compiled_again.__code__)
    again = lowered(2.0).compile()
    assert again.as_text() == first.as_text()
    assert again.memory_analysis() == first.memory_analysis()
    with pytest.raises(AssertionError, match="compiled again"):
        lowered(3.0).compile()
