"""One step planned in memory: it is the step that `build` plans, and whole sequences fill every rank alike."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import chunkplan
from chunkplan.config.plan import PlanConfig
from chunkplan.errors import ChunkplanError, DataError, UsageError
from chunkplan.packing import pack_lengths
from chunkplan.planfile.load import evaluation_folder
from chunkplan.planning.step import plan_step
from chunkplan.validation.validate import validate
from tests.support.plan_rows import tamper


@pytest.mark.parametrize(
    "options",
    [
        {"dp": 3},
        {"dp": 4, "cp": "auto", "k": 2},
        {"dp": 2, "pp": 2},
        {"dp": 2, "split": "none", "micro_batches": "fewest", "cap": 4000},
    ],
    ids=str,
)
def test_a_step_is_the_one_that_a_plan_of_its_sequences_has(tmp_path: Path, options: dict[str, Any]) -> None:
    lengths = np.random.default_rng(0).permutation(np.r_[np.arange(5, 200, 7), 900, 3000])
    np.save(tmp_path / "lengths.npy", lengths)
    options = {"cap": 256, **options}
    found = plan_step(lengths, **options)
    config = {name: value for name, value in options.items() if name != "cap"}
    plan = PlanConfig(chunk_size=options["cap"], global_batch=lengths.size, **{"k": 1, **config})
    chunkplan.build(tmp_path / "lengths.npy", tmp_path / "plan", plan)
    (built,) = chunkplan.load_plan(tmp_path / "plan").iter_steps()
    assert found == built
    assert not validate(tmp_path / "plan").violations


step_lengths = st.lists(st.integers(1, 40), min_size=1, max_size=24)


@example(
    [2, *[28] * 6], 2, 29, False, "fewest"
)  # no two go into one micro-batch: seven, and 2 x 4 would leave one empty
@given(step_lengths, st.integers(1, 5), st.integers(8, 60), st.booleans(), st.sampled_from(["fewest", 1, 2, 3]))
def test_every_rank_has_as_many_micro_batches_within_the_cap(
    lengths: list[int], dp: int, cap: int, equal: bool, micro_batches: int | str
) -> None:
    options = {"dp": dp, "cap": cap, "micro_batches": micro_batches, "equal_sequences": equal}
    try:
        step = plan_step(lengths, **options)
    except DataError as error:
        assert "though no bound" in error.message or not _is_possible(lengths, **options)
        return
    ranks = [step.sequences(rank) for rank in range(dp)]
    assert sorted(each for rank in ranks for ids in rank for each in ids) == list(range(len(lengths)))
    assert all(0 < sum(lengths[each] for each in ids) <= cap for rank in ranks for ids in rank)
    assert len({len(rank) for rank in ranks}) == 1 and micro_batches in ("fewest", len(ranks[0]))
    assert not equal or len({sum(map(len, rank)) for rank in ranks}) == 1
    assert step == plan_step(lengths, **options)


def _is_possible(lengths: list[int], dp: int, cap: int, micro_batches: int | str, equal_sequences: bool) -> bool:
    """Whether some assignment keeps to the counts and the cap, by trying all of few sequences; of many whether a
    packing shows that there are enough micro-batches."""
    most = len(lengths) // dp if micro_batches == "fewest" else int(micro_batches)
    if max(lengths) > cap or len(lengths) < dp or (equal_sequences and len(lengths) % dp):
        return False
    counts = range(1, most + 1) if micro_batches == "fewest" else [most]
    if sum((dp * count) ** len(lengths) for count in counts) > 20_000:
        num_bins = pack_lengths(np.array(lengths), cap, "bfd").num_bins
        return any(num_bins <= dp * count <= len(lengths) for count in counts)
    return any(
        min(sums) > 0 and max(sums) <= cap and (not equal_sequences or len(set(sizes)) == 1)
        for count in counts
        for places in product(range(dp * count), repeat=len(lengths))
        for sums, sizes in [
            (
                np.bincount(places, weights=lengths, minlength=dp * count),
                np.bincount(np.array(places) // count, minlength=dp).tolist(),
            )
        ]
    )


@given(st.integers(0, 2**32), st.sampled_from([2, 8, 16]), st.booleans())
def test_ranks_are_even_where_no_sequence_outweighs_one(seed: int, dp: int, equal: bool) -> None:
    lengths = np.random.default_rng(seed).lognormal(7, 1, 64 * dp).astype(int).clip(200, 8000)
    step = plan_step(lengths, dp=dp, cap=lengths.sum(), micro_batches=1, equal_sequences=equal)
    assert step.predicted_us <= 1.03 * step.lower_bound_us


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([], {}, "there are no sequences"),
        ([5], {"targets": []}, "there are no targets"),
        ([5, 0], {}, r"lengths\[1\] is 0, expected 1"),
        ([5.5, 1], {}, "no list of whole numbers"),
        ([5, 70], {"split": "none"}, "sequence 1 has 70 tokens, above the cap of 64"),
        ([5], {"micro_batches": 1}, "1 sequences cannot give each of 2 ranks one"),
        ([5, 6, 7], {"micro_batches": 1, "equal_sequences": True}, "3 sequences cannot give each of 2 ranks as many"),
        ([60, 60, 60], {"micro_batches": 1}, "none may do, each of one sequence"),
        ([5, 6], {"equal_sequences": True}, "equal-sequences goes with micro-batches"),
        ([5, 6], {"micro_batches": 1, "split": "full"}, "micro-batches are of whole sequences"),
        ([5, 6], {"micro_batches": 1, "targets": [1]}, "1 targets of 2 lengths"),
        ([5, -1], {}, r"lengths\[1\] is -1, expected 1"),
        ([[5], [6, 7]], {}, "no list of whole numbers"),
        ([5, 6], {"cap": 64.5}, "chunk-size is 64.5, expected a number of tokens"),
        ([5, 6], {"cap": None}, "chunk-size is None, expected a number of tokens"),
        ([5, 6], {"dp": 2.5}, "dp is 2.5, expected a whole number from 1"),
        ([5, 6], {"dp": 0}, "dp is 0, expected a whole number from 1"),
        ([8, 8, 8], {"cap": 8, "micro_batches": "fewest"}, "do not go into 2 x fewest micro-batches: none may do"),
        ([5, 6], {"pp": 100}, "Qwen2.5-7B has 28 layers, too few for 100 stages"),
        ([5, 6], {"step": -1}, "step is -1"),
        ([5, 6], {"cost": "h100"}, "cost is str"),
        ([5, 6], {"epochs": 2}, "plan_step has no option 'epochs'"),
    ],
)
def test_what_cannot_be_planned_says_why(lengths: list[int], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ChunkplanError, match=message) as raised:
        plan_step(lengths, **{"dp": 2, "cap": 64, **options})
    assert raised.value.hint
    assert isinstance(raised.value, DataError | UsageError)


@pytest.mark.parametrize(("number", "dp", "equal"), [(9, 8, True), (5, 8, True), (12, 7, True), (3, 4, False)])
def test_the_hint_of_sequences_that_do_not_go_into_ranks_works(number: int, dp: int, equal: bool) -> None:
    options: dict[str, Any] = {"cap": 64, "micro_batches": "fewest", "equal_sequences": equal}
    with pytest.raises(DataError, match=f"{number} sequences cannot give each of {dp} ranks") as raised:
        plan_step([5] * number, dp=dp, **options)
    [(sequences, ranks)] = re.findall(r"give a step \D*(\d+).* use dp (\d+)", raised.value.hint)
    plan_step([5] * number, dp=int(ranks), **options)
    plan_step([5] * int(sequences), dp=dp, **options)
    assert not equal or all(number % more for more in range(int(ranks) + 1, dp + 1))


@pytest.mark.parametrize(
    ("built", "claimed", "message"),
    [
        ({"micro_batches": "fewest"}, {"micro_batches": 2}, "1 chunks, expected 2"),
        ({"micro_batches": 1}, {"micro_batches": 1, "equal_sequences": True}, r"unequal \[1 3\] sequences"),
        ({"split": "none", "equal_chunks": True}, {"micro_batches": 1, "equal_chunks": False}, "without a sequence"),
    ],
)
def test_a_plan_that_breaks_its_counts_is_refused(
    tmp_path: Path, built: dict[str, Any], claimed: dict[str, Any], message: str
) -> None:
    lengths = [40] if "split" in built else [40, 5, 6, 7]
    np.save(tmp_path / "lengths.npy", np.array(lengths))
    config = PlanConfig(chunk_size=64, k=1, dp=2, cp="off", global_batch=4, **built)
    chunkplan.build(tmp_path / "lengths.npy", tmp_path / "plan", config)
    tamper(tmp_path / "plan", lambda rows: None, split="none", **claimed)
    found = [violation.message for violation in validate(tmp_path / "plan").violations]
    assert any(re.search(message, each) for each in found), found


def test_held_out_sequences_are_planned_however_few_they_are(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.arange(5, 40))
    config = PlanConfig(chunk_size=64, k=1, dp=4, global_batch=16, micro_batches=4, holdout=3, last_batch="drop")
    chunkplan.build(tmp_path / "lengths.npy", tmp_path / "plan", config)
    for folder in (tmp_path / "plan", evaluation_folder(tmp_path / "plan")):
        assert validate(folder).ok
