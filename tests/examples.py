"""How many examples a property is tried with."""

import hypothesis


def examples(number: int) -> hypothesis.settings:
    """`number` of them every day, five times as many in `tools/test.sh long`, whose profile has 500 instead of 100."""
    profile = hypothesis.settings.default
    assert profile is not None
    return hypothesis.settings(max_examples=number * profile.max_examples // 100)
