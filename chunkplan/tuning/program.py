"""The integer program that chooses among what was tried, with a K for each length class."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from chunkplan.solver import deterministic_solver

#: Deterministic seconds of CP-SAT; the programs have some hundred variables.
_EFFORT = 10.0

#: Times are counted in so many nanoseconds, and these in parts: what is below decides ties.
_TIME, _TIES = 1000, 128


@dataclass(frozen=True)
class Candidate:
    """A ChunkSize with a schedule, and a way to run the model, its `rung` of the ladder.

    `family` is the same for candidates that differ in their rung alone. `base_ns`: a step's time with the largest K. By
    length class and K, both ascending: `extra_ns`, the time a step takes longer with it; `stage_bytes`, the memory of
    each stage with it in the step with the longest sequence of the class.
    """

    family: int
    rung: int
    base_ns: float
    extra_ns: tuple[tuple[float, ...], ...]
    stage_bytes: tuple[tuple[tuple[int, ...], ...], ...]


def choose(candidates: list[Candidate], gpu_memory: int, most: int) -> list[tuple[int, tuple[int, ...]]]:
    """Choose the `most` best candidates of different families: (its place, each length class's place of K).

    The fastest comes first. Minimises predicted time under the memory of each stage, as an integer program that
    CP-SAT solves to the optimum; longer sequences, whose keys and values take more room, never get a larger K. Of
    solutions that take the same time it is the one of the lower rung with the smaller Ks. Fewer are returned where
    no more fit.
    """
    from ortools.sat.python import cp_model

    hopeful = _hopeful(candidates, gpu_memory, most)
    candidates = [candidates[place] for place in hopeful]
    found: list[tuple[int, tuple[int, ...]]] = []
    model = cp_model.CpModel()
    takes = [model.new_bool_var("") for _ in candidates]
    model.add_exactly_one(takes)
    terms, costs, choices = [], [], []
    for candidate, taken in zip(candidates, takes, strict=True):
        terms.append(taken)
        costs.append(round(candidate.base_ns / _TIME) * _TIES + candidate.rung)
        of_class = [[model.new_bool_var("") for _ in extra_ns] for extra_ns in candidate.extra_ns]
        for ks, extra_ns, stage_bytes in zip(of_class, candidate.extra_ns, candidate.stage_bytes, strict=True):
            model.add_exactly_one([*ks, ~taken])
            terms += ks
            costs += [round(extra / _TIME) * _TIES + place for place, extra in enumerate(extra_ns)]
            for k, of_stages in zip(ks, stage_bytes, strict=True):
                if max(of_stages) > gpu_memory:
                    model.add(k == 0)
        for shorter, longer in pairwise(of_class):
            for place, k in enumerate(longer):
                model.add_bool_or([~k, *shorter[place:]])
        choices.append(of_class)
    model.minimize(cp_model.LinearExpr.weighted_sum(terms, costs))
    solver = deterministic_solver(_EFFORT)
    while len(found) < min(most, len({candidate.family for candidate in candidates})):
        if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            break
        chosen = next(place for place, taken in enumerate(takes) if solver.boolean_value(taken))
        ks_of_class = [next(place for place, k in enumerate(ks) if solver.boolean_value(k)) for ks in choices[chosen]]
        found.append((hopeful[chosen], tuple(ks_of_class)))
        for candidate, taken in zip(candidates, takes, strict=True):
            if candidate.family == candidates[chosen].family:
                model.add(taken == 0)
    return found


def _hopeful(candidates: list[Candidate], gpu_memory: int, most: int) -> list[int]:
    """Return places of those that can be among the `most` best: at best no slower than so many families with one K."""
    best: dict[int, float] = {}
    for candidate in candidates:
        for place in range(len(candidate.extra_ns[0]) if candidate.extra_ns else 0):
            if all(max(stages[place]) <= gpu_memory for stages in candidate.stage_bytes):
                time = candidate.base_ns + sum(extra[place] for extra in candidate.extra_ns)
                best[candidate.family] = min(time, best.get(candidate.family, time))
    times = sorted(best.values())
    slowest = times[most - 1] if len(times) >= most else float("inf")
    return [place for place, candidate in enumerate(candidates) if candidate.base_ns <= slowest]
