"""Lower bounds of schedules of a rank's chunks: time, and memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.compiled import compiled
from chunkplan.cost.durations import ChunkTimes
from chunkplan.planfile.chunks import Chunks
from chunkplan.schedule.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FORWARD_KV,
    RECOMPUTE,
    unit_end,
)


class Jobs(NamedTuple):
    """The forwards of a rank's chunks, then the backwards, each with its recompute: int64 [pp, 2 n].

    `work` is the time of each; were its unit the only one, it would start at `before`, and `after` would be the least
    time from its end to that of all.
    """

    work: Int64Array
    before: Int64Array
    after: Int64Array


@compiled
def jobs_of(chunks: Chunks, times: ChunkTimes, pp: int, backward: int = BACKWARD) -> Jobs:
    """The jobs of each stage. A unit alone leaves no choice: its chunks forward ascending, then backward descending.

    `backward`: the op that the stage before waits for, a whole backward or its half for inputs.
    """
    n = chunks.keeps_activations.size
    shape = (pp, 2 * n)
    jobs = Jobs(np.empty(shape, np.int64), np.empty(shape, np.int64), np.empty(shape, np.int64))  # [pp, 2 n]
    for chunk in range(n):
        for stage in range(pp):
            recompute = np.int64(0) if chunks.keeps_activations[chunk] else times.durations[RECOMPUTE, stage, chunk]
            forward = FORWARD if chunks.keeps_activations[chunk] else FORWARD_KV
            jobs.work[stage, chunk] = times.durations[forward, stage, chunk]
            jobs.work[stage, n + chunk] = times.durations[backward, stage, chunk] + recompute
    start = 0
    while start < n:
        stop = unit_end(chunks.group_id, start)
        _add_before(chunks, times, pp, start, stop, backward, jobs)
        _add_after(chunks, times, pp, start, stop, backward, jobs)
        start = stop
    return jobs


@compiled
def _add_before(chunks: Chunks, times: ChunkTimes, pp: int, start: int, stop: int, backward: int, jobs: Jobs) -> None:
    n = chunks.keeps_activations.size
    clock = np.zeros(pp, np.int64)
    for chunk in range(start, stop):
        arrival = np.int64(0)
        for stage in range(pp):
            jobs.before[stage, chunk] = max(clock[stage], arrival)
            clock[stage] = jobs.before[stage, chunk] + jobs.work[stage, chunk]
            arrival = clock[stage] + times.link[chunk]
    for chunk in range(stop - 1, start - 1, -1):
        arrival = np.int64(0)
        for stage in range(pp - 1, -1, -1):
            recompute = jobs.work[stage, n + chunk] - times.durations[backward, stage, chunk]
            jobs.before[stage, n + chunk] = max(clock[stage], arrival - recompute)
            clock[stage] = jobs.before[stage, n + chunk] + jobs.work[stage, n + chunk]
            arrival = clock[stage] + times.link[chunk]


@compiled
def _add_after(chunks: Chunks, times: ChunkTimes, pp: int, start: int, stop: int, backward: int, jobs: Jobs) -> None:
    """Fill `jobs.after` for one unit, which is simulated backwards from its end."""
    n = chunks.keeps_activations.size
    clock = np.zeros(pp, np.int64)  # from here on the end
    for chunk in range(start, stop):
        rest = np.int64(0)
        for stage in range(pp):
            jobs.after[stage, n + chunk] = max(clock[stage], rest)
            rest = jobs.after[stage, n + chunk] + times.durations[backward, stage, chunk] + times.link[chunk]
            clock[stage] = jobs.after[stage, n + chunk] + jobs.work[stage, n + chunk]
    for chunk in range(stop - 1, start - 1, -1):
        rest = np.int64(0)
        for stage in range(pp - 1, -1, -1):
            jobs.after[stage, chunk] = max(clock[stage], rest)
            clock[stage] = jobs.after[stage, chunk] + jobs.work[stage, chunk]
            rest = clock[stage] + times.link[chunk]


@compiled
def makespan_bound(chunks: Chunks, times: ChunkTimes, jobs: Jobs, memory: int) -> int:
    """A lower bound on the time of schedules in which stages retain at most `memory` tokens.

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
        shared = int(_retained(chunks, times, jobs, stage) / memory * (1 - 2.0**-40))
        bound = max(bound, int(np.min(before) + np.min(after)) + shared)
    return bound


def unit_bound(chunks: Chunks, times: ChunkTimes) -> int:
    """A lower bound for a V of virtual stages with split backwards: the longest time of a unit alone.

    It is simulated as if each model stage were a stage of its own. Where the V turns there is no link.
    """
    durations = times.durations.copy()
    durations[BACKWARD] = durations[BACKWARD_INPUT]
    n, num_model_stages = chunks.num_tokens.size, durations.shape[1]
    jobs = jobs_of(chunks, ChunkTimes(durations, times.link), num_model_stages)
    ends = jobs.before[:, n:] + jobs.work[:, n:] + durations[BACKWARD_WEIGHT]
    return int(ends.max() - 2 * times.link.max())


@compiled
def _retained(chunks: Chunks, times: ChunkTimes, jobs: Jobs, stage: int) -> float:
    """Tokens of all chunks times the time for which `stage` retains each, at least."""
    pp, n = jobs.work.shape[0], chunks.keeps_activations.size
    total = 0.0
    start = 0
    while start < n:
        stop = unit_end(chunks.group_id, start)
        for chunk in range(start, stop):
            longest = jobs.work[stage, n + chunk]
            way = np.int64(0)  # of this chunk from `stage` to `turn` and back; the later parts of its group pass there
            for turn in range(stage, pp if chunks.keeps_activations[chunk] else stage):
                time = way
                for part in range(chunk, stop):
                    time += jobs.work[turn, part] + jobs.work[turn, n + part]
                for behind in range(turn + 1, pp):
                    time += jobs.work[behind, stop - 1] + jobs.work[behind, n + stop - 1] + 2 * times.link[stop - 1]
                longest = max(longest, time)
                way += jobs.work[turn, chunk] + jobs.work[turn, n + chunk] + 2 * times.link[chunk]
            total += float(chunks.num_tokens[chunk]) * longest
        start = stop
    return total


@compiled
def least_memory(chunks: Chunks) -> int:
    """The tokens whose activations a stage has to retain at once: the kept ones of a unit, or a chunk recomputed."""
    least = int(np.max(chunks.num_tokens))
    start = 0
    while start < chunks.keeps_activations.size:
        stop = unit_end(chunks.group_id, start)
        least = max(least, int(np.sum(chunks.num_tokens[start:stop] * chunks.keeps_activations[start:stop])))
        start = stop
    return least
