"""Searches with CP-SAT for an assignment whose slowest rank is faster, as chunks cost something beside their tokens.

Assigning by cost alone balances best but makes more chunks than packing first would. The answer lies between the two:
never worse than the assignment the search starts from, and the same on every machine, as effort is counted, not timed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.solver import deterministic_solver

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

#: Sequences are decided one by one for as many (sequence, rank) pairs; a small model finds more in the same effort.
_PAIRS = 512

#: A model of more pairs than that would take much memory, and find nothing.
_MOST_PAIRS = 100_000

#: The solver counts in 2^-20 of the heuristic's time, and stops within 10^-4 of the best possible.
_TIME_BITS = 20
_GAP = 1e-4

#: Fewer chunks gain more than this. Less is to be had by evening out the work, which the heuristic does better.
_MIN_GAIN = 1e-3

#: Where short sequences are not decided one by one, 1/128 of a chunk stays free, so that they can truly be packed.
_FREE_SHARE = 128


@dataclass(frozen=True, kw_only=True)
class _Step:
    costs: Int64Array
    demands: Int64Array
    own_chunks: Int64Array
    dp: int
    chunk_size: int
    chunk_cost: int
    equal_chunks: bool

    def value(self, ranks: Int64Array) -> int:
        """The objective, which is minimised: a lower bound on the step's time, in ns."""
        chunk_ns = self.chunks(ranks) * self.chunk_cost
        work = self.sums(self.costs, ranks)
        return int(work.max() + chunk_ns.max() if self.equal_chunks else (work + chunk_ns).max())

    def chunks(self, ranks: Int64Array) -> Int64Array:
        """The fewest chunks of every rank, int64 [dp], were short sequences to fill them without a gap."""
        shared = np.maximum(-(-self.sums(self.demands, ranks) // self.chunk_size), 0)
        return np.maximum(self.sums(self.own_chunks, ranks) + shared, 1)

    def sums(self, values: Int64Array, ranks: Int64Array) -> Int64Array:
        sums = np.zeros(self.dp, np.int64)
        np.add.at(sums, ranks, values)
        return sums

    @property
    def least_chunks(self) -> int:
        """All ranks together have as many chunks at least."""
        return max(int(self.own_chunks.sum()) + max(-(-int(self.demands.sum()) // self.chunk_size), 0), self.dp)

    @property
    def bound(self) -> int:
        """No assignment has a lower value."""
        work = int(self.costs.sum())
        if self.equal_chunks:
            most_chunks = max(-(-self.least_chunks // self.dp), int(self.own_chunks.max()))
            return max(-(-work // self.dp), int(self.costs.max())) + self.chunk_cost * most_chunks
        alone = int((self.costs + self.chunk_cost * np.maximum(self.own_chunks, 1)).max())
        return max(-(-(work + self.chunk_cost * self.least_chunks) // self.dp), alone)


def search_ranks(
    *,
    costs: Int64Array,
    demands: Int64Array,
    own_chunks: Int64Array,
    hint: Int64Array,
    dp: int,
    chunk_size: int,
    chunk_cost: int,
    equal_chunks: bool,
    effort: float,
) -> Int64Array:
    """A rank for each sequence of a step, int64 [n]: `hint` where nothing better was found.

    Minimised is the time of the slowest rank: its work and `chunk_cost` for every chunk; with `equal_chunks` the most
    work plus `chunk_cost` for the most chunks. A rank has the chunks of its split sequences and as many shared ones as
    its demands fill, one at least. That relaxes packing: pack both answers to know which is better.

    Args:
        costs: int64 [n], work of each sequence without what its chunks cost, ns; a step's sum fits 63 bits.
        demands: int64 [n], tokens each needs in shared chunks: its length; for a split one minus the room in its own.
        own_chunks: int64 [n], parts of a split sequence; 0 for a short one.
        hint: int64 [n], the heuristic's rank of each.
        chunk_cost: fixed cost of a chunk, ns.
        effort: most deterministic seconds (of CP-SAT) to search.
    """
    if hint.size == 0 or dp == 1:
        return hint
    step = _Step(
        costs=costs, demands=demands, own_chunks=own_chunks, dp=dp, chunk_size=chunk_size, chunk_cost=chunk_cost,
        equal_chunks=equal_chunks,
    )  # fmt: skip
    by_cost = np.lexsort((-costs, own_chunks == 0))  # split ones first: each has to be decided by itself
    num_decided = min(max(_PAIRS // dp, 2 * dp, int(np.count_nonzero(own_chunks))), hint.size)
    value = step.value(hint)
    if num_decided * dp > _MOST_PAIRS or value - step.bound <= _GAP * value:
        return hint
    # Ranks are interchangeable: number them by their first sequence, so that the solver sees each assignment once.
    _, starts = np.unique(np.concatenate([hint[by_cost], np.arange(dp)]), return_index=True)
    name = np.argsort(starts)
    ranks = _solve(step, by_cost, num_decided, np.argsort(name)[hint], value, effort)
    return name[ranks] if step.value(ranks) < value else hint


def _solve(
    step: _Step, by_cost: Int64Array, num_decided: int, hint: Int64Array, value: int, effort: float
) -> Int64Array:
    """Decide `by_cost[:num_decided]` one by one, and of the others how many tokens each rank gets."""
    from ortools.sat.python import cp_model

    decided, others = by_cost[:num_decided], by_cost[num_decided:]
    unit = max(value >> _TIME_BITS, 1)
    costs = (step.costs + unit // 2) // unit
    chunk_cost = (step.chunk_cost + unit // 2) // unit
    room = step.chunk_size - (step.chunk_size // _FREE_SHARE if others.size else 0)
    most_chunks = int(step.own_chunks.sum()) + int(np.maximum(step.demands, 0).sum()) // room + 1
    most = int(costs.sum()) + step.dp * (int(costs.max()) + chunk_cost * most_chunks)

    model = cp_model.CpModel()
    slowest = model.new_int_var(max(-(-int(costs.sum()) // step.dp), int(costs.max())), most, "slowest")
    fullest = model.new_int_var(1, most_chunks, "fullest")
    placed = [
        [model.new_bool_var(f"sequence {sequence} on rank {rank}") for rank in range(min(step.dp, place + 1))]
        for place, sequence in enumerate(decided)
    ]
    for choices in placed:
        model.add_exactly_one(choices)
    other_tokens = int(step.demands[others].sum())
    token_cost = round(int(costs[others].sum()) / max(other_tokens, 1))
    filler = [model.new_int_var(0, other_tokens, f"tokens on rank {rank}") for rank in range(step.dp)]
    model.add(sum(filler) == other_tokens)
    shared = [model.new_int_var(0, most_chunks, f"shared chunks of rank {rank}") for rank in range(step.dp)]
    for rank in range(step.dp):
        possible = [
            (choices[rank], sequence) for choices, sequence in zip(placed, decided, strict=True) if rank < len(choices)
        ]
        work = _weighted(possible, costs) + token_cost * filler[rank]
        num_chunks = _weighted(possible, step.own_chunks) + shared[rank]
        model.add(_weighted(possible, step.demands) + filler[rank] <= room * shared[rank])
        model.add(num_chunks >= 1)
        model.add(num_chunks <= fullest)
        model.add(work + (0 if step.equal_chunks else chunk_cost * num_chunks) <= slowest)

    # Found by experiment. Equal chunks: the hint is even, so what is better has fewer of them, is far away, and is
    # found from the linear relaxation. Else there is better near the hint, and the relaxation only costs effort.
    solver = deterministic_solver(effort)
    if step.equal_chunks:
        scaled = value // unit
        model.add(slowest + chunk_cost * fullest <= scaled - max(int(scaled * _MIN_GAIN), 1))
        model.minimize(slowest + chunk_cost * fullest)
    else:
        _add_hint(model, step, hint, decided, others, placed, filler, shared)
        model.minimize(slowest)
        solver.parameters.linearization_level = 0
    solver.parameters.relative_gap_limit = _GAP
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return hint
    ranks = hint.copy()
    ranks[decided] = [[solver.boolean_value(choice) for choice in choices].index(True) for choices in placed]
    own = step.sums(step.own_chunks[decided], ranks[decided])
    chunks = own + np.array([solver.value(number) for number in shared], np.int64)
    _place_others(
        step, decided, others, ranks, np.full_like(chunks, chunks.max()) if step.equal_chunks else chunks, room
    )
    return ranks


def _add_hint(
    model: cp_model.CpModel,
    step: _Step,
    hint: Int64Array,
    decided: Int64Array,
    others: Int64Array,
    placed: list[list[cp_model.IntVar]],
    filler: list[cp_model.IntVar],
    shared: list[cp_model.IntVar],
) -> None:
    for choices, sequence in zip(placed, decided, strict=True):
        for rank, choice in enumerate(choices):
            model.add_hint(choice, bool(hint[sequence] == rank))
    tokens = step.sums(step.demands[others], hint[others])
    num_shared = step.chunks(hint) - step.sums(step.own_chunks, hint)
    for rank in range(step.dp):
        model.add_hint(filler[rank], int(tokens[rank]))
        model.add_hint(shared[rank], int(num_shared[rank]))


def _weighted(choices: list[tuple[cp_model.IntVar, np.int64]], weights: Int64Array) -> cp_model.LinearExpr:
    from ortools.sat.python import cp_model

    used = [(choice, int(weights[sequence])) for choice, sequence in choices if weights[sequence]]
    return cp_model.LinearExpr.weighted_sum([choice for choice, _ in used], [weight for _, weight in used])


def _place_others(
    step: _Step, decided: Int64Array, others: Int64Array, ranks: Int64Array, num_chunks: Int64Array, room: int
) -> None:
    """Give each of `others`, dearest first, to the rank that is fastest so far of those with room; changes `ranks`."""
    own = step.sums(step.own_chunks[decided], ranks[decided])
    time = step.sums(step.costs[decided], ranks[decided])
    if not step.equal_chunks:
        time += step.chunk_cost * num_chunks
    left = room * (num_chunks - own) - step.sums(step.demands[decided], ranks[decided])
    for sequence in others:
        fits = left >= step.demands[sequence]
        rank = np.where(fits, time, np.iinfo(np.int64).max).argmin() if fits.any() else time.argmin()
        ranks[sequence] = rank
        time[rank] += step.costs[sequence]
        left[rank] -= step.demands[sequence]
