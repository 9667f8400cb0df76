"""What tests of searched schedules share: ranks to schedule, and an independent look at what came out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from chunkplan.cost.durations import ChunkTimes, chunk_times
from chunkplan.cost.rates import UNIT, Rates
from chunkplan.layers import STRAIGHT
from chunkplan.operations import OPS
from chunkplan.planfile.chunks import Chunks, chunks_without_segments
from chunkplan.schedule.actions import Actions, empty_actions
from chunkplan.schedule.simulate import simulate
from chunkplan.schedule.templates import state_aware_1f1b

ALONE = -1

#: The example every description of ChunkFlow agrees on: sequences of 1, 1, 2 and 4 units on 4 stages.
EXAMPLES = {
    "C = 2 units, K = 2": ([2, 2, 2, 2], [ALONE, ALONE, 0, 0], [1, 1, 1, 1]),
    "C = 2 units, K = 1": ([2, 2, 2, 2], [ALONE, ALONE, 0, 0], [1, 1, 0, 1]),
    "C = 1 unit, K = 4": ([1] * 8, [ALONE, ALONE, 0, 0, 1, 1, 1, 1], [1] * 8),
    "uncut": ([4, 2, 1, 1], [ALONE] * 4, [1] * 4),
}


class Rank(NamedTuple):
    """The chunks of a rank and their times: what a schedule is made for."""

    chunks: Chunks
    times: ChunkTimes


def make_rank(units: list[int], groups: list[int], keeps: list[int], layers: list[int], rates: Rates) -> Rank:
    tokens = np.array(units, np.int64)
    times = chunk_times(tokens, tokens.astype(np.float64) ** 2, rates, layers)
    return Rank(chunks_without_segments([0, tokens.size], tokens, groups, keeps), times)


def example(name: str) -> Rank:
    return make_rank(*EXAMPLES[name], [1] * 4, UNIT)


@st.composite
def ranks(draw: st.DrawFn, most_units: int) -> tuple[Rank, int]:
    """Standalone chunks, some of them empty, and groups in any order, and how many stages there are."""
    units: list[int] = []
    groups: list[int] = []
    keeps: list[int] = []
    for unit in range(draw(st.integers(1, most_units))):
        size = draw(st.sampled_from([1, 1, 2, 3, 5]))
        kept = draw(st.integers(1, size))
        groups += [ALONE if size == 1 else unit] * size
        keeps += [0] * (size - kept) + [1] * kept
        units += draw(st.lists(st.integers(int(size > 1), 9), min_size=size, max_size=size))
    layers = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    rates = draw(st.sampled_from([UNIT, Rates(token=3.0, pair=0.7, chunk=2.0, head=4.0, link_token=0.4, link=1.0)]))
    return make_rank(units, groups, keeps, layers, rates), len(layers)


def look(rank: Rank, pp: int, actions: Actions) -> tuple[int, list[int]]:
    """When a schedule is done, and the most tokens each stage retains; every invariant is asserted."""
    stages = [
        [
            (OPS[op], int(chunk))
            for op, chunk in zip(actions.ops[first:last], actions.chunk_ids[first:last], strict=True)
        ]
        for first, last in zip(actions.stages[:-1], actions.stages[1:], strict=True)
    ]
    assert not actions.virtual_stages.any() and len(stages) == pp
    orders, peaks = set(), []
    for stage, done in enumerate(stages):
        orders.add(orders_of(rank, done))
        peaks.append(_peak(rank, done))
        work = sum(int(rank.times.durations[OPS.index(op), stage, chunk]) for op, chunk in done)
        ends = simulate(rank.chunks, actions, rank.times, pp, STRAIGHT, 1)[
            actions.stages[stage] : actions.stages[stage + 1]
        ]
        assert work <= ends[-1], "a deadlock, or a stage that does two things at once"
    assert len(orders) == 1, "links take chunks in different orders"
    return int(simulate(rank.chunks, actions, rank.times, pp, STRAIGHT, 1).max()), peaks


def orders_of(rank: Rank, done: list[tuple[str, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The orders of forwards and of backwards of what is `done` on a model stage, of which all invariants hold."""
    n = rank.chunks.num_tokens.size
    for chunk in range(n):
        own = [op for op, other in done if other == chunk]
        first = ["forward"] if rank.chunks.keeps_activations[chunk] else ["forward_kv", "recompute"]
        assert own in ([*first, "backward"], [*first, "backward_input", "backward_weight"])
    for (op, chunk), then in zip(done, [*done[1:], ("", -1)], strict=True):
        assert op != "recompute" or (then[1] == chunk and then[0] in ("backward", "backward_input"))
    forwards = [chunk for op, chunk in done if op in ("forward", "forward_kv")]
    backwards = [chunk for op, chunk in done if op in ("backward", "backward_input")]
    for group in set(rank.chunks.group_id.tolist()) - {ALONE}:
        parts = np.flatnonzero(rank.chunks.group_id == group).tolist()
        assert [chunk for chunk in forwards if chunk in parts] == parts
        assert [chunk for chunk in backwards if chunk in parts] == parts[::-1]
    return tuple(forwards), tuple(backwards)


def _peak(rank: Rank, done: list[tuple[str, int]]) -> int:
    held: set[int] = set()
    peak = 0
    for op, chunk in done:
        if op in ("forward", "recompute"):
            held.add(chunk)
            group = rank.chunks.group_id == rank.chunks.group_id[chunk]
            if rank.chunks.group_id[chunk] != ALONE:
                num_kept = rank.chunks.keeps_activations[group].sum()
                assert sum(group[other] for other in held) <= num_kept, "more holders than are kept"
        elif op in ("backward", "backward_weight"):
            held.remove(chunk)
        peak = max(peak, sum(int(rank.chunks.num_tokens[other]) for other in held))
    return peak


def template(rank: Rank, pp: int) -> Actions:
    """State-aware 1F1B."""
    actions = empty_actions(rank.chunks.keeps_activations, pp, pp, False)
    state_aware_1f1b(rank.chunks, rank.times, pp, 1, 1, actions)
    return actions
