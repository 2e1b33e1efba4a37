"""Parameters of a request: what is refused, and what is kept."""

import numpy as np
import pytest

from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.decoding.structured.params import StructuredOutputsParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("top_k", 2**31),  # an int32 on the device
        ("top_p", 1e-45),  # 0 as a float32 on the device, and so no token at all
        ("repetition_penalty", 1e-45),
        ("presence_penalty", 1e39),
        ("temperature", 1e39),
        ("logit_bias", {1: -1e39}),
        ("top_k", 2.0),
        ("temperature", "a"),
        ("temperature", True),
        ("min_p", 1.5),
        ("max_tokens", 0),
        ("min_tokens", 129),
        ("n", 0),
        ("ignore_eos", 1),
        ("skip_special_tokens", "no"),
        ("stop", [""]),
        ("stop", [3]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", "ab"),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {3: float("nan")}),
        ("logit_bias", dict.fromkeys(range(65), 1.0)),
        ("logprobs", -1),
        ("logprobs", 21),
        ("seed", -(2**63) - 1),
        ("seed", 2**63),
        ("seed", np.float32(1.0)),
        ("structured", {"json_object": True}),
    ],
)
def test_values_out_of_range_are_refused_by_name(field, value):
    params = SamplingParams()
    object.__setattr__(params, field, value)  # past the type checks of tests, which users' runs do not have
    with pytest.raises(ValueError, match=f"{field}: got .*expected"):
        params.__post_init__()


@pytest.mark.parametrize(
    ("field", "value", "held"),
    [
        ("temperature", np.float32(0.5), 0.5),
        ("max_tokens", np.int64(5), 5),
        ("ignore_eos", np.bool_(True), True),
        ("stop_token_ids", (np.int32(3),), (3,)),
        ("logit_bias", {np.int64(3): np.float32(0.5)}, {3: 0.5}),
    ],
)
def test_numbers_of_numpy_are_numbers(field, value, held):
    params = SamplingParams()
    object.__setattr__(params, field, value)
    params.__post_init__()
    got = getattr(params, field)
    assert (got, type(got)) == (held, type(held))


def test_a_seed_of_64_bits_is_one_of_32():
    """Small ones are kept as they are, as answers depend on them; others are spread."""
    small, large = [0, 7, 2**32 - 1], [-1, -2, -(2**63), 2**32, 2**32 + 7, 2**63 - 1]
    assert [SamplingParams(seed=seed).seed_bits for seed in small] == small
    spread = {SamplingParams(seed=seed).seed_bits for seed in (*small, *large)}
    assert len(spread) == 9 and all(0 <= bits < 2**32 for bits in spread)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "structured"),
        ({"json_object": True, "regex": "a"}, "structured"),
        ({"json_object": 1}, "json_object"),
        ({"regex": ""}, "regex"),
        ({"choice": "ab"}, "choice"),
        ({"choice": []}, "choice"),
        ({"choice": 1}, "choice"),
        ({"choice": ["a", ""]}, "choice"),
        ({"regex": "a", "after": ""}, "after"),
        ({"grammar": 'root ::= "a"'}, "grammar"),
    ],
)
def test_a_shape_is_refused_by_name(given, named):
    with pytest.raises(ValueError, match=f"{named}: got .*expected"):
        StructuredOutputsParams(**given)


def test_a_shape_decides_where_an_answer_ends():
    shape = StructuredOutputsParams(choice=["yes", "no"])
    assert shape.choice == ("yes", "no") and hash(shape) == hash(StructuredOutputsParams(choice=("yes", "no")))
    with pytest.raises(ValueError, match="ignore_eos: got .*beside structured"):
        SamplingParams(structured=shape, ignore_eos=True)
    with pytest.raises(ValueError, match="min_tokens: got .*beside structured"):
        SamplingParams(structured=shape, min_tokens=1)
