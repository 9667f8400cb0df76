"""A step whose ranks share chunks is simulated as the plan predicts it: all of them together, waiting for the last."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkplan.errors import DataError, UsageError
from chunkplan.operations import NOT_KEPT
from chunkplan.planfile.plan import Action, Plan, PlanStep
from chunkplan.schedule.actions import RECOMPUTE
from chunkplan.schedule.timeline import Simulation, waiting_of
from chunkplan.schedule.trace import trace_events
from chunkplan.simulation import compare_schedules, simulate_plan, simulate_ranks
from tests.support.small_plans import built, with_late_rank

LENGTHS = st.lists(st.integers(1, 12_000), min_size=2, max_size=9)


@settings(max_examples=30)
@given(LENGTHS, st.sampled_from([(2, 1), (4, 1), (6, 1), (8, 1), (2, 3), (4, 2)]), st.sampled_from([300, 2000]))
def test_a_simulated_step_ends_when_the_plan_says_and_its_times_add_up(
    lengths: list[int], ranks: tuple[int, int], chunk_size: int
) -> None:
    dp, pp = ranks
    with TemporaryDirectory() as folder:
        config = {"chunk_size": chunk_size, "k": 1, "dp": dp, "pp": pp, "global_batch": 5, "epochs": 1}
        plan = built(Path(folder), lengths, cp="auto", **config)
        for step in plan.iter_steps():
            found = simulate_ranks(plan, step, range(dp))
            for rank, simulation in found.items():
                check_rank(simulation, step, rank)
            check_meetings(step, found)


def check_rank(found: Simulation, step: PlanStep, rank: int) -> None:
    ends = found.ends[found.actions.stages[1:] - 1]
    predicted = [1e3 * step.schedule_us[rank, stage] for stage in range(found.pp)]
    np.testing.assert_allclose(ends, predicted, rtol=1e-6)
    assert found.lower_bound <= found.makespan and found.waits.min() >= 0
    times = zip(found.busy_per_stage, found.waiting_per_stage, found.waiting_for_ranks_per_stage, strict=True)
    for busy, waiting, for_ranks in times:
        assert min(waiting.values()) >= 0
        assert busy + (sum(waiting.values()) + for_ranks) / found.makespan == pytest.approx(1)
    assert sum(found.critical_path.values()) == pytest.approx(found.makespan)
    assert all(part >= 0 for part in found.critical_path.values())
    assert sum(found.critical_ranks.values()) + found.critical_path["link"] == pytest.approx(found.makespan)
    path = found.critical_actions
    assert (path[0].start, path[-1].end, path[-1].rank) == (0, found.ends.max(), rank)
    for before, after in pairwise(path):
        link = int((found.step or found).times.link.max()) if before.stage != after.stage else 0
        assert 0 <= after.start - before.end <= link
    shared = found.table.cp_size[found.actions.chunk_ids] > 1
    has_attention = found.table.kept_attention[found.actions.chunk_ids] != NOT_KEPT  # heads may be exchanged again
    again = (found.actions.ops == RECOMPUTE) & has_attention
    assert np.array_equal(found.exchange_of_actions[~again] > 0, shared[~again])
    assert not (found.exchange_of_actions[again] > 0)[~shared[again]].any()


def check_meetings(step: PlanStep, found: dict[int, Simulation]) -> None:
    """What ranks do with a chunk that they share starts at once, and the last of them has not waited."""
    for rank, simulation in found.items():
        for action, chunk_id in enumerate(simulation.actions.chunk_ids.tolist()):
            chunk = step.chunks[rank][chunk_id]
            if chunk.cp_size == 1:
                assert simulation.waits[action] == 0
                continue
            others = [found[other] for other in range(chunk.cp_first_rank, chunk.cp_first_rank + chunk.cp_size)]
            same = [place_of(other, simulation, action) for other in others]
            starts = {int(other.starts[place]) for other, place in zip(others, same, strict=True)}
            assert starts == {int(simulation.starts[action])}
            assert min(other.waits[place] for other, place in zip(others, same, strict=True)) == 0


def place_of(other: Simulation, simulation: Simulation, action: int) -> int:
    """Where another rank does what one does with `action`."""
    wanted = [getattr(simulation.actions, name)[action] for name in ("ops", "chunk_ids", "virtual_stages")]
    columns = (other.actions.ops, other.actions.chunk_ids, other.actions.virtual_stages)
    same = other.stage_of == simulation.stage_of[action]
    for column, value in zip(columns, wanted, strict=True):
        same &= column == value
    [place] = np.flatnonzero(same)
    return int(place)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Two ranks that share the longest sequence, and have one more chunk each."""
    return built(tmp_path, [9000, 900, 900], chunk_size=2000, k=1, dp=2, epochs=1, cp="auto")


