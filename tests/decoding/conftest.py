"""The toy, once a process."""

import numpy as np
import pytest
from toy import MAX_TOKENS, Toy, generated, make_toy


@pytest.fixture(scope="session")
def toy() -> Toy:
    return make_toy()


@pytest.fixture(scope="session")
def vanilla(toy: Toy) -> np.ndarray:
    """What the target answers to the texts without drafts."""
    return np.asarray(generated(toy.target, None).output[:, :MAX_TOKENS])
