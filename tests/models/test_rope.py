"""RoPE sections of config.json: fields that are not read are refused unless they change nothing."""

import math
from typing import Any

import pytest

from eagle3_jax.models.families.deepseek_v3 import DeepseekV3Config
from eagle3_jax.models.layers import LinearScaling, LongScaling, YarnScaling
from eagle3_jax.models.rope import LONG, read_rope

# Of DeepSeek-R1-0528-Qwen3-8B, without its `attn_factor`.
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def test_a_factor_that_engines_read_differently_is_refused() -> None:
    problems: list[str] = []
    read_rope({"rope_theta": 1e6, "rope_scaling": YARN | {"attn_factor": 0.8782488562869419}}, problems)
    (problem,) = problems
    assert problem.startswith("rope_scaling.attn_factor: got 0.8782488562869419, expected none or 1: SGLang multiplies")
    # As the message says: what SGLang serves.
    theta, scaling = read_rope({"rope_theta": 1e6, "rope_scaling": YARN | {"attention_factor": 1.0}}, problems)
    assert isinstance(scaling, YarnScaling) and (theta, scaling.amplitude) == (1e6, 1.0)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (YARN | {"beta_fst": 16}, "rope_scaling.beta_fst: got 16, expected none"),
        (
            {"rope_type": "default", "partial_rotary_factor": 0.5},
            "rope_scaling.partial_rotary_factor: got 0.5, expected",
        ),
        ({"type": "linear", "factor": 2.0, "alpha": 1000}, "rope_scaling.alpha: got 1000, expected none"),
        (YARN | {"mscale": 1.0}, "rope_scaling.mscale: got 1.0, expected none"),
        # Of some targets, and of no head.
        (
            {"rope_type": "longrope"},
            "rope_scaling.rope_type: got 'longrope', expected 'default', 'linear', 'llama3' or",
        ),
        ({"rope_type": "dynamic", "alpha": 2.0}, "rope_scaling.rope_type: got 'dynamic', expected 'default', 'linear'"),
        ({"rope_type": "proportional"}, "rope_scaling.rope_type: got 'proportional', expected 'default', 'linear'"),
    ],
)
def test_what_is_not_read_is_refused(section: dict[str, Any], message: str) -> None:
    problems: list[str] = []
    read_rope({"rope_scaling": section}, problems)
    assert len(problems) == 1 and problems[0].startswith(message)


@pytest.mark.parametrize(
    ("section", "scaling"),
    [
        (YARN | {"attn_factor": 1.0, "extrapolation_factor": 1, "finetuned": True}, YarnScaling(4.0, 32768)),
        ({"type": "linear", "factor": 2.0, "original_max_position_embeddings": 64}, LinearScaling(2.0)),
        ({"rope_type": "default", "mrope_section": [16, 24, 24], "mrope_interleaved": True, "factor": 1.0}, None),
        ({"rope_type": "default", "alpha": None, "partial_rotary_factor": 1.0, "mscale": 1.0}, None),
    ],
)
def test_what_changes_nothing_may_be_declared(section: dict[str, Any], scaling: Any) -> None:
    problems: list[str] = []
    assert read_rope({"rope_scaling": section}, problems) == (10000.0, scaling) and problems == []


def test_a_part_of_the_head_that_is_declared_beside_the_section_is_refused_too() -> None:
    """As transformers 4 writes it: of a target and of a head."""
    problems: list[str] = []
    read_rope({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, problems)
    assert problems == ["partial_rotary_factor: got 0.5, expected none or 1"]
    for nothing in (None, 1, 1.0):
        problems = []
        assert (
            read_rope({"rope_theta": 1e4, "partial_rotary_factor": nothing}, problems) == (1e4, None) and not problems
        )


def test_deepseek_reads_its_own_factors() -> None:
    problems: list[str] = []
    scaled = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
    _, scaling = read_rope({"rope_scaling": scaled}, problems, DeepseekV3Config.scalings)
    assert problems == [] and getattr(scaling, "mscale_all_dim", None) == 1.0


def test_the_length_of_the_context_chooses_the_divisors_of_longrope() -> None:
    """For all of a text, however short: no cached key is rotated anew."""
    section = {"rope_type": "longrope", "short_factor": [1.0, 2], "long_factor": [3.0, 4.0]}
    section |= {"original_max_position_embeddings": 16}
    for factor, expected, amplitude in (
        (1.0, (1.0, 2), 1.0),
        (4.0, (3.0, 4.0), (1 + math.log(4) / math.log(16)) ** 0.5),
    ):
        problems: list[str] = []
        _, scaling = read_rope({"rope_scaling": section | {"factor": factor}}, problems, LONG)
        assert isinstance(scaling, LongScaling) and problems == []
        assert (scaling.divisors, scaling.amplitude) == (expected, pytest.approx(amplitude))
    for wrong in (2.0, [1.0, "2"]):
        problems = []
        read_rope({"rope_scaling": section | {"factor": 1.0, "short_factor": wrong}}, problems, LONG)
        assert len(problems) == 1 and problems[0].endswith("expected positive numbers")
