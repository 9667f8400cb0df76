"""Doors of other frameworks: every sample once, caps and counts kept, ranks even; their own tests pass with ours."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkplan.adapters.balance import balance_in_fewest
from chunkplan.adapters.slime import build_dp_schedule
from chunkplan.adapters.verl import get_seqlen_balanced_partitions
from chunkplan.exporting.export import DOORS
from tests.support.places import ROOT

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


def schedule_of_slime(lengths: list[int], batch: int, virtual: int = 1, **settings: Any) -> object:
    """What slime gives for rollouts of one sample each, on two ranks; `virtual` stages go by two micro-batches."""
    names = ("use_dynamic_batch_size", "max_tokens_per_gpu", "micro_batch_size", "balance_data", "balance_by_flops")
    args = dict(zip(names, (True, 50, None, False, False), strict=True)) | settings
    parallel = {"dp_size": 2, "cp_size": 1, "vpp_size": virtual, "microbatch_group_size_per_vp_stage": 2}
    rollouts = list(range(len(lengths)))
    return build_dp_schedule(
        SimpleNamespace(**args), parallel, lengths, global_batch_size=batch, rollout_indices=rollouts
    )


@pytest.mark.parametrize(
    ("door", "given", "kind", "message"),
    [
        (get_seqlen_balanced_partitions, ([], 2, False), AssertionError, r"items:\[0\] < k_partitions:\[2\]"),
        (get_seqlen_balanced_partitions, ([3], 2, False), AssertionError, r"items:\[1\] < k_partitions:\[2\]"),
        (get_seqlen_balanced_partitions, ([3, 4, 5], 2, True), AssertionError, "3 % 2 != 0"),
        (get_seqlen_balanced_partitions, ([3, 4], 0, False), AssertionError, "no whole number from 1"),
        (get_seqlen_balanced_partitions, ([3, 4, 5], 1.5, False), AssertionError, "no whole number from 1"),
        (get_seqlen_balanced_partitions, ([3, -4, 5], 2, False), ValueError, "item 1 is -4, expected a number from 0"),
        (get_seqlen_balanced_partitions, ([3, float("nan")], 2, False), ValueError, "item 1 is nan"),
        (balance_in_fewest, ([3.5, 7], [3, 7], 2, 64), ValueError, "no list of whole numbers; give the tokens"),
        (schedule_of_slime, ([], 2), AssertionError, r"num_rollouts \(0\) < global_batch_size \(2\)"),
        (schedule_of_slime, ([3], 1), AssertionError, "at least one sample per rank"),
        (schedule_of_slime, ([3, 4, 5], 3, 2), AssertionError, "multiple of 2 micro-batches on 2 ranks; use a larger"),
        (schedule_of_slime, ([3, 0], 2), ValueError, r"lengths\[1\] is 0, expected 1 .*; leave out sequences"),
        (schedule_of_slime, ([3, -4], 2), ValueError, r"lengths\[1\] is -4, expected 1"),
        (schedule_of_slime, ([3, 4.5], 2), ValueError, "no list of whole numbers; give the tokens"),
        (schedule_of_slime, ([3, 4], 0), AssertionError, "global_batch_size is 0, expected 1 or more"),
    ],
)
def test_bad_input_is_refused_by_the_errors_of_the_framework(
    door: Callable[..., object], given: tuple[Any, ...], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        door(*given)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens_per_gpu": None}, "max_tokens_per_gpu is None, expected a whole number from 1"),
        ({"use_dynamic_batch_size": False}, "micro_batch_size is None, expected a whole number from 1"),
        ({"use_dynamic_batch_size": False, "micro_batch_size": 3}, "no multiple of 2 x 1; change global_batch_size"),
    ],
)
def test_settings_of_slime_that_do_not_go_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        schedule_of_slime([3, 4, 5], 3, **settings)


class Peer(NamedTuple):
    """A framework, in folders of CHUNKPLAN_PEERS of which the first is its checkout, with tests that need no GPU.

    `line` puts our door in place. `tests` are paths from the checkout, and names of cases in tests/adapters; `left_out`
    does not run, by `pytest -k`.
    """

    line: str
    folders: list[str]
    tests: list[str]
    left_out: str = ""


PEERS = {
    "slime": Peer(DOORS["slime"], ["slime"], ["tests/test_dp_schedule.py"]),
    "nemo_rl": Peer(DOORS["nemo-rl"], ["nemo_rl"], ["tests/unit/data/packing/test_algorithms.py", "cases_nemo_rl.py"]),
    # Left out: a test that asks for two GPUs.
    "verl": Peer(
        DOORS["verl"], ["verl"], ["tests/utils/test_seqlen_balancing.py", "cases_verl.py"], "distributed_params"
    ),
    "verl, dynamic context parallelism": Peer(
        DOORS["megatron"],
        ["verl", "megatron"],
        ["tests/utils/test_dynamic_cp_scheduler.py", "cases_verl_dynamic_cp.py"],
    ),
    "megatron": Peer(
        DOORS["megatron"],
        ["megatron"],
        ["tests/unit_tests/test_sequence_packing.py", "cases_megatron.py"],
        "wrap_dataloader or get_batch_on_this_rank or distributed or dcp_compatible",
    ),
    # Left out: a test of which bins prime-rl splits; ours have less in the heaviest one.
    "prime_rl": Peer(
        DOORS["prime-rl"],
        ["prime_rl", "prime_rl/src", "prime_rl/packages/prime-rl-configs/src"],
        ["tests/unit/orchestrator/test_batch.py", "cases_prime_rl.py"],
        "splits_heaviest_flop_bin",
    ),
    "megatron_bridge": Peer(
        "from chunkplan.adapters import megatron_bridge; megatron_bridge.install()",
        ["megatron_bridge", "megatron_bridge/src", "megatron"],
        ["tests/unit_tests/data/packing/test_parquet.py", "cases_megatron_bridge.py"],
    ),
    "torchtitan": Peer(DOORS["torchtitan"].splitlines()[0], ["torchtitan"], ["cases_torchtitan.py"]),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", PEERS)
def test_their_own_tests_and_ours_pass_with_ours_in_place(name: str, tmp_path: Path) -> None:
    """By the line that `export --to NAME` prints; what the checkouts import is on the path of Python."""
    peer = PEERS[name]
    folders = [Path(os.environ.get("CHUNKPLAN_PEERS", tmp_path), folder) for folder in peer.folders]
    if missing := [folder.name for folder in folders if not folder.is_dir()]:
        pytest.skip(f"no checkout of {missing[0]}: set CHUNKPLAN_PEERS to a folder that has it as {missing[0]}")
    (tmp_path / "in_place.py").write_text(f"import bare_packages\n{peer.line}\n")
    path = os.pathsep.join(
        map(str, [tmp_path, ROOT / "tests/support", *folders, os.environ.get("PYTHONPATH", ""), ROOT])
    )
    tests = [str(ROOT / "tests/adapters" / each) if each.startswith("cases_") else each for each in peer.tests]
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    options = ["-c", str(tmp_path / "pytest.ini"), "--noconftest", "-p", "in_place", "-p", "no:cacheprovider"]
    options += ["--import-mode=importlib", "-W", "ignore"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests, *(["-k", f"not ({peer.left_out})"] * bool(peer.left_out))],
        cwd=folders[0],
        env=os.environ | {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
