"""Measures schedules: long-tail steps on a pipeline of 4 processes, beside what the simulator predicts and replays.

    python benchmarks/pipeline.py                          # 4 minutes on 2 cores
    python benchmarks/pipeline.py --lengths data.parquet   # a column of lengths of your own

Every step runs in three ways: plain 1F1B, where every sequence is a micro-batch of its own in the order of the batch;
state-aware 1F1B of its chunks; and the order that `--schedule search` finds for them in no more memory. All run with
the trainer's executor and links, a process a stage. Few machines that this runs on can compute four stages at once, so:

- stages that sleep for as long as the cost model predicts of each action, all times scaled alike. Schedules, links and
  processes are real, the model is not.
- stages of a small model, with all lengths and the ChunkSize divided by 8. Four stages share the cores there are, so
  that their makespans say nothing about schedules; that loss and gradients are the same, and what replays say, does.

The measured bubble of a stage is the share of the time in which none of its actions ran; the replayed one is what the
simulator makes of the measured times of actions, with nothing lost between stages.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
from lengths import lengths
from machine import machine
from pipeline_stages import Job, Ran, run_stages
from planning import print_table
from runtime_batch import qwen2

from chunkplan.planfile.chunks import chunks_of_rows
from chunkplan.reporting.replay import Replay, replay, waiting_shares
from chunkplan.schedule.timeline import Simulation
from chunkplan.simulation import reschedule, simulate_lengths

PP = 4
GLOBAL_BATCH = 32
CHUNK_SIZE, K = 8192, 4
LONGEST, CUT = 32768, 98304
SMALLER = 8

#: Seconds of sleep for the plain way of a step.
SECONDS = 4.0

#: What the other ways are compared with.
PLAIN = "plain 1F1B"

#: The largest of all stages.
DIFFERENCE = "difference, points"

Row = dict[str, Any]


def ways_of(tokens: Sequence[int], chunk_size: int) -> dict[str, Simulation]:
    """Simulate every way to run a step."""
    whole = simulate_lengths(tokens, chunk_size=None, pp=PP)
    in_order = sorted(whole.chunks, key=lambda chunk: chunk.segments[0].sequence_id)
    micro_batches = tuple(replace(chunk, chunk_id=place) for place, chunk in enumerate(in_order))
    chunked = simulate_lengths(tokens, chunk_size=chunk_size, k=K, pp=PP, schedule="1f1b")
    return {
        PLAIN: reschedule(replace(whole, table=chunks_of_rows(micro_batches)), "1f1b"),
        "state-aware 1F1B": chunked,
        "search": reschedule(chunked, "search", memory_tokens=max(chunked.peak_retained_tokens)),
    }


def measure_sleeping(steps: Sequence[Sequence[int]], repeats: int) -> tuple[list[Row], list[Row]]:
    """Measure makespans and bubbles: a row of each for every step and way."""
    jobs, names = [], []
    for number, tokens in enumerate(steps):
        ways = ways_of(tokens, CHUNK_SIZE)
        scale = SECONDS / ways[PLAIN].makespan * 1e6
        jobs += [Job(way, random_tokens(tokens, 2), scale) for way in ways.values()]
        names += [(number, name) for name in ways]
    rounds = run_stages(jobs, PP, repeats)
    makespans, bubbles = [], []
    for (number, name), job, runs in zip(names, jobs, rounds, strict=True):
        replays = replays_of(runs, job)
        seconds, predicted = median(replays).measured.makespan / 1e6, job.step.makespan / 1e6 * job.scale
        if name == PLAIN:
            plain_seconds, plain_predicted = seconds, predicted
        makespans.append(
            {
                "step": number,
                "longest": max(map(len, job.sequences)),
                "way": name,
                "micro-batches": len(job.step.chunks),
                "measured s": round(seconds, 3),
                "predicted s": round(predicted, 3),
                "faster than plain, measured": round(plain_seconds / seconds, 2),
                "predicted": round(plain_predicted / predicted, 2),
                "peak retained tokens by stage": " ".join(f"{count:,}" for count in job.step.peak_retained_tokens),
            }
        )
        bubbles.append({"step": number, "way": name, **bubble_row(replays), "predicted": percents(job.step)})
    return makespans, bubbles


def measure_computing(tokens: Sequence[int], repeats: int) -> list[Row]:
    """A row for every way.

    Raises:
        SystemExit: the ways do not come to the same loss and gradients.
    """
    config = qwen2(128, PP, 4096, max(tokens))
    ways = ways_of(tokens, CHUNK_SIZE // SMALLER)
    jobs = [Job(way, random_tokens(tokens, config.vocab_size)) for way in ways.values()]
    rounds = run_stages(jobs, PP, repeats, config)
    reference = rounds[0][0][-1]
    for ran in (run[-1] for runs in rounds for run in runs):
        if abs(ran.loss / reference.loss - 1) > 1e-5 or abs(ran.norm / reference.norm - 1) > 1e-4:
            raise SystemExit(f"the ways do not agree, the comparison is void: {reference}, {ran}")
    rows = []
    for name, job, runs in zip(ways, jobs, rounds, strict=True):
        last = runs[0][-1]
        found = {"loss": f"{last.loss:.6f}", "norm of gradients": f"{last.norm:.6f}"}
        rows.append({"way": name, **found, **bubble_row(replays_of(runs, job))})
    return rows


def replays_of(runs: Sequence[Sequence[Ran]], job: Job) -> list[Replay]:
    """Replay the runs of a job, in order of makespan."""
    works = {0: (job.step, {0: 0})}
    replays = [each for run in runs for each in replay(works, [ran.times for ran in run], 1, "step")]
    return sorted(replays, key=lambda each: each.measured.makespan)


def median(replays: Sequence[Replay]) -> Replay:
    """The replay of median makespan."""
    return replays[(len(replays) - 1) // 2]


def bubble_row(replays: Sequence[Replay]) -> Row:
    """Make a row of how far what was measured is from the replay."""
    found = median(replays)
    return {
        "measured s": round(found.measured.makespan / 1e6, 3),
        "replayed s": round(found.replayed.makespan / 1e6, 3),
        "bubble by stage, measured": percents(found.measured),
        "replayed": percents(found.replayed),
        DIFFERENCE: points(found),
        "of any run": max(map(points, replays)),
    }


def points(replayed: Replay) -> float:
    """The largest difference of a stage's measured and replayed bubble."""
    pairs = zip(waiting_shares(replayed.measured), waiting_shares(replayed.replayed), strict=True)
    return round(max(abs(one - other) for one, other in pairs) * 100, 2)


