"""The draft vocabulary on disk: any comes back, and a wrong mapping is refused for what it is."""

import pathlib
from typing import Any

import numpy as np
import pytest
import tiny_heads
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from tiny_heads import TARGET, alter, make_draft

from eagle3_jax.formats.heads import load_draft, save_draft
from eagle3_jax.formats.stored import DraftFormatError

IDS = np.array(tiny_heads.IDS)
OTHER = np.isin(np.arange(50), [0, 3, 4, 17, 20, 48])


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"d2t": np.array([0, 3, 4, 7, 10, 12]), "t2d": None}, "as absolute ids do"),
        ({"d2t": np.array([0, 2, 2, 14, 16, -3]), "t2d": None}, "ascending, distinct"),
        ({"d2t": (IDS - np.arange(6)).astype(np.float32)}, "d2t: got dtype float32"),
        ({"t2d": OTHER}, "t2d: got other tokens"),
        ({"t2d": OTHER[:-1]}, "t2d: got shape [49], expected [50]"),
    ],
)
def test_a_vocabulary_mapping_that_is_wrong_is_refused(
    tmp_path: pathlib.Path, tensors: dict[str, Any], message: str
) -> None:
    saved = tmp_path / "head"
    save_draft(saved, make_draft(), target=TARGET, dtype="float32")
    alter(saved, tensors)
    with pytest.raises(DraftFormatError) as caught:
        load_draft(saved, target=TARGET)
    assert message in str(caught.value)


@pytest.mark.slow
@examples(15)
@given(ids=st.sets(st.integers(0, 49), min_size=1).map(sorted))
def test_any_vocabulary_comes_back(tmp_path_factory: pytest.TempPathFactory, ids: list[int]) -> None:
    folder = tmp_path_factory.mktemp("vocabulary") / "head"
    save_draft(folder, make_draft(ids=ids), target=TARGET, dtype="float32")
    assert load_draft(folder, target=TARGET).token_ids.tolist() == ids


def test_the_whole_vocabulary_needs_no_mapping(tmp_path: pathlib.Path) -> None:
    """vLLM has no place for one there, and ends."""
    save_draft(tmp_path / "head", make_draft(ids=list(range(50))), target=TARGET, dtype="float32")
    tensors, config = tiny_heads.read(tmp_path / "head")
    assert not {"d2t", "t2d"} & tensors.keys() and config["draft_vocab_size"] == 50
    alter(tmp_path / "head", {"d2t": np.zeros(50, np.int64)})  # as EAGLE's own may have it
    assert load_draft(tmp_path / "head", target=TARGET).token_ids.tolist() == list(range(50))
