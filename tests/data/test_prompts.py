"""The packaged prompts: enough, distinct, clean."""

import collections

import pytest

from eagle3_jax.data import filters, personal, sources
from eagle3_jax.data.duplicates import Duplicates, signature


@pytest.mark.slow
def test_packaged_prompts_are_many_distinct_and_clean():
    """At least fifty of each category, which come in turn; those of long context are long; nothing is filtered."""
    prompts = [record for record in sources.packaged() if isinstance(record, dict)]
    counts = collections.Counter(prompt["category"] for prompt in prompts)
    assert set(counts) == {"code", "chat", "long_context", "math", "multilingual"} and min(counts.values()) >= 50
    assert len({prompt["category"] for prompt in prompts[:5]}) == 5
    assert len({prompt["id"] for prompt in prompts}) == len(prompts)
    duplicates = Duplicates(near=0.8)
    for prompt in prompts:
        messages = prompt["messages"]
        assert [message["role"] for message in messages] == ["user"]
        if prompt["category"] == "long_context":
            assert 150 <= len(filters.content(messages).split()) <= 600
        assert filters.refuse(messages, max_chars=8000) is None
        assert filters.redact(messages, personal.redact) == (messages, {})
        assert duplicates.check(filters.content_hash(messages), lambda: signature(messages, 0.8)) is None  # noqa: B023
