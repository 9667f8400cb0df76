"""Measures orders on processes: every schedule, beside what is predicted of it, and beside plain state-aware 1F1B.

    python benchmarks/orders_processes.py                    # 6 minutes on 2 cores
    python benchmarks/orders_processes.py --only computing   # one part of it

Executor, links, exchanges and processes are the trainer's. Few machines that this runs on can compute eight stages at
once, so most processes sleep for as long as the cost model predicts of each action (Qwen2.5-7B on H100s), all times
scaled alike:

- stages of one data-parallel rank, 4 and 8 of them;
- ranks that share sequences, on the stages of pipelines, by the schedules that can have such;
- a small model that computes, on two stages of one thread each, with all lengths and the ChunkSize divided by 8. The
  prediction is that of a profile which `chunkplan calibrate` measures first, on two processes at a time.

Schedules take turns, after one round that does not count. Seconds are those until the last process has done its last
action, medians of all repeats; gradients are not reduced.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from context_parallel import calibrate
from context_parallel_processes import PlannedStep, run_plans
from lengths import lengths
from machine import machine
from pipeline_stages import Job, Ran, run_stages
from planning import Row, measure_all
from runtime_batch import qwen2, write_analysis

from chunkplan import PlanConfig, build
from chunkplan.cost.hardware import load_hardware
from chunkplan.cost.model import CostModel
from chunkplan.cost.model_config import read_model_config
from chunkplan.simulation import simulate_lengths, simulate_ranks

SCHEDULES = ("1f1b", "auto", "interleaved", "zero-bubble", "zero-bubble-v", "search")
CHUNK_SIZE, K, NUM_SEQUENCES, CUT = 8192, 4, 64, 98_304
SMALLER = 8

#: Those of ranks that share sequences, and dp, pp of such.
OF_GROUPS = ("1f1b", "auto", "zero-bubble")
SHARED = ((2, 2), (2, 4), (4, 2))


def step_of(num_sequences: int) -> list[int]:
    """Long-tail lengths, one of them as long as any."""
    tokens = lengths("long-tail", 100_000, None)
    return [*tokens[: num_sequences - 1].tolist(), min(int(tokens.max()), CUT)]


def measure_stages(seconds: float, repeats: int) -> list[Row]:
    """Measure the stages of one rank, which sleep; plain 1F1B is predicted to take `seconds`."""
    step, rows = step_of(NUM_SEQUENCES), []
    for pp in (4, 8):
        found = [simulate_lengths(step, chunk_size=CHUNK_SIZE, k=K, pp=pp, schedule=each) for each in SCHEDULES]
        scale = seconds / found[0].makespan * 1e6
        jobs = [Job(each, [np.zeros(length, np.int32) for length in step], scale) for each in found]
        predicted = [each.makespan / 1e6 * scale for each in found]
        rows += rows_of(f"1 x {pp}", SCHEDULES, predicted, ends_of(run_stages(jobs, pp, repeats)))
    return rows


def measure_groups(seconds: float, repeats: int, folder: Path) -> list[Row]:
    """Measure ranks that share sequences, which sleep; plain 1F1B is predicted to take `seconds`."""
    rows, layouts = [], []
    for dp, pp in SHARED:
        values, own = step_of(dp * NUM_SEQUENCES), folder / f"{dp}-{pp}"
        own.mkdir()
        write_analysis(own / "analysis", values, 2)
        steps = []
        for schedule in OF_GROUPS:
            settings = {"chunk_size": CHUNK_SIZE, "k": K, "dp": dp, "pp": pp, "cp": "auto", "schedule": schedule}
            plan = build(
                own / "analysis", own / schedule, PlanConfig(**settings, global_batch=len(values), keep_attention="off")
            )
            ranks = simulate_ranks(plan, next(plan.iter_steps()), range(dp)).values()
            predicted = max(rank.makespan for rank in ranks) / 1e6
            steps.append(PlannedStep(plan.path, [rank.times.durations for rank in ranks], predicted))
        scale = seconds / steps[OF_GROUPS.index("1f1b")].seconds
        layouts.append((dp * pp, [replace(step, scale=scale) for step in steps]))
    for (dp, pp), (_, steps), runs in zip(SHARED, layouts, run_plans(layouts, repeats), strict=True):
        ends = [statistics.median(max(each.spent.end for each in run) for run in of_step) for of_step in runs]
        rows += rows_of(f"{dp} x {pp}", OF_GROUPS, [step.seconds * step.scale for step in steps], ends)
    return rows


def measure_computing(repeats: int, folder: Path) -> list[Row]:
    """Measure the stages of a small model, beside the prediction of a profile of this machine.

    Raises:
        SystemExit: schedules do not come to the same loss and gradients.
    """
    step = [max(2, length // SMALLER) for length in step_of(NUM_SEQUENCES)]
    config = qwen2(256, 8, 4096, max(step))
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    hardware = load_hardware(calibrate(folder))
    cost = CostModel(shape=read_model_config(folder / "config.json"), hardware=hardware, precision="fp32")
    settings: dict[str, Any] = {"chunk_size": CHUNK_SIZE // SMALLER, "k": K, "pp": 2, "cost": cost}
    found = [simulate_lengths(step, schedule=each, **settings) for each in SCHEDULES]
    random = np.random.default_rng(0)
    sequences = [random.integers(0, config.vocab_size, length, np.int32) for length in step]
    rounds = run_stages([Job(each, sequences) for each in found], 2, repeats, config)
    reference = rounds[0][0]
    for ran in (run for runs in rounds for run in runs):
        loss, expected = (sum(each.loss for each in run) for run in (ran, reference))
        if abs(loss / expected - 1) > 1e-5 or abs(ran[0].norm / reference[0].norm - 1) > 1e-4:
            raise SystemExit(f"the schedules do not agree, the comparison is void: {reference}, {ran}")
    return rows_of("1 x 2", SCHEDULES, [each.makespan / 1e6 for each in found], ends_of(rounds))


def ends_of(rounds: Sequence[Sequence[Sequence[Ran]]]) -> list[float]:
    """When the last stage of each job is done, in seconds; the median of its repeats."""
    return [statistics.median(max(each.times.spent.end for each in run) for run in runs) for runs in rounds]


def rows_of(layout: str, schedules: Sequence[str], predicted: Sequence[float], measured: Sequence[float]) -> list[Row]:
    """Make a row of each schedule, beside plain 1F1B."""
    plain = schedules.index("1f1b")
    return [
        {
            "ranks x stages": layout,
            "schedule": schedule,
            "predicted s": round(expected, 3),
            "measured s": round(found, 3),
            "measured / predicted": round(found / expected, 3),
            "1f1b / this, predicted": round(predicted[plain] / expected, 3),
            "measured": round(measured[plain] / found, 3),
        }
        for schedule, expected, found in zip(schedules, predicted, measured, strict=True)
    ]


def main() -> None:
    """Measure what the command line asks for, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*TITLES], nargs="+", default=[*TITLES])
    parser.add_argument("--seconds", type=float, default=4.0, help="of sleep, predicted for plain 1F1B")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    seconds, repeats = options.seconds, options.repeats
    parts = {
        "stages": lambda folder: measure_stages(seconds, repeats),
        "groups": partial(measure_groups, seconds, repeats),
        "computing": partial(measure_computing, repeats),
    }
    chosen = {name: part for name, part in parts.items() if name in options.only}
    measure_all(chosen, TITLES, machine("chunkplan", "torch", "numba"), as_json=options.json)


TITLES = {
    "stages": f"Stages that sleep (ChunkSize {CHUNK_SIZE:,}, K {K}, {NUM_SEQUENCES} sequences)",
    "groups": f"Ranks that share sequences, and sleep ({NUM_SEQUENCES} sequences a rank)",
    "computing": f"A small model on 2 processes (ChunkSize {CHUNK_SIZE // SMALLER:,}, lengths / {SMALLER})",
}


if __name__ == "__main__":
    main()
