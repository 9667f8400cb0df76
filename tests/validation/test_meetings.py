"""Ranks that share sequences meet; an order in which they deadlock is found, and who for whom."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chunkplan import validate
from chunkplan.validation.checks_schedule import ActionGraph, find_cycle, run_stages
from tests.support.plan_rows import Rows, tamper


def later_group_first(rows: Rows, rank: int) -> None:
    """The rank does all of chunks 5 and 6, group 4, before the chunks that it shares with all others."""
    for row in rows["schedule"]:
        if row["dp_rank"] == rank:
            last = [action for action in row["actions"] if action["chunk_id"] in (5, 6)]
            row["actions"] = last + [action for action in row["actions"] if action["chunk_id"] not in (5, 6)]


def test_ranks_that_meet_in_different_orders_are_named_with_what_each_waits_for(shared_plan: Path) -> None:
    tamper(shared_plan, lambda rows: later_group_first(rows, 7))
    [violation] = validate(shared_plan).violations
    assert (violation.invariant, violation.step, violation.dp_rank, violation.chunk_id) == ("acyclic", 0, 7, 5)
    assert violation.message == (
        "stage 0 is stuck at action 0, `forward` of chunk 5: a deadlock; it waits for rank 6, stage 0 at "
        "`forward_kv` of chunk 0, which waits for rank 7, stage 0"
    )


def test_ranks_that_all_meet_in_another_order_are_not_in_each_others_way(shared_plan: Path) -> None:
    """Group 4 is that of ranks 6 and 7 alone: when both do it first, the others wait a little longer."""
    tamper(shared_plan, lambda rows: [later_group_first(rows, rank) for rank in (6, 7)] and None)
    assert validate(shared_plan).ok


def halve(rows: Rows, rank: int) -> None:
    for row in rows["schedule"]:
        if row["dp_rank"] == rank:
            halves = [(action, half) for action in row["actions"] for half in ("backward_input", "backward_weight")]
            row["actions"] = [
                {**action, "op": half if action["op"] == "backward" else action["op"]}
                for action, half in halves
                if action["op"] == "backward" or half == "backward_input"
            ]


def test_gradients_of_weights_alone_need_no_meeting_but_halves_meet_halves(shared_plan: Path) -> None:
    def of_one(rows: Rows) -> None:
        halve(rows, 5)

    def of_all(rows: Rows) -> None:
        for rank in (0, 1, 2, 3, 4, 6, 7):
            halve(rows, rank)
        for row in rows["schedule"]:  # and each rank gets these done when it pleases
            if row["dp_rank"] % 2:
                late = [action for action in row["actions"] if action["op"] == "backward_weight"]
                late = [action for action in late if action["chunk_id"] < 5]
                row["actions"] = [action for action in row["actions"] if action not in late] + late

    tamper(shared_plan, of_one)
    [violation] = validate(shared_plan).violations
    assert (violation.invariant, violation.dp_rank, violation.chunk_id) == ("acyclic", 5, 2)
    assert "does `backward_input` of chunk 2, with `backward` on rank 0" in violation.message
    tamper(shared_plan, of_all, k=8)
    assert validate(shared_plan).ok


@given(st.data(), st.integers(1, 4), st.integers(1, 2))
def test_stages_that_meet_end_where_they_do_one_after_another(data: st.DataObject, num_ranks: int, pp: int) -> None:
    """Each stage does some meetings with the same stage of other ranks; those of the second wait for the first's."""
    meetings = data.draw(st.lists(st.sets(st.integers(0, num_ranks - 1), min_size=1), max_size=5))
    stages = [
        data.draw(st.permutations([number for number, ranks in enumerate(meetings) if rank in ranks]))
        for rank in range(num_ranks)
        for _ in range(pp)
    ]
    offsets = np.cumsum([0, *map(len, stages)])
    reached, done = [0] * len(stages), set()
    moving = True
    while moving:
        moving = False
        for number, ranks in enumerate(meetings):
            for half in range(pp):
                members = [rank * pp + half for rank in ranks]
                there = all(stages[i][reached[i] : reached[i] + 1] == [number] for i in members)
                if there and (half == 0 or (number, half - 1) in done):
                    done.add((number, half))
                    moving = True
                    for i in members:
                        reached[i] += 1
    waits_for = [
        offsets[i - 1] + stages[i - 1].index(number) if i % pp else -1 for i, own in enumerate(stages) for number in own
    ]
    graph = ActionGraph(
        offsets=offsets,
        unit=np.zeros(len(stages), np.int64),
        waits_for=np.array(waits_for, np.int64),
        meeting=np.array([number * pp + i % pp for i, own in enumerate(stages) for number in own], np.int64),
    )
    found = run_stages(graph)
    assert found.tolist() == [start + ended for start, ended in zip(offsets[:-1].tolist(), reached, strict=True)]
    if (found < offsets[1:]).any():
        cycle = find_cycle(graph, found)
        for one, other in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
            assert found[one] < offsets[one + 1] and found[other] < offsets[other + 1]
            at_link = one // pp == other // pp and waits_for[found[one]] >= found[other]
            assert at_link or graph.meeting[found[one]] in graph.meeting[found[other] : offsets[other + 1]]
