"""Who dies, stops or is late in the middle of an exchange is named, with the step, the sequence and the page."""

from __future__ import annotations

import json
import re

import pytest
from torch.distributed import HashStore

from chunkplan import PlanConfig, build
from chunkplan_runtime.failures.watchdog import Heartbeat
from chunkplan_runtime.layout import Activity
from tests.runtime.failures.test_watchdog import END_IT, RESUME, WHY, Outcomes
from tests.support.analyses import write_analysis
from tests.support.shared_plans import given_blocks


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, tiny_config, random_sequences):
    """Of a step with one sequence of 42 tokens in chunks of 6 a process, of which one has activations at a time."""
    folder = tmp_path_factory.mktemp("faults")
    write_analysis(folder / "analysis", random_sequences([42], seed=4))
    for name, block in {"heads-2": (0, 2, 2), "pages-3": (0, 3, 1)}.items():
        with given_blocks({42: block}):
            config = PlanConfig(chunk_size=6, k=1, dp=block[1], cp="auto", global_batch=1)
            build(folder / "analysis", folder / name, config, workers=1)
    (folder / "config.json").write_text(json.dumps(tiny_config("qwen2")))
    return Outcomes(folder, cases="tests.support.exchange_fault_cases")


HEADS = r"exchanging heads of tokens \d+ to \d+ of sequence 0 in layer \d with"
PAGE = r"fetching the page of tokens \d+ to \d+ of sequence 0 from"
SUMS = r"adding up gradients of the page of tokens \d+ to \d+ of sequence 0 with"


ANY = r"\w+"


def at(rank, action):
    return rf"step 0, rank {rank}, in the {action} of chunk \d"


@pytest.mark.soak
@pytest.mark.parametrize("action", ["forward", "backward"])
def test_who_dies_among_those_that_share_heads_is_named_with_what_the_other_waits_for(outcomes, action):
    assert outcomes.codes(f"heads-{action}-kill") == [1, -9]
    kind = "forward(_kv)?" if action == "forward" else action
    expected = (
        r"error: process 1 of 2 \(data parallel\) died at step 0: nothing heard of it for 2 s"
        rf"(; last heard of in {at(1, ANY)}(, {HEADS} process 0)?)?"
        rf"; process 0 waits for it in {at(0, kind)}, {HEADS} process 1\n" + re.escape(WHY)
    )
    assert re.fullmatch(expected, outcomes.printed(f"heads-{action}-kill"))


@pytest.mark.soak
def test_who_dies_among_those_that_share_pages_is_named_with_all_that_wait_for_it(outcomes):
    assert outcomes.codes("pages-forward-kill") == [1, 1, -9]
    assert re.search(
        r"^error: process 2 of 3 \(data parallel\) died at step 0: nothing heard of it for 2 s"
        rf".*; process 0 waits for it in {at(0, 'forward(_kv)?')}, {PAGE} processes 1, 2; so does process 1\n"
        + re.escape(WHY),
        outcomes.printed("pages-forward-kill"),
    )


@pytest.mark.soak
def test_the_process_with_the_store_is_named_with_the_gradients_that_another_waits_for(outcomes):
    assert outcomes.codes("sums-backward-kill") == [-9, 1, 1]
    assert re.search(
        r"^error: process 0 of 3 \(data parallel\) died at step 0: its store closed the connection"
        rf".*; process (1 waits for it in {at(1, 'backward')}, {SUMS} processes 0, 2"
        rf"|2 waits for it in {at(2, 'backward')}, {SUMS} processes 0, 1)\n" + re.escape(WHY),
        outcomes.printed("sums-backward-kill"),
    )


@pytest.mark.soak
def test_who_is_suspended_is_named_with_what_the_others_wait_for(outcomes):
    assert outcomes.codes("pages-forward-stop") == [1] * 3
    error, hint = outcomes.printed("pages-forward-stop").splitlines()
    assert re.fullmatch(
        r"error: process 2 of 3 \(data parallel\) is suspended at step 0 \(stopped by a signal\): "
        rf"nothing heard of it for 2 s.*; process 0 waits for it in {at(0, ANY)}, {PAGE} processes 1, 2"
        r"; so does process 1",
        error,
    )
    assert re.fullmatch(END_IT + re.escape(RESUME), f"{hint}\n")


@pytest.mark.soak
def test_who_is_late_is_waited_for_with_a_warning_that_names_it(outcomes):
    """It says itself that it waits for nobody."""
    assert outcomes.codes("heads-forward-sleep") == [0, 0]
    late, other = (
        rf"^warning: process {rank} of 2 \(data parallel\) has not moved for 500.0 ms: {at(rank, ANY)}"
        for rank in range(2)
    )
    printed = outcomes.printed("heads-forward-sleep")
    assert re.search(rf"{other}, {HEADS} process 0$", printed, re.M)
    assert re.search(rf"{late}$", printed, re.M)


def test_whoever_finds_a_process_lost_knows_who_waits_for_it():
    """All but process 0 hear of that one alone, until they have something to say."""
    store = HashStore()
    beats = [Heartbeat(store, rank, 3) for rank in range(3)]
    beats[1].activity = lambda: Activity("exchanging heads of sequence 7 with process 0", (0,))
    for beat in beats:
        beat.exchange()
    assert 1 not in beats[2].activities()
    beats[2].read(range(3))
    assert beats[2].activities()[1] == Activity("exchanging heads of sequence 7 with process 0", (0,))
    late = Heartbeat(HashStore(), 0, 2)
    late.read(range(2))
    assert late.activities().keys() == {0}, "one that has not begun says nothing"
