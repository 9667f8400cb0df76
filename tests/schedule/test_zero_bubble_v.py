"""A V of virtual stages keeps every invariant, takes no more memory than 1F1B, and is faster than zero-bubble."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

import chunkplan
from chunkplan.cost.model import CostModel
from chunkplan.cost.rates import UNIT, Rates
from chunkplan.layers import FAMILIES
from chunkplan.operations import OPS
from chunkplan.schedule.actions import Actions, empty_actions
from chunkplan.schedule.auto import BASELINE_MEMORY, auto
from chunkplan.schedule.bounds import unit_bound
from chunkplan.schedule.holdings import peak_retained
from chunkplan.schedule.simulate import simulate
from chunkplan.schedule.zero_bubble_v import zero_bubble_v
from chunkplan.simulation import simulate_lengths, simulate_plan
from tests.support.schedule_checks import ALONE, EXAMPLES, Rank, make_rank, orders_of, ranks, template

#: Links that take as long as an action does.
LINKS = Rates(token=1.0, pair=0.0, chunk=0.0, head=2.0, link_token=0.7, link=3.0)


def scheduled(rank: Rank, pp: int) -> Actions:
    actions = empty_actions(rank.chunks.keeps_activations, pp, 2 * pp, True)
    zero_bubble_v(*rank, pp, actions)
    return actions


def in_a_v(rank: Rank, pp: int, rates: Rates = UNIT) -> Rank:
    """The chunks of `rank` on twice as many model stages, of one, two or three layers."""
    chunks = rank.chunks
    layers = [1 + place % 3 for place in range(2 * pp)]
    return make_rank(
        chunks.num_tokens.tolist(), chunks.group_id.tolist(), chunks.keeps_activations.tolist(), layers, rates
    )


def look_at_v(rank: Rank, pp: int, actions: Actions) -> tuple[int, int]:
    """When a schedule is done, and twice the tokens that the fullest stage retains; every invariant is asserted."""
    stages = [
        [
            (OPS[actions.ops[action]], int(actions.chunk_ids[action]), int(actions.virtual_stages[action]))
            for action in range(first, last)
        ]
        for first, last in zip(actions.stages[:-1], actions.stages[1:], strict=True)
    ]
    orders, most = set(), 0
    for done in stages:
        for virtual_stage in (0, 1):
            orders.add(orders_of(rank, [(op, chunk) for op, chunk, place in done if place == virtual_stage]))
        for (op, *where), (then, *there) in pairwise(done):
            assert op != "recompute" or (then, there) == ("backward_input", where)
        held: set[tuple[int, ...]] = set()
        for op, chunk, virtual_stage in done:
            held |= {(chunk, virtual_stage)} if op in ("forward", "recompute") else set()
            for place in (0, 1):
                group = [
                    other
                    for other, at in held
                    if rank.chunks.group_id[other] == rank.chunks.group_id[chunk] and at == place
                ]
                kept = rank.chunks.keeps_activations[rank.chunks.group_id == rank.chunks.group_id[chunk]].sum()
                assert rank.chunks.group_id[chunk] == ALONE or len(group) <= kept, "more holders than are kept"
            most = max(most, sum(int(rank.chunks.num_tokens[other]) for other, _ in held))
            held -= {(chunk, virtual_stage)} if op == "backward_weight" else set()
        assert not held
    assert len(orders) == 1, "links take chunks in different orders"
    return played(rank, pp, stages), most


def played(rank: Rank, pp: int, stages: list[list[tuple[str, int, int]]]) -> int:
    """When all is done: one action after another, each when its stage is free and what it waits for is there."""
    done: dict[tuple[str, int, int], int] = {}  # (what, chunk, model stage): when
    clock, position = [0] * pp, [0] * pp
    while any(position[stage] < len(stages[stage]) for stage in range(pp)):
        before = list(position)
        for stage, actions in enumerate(stages):
            while position[stage] < len(actions):
                op, chunk, virtual_stage = actions[position[stage]]
                place = stage if virtual_stage == 0 else 2 * pp - 1 - stage
                what, step = ("forward", -1) if op.startswith("forward") else ("backward", 1)
                ready = 0
                if op in ("forward", "forward_kv", "backward_input") and 0 <= place + step < 2 * pp:
                    if (what, chunk, place + step) not in done:
                        break
                    turns = {place, place + step} == {pp - 1, pp}
                    ready = done[what, chunk, place + step] + (0 if turns else int(rank.times.link[chunk]))
                elif op == "backward_input":
                    assert ("forward", chunk, place) in done
                clock[stage] = max(clock[stage], ready) + int(rank.times.durations[OPS.index(op), place, chunk])
                if op in ("forward", "forward_kv", "backward_input"):
                    done[what, chunk, place] = clock[stage]
                position[stage] += 1
        assert position != before, "a deadlock"
    return max(clock)


@given(ranks(most_units=8))
@settings(max_examples=150)
def test_a_v_keeps_all_invariants_within_the_memory_of_1f1b(drawn: tuple[Rank, int]) -> None:
    rank, pp = drawn
    memory = max(peak_retained(rank.chunks, template(rank, pp)))
    for rates in (UNIT, LINKS):
        on_v = in_a_v(rank, pp, rates)
        actions = scheduled(on_v, pp)
        end, most = look_at_v(on_v, pp, actions)
        ends = simulate(on_v.chunks, actions, on_v.times, pp, FAMILIES["zero-bubble-v"].placement, 1)
        assert ends.min() >= 0 and ends.max() == end
        assert unit_bound(*on_v) <= end
        assert peak_retained(on_v.chunks, actions).max() == most <= 2 * memory


@pytest.mark.parametrize(
    ("name", "halves"),
    [("C = 2 units, K = 2", 54), ("C = 2 units, K = 1", 58), ("C = 1 unit, K = 4", 55), ("uncut", 76)],
)
def test_on_the_published_example_it_is_faster_than_zero_bubble_on_the_same_memory(name: str, halves: int) -> None:
    """Zero-bubble takes 32, 34, 30 and 40 units."""
    rank = make_rank(*EXAMPLES[name], [1] * 8, UNIT)
    assert look_at_v(rank, 4, scheduled(rank, 4))[0] == halves
    whole = make_rank(*EXAMPLES[name], [2] * 4, UNIT)
    assert halves < auto(*whole, 4, BASELINE_MEMORY, 0, True)[1]


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_equal_chunks_wait_for_nothing_but_the_first_one(pp: int) -> None:
    """ZB-V on as many equal chunks as warm it up, with halves of equal time: each stage is busy once it has begun."""
    n = 2 * pp
    rank = make_rank([2] * n, [ALONE] * n, [1] * n, [1] * 2 * pp, UNIT)
    end, most = look_at_v(rank, pp, scheduled(rank, pp))
    assert end == 2 * 6 * n + 2 * (pp - 1)
    assert most == 2 * 2 * pp


def test_the_bound_of_a_v_is_met_where_one_sequence_is_all_there_is() -> None:
    found = simulate_lengths([4096], chunk_size=4096, k=1, pp=4, schedule="zero-bubble-v", cost="unit")
    assert found.lower_bound == found.makespan
    assert found.makespan == 4096 * (1 / 2) * (8 + 8 + 1)


def test_first_and_last_model_stage_are_on_the_first_stage(tmp_path: Path) -> None:
    """The head's time is stage 0's, and its activations; nothing goes over a link where the V turns."""
    np.save(tmp_path / "lengths.npy", np.array([32_000, 7200, 136, 16_800, 512, 5600]))
    config = chunkplan.PlanConfig(chunk_size=8192, k=1, global_batch=6, pp=3, schedule="zero-bubble-v")
    assert config.placement == (2, True)
    plan = chunkplan.build(tmp_path / "lengths.npy", tmp_path / "plan", config)
    assert chunkplan.validate(plan.path).ok
    found = simulate_plan(plan)
    assert found.cost is not None and found.to_dict()["virtual_stages"] == 2
    turned = [(int(stage), int(place)) for stage, place in zip(found.stage_of, found.model_stages, strict=True)]
    assert set(turned) == {(0, 0), (0, 5), (1, 1), (1, 4), (2, 2), (2, 3)}
    head = CostModel().rates.head
    assert head > 0
    work = [(found.ends - found.starts)[found.stage_of == stage].sum() for stage in range(3)]
    assert work[0] > work[1] and work[0] > work[2]