def percents(simulation: Simulation) -> str:
    """The share of the time that each stage waits, in percent, as text."""
    return " ".join(f"{share:.1%}" for share in waiting_shares(simulation))


def random_tokens(tokens: Sequence[int], vocab_size: int) -> list[npt.NDArray[np.int32]]:
    """Draw random tokens for a sequence of each length."""
    random = np.random.default_rng(0)
    return [random.integers(0, vocab_size, length, np.int32) for length in tokens]


def long_steps(values: npt.NDArray[np.integer], num_steps: int) -> list[list[int]]:
    """The first steps that have a sequence of at least `LONGEST` tokens; none is over `CUT`."""
    batches = np.minimum(values[: values.size // GLOBAL_BATCH * GLOBAL_BATCH], CUT).reshape(-1, GLOBAL_BATCH)
    found: list[list[int]] = batches[batches.max(axis=1) >= LONGEST][:num_steps].tolist()
    if len(found) < num_steps:
        raise SystemExit(f"of these lengths {len(found)} steps have a sequence of {LONGEST:,} tokens, not {num_steps}")
    return found


def main() -> None:
    """Measure what the command line asks for, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, help="a .parquet file, its first column")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.lengths:
        values = pq.read_table(options.lengths).column(0).to_numpy()
    else:
        values = lengths("long-tail", 100_000, cap=None)
    steps = long_steps(values, options.steps)
    print(machine("chunkplan", "torch", "transformers", "numba"))
    started = time.perf_counter()
    makespans, bubbles = measure_sleeping(steps, options.repeats)
    settings = f"ChunkSize {CHUNK_SIZE:,}, K {K}, {GLOBAL_BATCH} sequences a step, medians of {options.repeats}"
    print_table(f"{PP} stages that sleep for as long as predicted: {settings}", makespans)
    print_table("The same runs: bubbles", bubbles)
    computing = measure_computing([max(2, length // SMALLER) for length in steps[0]], options.repeats)
    print_table(
        f"{PP} stages of a small model, lengths and ChunkSize divided by {SMALLER}: seconds do not compare schedules",
        computing,
    )
    for what, rows in (("sleep", bubbles), ("compute", computing)):
        largest = max(row[DIFFERENCE] for row in rows)
        print(f"\nstages that {what}: measured and replayed bubbles differ by at most {largest} points in median runs")
    print(f"({time.perf_counter() - started:.0f} s)")


if __name__ == "__main__":
    main()
