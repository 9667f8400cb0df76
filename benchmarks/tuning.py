"""How long `tune`, schedules and simulation take, and how near the choice is to the best of the full simulation.

    python benchmarks/tuning.py                         # about 10 minutes on 2 cores
    python benchmarks/tuning.py --only tune             # one part of it
    python benchmarks/tuning.py --real lengths.parquet  # a distribution of your own beside the synthetic one

`tune` and `build` are whole commands in processes of their own, the second run of each. The choice is held against
every ChunkSize, K and schedule tried on all steps of the data, not on a sample.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from lengths import lengths
from machine import machine
from planning import run, write_lengths

import chunkplan
from chunkplan.arrays import Int32Array
from chunkplan.cost.hardware import load_hardware
from chunkplan.cost.shape import QWEN2_5_7B
from chunkplan.tuning.options import LADDER, GpuLayout, TuneOptions
from chunkplan.tuning.sampling import sample_steps
from chunkplan.tuning.trial import try_out

Row = dict[str, Any]

LAYOUT = GpuLayout(dp=1, tp=4, pp=4)
PARTS = ("tune", "choice", "schedules")


def measure_tune(sizes: list[int], folder: Path) -> list[Row]:
    """Measure `chunkplan tune --tp 4 --pp 4`: 20 ChunkSizes x 6 Ks x 2 schedules on long-tail lengths."""
    rows = []
    for size in sizes:
        source = write_lengths(folder / f"{size}.parquet", lengths("long-tail", size, cap=None))
        command = ["tune", source, "--tp", "4", "--pp", "4", "--output", folder / "tune.json"]
        run(command)
        seconds, num_bytes = run(command)
        document = json.loads((folder / "tune.json").read_text())
        rows.append(
            {
                "sequences": size,
                "s": round(seconds, 1),
                "GB": round(num_bytes / 1e9, 2),
                "configurations": len(document["choices"]),
                "speedup": round(document["speedup"], 2),
            }
        )
    return rows


def measure_choice(name: str, num_tokens: Int32Array, folder: Path) -> list[Row]:
    """Compare the chosen configuration with the best of all configurations, both on all steps."""
    path = folder / "choice.npy"
    np.save(path, num_tokens)
    rows = []
    for gpu_memory in (80 << 30, 32 << 30):
        options = TuneOptions(
            shape=QWEN2_5_7B, hardware=load_hardware("h100"), gpu_memory=gpu_memory, tp=LAYOUT.tp, pp=LAYOUT.pp
        )
        chosen = chunkplan.tune(path, options).chosen
        cost = options.cost(LAYOUT, LADDER[0])
        everything = sample_steps(num_tokens, chosen.config, cost, num_tokens.size)
        times = []
        for schedule, chunk_size, k in product(options.schedules_of(LAYOUT), options.chunk_sizes, options.ks):
            config = options.plan_config(LAYOUT, chunk_size, k, schedule)
            for rung in LADDER:
                cost = options.cost(LAYOUT, rung)
                if rung.kv_offload and chunk_size < cost.offload_chunk_size:
                    continue
                outcome = try_out(everything, config, cost)
                if outcome.memory(cost).total <= gpu_memory:
                    times.append(outcome.step_ns)
                    break
        on_all_steps = try_out(everything, chosen.config, chosen.cost)
        rows.append(
            {
                "lengths": name,
                "GiB": gpu_memory >> 30,
                "steps": int(everything.sizes.size),
                "chosen": [chosen.config.chunk_size, chosen.config.k, chosen.config.schedule],
                "over the best": round(on_all_steps.step_ns / min(times) - 1, 4),
                "sampled over all steps": round(chosen.step_ns / on_all_steps.step_ns - 1, 4),
                "GiB needed": round(on_all_steps.memory(chosen.cost).total / 2**30, 1),
            }
        )
    return rows


def measure_schedules(size: int, folder: Path) -> list[Row]:
    """Measure a whole plan on 8 stages: split, packed, scheduled, simulated and written."""
    source = write_lengths(folder / f"{size}.parquet", lengths("long-tail", size, cap=None))
    rows = []
    for schedule in ("1f1b", "interleaved", "zero-bubble"):
        build = ["build", source, "--chunk-size", "8192", "--k", "4", "--pp", "8", "--schedule", schedule]
        build += ["--output", folder / "plan"] + (["--virtual-stages", "3"] if schedule == "interleaved" else [])
        seconds, num_bytes = run(build)
        predicted = chunkplan.load_plan(folder / "plan").manifest["predictions"]
        rows.append(
            {
                "schedule": schedule,
                "sequences": size,
                "s": round(seconds, 1),
                "GB": round(num_bytes / 1e9, 2),
                "over the bound": round(predicted["predicted_us"] / predicted["lower_bound_us"], 3),
            }
        )
    return rows


def main() -> None:
    """Measure, and print a JSON line for each row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--real", type=Path, action="append", default=[], help="a file with one column of lengths")
    options = parser.parse_args()
    parts = options.only or PARTS
    print(json.dumps({"machine": machine("numpy", "numba", "ortools")}))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = measure_tune(options.sizes, folder) if "tune" in parts else []
        if "choice" in parts:
            rows += measure_choice("long-tail 100K", lengths("long-tail", 100_000, cap=None), folder)
            for path in options.real:
                rows += measure_choice(path.stem, pq.read_table(path).column(0).to_numpy().astype(np.int32), folder)
        if "schedules" in parts:
            rows += measure_schedules(max(options.sizes), folder)
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
