"""What no schedule of a rank's chunks with whole backwards can do better than: in time, and in memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.compiled import compiled
from chunkplan.schedule.actions import BACKWARD, FORWARD, FORWARD_KV, RECOMPUTE, RankChunks, end_of_unit


class Jobs(NamedTuple):
    """The forwards of a rank's chunks, then the backwards, each with its recompute: int64 [pp, 2 n].

    `work` is the time of each; were its unit the only one, it would start at `before`, and `after` would be the least
    time from its end to that of all.
    """

    work: Int64Array
    before: Int64Array
    after: Int64Array


@compiled
def jobs_of(rank: RankChunks, pp: int) -> Jobs:
    """The jobs of each stage. A unit alone leaves no choice: its chunks forward ascending, then backward descending."""
    n = rank.keeps.size
    shape = (pp, 2 * n)
    jobs = Jobs(np.empty(shape, np.int64), np.empty(shape, np.int64), np.empty(shape, np.int64))
    for chunk in range(n):
        for stage in range(pp):
            recompute = np.int64(0) if rank.keeps[chunk] else rank.durations[RECOMPUTE, stage, chunk]
            forward = FORWARD if rank.keeps[chunk] else FORWARD_KV
            jobs.work[stage, chunk] = rank.durations[forward, stage, chunk]
            jobs.work[stage, n + chunk] = rank.durations[BACKWARD, stage, chunk] + recompute
    first = 0
    while first < n:
        last = end_of_unit(rank.group_id, first)
        _add_before(rank, pp, first, last, jobs)
        _add_after(rank, pp, first, last, jobs)
        first = last
    return jobs


@compiled
def _add_before(rank: RankChunks, pp: int, first: int, last: int, jobs: Jobs) -> None:
    n = rank.keeps.size
    clock = np.zeros(pp, np.int64)
    for chunk in range(first, last):
        arrival = np.int64(0)
        for stage in range(pp):
            jobs.before[stage, chunk] = max(clock[stage], arrival)
            clock[stage] = jobs.before[stage, chunk] + jobs.work[stage, chunk]
            arrival = clock[stage] + rank.link[chunk]
    for chunk in range(last - 1, first - 1, -1):
        arrival = np.int64(0)
        for stage in range(pp - 1, -1, -1):
            recompute = jobs.work[stage, n + chunk] - rank.durations[BACKWARD, stage, chunk]
            jobs.before[stage, n + chunk] = max(clock[stage], arrival - recompute)
            clock[stage] = jobs.before[stage, n + chunk] + jobs.work[stage, n + chunk]
            arrival = clock[stage] + rank.link[chunk]


@compiled
def _add_after(rank: RankChunks, pp: int, first: int, last: int, jobs: Jobs) -> None:
    """The same from the end backwards."""
    n = rank.keeps.size
    clock = np.zeros(pp, np.int64)  # from here on the end
    for chunk in range(first, last):
        rest = np.int64(0)
        for stage in range(pp):
            jobs.after[stage, n + chunk] = max(clock[stage], rest)
            rest = jobs.after[stage, n + chunk] + rank.durations[BACKWARD, stage, chunk] + rank.link[chunk]
            clock[stage] = jobs.after[stage, n + chunk] + jobs.work[stage, n + chunk]
    for chunk in range(last - 1, first - 1, -1):
        rest = np.int64(0)
        for stage in range(pp - 1, -1, -1):
            jobs.after[stage, chunk] = max(clock[stage], rest)
            clock[stage] = jobs.after[stage, chunk] + jobs.work[stage, chunk]
            rest = clock[stage] + rank.link[chunk]


@compiled
def makespan_bound(rank: RankChunks, jobs: Jobs, memory: int) -> int:
    """No schedule in which stages retain at most `memory` tokens is faster.

    The larger of two bounds for each stage: for all sets of jobs, the earliest start of one, the work of all, and the
    least time after one (Carlier, EJOR 11, 1982: the time of the best preemptive schedule); and the tokens of every
    chunk, as long as each is retained at least, which share `memory` (above 0).
    """
    bound = 0
    for stage in range(jobs.work.shape[0]):
        work, before, after = jobs.work[stage], jobs.before[stage], jobs.after[stage]
        latest_first = np.argsort(-before, kind="mergesort")
        for least in np.unique(after):
            total = np.int64(0)
            for job in latest_first:
                if after[job] >= least:
                    total += work[job]
                    bound = max(bound, int(before[job] + total + least))
        # Rounding errors of the sum are far below one part in 2^40.
        shared = int(_retained(rank, jobs, stage) / memory * (1 - 2.0**-40))
        bound = max(bound, int(np.min(before) + np.min(after)) + shared)
    return bound


@compiled
def _retained(rank: RankChunks, jobs: Jobs, stage: int) -> float:
    """Tokens of all chunks times the time for which `stage` retains each, at least."""
    pp, n = jobs.work.shape[0], rank.keeps.size
    total = 0.0
    first = 0
    while first < n:
        last = end_of_unit(rank.group_id, first)
        for chunk in range(first, last):
            longest = jobs.work[stage, n + chunk]
            way = np.int64(0)  # of this chunk from `stage` to `turn` and back; the later parts of its group pass there
            for turn in range(stage, pp if rank.keeps[chunk] else stage):
                time = way
                for part in range(chunk, last):
                    time += jobs.work[turn, part] + jobs.work[turn, n + part]
                for behind in range(turn + 1, pp):
                    time += jobs.work[behind, last - 1] + jobs.work[behind, n + last - 1] + 2 * rank.link[last - 1]
                longest = max(longest, time)
                way += jobs.work[turn, chunk] + jobs.work[turn, n + chunk] + 2 * rank.link[chunk]
            total += float(rank.num_tokens[chunk]) * longest
        first = last
    return total


@compiled
def least_memory(rank: RankChunks) -> int:
    """The tokens whose activations a stage has to retain at once: the kept ones of a unit, or a chunk recomputed."""
    least = int(np.max(rank.num_tokens))
    first = 0
    while first < rank.keeps.size:
        last = end_of_unit(rank.group_id, first)
        least = max(least, int(np.sum(rank.num_tokens[first:last] * rank.keeps[first:last])))
        first = last
    return least
