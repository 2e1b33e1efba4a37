"""SmolLM2 under schemas of many kinds: every answer that ended is a value of its schema, with drafts."""

import json
import random
from typing import Any

import pytest

from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.decoding.structured.params import StructuredOutputsParams

NAMES = "name age city title price count tags status email date notes score items owner active".split()
WORDS = "red green blue small large new used open closed cat dog bird".split()


def value(rng: random.Random, depth: int) -> dict[str, Any]:
    """Draws a schema; containers are few and end soon, so that answers do."""
    low = rng.randint(-20, 50)
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": rng.randint(4, 20)},
        {"type": "string", "pattern": rng.choice(["^[A-Z]{2}[0-9]{3}$", "^(?:id|no)-\\d{1,4}$", "^[a-z]{3,8}$"])},
        {"type": "string", "format": rng.choice(["date", "date-time", "uuid", "ipv4"])},
        {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)},
        {"type": "number", "exclusiveMinimum": low, "maximum": low + 10},
        {"type": "boolean"},
        {"enum": [*rng.sample(WORDS, 3), None, 7]},
        {"const": rng.choice(WORDS)},
        {"anyOf": [{"type": "null"}, {"type": "string", "minLength": 1, "maxLength": 8}]},
        {"$ref": "#/$defs/point"},
    ]
    if depth:
        kinds += [record(rng, depth - 1), record(rng, depth - 1)]
        kinds += [{"type": "array", "items": value(rng, depth - 1), "minItems": rng.randint(0, 2), "maxItems": 3}] * 2
        kinds += [{"type": "array", "prefixItems": [value(rng, 0), value(rng, 0)], "items": False, "minItems": 2}]
        tagged = [
            {"type": "object", "properties": {"kind": {"const": word}, "x": value(rng, 0)}, "required": ["kind", "x"]}
            for word in rng.sample(WORDS, 2)
        ]
        kinds += [{"oneOf": tagged}]
    return rng.choice(kinds)


def record(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 4))
    required = rng.sample(names, rng.randint(0, len(names)))
    found = {"type": "object", "properties": {name: value(rng, depth) for name in names}, "required": required}
    return found | ({"additionalProperties": False} if rng.random() < 0.7 else {})


def schemas(count: int) -> list[dict[str, Any]]:
    rng, point = random.Random(0), {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}
    return [record(rng, rng.randint(1, 2)) | {"$defs": {"point": point}} for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, pytest.param(300, marks=pytest.mark.long)])
def test_every_finished_answer_is_a_value_of_its_schema(count):
    jsonschema: Any = pytest.importorskip("jsonschema")
    engine = Engine.load("smollm2-135m-instruct", weights="stored", batch_size=8, max_length=768, structured_mib=256)
    every = schemas(count)
    prompts = [f"Answer with JSON of this schema: {json.dumps(schema)}"[:600] for schema in every]
    params = [
        SamplingParams(max_tokens=400, temperature=i % 2, seed=i, structured=StructuredOutputsParams(json=schema))
        for i, schema in enumerate(every)
    ]
    outputs = engine.generate(prompts, params)
    for schema, output in zip(every, outputs, strict=True):
        assert output.error is None
        if output.finish_reason == "stop":
            jsonschema.validate(json.loads(output.text), schema)
    assert sum(output.finish_reason == "stop" for output in outputs) >= 0.9 * count
    assert sum(sum(output.stats.accepted_per_position) for output in outputs) > 0
