"""Measures orders: how near the steps of a plan come to what no plan of their work beats, and what finding them takes.

    python benchmarks/orders.py                                        # half a minute on one core
    python benchmarks/orders.py --lengths data.parquet                 # a column of lengths of your own beside it
    python benchmarks/orders.py --schedules 1f1b,auto                  # some schedules

A step takes as long as its slowest rank. `over work` is the sum of these times over that of the bounds that a plan
names, which are work and the longest sequence shared by all stages; `over order` over that of what no order of the same
chunks with whole backwards beats, without a limit on memory. Retained and KV tokens are the most of any stage. The
schedules run on one thread, after a first run that compiles.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from machine import machine
from planning import print_table

from chunkplan.arrays import Int64Array
from chunkplan.config.plan import VIRTUAL, PlanConfig
from chunkplan.cost.durations import ChunkTimes
from chunkplan.cost.model import CostModel
from chunkplan.planfile.chunks import Chunks, chunks_of_rank
from chunkplan.planning.batches import step_blocks
from chunkplan.planning.method import Dataset, chunk_block, predict_block, schedule_block
from chunkplan.schedule.actions import times_of_rank
from chunkplan.schedule.bounds import jobs_of, makespan_bound
from chunkplan.schedule.holdings import KV

#: No rank retains as many tokens.
_NO_LIMIT = 2**62

Row = dict[str, Any]


def cases(path: Path | None, num_steps: int) -> dict[str, tuple[Int64Array, PlanConfig]]:
    """The lengths of each case and what they are planned with: those of pre-training, and of a mixture."""
    config = PlanConfig(chunk_size=8192, k=4, dp=4, pp=4, cp="off")
    found = {"uniform 32K": (np.full(num_steps * config.global_batch, 32768, np.int64), config)}
    if path is not None:
        tail = PlanConfig(chunk_size=3072, k=16, pp=8, cp="off")
        lengths = pq.read_table(path).column(0).to_numpy().astype(np.int64)
        found[path.stem] = lengths[: num_steps * tail.global_batch], tail
    return found


def measure(name: str, lengths: Int64Array, config: PlanConfig, schedules: list[str]) -> list[Row]:
    """Schedule all steps of these lengths by each schedule."""
    cost = CostModel()
    dataset = Dataset(lengths.astype(np.int32), np.maximum(lengths - 1, 0).astype(np.int32), None)
    blocks = list(step_blocks(lambda _: np.ones(lengths.size, np.int32), config))
    proved = sum(
        proved_ns(each.chunks, each.times, config)
        for each in (chunk_block(block, dataset, config, cost) for block in blocks)
    )
    rows = []
    for schedule in schedules:
        of_schedule = replace(config, schedule=schedule, virtual_stages=2 if schedule in VIRTUAL else 1)
        chunked = [chunk_block(block, dataset, of_schedule, cost) for block in blocks]
        schedule_block(blocks[0], chunked[0], of_schedule, cost)  # compiles
        started = time.perf_counter()
        scheduled = [schedule_block(*each, of_schedule, cost) for each in zip(blocks, chunked, strict=True)]
        seconds = time.perf_counter() - started
        planned = [
            predict_block(block, dataset, of_schedule, cost, each, found)
            for block, each, found in zip(blocks, chunked, scheduled, strict=True)
        ]
        steps = [each.tables["steps"].to_pydict() for each in planned]
        predicted, bound = (sum(sum(each[column]) for each in steps) for column in ("predicted_us", "lower_bound_us"))
        num_steps = sum(block.sizes.size for block in blocks)
        rows.append(
            {
                "case": name,
                "schedule": schedule,
                "steps": num_steps,
                "over work": round(predicted / bound, 3),
                "over order": round(1000 * predicted / proved, 3),
                "ms a step": round(1000 * seconds / num_steps, 2),
                "retained": max(int(each.peak_retained_tokens.max()) for each in scheduled),
                "KV": max(int(each.peaks[:, KV].max()) for each in planned),
            }
        )
    return rows


def proved_ns(chunks: Chunks, times: ChunkTimes, config: PlanConfig) -> int:
    """The time that no order of the chunks of these steps beats, summed over steps."""
    bounds = []
    for rank in range(chunks.rank_chunks.size - 1):
        rank_chunks, rank_times = chunks_of_rank(chunks, rank), times_of_rank(chunks, times, rank)
        jobs = jobs_of(rank_chunks, rank_times, config.pp)
        bounds.append(makespan_bound(rank_chunks, rank_times, jobs, _NO_LIMIT))
    return int(np.reshape(bounds, (-1, config.dp)).max(axis=1).sum())


def main() -> None:
    """Measure what the command line asks for, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--schedules", default="1f1b,auto,interleaved,zero-bubble,zero-bubble-v,search")
    options = parser.parse_args()
    rows = []
    for name, (lengths, config) in cases(options.lengths, options.steps).items():
        rows += measure(name, lengths, config, options.schedules.split(","))
    print(machine())
    print_table("orders", rows)


if __name__ == "__main__":
    main()
