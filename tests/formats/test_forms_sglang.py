"""The SGLang form: what SGLang, SpecForge and vLLM read is there, in each one's counting."""

import dataclasses
import json
import pathlib
from typing import Any

import pytest
import tiny_heads
from tiny_heads import AUX_KEY, TARGET, alter, assert_same, make_draft

from eagle3_jax.formats.heads import load_draft, save_draft
from eagle3_jax.formats.stored import DraftFormatError


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> pathlib.Path:
    save_draft(tmp_path / "head", make_draft(), target=TARGET, dtype="float32")
    return tmp_path / "head"


def test_transformers_reads_the_config(saved: pathlib.Path) -> None:
    from transformers import LlamaConfig as HFConfig

    config = HFConfig.from_pretrained(saved)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert (config.head_dim, config.draft_vocab_size) == (6, 6)


def test_other_aux_layers_are_written_for_both_conventions(tmp_path: pathlib.Path) -> None:
    target = dataclasses.replace(TARGET, aux_layers=(1, 5, 8, 11))
    draft = make_draft(target=target)
    save_draft(tmp_path / "head", draft, target=target, dtype="float32")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config[AUX_KEY] == [1, 5, 8, 11]
    assert config["eagle_config"] == {AUX_KEY: [0, 4, 7, 10], "use_aux_hidden_state": True}
    assert load_draft(tmp_path / "head", target=target).head.config.aux_layers == (1, 5, 8, 11)
    alter(tmp_path / "head", {}, **{AUX_KEY: None})  # SGLang's part alone
    assert load_draft(tmp_path / "head", target=target).head.config.aux_layers == (1, 5, 8, 11)
    with pytest.raises(DraftFormatError, match=r"aux layers.*got \(1, 5, 8, 11\), expected \(2, 6, 9\)"):
        load_draft(tmp_path / "head", target=TARGET)
    alter(tmp_path / "head", {}, **{AUX_KEY: [1, 5, 8, 10]})
    with pytest.raises(DraftFormatError, match=r"eagle_config.*got \[0, 4, 7, 10\], expected \[0, 4, 7, 9\]"):
        load_draft(tmp_path / "head", target=target)


@pytest.mark.parametrize("layers", [(0, 6, 9), (2, 6, 12)])
def test_boundaries_that_sglang_cannot_capture_are_refused(tmp_path: pathlib.Path, layers: tuple[int, ...]) -> None:
    """SGLang adds the residual at the entry of blocks 0 to 11: there is none at 0, and no entry 12."""
    target = dataclasses.replace(TARGET, aux_layers=layers)
    expected = r"target\.aux_layers: got .*, expected boundaries 1 to 11: SGLang captures neither 0 .* nor 12"
    with pytest.raises(DraftFormatError, match=expected):
        save_draft(tmp_path / "head", make_draft(target=target), target=target, dtype="float32")
    assert list(tmp_path.iterdir()) == []


def test_a_shallow_target_whose_default_collides_has_its_layers_written(tmp_path: pathlib.Path) -> None:
    target = dataclasses.replace(TARGET, num_hidden_layers=4, aux_layers=(1, 2))
    save_draft(tmp_path / "head", make_draft(target=target), target=target, dtype="float32")
    assert json.loads((tmp_path / "head" / "config.json").read_text())[AUX_KEY] == [1, 2]


def test_the_first_names_of_the_aux_norms_are_taken(tmp_path: pathlib.Path) -> None:
    """SGLang still reads heads of `use_aux_norm`."""
    draft = make_draft(fc_norm=True)
    save_draft(tmp_path / "head", draft, target=TARGET, dtype="float32")
    held, _ = tiny_heads.read(tmp_path / "head")
    first = {f"aux_norm_{place}.weight": held[f"fc_norm.{i}.weight"] for i, place in enumerate(("low", "mid", "high"))}
    alter(tmp_path / "head", {f"fc_norm.{i}.weight": None for i in range(3)} | first, fc_norm=None, use_aux_norm=True)
    assert_same(load_draft(tmp_path / "head", target=TARGET), draft)


@pytest.mark.parametrize("form", ["sglang", "vllm"])
def test_a_norm_before_fc_is_read_in_eagle_config_too(tmp_path: pathlib.Path, form: str) -> None:
    """Where NVIDIA's heads have it; there it counts more than at top level."""
    draft = make_draft(norm_before_fc=True)
    save_draft(tmp_path / "head", draft, target=TARGET, dtype="float32", form=form)
    held, config = tiny_heads.read(tmp_path / "head")
    assert held["input_norm.weight"].shape == (48,) and config["norm_before_fc"] is True
    inner = config.get("eagle_config", {})
    alter(tmp_path / "head", norm_before_fc=False, eagle_config=inner | {"norm_before_fc": True})
    assert_same(load_draft(tmp_path / "head", target=TARGET), draft)
    alter(tmp_path / "head", norm_before_fc=True, eagle_config=inner | {"norm_before_fc": False})
    with pytest.raises(DraftFormatError, match="surplus tensor input_norm.weight"):
        load_draft(tmp_path / "head", target=TARGET)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("draft_vocab_size", None, "draft_vocab_size: missing"),
        ("norm_before_residual", True, "norm_before_residual: got True, expected False"),
        ("fc_norm", 1, "fc_norm: got 1, expected true or false"),
        (AUX_KEY, ["1"], f"{AUX_KEY}: got ['1'], expected a list of integers"),
    ],
)
def test_what_sglang_would_misread_is_refused(saved: pathlib.Path, field: str, value: Any, message: str) -> None:
    alter(saved, **{field: value})
    with pytest.raises(DraftFormatError) as caught:
        load_draft(saved, target=TARGET)
    assert message in str(caught.value)
