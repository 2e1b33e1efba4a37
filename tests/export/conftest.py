"""What the checks of exports in real vLLM share."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from eagle3_jax.export import check
from eagle3_jax.runs import disk


@pytest.fixture(scope="module")
def plain_answers_once() -> Iterator[None]:
    """Asks vLLM without a head once for each request: its answers do not depend on the head that is checked."""
    ask, known = check.ask, {}

    def answers(process: Any, python: Any, request: dict[str, Any]) -> dict[str, Any]:
        if request["draft"] is not None:
            return ask(process, python, request)
        weights = disk.digest(pathlib.Path(request["target"], "model.safetensors"))  # of copies of one folder
        of_heads = dict.fromkeys(("method", "algorithm", "refused_on_cpu"))
        key = json.dumps(request | of_heads | {"target": weights})
        if key not in known:
            known[key] = ask(process, python, request)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "ask", answers)
        patch.setenv("OMP_NUM_THREADS", "1")  # on busy cores a second thread waits more than it works
        yield
