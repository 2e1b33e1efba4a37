"""Arguments of any kind: each is refused at once by its name, or answered; no other request notices."""

import dataclasses
import types
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_heads
from examples import examples
from flax import nnx
from hypothesis import example, given
from hypothesis import strategies as st

from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.models.families.llama import Llama

VOCABULARY = 448
ASKED = SamplingParams(max_tokens=6, ignore_eos=True)
NUMBERS = [-(2**63), -1, 0, 1, 7, VOCABULARY, 2**32, 10**400, 0.5, 1.5, -0.0, 1e300, float("nan"), float("inf")]
PLAIN = st.sampled_from([None, True, False, *NUMBERS, *map(np.int64, (0, 3)), np.float32(0.5), np.bool_(True)])
PLAIN |= st.text(max_size=5) | st.sampled_from(["\ud800", "1", b"1", object(), object, ASKED, range(3), 1j])
ARRAYS = st.sampled_from(
    [np.array(1), np.array([1, 2]), np.array([[1, 2]]), np.array([0.5]), np.array(["a"]), np.ones(0)]
)
NESTED = st.recursive(
    PLAIN | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(
            st.sampled_from(["role", "content", "tool_calls", "a"]) | st.integers(0, 5), inner, max_size=3
        )
    ),
    max_leaves=6,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "x"]) | NESTED, "content": st.text("ab") | NESTED},
    optional={"tool_calls": NESTED, "name": NESTED},
)
PROMPTS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20) | st.lists(MESSAGE, max_size=3) | NESTED
FIELDS = st.fixed_dictionaries({}, optional={field.name: NESTED for field in dataclasses.fields(SamplingParams)})


@pytest.fixture(scope="module")
def engine() -> Engine:
    model = Llama(tiny.llama_config(vocab_size=VOCABULARY), rngs=nnx.Rngs(0))
    return Engine(model, tiny.make_tokenizer(), batch_size=2, max_length=64, page_size=16)


@pytest.fixture(scope="module")
def alone(engine) -> list[int]:
    return engine.generate([[1, 2, 3]], ASKED)[0].token_ids


@pytest.mark.slow
@examples(50)
@example([4, 5], {}, {"sample": "1"})
@given(
    PROMPTS,
    FIELDS,
    st.fixed_dictionaries(
        {}, optional={"params": NESTED, **dict.fromkeys(("timeout", "sample", "drafts", "adapt"), NESTED)}
    ),
)
def test_a_caller_s_mistake_is_its_own(engine, alone, prompt, fields, options):
    neighbour = engine.submit([1, 2, 3], ASKED)
    next(iter(neighbour))
    try:
        options = {"params": SamplingParams(**{"max_tokens": 3} | fields)} | options
        request = engine.submit(prompt, **options)
    except ValueError as error:
        assert "expected" in str(error) or "refuses" in str(error)
    else:
        assert request.result().error is None
    assert neighbour.result().token_ids == alone and engine.stats().running == 0


def test_what_is_no_argument_of_an_engine_is_refused_by_its_name(engine):
    config = tiny.llama_config(vocab_size=VOCABULARY, aux_layers=(0, 1, 3))
    model, head = Llama(config, rngs=nnx.Rngs(0)), tiny_heads.make_draft(target=config)

    def make(draft: Any = None, **options: Any) -> Engine:
        return Engine(model, tiny.make_tokenizer(), draft, max_length=32, page_size=16, **options)

    drafting: Any = make(head)
    wrong = []
    asked = {
        "adapt": [lambda x=x: make(head, adapt=x) for x in ({}, True, "folder")],
        "memory_fraction": [lambda x=x: make(memory_fraction=x) for x in ("0.5", 0, 1.0, True, float("nan"))],
        "simulated_acceptance": [lambda: make(head, simulated_acceptance="0.5")],
        "prefix_cache": [lambda: make(prefix_cache="no")],
        "sample_drafts": [lambda: make(head, sample_drafts=None)],
        "timeout": [lambda x=x: engine.submit([1], timeout=x) for x in ("30", 0, float("nan"), True)],
        "sample": [lambda x=x: engine.submit([1], sample=x) for x in ("1", 1.5, True)],
        "drafts": [lambda: engine.submit([1], drafts="no")],
        "prompt": [lambda x=x: engine.submit(x) for x in (np.array(1), np.array([[1, 2]]), types.MappingProxyType({}))],
        "draft": [lambda x=x: drafting.replace_draft(x) for x in (None, "folder", head.head)],
    }
    for field, works in asked.items():
        for work in works:
            with pytest.raises(ValueError, match=rf"(?s)^{field}[^:]*: got .*expected") as found:
                work()
            wrong += ["\n" in str(found.value)]
    assert len(wrong) >= 20
