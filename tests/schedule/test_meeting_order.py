"""Ranks that share chunks meet in one order, so that no process deadlocks."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import chunkplan
from chunkplan.planfile.plan import PlanStep
from tests.support.planned_steps import save

#: An action's place in an order in which everything comes after what it waits for.
Value = tuple[int, bool, int, int, bool]


def values_of(step: PlanStep, rank: int, stage: int, pp: int) -> list[Value]:
    """The value of each action of a stage, in the order in which the stage does them."""
    chunks = step.chunks[rank]
    stops = [chunk.chunk_id + chunk.group_size - chunk.group_index for chunk in chunks]  # of each chunk's group
    values = []
    for action in step.actions[rank, stage]:
        chunk = action.chunk_id
        if action.op in ("forward", "forward_kv"):
            values.append((chunk + 1 + stage - (pp - 1), False, chunk, stage, False))
        else:
            first = stops[chunk] - chunks[chunk].group_size
            backward = first + stops[chunk] - 1 - chunk  # groups go backward from their last chunk to their first
            values.append((max(backward + 1, stops[chunk]), True, backward, -stage, action.op == "backward"))
    return values


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("dp", [6, 8])
def test_everything_comes_after_what_it_waits_for(tmp_path: Path, dp: int, pp: int) -> None:
    """Within a process, from stage to stage, and where ranks meet, as in the proof; with blocks of several sizes."""
    rng = np.random.default_rng([dp, pp])
    lengths = [*rng.integers(1, 9000, 60), *rng.integers(9000, 90_000, 12)]
    schedule = "algorithm2" if pp == 1 else "1f1b"
    config = chunkplan.PlanConfig(chunk_size=4096, k=2, dp=dp, pp=pp, cp="auto", global_batch=24, schedule=schedule)
    sizes = set()
    for step in chunkplan.build(save(tmp_path, lengths), tmp_path / "plan", config).iter_steps():
        places: dict[tuple[object, ...], Value] = {}
        for rank, chunks in step.chunks.items():
            sizes |= {chunk.cp_size for chunk in chunks}
            for stage in range(pp):
                actions, values = step.actions[rank, stage], values_of(step, rank, stage, pp)
                assert all(before < after for before, after in pairwise(values))
                for action, value in zip(actions, values, strict=True):
                    places[rank, stage, action.chunk_id, value[1], action.op == "recompute"] = value
        for (rank, stage, chunk_id, is_backward, is_recompute), value in places.items():
            if stage + 1 < pp and not is_recompute:
                other = places[rank, stage + 1, chunk_id, is_backward, False]
                assert other < value if is_backward else value < other
            chunk = step.chunks[rank][chunk_id]
            if chunk.cp_size > 1:
                first = step.chunks[chunk.cp_first_rank][chunk_id]
                assert (first.group_id, first.group_index) == (chunk.group_id, chunk.group_index)
                assert places[chunk.cp_first_rank, stage, chunk_id, is_backward, is_recompute] == value
    assert len(sizes) > 2
