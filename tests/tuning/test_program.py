"""The integer program finds the best choice there is."""

from __future__ import annotations

from itertools import pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

from chunkplan.tuning.program import Candidate, choose


@settings(max_examples=60)
@given(st.data())
def test_the_program_finds_what_trying_everything_finds(data: st.DataObject) -> None:
    """One candidate, one K for each length class, none larger for longer ones, the least time within the memory."""
    num_classes, num_ks, num_stages = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 3)), 2
    candidates = []
    for family in range(data.draw(st.integers(1, 3))):
        extra = [
            sorted(data.draw(st.lists(st.integers(0, 50), min_size=num_ks, max_size=num_ks)), reverse=True)
            for _ in range(num_classes)
        ]
        memory = [
            [[data.draw(st.integers(1, 9)) + place for _ in range(num_stages)] for place in range(num_ks)]
            for _ in range(num_classes)
        ]
        candidates.append(
            Candidate(
                family=family,
                rung=0,
                base_ns=1000.0 * data.draw(st.integers(1, 60)),
                extra_ns=tuple(tuple(1000.0 * value for value in row) for row in extra),
                stage_bytes=tuple(tuple(tuple(stages) for stages in row) for row in memory),
            )
        )
    budget = data.draw(st.integers(1, 11))
    best = {}
    for place, candidate in enumerate(candidates):
        for ks in product(range(num_ks), repeat=num_classes):
            fits = all(max(candidate.stage_bytes[c][k]) <= budget for c, k in enumerate(ks))
            if fits and all(before >= after for before, after in pairwise(ks)):
                time = candidate.base_ns + sum(candidate.extra_ns[c][k] for c, k in enumerate(ks))
                best[place] = min(time, best.get(place, time))
    found = choose(candidates, budget, len(candidates))
    times = [
        candidates[place].base_ns + sum(candidates[place].extra_ns[c][k] for c, k in enumerate(ks))
        for place, ks in found
    ]
    assert times == sorted(best.values())
