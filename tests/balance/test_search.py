"""Assignments that CP-SAT finds, against the hint and against every possible one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product

import numpy as np
import pytest

from chunkplan.balance.search import search_ranks

EFFORT = 0.2


def value(ranks, *, costs, demands, own_chunks, dp, chunk_size, chunk_cost, equal_chunks) -> int:
    """What the search minimises, rank by rank, in whole numbers of any size."""
    work, chunks = [], []
    for rank in range(dp):
        on_rank = [sequence for sequence in range(len(costs)) if ranks[sequence] == rank]
        shared = max(-(-sum(int(demands[i]) for i in on_rank) // chunk_size), 0)
        work.append(sum(int(costs[i]) for i in on_rank))
        chunks.append(max(sum(int(own_chunks[i]) for i in on_rank) + shared, 1))
    if equal_chunks:
        return max(work) + chunk_cost * max(chunks)
    return max(cost + chunk_cost * number for cost, number in zip(work, chunks, strict=True))


def random_step(seed: int, num_sequences: int, dp: int, chunk_size: int, chunk_cost: int, equal_chunks: bool) -> dict:
    """Sequences of up to a few chunks; in every other step split ones leave their room to short ones."""
    rng = np.random.default_rng(seed)
    tokens = np.minimum(1 + rng.exponential(chunk_size / 2, num_sequences).astype(np.int64), 4 * chunk_size)
    own_chunks = np.where(tokens > chunk_size, -(-tokens // chunk_size), 0)
    room = tokens - own_chunks * chunk_size if seed % 2 else 0 * tokens
    return {
        "costs": tokens + tokens**2 // (8 * chunk_size),
        "demands": np.where(own_chunks > 0, room, tokens),
        "own_chunks": own_chunks,
        "dp": dp,
        "chunk_size": chunk_size,
        "chunk_cost": chunk_cost,
        "equal_chunks": equal_chunks,
    }


def dearest_first(costs: np.ndarray, dp: int) -> np.ndarray:
    loads, ranks = [0] * dp, np.empty(costs.size, np.int64)
    for sequence in np.argsort(-costs, kind="stable"):
        ranks[sequence] = loads.index(min(loads))
        loads[ranks[sequence]] += int(costs[sequence])
    return ranks


@pytest.mark.parametrize("equal_chunks", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_small_steps_are_assigned_as_well_as_they_can_be(seed: int, equal_chunks: bool) -> None:
    dp = 2 + seed % 2
    step = random_step(seed, 7 - seed % 3, dp, 20, (1, 7, 40)[seed // 2 % 3], equal_chunks)
    ranks = search_ranks(**step, hint=np.zeros(step["costs"].size, np.int64), effort=2.0)
    best = min(value(choice, **step) for choice in product(range(dp), repeat=step["costs"].size))
    assert value(ranks, **step) == best


@pytest.mark.parametrize("equal_chunks", [False, True])
def test_large_steps_are_never_worse_than_the_hint_and_often_better(equal_chunks: bool) -> None:
    better = 0
    for seed in range(6):
        step = random_step(seed, 120, 8, 2048, 1000, equal_chunks)
        hint = dearest_first(step["costs"], 8)
        ranks = search_ranks(**step, hint=hint, effort=EFFORT)
        assert ranks.shape == hint.shape and ranks.min() >= 0 and ranks.max() < 8
        assert value(ranks, **step) <= value(hint, **step)
        better += value(ranks, **step) < value(hint, **step)
    assert better >= 2


def test_two_runs_and_another_process_give_the_same_answer() -> None:
    """Even when the effort is spent before the answer is proved best."""
    program = (
        "from tests.balance.test_search import *\n"
        "step = random_step(2, 120, 8, 2048, 1000, False)\n"
        "print(search_ranks(**step, hint=dearest_first(step['costs'], 8), effort=0.05).tolist())\n"
    )
    step = random_step(2, 120, 8, 2048, 1000, False)
    hint = dearest_first(step["costs"], 8)
    first, second = (search_ranks(**step, hint=hint, effort=0.05).tolist() for _ in range(2))
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True)
    assert first == second == json.loads(run.stdout)
    assert first != hint.tolist()


def test_with_equal_chunks_the_most_chunks_count_rather_than_those_of_the_slowest_rank() -> None:
    """One dear sequence of a token, three cheap ones of a chunk each: three chunks beside one, or two beside two."""
    step = {
        "costs": np.array([50, 5, 5, 5], np.int64),
        "demands": np.array([1, 10, 10, 10], np.int64),
        "own_chunks": np.zeros(4, np.int64),
        "dp": 2,
        "chunk_size": 10,
        "chunk_cost": 20,
    }
    hint = np.zeros(4, np.int64)
    unequal = search_ranks(**step, hint=hint, equal_chunks=False, effort=EFFORT)
    equal = search_ranks(**step, hint=hint, equal_chunks=True, effort=EFFORT)
    assert value(unequal, **step, equal_chunks=False) == 75
    assert np.count_nonzero(unequal == unequal[0]) == 1
    assert value(equal, **step, equal_chunks=True) == 95
    assert np.count_nonzero(equal == equal[0]) == 2


@pytest.mark.parametrize("equal_chunks", [False, True])
def test_one_rank_has_everything_and_ranks_too_many_stay_empty(equal_chunks: bool) -> None:
    alone = random_step(1, 9, 1, 64, 5, equal_chunks)
    assert search_ranks(**alone, hint=np.zeros(9, np.int64), effort=EFFORT).tolist() == [0] * 9
    step = random_step(2, 3, 16, 64, 5, equal_chunks)
    ranks = search_ranks(**step, hint=np.full(3, 15, np.int64), effort=EFFORT)
    assert len(set(ranks.tolist())) == 3  # each by itself is best
    nothing = random_step(1, 0, 4, 64, 5, equal_chunks)
    assert search_ranks(**nothing, hint=np.zeros(0, np.int64), effort=EFFORT).size == 0


def test_short_sequences_go_where_a_split_one_leaves_room() -> None:
    """A sequence of 11 tokens in two chunks of 10 has room for the three short ones; the other rank is fully used."""
    step = {
        "costs": np.array([11, 20, 3, 3, 3], np.int64),
        "demands": np.array([-9, 0, 3, 3, 3], np.int64),
        "own_chunks": np.array([2, 2, 0, 0, 0], np.int64),
        "dp": 2,
        "chunk_size": 10,
        "chunk_cost": 100,
        "equal_chunks": False,
    }
    ranks = search_ranks(**step, hint=np.array([0, 1, 0, 0, 1], np.int64), effort=EFFORT)
    assert ranks[2:].tolist() == [ranks[0]] * 3 != [ranks[1]] * 3
    assert value(ranks, **step) == 220


@pytest.mark.parametrize("equal_chunks", [False, True])
def test_costs_near_the_largest_do_not_overflow(equal_chunks: bool) -> None:
    step = random_step(4, 200, 4, 2048, 2**50, equal_chunks)
    step["costs"] = 2**53 - step["costs"]
    hint = np.zeros(200, np.int64)
    ranks = search_ranks(**step, hint=hint, effort=EFFORT)
    assert value(ranks, **step) < value(hint, **step) / 2


def test_a_step_too_large_to_search_keeps_its_hint() -> None:
    step = random_step(5, 4096, 512, 2048, 1000, False)
    hint = dearest_first(step["costs"], 512)
    assert search_ranks(**step, hint=hint, effort=EFFORT) is hint
