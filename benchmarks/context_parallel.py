"""Measures steps in which ranks share sequences, beside the same steps without, and beside what is predicted of both.

    python benchmarks/context_parallel.py                          # 5 minutes on 2 cores
    python benchmarks/context_parallel.py --lengths a.parquet      # a mixture of your own: a column of lengths
    python benchmarks/context_parallel.py --only computing         # a model that computes, on 2 processes

Of each mixture of lengths the first step of 256 sequences with one of at least 65,536 tokens, planned with `--cp off`
and with `--cp auto`. Both run with the trainer's own stream, executor, links and exchanges, in turn. Few machines that
this runs on can compute eight ranks at once, so:

- processes that sleep for as long as the cost model predicts of each action (Qwen2.5-7B on H100s), all times scaled
  alike. Plans, order, processes, links, and who waits for whom are real; computing is not, and of what is exchanged
  only so much as is needed to wait for each other: heads of one number, in one layer.
- a small model that computes, on 2 processes of one thread each, with all lengths and the ChunkSize divided by 8. The
  prediction is that of a profile which `chunkplan calibrate` measures first, on two processes at a time.

Seconds are those until the last process has done its last action, medians of all repeats, and in brackets least and
most; gradients are not reduced. Ratios are those of pairs that ran one after the other. Replayed is what the simulator
makes of the measured times of actions, those of shared chunks since all were there: nothing is lost between actions.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from context_parallel_processes import PlannedStep, run_plans
from lengths import lengths
from machine import machine
from planning import Row, measure_all
from runtime_batch import qwen2, write_analysis

from chunkplan import PlanConfig, build
from chunkplan.arrays import Int64Array
from chunkplan.cost.hardware import load_hardware
from chunkplan.cost.model import CostModel
from chunkplan.cost.model_config import read_model_config
from chunkplan.planfile.load import load_plan
from chunkplan.planfile.measured import MeasuredStep, StepTimeline
from chunkplan.reporting.replay import replay_step
from chunkplan.simulation import simulate_ranks
from chunkplan_runtime.layout import RankLayout

GLOBAL_BATCH, LONGEST = 256, 65_536
CHUNK_SIZE, K = 8192, 4
SMALLER = 8

#: dp, pp of processes that sleep.
LAYOUTS = ((4, 1), (8, 1), (2, 2), (4, 2))

#: Seconds of sleep that are predicted of a step with groups.
SECONDS = 5.0

#: Where real lengths lie beside the repository, if they do.
REAL = Path(__file__).parents[2] / "shared" / "lengths" / "merged_long_sft.parquet"


def plan_both(
    folder: Path, values: Int64Array, cost: CostModel, vocab_size: int = 2, **config: Any
) -> list[PlannedStep]:
    """Plan one step of random tokens without groups and with groups."""
    folder.mkdir()
    write_analysis(folder / "analysis", values.tolist(), vocab_size)
    steps = []
    for cp in ("off", "auto"):
        settings = PlanConfig(k=K, global_batch=len(values), cp=cp, keep_attention="off", **config)
        plan = build(folder / "analysis", folder / f"plan-{cp}", settings, cost=cost)
        described = next(plan.iter_steps())
        ranks = simulate_ranks(plan, described, range(plan.config.dp)).values()
        seconds = max(rank.makespan for rank in ranks) / 1e6
        steps.append(PlannedStep(plan.path, [rank.times.durations for rank in ranks], seconds))
    return steps


def measured_row(
    steps: Sequence[PlannedStep], runs: Sequence[Sequence[Sequence[StepTimeline]]], layout: RankLayout
) -> Row:
    """Make a row of what was measured of a step without and with groups, and what was predicted."""
    measured = [[max(times.spent.end for times in run) for run in rounds] for rounds in runs]
    predicted = [step.seconds * step.scale for step in steps]
    over = [[seconds / expected for seconds in each] for each, expected in zip(measured, predicted, strict=True)]
    plan = load_plan(steps[1].plan)
    replays = [replay_step(MeasuredStep(plan, list(run), layout.dp, planned=True)) for run in runs[1]]
    replayed = [max(each.replayed.makespan for each in found) / 1e6 for found in replays]
    ratios = [off / auto for off, auto in zip(*measured, strict=True)]
    return {
        "s without": spread(measured[0]),
        "s with": spread(measured[1]),
        "measured / predicted, without": spread(over[0]),
        "with": spread(over[1]),
        "measured / replayed, with": spread([one / other for one, other in zip(measured[1], replayed, strict=True)]),
        "without / with, measured": spread(ratios),
        "predicted": f"{predicted[0] / predicted[1]:.3f}",
    }


def spread(values: Sequence[float]) -> str:
    """The median, and the least and the most of them."""
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def measure_sleeping(mixtures: dict[str, Int64Array], repeats: int, folder: Path) -> list[Row]:
    """Measure processes that sleep, on every layout."""
    rows, layouts = [], []
    for dp, pp in LAYOUTS:
        steps = []
        for name, values in mixtures.items():
            both = plan_both(folder / f"{name}-{dp}-{pp}", values, CostModel(), chunk_size=CHUNK_SIZE, dp=dp, pp=pp)
            steps += [replace(step, scale=SECONDS / both[1].seconds) for step in both]
            rows.append({"lengths": name, "longest": f"{values.max():,}", "dp": dp, "pp": pp})
        layouts.append((dp * pp, steps))
    pairs = [
        (steps[at : at + 2], runs[at : at + 2])
        for (_, steps), runs in zip(layouts, run_plans(layouts, repeats), strict=True)
        for at in range(0, len(steps), 2)
    ]
    return [row | measured_row(*pair, RankLayout(row["dp"], row["pp"])) for row, pair in zip(rows, pairs, strict=True)]


def measure_computing(mixtures: dict[str, Int64Array], repeats: int, folder: Path) -> list[Row]:
    """Measure a small model on two processes, beside the prediction of a profile of this machine."""
    small = {name: np.maximum(values // SMALLER, 2) for name, values in mixtures.items()}
    config = qwen2(256, 2, 4096, int(max(values.max() for values in small.values())))
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    cost = CostModel(
        shape=read_model_config(folder / "config.json"), hardware=load_hardware(calibrate(folder)), precision="fp32"
    )
    plans = {
        name: plan_both(folder / name, values, cost, chunk_size=CHUNK_SIZE // SMALLER, dp=2)
        for name, values in small.items()
    }
    [runs] = run_plans([(2, [step for steps in plans.values() for step in steps])], repeats, config)
    return [
        {
            "lengths": name,
            "longest": f"{small[name].max():,}",
            "tokens": f"{small[name].sum():,}",
            **measured_row(steps, runs[2 * number : 2 * number + 2], RankLayout(2)),
        }
        for number, (name, steps) in enumerate(plans.items())
    ]


def calibrate(folder: Path) -> Path:
    """Make a profile of one thread of this machine while another one is at the same."""
    profiles = [folder / f"profile-{number}.toml" for number in range(2)]
    sizes = ["--chunk-sizes", "256,512,1024", "--prefixes", "2048,8192", "--device", "cpu"]
    command = [sys.executable, "-m", "chunkplan_cli.main", "calibrate", "--model", folder / "config.json"]
    processes = [
        subprocess.Popen(
            [*command, *sizes, "--output", profile],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for profile in profiles
    ]
    if sum(process.wait() for process in processes):
        raise SystemExit("`chunkplan calibrate` failed")
    return profiles[0]


def long_step(values: Int64Array) -> Int64Array:
    """The first `GLOBAL_BATCH` sequences, in their order, that have one of at least `LONGEST` tokens."""
    steps = values[: values.size // GLOBAL_BATCH * GLOBAL_BATCH].reshape(-1, GLOBAL_BATCH)
    found = steps[steps.max(axis=1) >= LONGEST]
    if not len(found):
        raise SystemExit(f"of these lengths no step has a sequence of {LONGEST:,} tokens")
    first: Int64Array = found[0]
    return first


def main() -> None:
    """Measure what the command line asks for, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*TITLES], nargs="+", default=[*TITLES])
    parser.add_argument(
        "--lengths",
        type=Path,
        nargs="+",
        default=[REAL] if REAL.exists() else [],
        help=f".parquet files with a column of lengths; by default {REAL.name} of ../shared/lengths, or synthetic ones",
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    mixtures = {path.stem: pq.read_table(path).column(0).to_numpy().astype(np.int64) for path in options.lengths}
    mixtures = mixtures or {"long-tail": lengths("long-tail", 100_000, cap=None).astype(np.int64)}
    steps = {name: long_step(values) for name, values in mixtures.items()}
    parts = {
        "sleeping": partial(measure_sleeping, steps, options.repeats),
        "computing": partial(measure_computing, steps, 2 * options.repeats + 1),
    }
    started, load = time.perf_counter(), os.getloadavg()[0]
    chosen = {name: part for name, part in parts.items() if name in options.only}
    measure_all(chosen, TITLES, machine("chunkplan", "torch", "transformers", "numba"), as_json=options.json)
    loads = f"load of the machine before {load:.1f}, after {os.getloadavg()[0]:.1f}"
    print(f"({time.perf_counter() - started:.0f} s; {loads})")


TITLES = {
    "sleeping": f"Processes that sleep (ChunkSize {CHUNK_SIZE:,}, K {K}, {GLOBAL_BATCH} sequences a step)",
    "computing": f"A small model on 2 processes (ChunkSize {CHUNK_SIZE // SMALLER:,}, K {K}, lengths / {SMALLER})",
}


if __name__ == "__main__":
    main()
