"""Runs the first step of plans in which ranks share sequences, on processes: a model, or a stand-in that sleeps."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pipeline_stages import Sleeper

from chunkplan.planfile.load import load_plan
from chunkplan.schedule.simulated import Simulation
from chunkplan_runtime.distributed.groups import make_groups
from chunkplan_runtime.execution.executor import Executor
from chunkplan_runtime.execution.links import Wire
from chunkplan_runtime.feed.stream import PlanStream, open_plan
from chunkplan_runtime.layout import choose_layout
from chunkplan_runtime.models.model import CausalLM, new_model
from chunkplan_runtime.profiling.timeline import ActionClock, StepTimeline
from chunkplan_runtime.sharing import blocks_on

_CPU = torch.device("cpu")
_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class PlannedStep:
    """The first step of the plan in `plan`, as it is predicted on each rank; `scale`: seconds of sleep for one."""

    plan: Path
    ranks: list[Simulation]
    scale: float = 1.0


def run_plans(
    steps: Sequence[PlannedStep], num_processes: int, repeats: int, config: Any = None
) -> list[list[list[StepTimeline]]]:
    """Run every step `repeats` times, in turn, after a round that does not count.

    Returns [len(steps)][repeats][num_processes]. Every process runs a model of `config`; without one they sleep.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = (num_processes, Path(folder), list(steps), repeats, config)
        torch.multiprocessing.spawn(_work, args=given, nprocs=num_processes)
        by_process = [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(num_processes)]
    return [
        [[rounds[repeat][step] for rounds in by_process] for repeat in range(repeats)] for step in range(len(steps))
    ]


def _work(rank: int, num_processes: int, folder: Path, steps: list[PlannedStep], repeats: int, config: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", _TIMEOUT, world_size=num_processes, rank=rank)
    model = None if config is None else new_model(config, torch.float32, seed=0)
    runs = [_Run(step, rank, num_processes, model) for step in steps]
    for run in runs:
        run(0.1)
    rounds = [[run(1.0) for run in runs] for _ in range(repeats)]
    (folder / str(rank)).write_bytes(pickle.dumps(rounds))
    dist.destroy_process_group()


class _Run:
    """One process of a step: its groups and links, its work, and what the executor takes for a model."""

    def __init__(self, step: PlannedStep, rank: int, num_processes: int, model: CausalLM | None) -> None:
        plan, analysis = open_plan(step.plan, pp=load_plan(step.plan).config.pp)
        self._layout = choose_layout(plan, num_processes, rank)
        self._groups = make_groups(self._layout, _CPU, _TIMEOUT, blocks_on(plan, self._layout.dp))
        self._planned = step.ranks[self._layout.dp_rank]
        self._scale = step.scale
        self._model = model
        # A token more than the largest there is: the plan is of a vocabulary that no stand-in has.
        vocab_size = 1 << 30 if model is None else model.vocab_size
        stream = PlanStream(plan, analysis, vocab_size=vocab_size, max_positions=None, prefetch=0, layout=self._layout)
        work = next(iter(stream))
        [self._work] = work.ranks
        self._num_targets = work.step.num_target_tokens

    def __call__(self, scale: float) -> StepTimeline:
        """Run the step; what sleeps does so `scale` times as long."""
        model: Any = self._model or Sleeper.of(self._planned, self._scale * scale, self._work, self._layout)
        wire = Wire(model.config.hidden_size if self._model else 1, model.dtype, model.device)
        executor = Executor(model, links=self._groups.links(wire), exchanges=self._groups.exchanges)
        clock = ActionClock(_CPU)
        dist.barrier()
        clock.start(0)
        executor.run(self._work, self._num_targets, clock.around(self._work.dp_rank))
        times = clock.stop()
        if self._model is not None:
            self._model.model.zero_grad(set_to_none=False)
        return times
