"""Runs the first step of plans in which ranks share sequences, on processes: a model, or a stand-in that sleeps."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pipeline_stages import Sleeper, weight_halves

from chunkplan.arrays import Int64Array
from chunkplan.planfile.load import load_plan
from chunkplan.planfile.measured import StepTimeline
from chunkplan_runtime.distributed.job import make_groups
from chunkplan_runtime.execution.executor import ActionClock, RankExecutor
from chunkplan_runtime.feed.stream import PlanStream, open_plan
from chunkplan_runtime.layout import choose_layout, used_blocks
from chunkplan_runtime.models.model import CausalLM, new_model

_CPU = torch.device("cpu")
_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class PlannedStep:
    """The first step of a plan, predicted to take `seconds`; `scale`: seconds of sleep for a predicted one.

    `durations`: by data-parallel rank those of its chunks, in ns [num_ops, pp, num_chunks].
    """

    plan: Path
    durations: list[Int64Array]
    seconds: float
    scale: float = 1.0


def run_plans(
    layouts: Sequence[tuple[int, Sequence[PlannedStep]]], repeats: int, config: Any = None
) -> list[list[list[list[StepTimeline]]]]:
    """Run steps on so many processes, in turn, `repeats` times after a round that does not count.

    Returns [len(layouts)][len(steps)][repeats][num_processes]. Every process runs a model of `config`; without one
    they sleep.
    """
    with tempfile.TemporaryDirectory() as folder:
        most = max(num_processes for num_processes, _ in layouts)
        torch.multiprocessing.spawn(_work, args=(Path(folder), list(layouts), repeats, config), nprocs=most)
        by_process = [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(most)]
    return [
        [
            [[rounds[number][repeat][step] for rounds in by_process[:num_processes]] for repeat in range(repeats)]
            for step in range(len(steps))
        ]
        for number, (num_processes, steps) in enumerate(layouts)
    ]


def _work(rank: int, folder: Path, layouts: list[tuple[int, Sequence[PlannedStep]]], repeats: int, config: Any) -> None:
    torch.set_num_threads(1)
    if config is None:
        with suppress(PermissionError):  # not to be late where other programs run; threads of gloo inherit it
            os.setpriority(os.PRIO_PROCESS, 0, -10)
    model = None if config is None else new_model(config, torch.float32, seed=0)
    found: list[list[list[StepTimeline]]] = []
    for number, (num_processes, steps) in enumerate(layouts):
        found.append([])
        if rank >= num_processes:
            continue
        store = f"file://{folder}/store-{number}"
        dist.init_process_group("gloo", store, _TIMEOUT, world_size=num_processes, rank=rank)
        runs = [_Run(step, rank, num_processes, model) for step in steps]
        for run in runs:
            run(0.1)
        found[-1] = [[run(1.0) for run in runs] for _ in range(repeats)]
        dist.destroy_process_group()
    (folder / str(rank)).write_bytes(pickle.dumps(found))


class _Run:
    """One process of a step: its groups and links, its work, and what the executor takes for a model."""

    def __init__(self, step: PlannedStep, rank: int, num_processes: int, model: CausalLM | None) -> None:
        plan, analysis = open_plan(step.plan, pp=load_plan(step.plan).config.pp)
        self._layout = choose_layout(plan, num_processes, rank)
        self._groups = make_groups(self._layout, _CPU, _TIMEOUT, used_blocks(plan))
        self._durations = step.durations[self._layout.replica]
        self._scale = step.scale
        self._model = model
        vocab_size = 2 if model is None else model.vocab_size
        stream = PlanStream(plan, analysis, vocab_size=vocab_size, max_positions=None, prefetch=0, layout=self._layout)
        work = next(iter(stream))
        [self._work] = work.ranks
        self._num_targets = work.step.num_target_tokens

    def __call__(self, scale: float) -> StepTimeline:
        """Run the step; what sleeps does so `scale` times as long."""
        model: Any = self._model or Sleeper.of(self._durations, self._scale * scale, self._work, self._layout)
        links = self._groups.links(model.config.hidden_size if self._model else 1, model.dtype)
        executor = RankExecutor(model, links=links, exchanges=self._groups.exchanges)
        clock = ActionClock(_CPU)
        dist.barrier()
        clock.start(0)
        around = clock.around(self._work.dp_rank)
        if self._model is None:
            around = weight_halves(around, self._durations, self._scale * scale, self._layout)
        executor.run(self._work, self._num_targets, around)
        times = clock.stop()
        if self._model is not None:
            self._model.model.zero_grad(set_to_none=False)
        return times
