"""The table of engines: what is refused by it, what export says by it, and that the document repeats it."""

import dataclasses
import pathlib
from typing import Any

import pytest
from tiny_heads import TARGET, make_draft

from eagle3_jax.formats.eagle3 import BY_TARGET, EAGLE3
from eagle3_jax.formats.files import DraftFormatError
from eagle3_jax.formats.heads import save_draft
from eagle3_jax.formats.kinds import StoredHead
from eagle3_jax.models.families import FAMILIES
from eagle3_jax.models.layers import LinearScaling, RopeScaling, YarnScaling

YARN = YarnScaling(4.0, 1024, truncate=False)


def stored(layers: tuple[int, ...] = (2, 6, 9), **changes: Any) -> StoredHead:
    target = dataclasses.replace(TARGET, aux_layers=layers)
    return EAGLE3.stored(make_draft(target=target, **changes), target, "float32", None)


@pytest.mark.parametrize(
    ("form", "head", "text"),
    [
        ("sglang", {"head_dim": 4}, "served by SGLang 0.4.5, vLLM 0.21.0, sglang-jax cddbf6f and later"),
        (
            "vllm",
            {"fc_norm": True},
            "served by vLLM 0.22.0 and later; not by tpu-inference (to 0.32.0): `fc_norm` fails",
        ),
        ("speculators", {"fc_norm": True}, "served by vLLM 0.25.0 and later"),
        (
            "sglang",
            {"norm_before_fc": True, "rope_scaling": YARN},
            "served by SGLang 0.5.23, vLLM 0.21.0 and later; not by sglang-jax (to cddbf6f (2026-08)): "
            "`norm_before_fc` ignored, RoPE `yarn`, `truncate` false ignored",
        ),
        ("eagle", {"head_dim": 4}, "served by vLLM 0.21.0, EAGLE cb7e084, tpu-inference 0.32.0 and later"),
    ],
)
def test_the_engines_that_run_a_head_are_named(form: str, head: dict[str, Any], text: str) -> None:
    assert EAGLE3.served_by(stored(**head), form) == text


@pytest.mark.parametrize(
    ("form", "head", "message"),
    [
        (
            "sglang",
            {"norm_before_residual": True},
            r"norm_before_residual: got True, expected False; SGLang \(to 0.5.23\): ignored[\s\S]*"
            r"export.format: got 'sglang', expected vllm or speculators",
        ),
        ("eagle", {"head_dim": 4, "fc_norm": True}, r"fc_norm: got True, expected False; EAGLE \(to cb7e084"),
        (
            "sglang",
            {"rope_scaling": dataclasses.replace(YARN, attention_factor=1.2)},
            r"rope_scaling.attention_factor: got 1.2, expected none; SGLang \(to 0.5.23\): ignored",
        ),
        ("eagle", {"head_dim": 6}, r"head_dim: got 6, expected hidden_size / num_attention_heads = 16 / 4; EAGLE"),
        ("eagle", {"head_dim": 4, "layers": (1, 6, 9)}, r"target.aux_layers: got \(1, 6, 9\), expected the default"),
        ("sglang", {"layers": (0, 6, 9)}, r"neither 0 \(the embeddings\) nor 12 .*; SGLang \(to 0.5.23\): fails"),
    ],
)
def test_what_the_forms_engine_cannot_run_is_refused_before_a_file_is_there(
    tmp_path: pathlib.Path, form: str, head: dict[str, Any], message: str
) -> None:
    layers = head.pop("layers", (2, 6, 9))
    target = dataclasses.replace(TARGET, aux_layers=layers)
    with pytest.raises(DraftFormatError, match=message):
        save_draft(tmp_path / "head", make_draft(target=target, **head), target=target, dtype="float32", form=form)
    assert list(tmp_path.iterdir()) == []


def test_of_deepseek_engines_count_and_capture_other_layers() -> None:
    """SGLang counts from one only where the first is one; vLLM has no residual to add at block 0."""

    def of_deepseek(*layers: int) -> StoredHead:
        return dataclasses.replace(stored(layers), verifier={"architectures": ["DeepseekV3ForCausalLM"]})

    (text,) = EAGLE3.refusals(of_deepseek(3, 6, 9), "sglang")
    assert text.startswith("target.aux_layers: got (3, 6, 9), expected the default") and text.endswith("ignored")
    assert EAGLE3.refusals(of_deepseek(3, 6, 9), "vllm") == EAGLE3.refusals(stored((3, 6, 9)), "sglang") == []
    assert EAGLE3.refusals(of_deepseek(2, 7, 9), "sglang") == []
    (text,) = EAGLE3.refusals(of_deepseek(0, 6, 9), "vllm")
    assert text.startswith("target.aux_layers: got (0, 6, 9), expected boundaries from 1") and text.endswith("fails")
    assert "aux layer 0 of DeepSeek fails" in EAGLE3.served_by(of_deepseek(0, 6, 9), "vllm")
    assert EAGLE3.refusals(of_deepseek(2, 6, 12), "vllm") == []
    assert EAGLE3.served_by(of_deepseek(2, 6, 12), "vllm").startswith("served by vLLM 0.32.0 and later")


@pytest.mark.parametrize(
    ("form", "architecture", "text"),
    [
        (
            "sglang",
            "Gemma3ForCausalLM",
            "served by no engine; not by SGLang (to 0.5.23): Gemma3ForCausalLM ignored; "
            "not by vLLM (to 0.33.0): Gemma3ForCausalLM fails; "
            "not by sglang-jax (to cddbf6f (2026-08)): Gemma3ForCausalLM fails",
        ),
        ("speculators", "Gemma3ForConditionalGeneration", "served by no engine; not by vLLM (to 0.33.0): Gemma3ForCau"),
        (
            "eagle",
            "Qwen3ForCausalLM",
            "served by vLLM 0.21.0, EAGLE cb7e084 and later; not by tpu-inference (to 0.32.0): Qwen3",
        ),
    ],
)
def test_an_engine_that_cannot_draft_for_the_target_is_not_promised(form: str, architecture: str, text: str) -> None:
    """But the head is written: it drafts here."""
    head = dataclasses.replace(stored(head_dim=4), verifier={"architectures": [architecture]})
    assert EAGLE3.served_by(head, form).startswith(text)
    assert EAGLE3.refusals(head, form) == []


def test_every_family_but_llama_has_its_row() -> None:
    families = {family.config.architecture for family in FAMILIES} - {"LlamaForCausalLM"}
    assert families <= BY_TARGET.keys()


def test_export_warns_of_a_rope_that_tpu_inference_misreads() -> None:
    """For a form that it reads."""
    linear, llama3 = (stored(rope_scaling=x) for x in (LinearScaling(4.0), RopeScaling(8.0, 1.0, 4.0, 64)))
    assert EAGLE3.warning(linear, "vllm").startswith(
        "tpu-inference rotates by another RoPE, without an error (RoPE `linear`)"
    )
    assert EAGLE3.warning(linear, "sglang") == EAGLE3.warning(llama3, "vllm") == EAGLE3.warning(stored(), "vllm") == ""
