"""Doors of other frameworks: every sample once, caps and counts kept, ranks even; their own tests pass with ours."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkplan.adapters.balance import balance_in_fewest
from chunkplan.adapters.slime import build_dp_schedule
from chunkplan.adapters.verl import get_seqlen_balanced_partitions

works = st.lists(st.integers(1, 10**15), min_size=1, max_size=60)


@given(works, st.integers(1, 9), st.booleans())
def test_partitions_take_every_item_once_and_are_even(work: list[int], parts: int, equal_size: bool) -> None:
    """The heaviest is within what longest-first guarantees of the bound (Graham 1969), where sizes are free."""
    if len(work) < parts or (equal_size and len(work) % parts):
        with pytest.raises(AssertionError, match=r"number of items|!= 0"):
            get_seqlen_balanced_partitions(work, parts, equal_size)
        return
    found = get_seqlen_balanced_partitions(work, parts, equal_size)
    assert sorted(each for part in found for each in part) == list(range(len(work)))
    assert all(part and part == sorted(part) for part in found) and len(found) == parts
    assert not equal_size or {len(part) for part in found} == {len(work) // parts}
    if not equal_size:
        descending = sorted(work, reverse=True)
        pair = sum(descending[parts - 1 : parts + 1]) if len(work) > parts else 0
        bound = max(sum(work) / parts, descending[0], pair)
        assert max(sum(work[each] for each in part) for part in found) <= 1.5 * bound + 1


@given(
    st.lists(st.integers(1, 99), min_size=1, max_size=50), st.integers(1, 4), st.integers(100, 300), st.integers(1, 3)
)
def test_micro_batches_keep_the_cap_and_are_a_multiple(lengths: list[int], ranks: int, cap: int, multiple: int) -> None:
    found = balance_in_fewest(lengths, lengths, ranks, cap, multiple=multiple)
    if found is None:
        assert len(lengths) < ranks * multiple * -(-max(sum(lengths) // (cap // 2 * ranks), 1) // multiple) + ranks
        return
    assert sorted(each for rank in found for places in rank for each in places) == list(range(len(lengths)))
    assert all(0 < sum(lengths[each] for each in places) <= cap for rank in found for places in rank)
    assert {len(rank) for rank in found} == {len(found[0])} and len(found[0]) % multiple == 0


def test_rollouts_stay_in_their_step_and_a_sample_over_the_cap_is_alone() -> None:
    lengths = [90, 10, 300, 40, 40, 20, 70, 30, 10, 10, 5]
    rollouts = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5]
    args = SimpleNamespace(
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=50,
        micro_batch_size=None,
        balance_data=False,
        balance_by_flops=False,
    )
    parallel = {"dp_size": 2, "cp_size": 2, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    samples, places, counts, sizes = build_dp_schedule(
        args, parallel, lengths, global_batch_size=2, rollout_indices=rollouts
    )
    assert sizes == [2, 2, 2] and [len(each) for each in places] == [sum(counts)] * 2
    firsts = np.cumsum([0, *counts])
    for step, (first, stop) in enumerate(pairwise(firsts.tolist())):
        batches = [
            [samples[rank][each] for each in places[rank][index]] for rank in (0, 1) for index in range(first, stop)
        ]
        assert sorted(each for batch in batches for each in batch) == [
            i for i, rollout in enumerate(rollouts) if rollout // 2 == step
        ]
        assert all(len(batch) == 1 or sum(lengths[each] for each in batch) <= 100 for batch in batches)


#: Of each framework: folders of its checkout that are imported, its tests that need no GPU, and those left out.
THEIRS = {
    "slime": (["."], ["tests/test_dp_schedule.py"], ""),
    "nemo_rl": (["."], ["tests/unit/data/packing/test_algorithms.py"], ""),
    "verl": (["."], ["tests/utils/test_seqlen_balancing.py"], "not distributed_params"),  # asks for two GPUs
    "megatron": (
        ["."],
        ["tests/unit_tests/test_sequence_packing.py"],
        "not wrap_dataloader and not get_batch_on_this_rank and not distributed and not dcp_compatible",
    ),
    # Left out: a test of which bins prime-rl splits; ours have less in the heaviest one.
    "prime_rl": (
        ["src", "packages/prime-rl-configs/src"],
        ["tests/unit/orchestrator/test_batch.py"],
        "not splits_heaviest_flop_bin",
    ),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", THEIRS)
def test_their_own_tests_pass_with_ours_in_place(name: str, tmp_path: Path) -> None:
    """The checkouts are folders of CHUNKPLAN_PEERS, named as here; what they import is on the path of Python."""
    checkout = Path(os.environ.get("CHUNKPLAN_PEERS", tmp_path), name)
    if not checkout.is_dir():
        pytest.skip(f"no checkout of {name}: set CHUNKPLAN_PEERS to a folder that has it as {name}")
    folders, tests, only = THEIRS[name]
    (tmp_path / "in_place.py").write_text(f"from chunkplan.adapters import {name}\n{name}.install()\n")
    own = [str(checkout / folder) for folder in folders]
    path = os.pathsep.join([str(tmp_path), *own, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "--noconftest", "-p", "in_place", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(
        [*command, *(["-k", only] if only else [])],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
