"""Measures what making the process groups of a layout takes, once at the start of a run. Linux only.

    python benchmarks/process_groups.py                      # a minute on 2 cores
    python benchmarks/process_groups.py --lengths a.parquet  # a mixture of your own: a column of lengths

Layouts that run: gloo processes on this machine that do nothing else. They join, and make the groups that a plan with
`--cp auto` uses, each used once. "A second of all" is what another group of all processes would take: the trainer had
one for objects, which now go through the default group. Processes start anew for every round; of each round the process
counts that took longest, for joining the one that came last, and of all rounds the fastest.

The large layout does not run here. How many groups there are, and how many each process is in, is counted by calling
the trainer's own code as a process of 512 over torch's backend that sends nothing, which also says what the calls alone
take. Its seconds are extrapolated, by the connections of a process, from the largest layout that ran, where processes
share cores and no network is between them: an order of magnitude, and no measurement.
"""

from __future__ import annotations

import argparse
import pickle
import socket
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from context_parallel import REAL
from lengths import lengths
from machine import machine
from planning import Row, print_table, write_lengths
from torch.testing._internal.distributed.fake_pg import FakeStore

from chunkplan import PlanConfig, build
from chunkplan.arrays import Int64Array
from chunkplan_runtime.distributed.job import make_groups
from chunkplan_runtime.layout import Block, RankLayout, used_blocks

#: dp, pp of those that run, and of one that does not.
LAYOUTS = ((4, 2), (8, 2), (8, 4))
LARGE = (64, 8)

_CPU, _TIMEOUT = torch.device("cpu"), timedelta(minutes=5)


class Took(NamedTuple):
    """Seconds of a process: to join, to make its groups, and to make a second one of all."""

    joined: float
    made: float
    second: float


def blocks_of(values: Int64Array, dp: int, pp: int) -> list[Block]:
    """Which ranks share sequences in a plan of all lengths."""
    with tempfile.TemporaryDirectory() as folder:
        source = write_lengths(Path(folder) / "lengths.parquet", values)
        config = PlanConfig(chunk_size=8192, k=4, dp=dp, pp=pp, cp="auto")
        return used_blocks(build(source, Path(folder) / "plan", config))


def start(layout: RankLayout, blocks: list[Block]) -> list[Took]:
    """Start processes anew, each of which says what it took."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        # Forked, so that many fit. Nothing in this process has begun a thread: plans are built in another one.
        given = (layout, blocks, port, Path(folder))
        torch.multiprocessing.start_processes(_work, args=given, nprocs=layout.world_size, start_method="fork")
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(layout.world_size)]


def _work(rank: int, layout: RankLayout, blocks: list[Block], port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    started = time.perf_counter()
    how = {"world_size": layout.world_size, "rank": rank, "timeout": _TIMEOUT}
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", **how)
    dist.all_reduce(torch.zeros(1))
    joined = time.perf_counter() - started
    groups = make_groups(RankLayout(layout.dp, layout.pp, rank), _CPU, _TIMEOUT, blocks)
    dist.barrier()
    started = time.perf_counter()
    dist.all_reduce(torch.zeros(1), group=dist.new_group(backend="gloo", timeout=_TIMEOUT))
    second = time.perf_counter() - started
    took = Took(joined, groups.seconds, second)
    (folder / str(rank)).write_bytes(pickle.dumps(took))
    dist.barrier()
    dist.destroy_process_group()


class Counted(NamedTuple):
    """Of one process: the calls for groups, the sizes of those that it is in, and seconds of the calls."""

    num_calls: int
    sizes: list[int]
    seconds: float


def count(layout: RankLayout, blocks: list[Block]) -> Counted:
    """Make the groups of a process that sends nothing."""
    calls: list[list[int]] = []
    new_group = dist.new_group

    def counted(ranks: list[int], **how: object) -> dist.ProcessGroup:
        calls.append(ranks)
        made: dist.ProcessGroup = new_group(ranks, **how)
        return made

    dist.init_process_group("fake", store=FakeStore(), rank=layout.process, world_size=layout.world_size)
    with patch.object(dist, "new_group", counted):
        groups = make_groups(layout, _CPU, _TIMEOUT, blocks)
    dist.destroy_process_group()
    sizes = [layout.world_size, *(len(ranks) for ranks in calls if layout.process in ranks)]
    return Counted(len(calls), sizes, groups.seconds)


def counted_row(layout: RankLayout, blocks: list[Block]) -> tuple[Row, int]:
    """Make a row of what the code of all processes asks for; also the connections of a process but to join."""
    found = [count(RankLayout(layout.dp, layout.pp, rank), blocks) for rank in range(layout.world_size)]
    connections = [sum(size - 1 for size in each.sizes) for each in found]
    return {
        "processes": layout.world_size,
        "dp": layout.dp,
        "pp": layout.pp,
        "groups in all": 1 + found[0].num_calls,
        "of a process, most": max(len(each.sizes) for each in found),
        "its connections, most": max(connections),
        "ms of calls alone": f"{1e3 * statistics.median(each.seconds for each in found):.1f}",
    }, max(connections) - (layout.world_size - 1)


def measure(blocks: dict[tuple[int, int], list[Block]], repeats: int) -> list[Row]:
    """Measure every layout that runs, and extrapolate the large one."""
    rows, rates = [], (0.0, 0.0)
    for dp, pp in LAYOUTS:
        layout, own = RankLayout(dp, pp), blocks[dp, pp]
        row, connections = counted_row(layout, own)
        rounds = [start(layout, own) for _ in range(repeats)]
        joined = min(min(each.joined for each in took) for took in rounds)
        made = min(max(each.made for each in took) for took in rounds)
        second = min(max(each.second for each in took) for took in rounds)
        rates = made / connections, second / (layout.world_size - 1)
        rows.append(row | seconds_columns(f"{joined:.2f}", f"{made:.2f}", f"{second:.2f}"))
    layout = RankLayout(*LARGE)
    row, connections = counted_row(layout, blocks[LARGE])
    expected = (rates[0] * connections, rates[1] * (layout.world_size - 1))
    return [*rows, row | seconds_columns("", *(f"(about {seconds:.0f})" for seconds in expected))]


def seconds_columns(joined: str, made: str, second: str) -> Row:
    """Name what was measured."""
    return {"s to join": joined, "s of its groups": made, "s of a second of all": second}


def main() -> None:
    """Measure what the command line asks for, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, default=REAL if REAL.exists() else None)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with ProcessPoolExecutor(1, get_context("spawn")) as other:
        values = other.submit(read, options.lengths).result()
        blocks = {(dp, pp): other.submit(blocks_of, values, dp, pp).result() for dp, pp in (*LAYOUTS, LARGE)}
    print_table("Process groups of a layout, made once at the start", measure(blocks, options.repeats))
    print(f"\n{machine('chunkplan', 'torch')}")


def read(path: Path | None) -> Int64Array:
    """The lengths of a file, or those of a synthetic long tail."""
    if path is None:
        return lengths("long-tail", 100_000, cap=None).astype(np.int64)
    values: Int64Array = pq.read_table(path).column(0).to_numpy().astype(np.int64)
    return values


if __name__ == "__main__":
    main()