def test_a_rank_waits_for_the_one_that_comes_last_and_the_critical_path_goes_through_that(plan: Plan) -> None:
    found = simulate_ranks(plan, with_late_rank(plan), [0, 1])
    own = found[1].table.cp_size[found[1].actions.chunk_ids] == 1
    late = int((found[1].ends - found[1].starts)[own].sum())
    assert found[0].waits[0] == found[0].starts[0] == late > 0
    assert found[1].waits[np.flatnonzero(~own)[0]] == 0
    path = found[0].critical_actions
    assert [(action.rank, action.start, action.end) for action in path[: own.sum()]] == [
        (1, int(start), int(end)) for start, end in zip(found[1].starts[own], found[1].ends[own], strict=True)
    ]
    assert {action.rank for action in path[own.sum() :]} == {0}, "what both do together is on the path of this one"
    assert found[0].critical_ranks[1] == found[0].in_unit(late)
    assert set(found[1].critical_ranks) == {1}
    assert found[0].critical_path["forward_kv"] > 0 and found[0].critical_path["recompute"] > 0
    assert found[0].bubble < 0.5, "what a stage waits for ranks is no bubble"
    step = found[0].step
    assert step is not None
    assert waiting_of(step, 1).starts.tolist() == [*found[0].starts.tolist(), *found[1].starts.tolist()]


def test_a_trace_has_waiting_and_exchange_of_shared_chunks_alone(plan: Plan) -> None:
    found = simulate_ranks(plan, with_late_rank(plan), [0])[0]
    events = [event for event in trace_events(found) if event["ph"] == "X"]
    first, second = events[:2]
    assert (first["name"], first["cat"], first["ts"]) == ("waits for ranks 0-1", "waiting", 0)
    assert (second["ts"], second["args"]["waited_us"]) == (first["dur"], first["dur"])
    for before, after in pairwise(events):
        assert before["ts"] + before["dur"] <= after["ts"] + 1e-3
    shared = {chunk.chunk_id for chunk in found.chunks if chunk.cp_size > 1}
    for event in events:
        if event["cat"] != "waiting":
            assert ("exchange_us" in event["args"]) == (event["args"]["chunk"] in shared)
    told = [event["args"] for event in events if "exchange_us" in event["args"]]
    assert all(args["ranks"] == "0-1" and args["cp_size"] == 2 for args in told)
    assert sum(args["exchange_us"] for args in told) == pytest.approx(found.exchange_per_stage[0], abs=0.01)


def test_ranks_that_wait_for_each_other_for_ever_are_reported(tmp_path: Path) -> None:
    plan = built(tmp_path, [30_000, 9000, 10], chunk_size=20_000, k=1, dp=2, epochs=1, cp="auto")
    [step] = plan.iter_steps()
    assert sum(chunk.cp_size == 2 for chunk in step.chunks[0]) == 2
    swapped = [
        Action(action.op, {0: 1, 1: 0}.get(action.chunk_id, action.chunk_id), 0) for action in step.actions[1, 0]
    ]
    with pytest.raises(DataError, match="deadlock"):
        simulate_ranks(plan, replace(step, actions={**step.actions, (1, 0): swapped}), [0])


@pytest.mark.parametrize(
    "change",
    [{"cp_first_rank": 1}, {"cp_first_rank": 10**6}, {"cp_size": 10**6}, {"cp_heads": 0}, {"prefix_tokens": 7}],
)
def test_ranks_that_do_not_agree_on_a_shared_chunk_are_reported(plan: Plan, change: dict[str, int]) -> None:
    [step] = plan.iter_steps()
    chunks = [replace(step.chunks[1][0], **change), *step.chunks[1][1:]]
    with pytest.raises(DataError, match="do not agree"):
        simulate_ranks(plan, replace(step, chunks={**step.chunks, 1: chunks}), [1])


def test_another_schedule_is_that_of_all_ranks_or_refused(tmp_path: Path) -> None:
    plan = built(tmp_path, [9000, 900, 900], chunk_size=2000, k=1, dp=2, pp=2, epochs=1, cp="auto")
    found = simulate_plan(plan, rank=0)
    again = simulate_plan(plan, rank=0, schedule="auto")
    assert again.ends.tolist() == found.ends.tolist()
    assert again.waits.tolist() == found.waits.tolist()
    plain, _, split = compare_schedules(found, ["1f1b", "auto", "zero-bubble"])
    assert split.makespan < found.makespan <= plain.makespan
    with pytest.raises(UsageError, match="orders every rank by itself") as refused:
        compare_schedules(found, ["1f1b", "search"])
    assert refused.value.hint == "use auto or 1f1b or zero-bubble, or a step without shared sequences"
