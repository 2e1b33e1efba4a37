"""Who stays, from relations and block by block, is who a pass over all prompts in order would keep."""

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from eagle3_jax.prepare.beam.keeping import Fate, Relation, decide


def in_order(prompts: list[tuple[int, int]], near: set[tuple[int, int]]) -> list[Fate]:
    """The pass over all. Args: prompts: (identity, shingles) of each. near: which shingles are alike."""
    fates: list[Fate] = []
    for identity, shingles in prompts:
        kept = [prompt for prompt, fate in zip(prompts, fates, strict=False) if fate == Fate.KEPT]
        if identity in {other for other, _ in kept}:
            fates.append(Fate.EXACT)
        elif any((shingles, other) in near or shingles == other for _, other in kept):
            fates.append(Fate.NEAR)
        else:
            fates.append(Fate.KEPT)
    return fates


@pytest.mark.slow
@examples(200)
@given(st.data())
def test_it_equals_the_pass_in_order(data):
    count, kinds = data.draw(st.integers(1, 24)), data.draw(st.integers(1, 12))
    ids = st.integers(0, kinds - 1)
    # Shingles belong to one identity, an identity has up to three sets of them.
    drawn = data.draw(st.lists(st.tuples(ids, st.integers(0, 2)), min_size=count, max_size=count))
    prompts = [(identity, 3 * identity + variant) for identity, variant in drawn]
    alike = data.draw(st.sets(st.tuples(st.integers(0, 3 * kinds), st.integers(0, 3 * kinds)), max_size=40))
    near = alike | {(b, a) for a, b in alike}
    firsts = {shingles: prompts.index((identity, shingles)) for identity, shingles in prompts}
    rows = []
    for place, (identity, shingles) in enumerate(prompts):
        for other, first in firsts.items():
            if first >= place:
                continue
            if other == shingles:
                rows.append((place, first, Relation.COPY))
            elif other // 3 == identity:
                rows.append((place, first, Relation.SAME))
            if firsts[shingles] == place and (shingles, other) in near:
                rows.append((place, first, Relation.NEAR))
    relations = np.array(sorted(rows), np.int64).reshape(-1, 3)
    kept, found, start = np.ones(count, bool), [], 0
    while start < count:
        stop = data.draw(st.integers(start + 1, count))
        of_block = relations[(relations[:, 0] >= start) & (relations[:, 0] < stop)]
        found += decide(of_block, kept, start, stop).tolist()
        start = stop
    assert found == in_order(prompts, near)
    assert kept.tolist() == [fate == Fate.KEPT for fate in found]


def test_every_second_of_a_chain_stays():
    count = 1001
    chain = np.array([(place, place - 1, Relation.NEAR) for place in range(1, count)], np.int64)
    fates = decide(chain, np.ones(count, bool), 0, count)
    assert fates.tolist() == [Fate.KEPT, Fate.NEAR] * 500 + [Fate.KEPT]
