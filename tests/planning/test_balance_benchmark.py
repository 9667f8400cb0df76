"""The benchmark of one step: every entry plans, and ours breaks nothing and is not beaten."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.balance.__main__ import entries, is_best, is_faultless, measure
from benchmarks.balance.instances import LENGTHS, MODELS, Step
from benchmarks.balance.scoring import score
from chunkplan.planning.step import plan_step
from tests.support.places import ROOT

SMALL = [
    Step("whole", "mixture", 8, 8_192, 1, MODELS[1]),
    Step("whole", "sample", 8, 8_192, 4, MODELS[0]),
    Step("shared", "sample", 8, 8_192, 1, MODELS[1]),
    Step("shared", "mixture", 8, 32_768, 4, MODELS[2]),
]

HASHES = {"chats": "50f0d03f111353be", "mixture": "660268e153d3228d", "sample": "bba4667e23f58e8c"}


def test_lengths_are_frozen() -> None:
    """Figures of other versions can be compared only where the steps are the same."""
    found = {path.stem: sha256(path.read_bytes()).hexdigest()[:16] for path in LENGTHS.glob("*.txt")}
    assert found == HASHES


def test_an_entry_is_a_small_file_and_one_that_is_missing_says_what() -> None:
    found, missing = entries()
    paths = list((ROOT / "benchmarks" / "balance" / "entries").glob("[a-z]*.py"))
    assert found.keys() | missing.keys() == {path.stem for path in paths} and all(missing.values())
    assert found.keys() >= {"chunkplan_whole", "chunkplan_shared", "transformers"}
    assert max(path.read_text(encoding="utf-8").count("\n") for path in paths) <= 40


@pytest.mark.parametrize("step", SMALL, ids=lambda step: step.name)
def test_ours_has_no_fault_and_is_not_beaten(step: Step) -> None:
    """By any entry that is installed, waiting after each round and at the end; no plan is below the bound."""
    found, _ = entries()
    rows = {name: measure(step, entry) for name, entry in found.items() if step.track == entry.TRACK}
    ours = f"chunkplan_{step.track}"
    assert is_faultless(rows[ours])
    assert is_best(rows, ours, "after_step") and is_best(rows, ours, "after_rounds")
    for row in rows.values():
        assert not is_faultless(row) or min(row["after_step"], row["after_rounds"]) >= 1


def test_faults_are_counted() -> None:
    step = SMALL[0]
    everything = list(range(len(step.lengths)))
    above = score(step, [[everything, *([] for _ in range(7))]])
    assert (above.broken_caps, above.dropped_tokens, above.unequal_counts) == (1, 0, 1)
    part = score(step, [[[rank] for rank in range(8)]])
    assert (part.broken_caps, part.unequal_counts) == (0, 0)
    assert part.dropped_tokens == sum(step.lengths[8:])


@given(st.integers(0, 2**32), st.sampled_from([2, 8]), st.sampled_from([1, 4]))
def test_micro_batches_that_ranks_do_at_a_time_are_alike(seed: int, dp: int, pp: int) -> None:
    """Waiting after each round takes at most a tenth longer than waiting at the end, whatever is left at the end."""
    lengths = np.random.default_rng(seed).lognormal(6.5, 1, 64 * dp).astype(int).clip(16, 8000)
    work = lengths * 24_576 + lengths**2
    found = plan_step(lengths, dp=dp, cap=8192, micro_batches="fewest", split="none", cp="off", pp=pp)
    times = np.array([[work[ids].sum() for ids in found.sequences(rank)] for rank in range(dp)])
    assert times.max(axis=0).sum() <= 1.1 * times.sum(axis=1).max()
