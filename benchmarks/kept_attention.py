"""Measures what keeping attention of chunks that are run again saves, by the cost model: Qwen2.5-7B.

    python benchmarks/kept_attention.py                            # a minute
    python benchmarks/kept_attention.py --lengths data.parquet     # a column of lengths of your own on stages beside it

*Run again* is the part of the work of one sequence on one stage that is recomputed, in chunks of 8,192. On stages,
*over work* is as in benchmarks/orders.py: predicted time over that of the bounds that a plan names.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from machine import machine
from planning import print_table

from chunkplan.arrays import Int64Array
from chunkplan.config.plan import VIRTUAL, PlanConfig
from chunkplan.cost.hardware import load_hardware
from chunkplan.cost.model import CostModel
from chunkplan.planning.batches import step_blocks
from chunkplan.planning.memory import host_bytes_of
from chunkplan.planning.method import Dataset, Planned, plan_block

PROFILES = ("h100", "a100", "rtx4090")
LENGTHS = tuple(1 << power for power in range(15, 21))
KS = (1, 2, 4)
SCHEDULES = ("1f1b", "auto", "zero-bubble", "zero-bubble-v")

Row = dict[str, Any]


def plan(lengths: Int64Array, config: PlanConfig, cost: CostModel) -> list[Planned]:
    """Plan sequences of these lengths."""
    dataset = Dataset(lengths.astype(np.int32), np.maximum(lengths - 1, 0).astype(np.int32), None)
    blocks = step_blocks(lambda _: np.ones(lengths.size, np.int32), config)
    return [plan_block(block, dataset, config, cost, lambda: False) for block in blocks]


def sums(planned: list[Planned], *columns: str) -> list[float]:
    """Sum columns of the steps."""
    steps = [each.tables["steps"].to_pydict() for each in planned]
    return [sum(sum(each[column]) for each in steps) for column in columns]


def measure_sequences(profile: str) -> list[Row]:
    """Measure sequences of each length: what is run again without kept attention and with it, and host memory."""
    cost = CostModel(hardware=load_hardware(profile))
    rows = []
    for num_tokens in LENGTHS:
        row: Row = {"profile": profile, "tokens": num_tokens}
        for k in KS:
            shares = []
            for keep in ("off", "auto"):
                config = PlanConfig(chunk_size=8192, k=k, global_batch=1, keep_attention=keep)
                planned = plan(np.array([num_tokens]), config, cost)
                [again_us] = sums(planned, "recompute_us")
                shares.append(f"{again_us / float(planned[0].chunks.cost.sum(dtype=np.float64)):.1%}")
            row[f"K {k}, run again"] = " -> ".join(shares)
            if k == 1:
                row["host, GiB"] = round(host_bytes_of(config, cost, planned[0].peaks) / 2**30, 1)
        rows.append(row)
    return rows


def measure_stages(path: Path, hardware: Sequence[str], num_steps: int) -> list[Row]:
    """Plan steps of these lengths on 8 stages by each schedule, with each profile."""
    lengths = pq.read_table(path).column(0).to_numpy().astype(np.int64)
    rows = []
    for profile, split, schedule in product(hardware, ("full", "cost"), SCHEDULES):
        row: Row = {"profile": profile, "parts of equal": "time" if split == "cost" else "length", "schedule": schedule}
        for keep in ("off", "auto"):
            config = PlanConfig(
                chunk_size=3072,
                k=16,
                pp=8,
                schedule=schedule,
                virtual_stages=2 if schedule in VIRTUAL else 1,
                split=split,
                keep_attention=keep,
            )
            cost = CostModel(hardware=load_hardware(profile))
            planned = plan(lengths[: num_steps * config.global_batch], config, cost)
            predicted, bound = sums(planned, "predicted_us", "lower_bound_us")
            row[f"over work, {keep}"] = round(predicted / bound, 3)
        rows.append(row)
    return rows


def main() -> None:
    """Measure what the command line asks for, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--hardware", nargs="+", default=["h100"], help="profiles of the GPUs of the stages")
    options = parser.parse_args()
    print(machine())
    print_table("sequences", (row for profile in PROFILES for row in measure_sequences(profile)))
    if options.lengths:
        print_table("stages", measure_stages(options.lengths, options.hardware, options.steps))


if __name__ == "__main__":
    main()
