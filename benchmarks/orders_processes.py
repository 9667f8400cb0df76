"""Measures orders on processes: every schedule on 4 and 8 of them, with actions that sleep for as long as is predicted.

    python benchmarks/orders_processes.py       # 3 minutes on 2 cores

Executor, links and processes are the trainer's; in place of the model each action sleeps, all times scaled alike, so
that few cores are enough. A step is of long-tail lengths, as one data-parallel rank has them. The measured time is from
a barrier until the last process is done, the median of some repeats.
"""

from __future__ import annotations

import argparse
import pickle
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lengths import lengths
from machine import machine
from pipeline_stages import Job, work_of
from planning import print_table
from torch import Tensor, nn

from chunkplan.layers import V_SHAPED
from chunkplan.operations import OPS
from chunkplan.planfile.plan import Action
from chunkplan.simulation import simulate_lengths
from chunkplan_runtime.attention.context import Current
from chunkplan_runtime.distributed.groups import make_groups
from chunkplan_runtime.execution.executor import Executor
from chunkplan_runtime.execution.links import Wire
from chunkplan_runtime.feed.stream import ChunkTensors
from chunkplan_runtime.kv.store import StateStore
from chunkplan_runtime.layout import RankLayout

SCHEDULES = ("1f1b", "auto", "interleaved", "zero-bubble", "zero-bubble-v", "search")
_CPU = torch.device("cpu")
_TIMEOUT = timedelta(seconds=120)
_CHUNK_SIZE, _K, _NUM_SEQUENCES, _CUT = 8192, 4, 64, 98_304

Row = dict[str, Any]


@dataclass(frozen=True)
class PassedOn:
    """What the executor needs of a model: its hidden states are one number a token, as they came."""

    is_first: bool
    is_last: bool
    parts: list[Any]
    head: nn.Module = field(default_factory=lambda: nn.Linear(1, 2))
    vocab_size: int = 2
    device: torch.device = _CPU
    dtype: torch.dtype = torch.float32
    current: Current = field(default_factory=Current)

    @classmethod
    def of(cls, layout: RankLayout) -> PassedOn:
        """The parts of a model that a process of `layout` has."""
        current = Current()
        last = layout.num_model_stages - 1
        parts = [cls(each == 0, each == last, [], current=current) for each in layout.model_stages()]
        return cls(layout.is_first, layout.is_last, parts, current=current)

    def hidden_states(
        self, tensors: ChunkTensors, store: StateStore, inputs: Tensor | None = None, seed: int | None = None
    ) -> Tensor:
        """Those that came, [num_tokens, 1]."""
        hidden = torch.zeros(len(tensors.labels), 1, requires_grad=True) if inputs is None else inputs
        return hidden.clone()


def measure(pp: int, seconds: float, repeats: int) -> list[Row]:
    """Run a step on `pp` processes by every schedule; that of plain 1F1B is predicted to take `seconds`."""
    tokens = lengths("long-tail", 100_000, None)
    longest = int(np.argmax(tokens.clip(max=_CUT)))
    step = [*tokens[: _NUM_SEQUENCES - 1].tolist(), int(tokens[longest].clip(max=_CUT))]
    jobs = []
    for schedule in SCHEDULES:
        found = simulate_lengths(step, chunk_size=_CHUNK_SIZE, k=_K, pp=pp, schedule=schedule)
        scale = seconds / jobs[0].step.makespan * 1e6 if jobs else seconds / found.makespan * 1e6
        jobs.append(Job(found, [np.zeros(length, np.int32) for length in step], scale))
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_work, args=(pp, Path(folder), jobs, repeats), nprocs=pp)
        ends = np.max([pickle.loads((Path(folder) / str(stage)).read_bytes()) for stage in range(pp)], axis=0)
    rows: list[Row] = []
    for job, found_ends in zip(jobs, np.median(ends, axis=0), strict=True):
        predicted = job.step.makespan / 1e6 * job.scale
        first = rows[0] if rows else None
        rows.append(
            {
                "stages": pp,
                "schedule": job.step.schedule,
                "predicted s": round(predicted, 3),
                "measured s": round(float(found_ends), 3),
                "measured over predicted": round(float(found_ends) / predicted, 3),
                "times 1f1b, predicted": 1.0 if first is None else round(first["predicted s"] / predicted, 3),
                "measured": 1.0 if first is None else round(first["measured s"] / float(found_ends), 3),
            }
        )
    return rows


def _work(stage: int, pp: int, folder: Path, jobs: list[Job], repeats: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", _TIMEOUT, world_size=pp, rank=stage)
    found = []
    groups: dict[RankLayout, Any] = {}
    for job in jobs:
        layout = RankLayout(1, pp, stage, job.step.virtual_stages, job.step.schedule in V_SHAPED)
        groups.setdefault(layout, make_groups(layout, _CPU, _TIMEOUT))
    for _ in range(repeats + 1):
        for job in jobs:
            layout = RankLayout(1, pp, stage, job.step.virtual_stages, job.step.schedule in V_SHAPED)
            found.append(_run(job, layout, groups[layout]))
    ends = np.reshape(found, (repeats + 1, len(jobs)))[1:]  # the first round does not count
    (folder / str(stage)).write_bytes(pickle.dumps(ends))
    dist.destroy_process_group()


def _run(job: Job, layout: RankLayout, groups: Any) -> float:
    """Run a step on one stage; returns when it is done, in seconds."""
    durations = job.step.times.durations / 1e9 * job.scale  # [num_ops, num_model_stages, num_chunks]
    model_stages = layout.model_stages()

    @contextmanager
    def sleeping(action: Action) -> Iterator[None]:
        time.sleep(durations[OPS.index(action.op), model_stages[action.virtual_stage], action.chunk_id])
        yield

    model: Any = PassedOn.of(layout)
    executor = Executor(model, links=groups.links(Wire(1, torch.float32, _CPU)))
    work = work_of(job, layout.stage)
    dist.barrier()
    started = time.perf_counter()
    executor.run(work, sum(len(sequence) for sequence in job.sequences), sleeping)
    return time.perf_counter() - started


def main() -> None:
    """Measure, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rows = [row for pp in (4, 8) for row in measure(pp, options.seconds, options.repeats)]
    print(machine())
    print_table("orders on processes", rows)


if __name__ == "__main__":
    main()
