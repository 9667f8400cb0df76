"""What processes do in tests of reductions: record what they launch, and reduce over machines of so many processes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from chunkplan_runtime.feed import stream
from chunkplan_runtime.models.model import new_model, read_config
from chunkplan_runtime.models.precise import evaluate_in_float64
from tests.support.distributed_cases import make_stage, open_for_its_stages


class Event(NamedTuple):
    """A process launches an operation of a group, or its backward comes to a layer ("layer", its index)."""

    what: str
    where: str | int
    num_numbers: int


class Recorded(NamedTuple):
    """What a process does in a step in order, the names of the groups that gradients may be reduced in, its layers."""

    events: list[Event]
    reducing: list[str]
    layers: list[int]
    reduces_early: bool

    @property
    def reductions(self) -> list[Event]:
        """Those of gradients."""
        return [event for event in self.events if event.where in self.reducing and "reduce_scatter" in event.what]


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            boxed = [each for each in args if isinstance(each, torch.ScriptObject)]
            [group] = [each for each in boxed if str(each._type()).endswith("ProcessGroup")]
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            name = dist.ProcessGroup.unbox(group).group_name
            self.events.append(Event(func._opname, name, sum(tensor.numel() for tensor in tensors)))
        return func(*args, **(kwargs or {}))


def record_steps(
    rank: int,
    *,
    plan: Path,
    config: Path,
    steps: Sequence[int] = (0,),
    machine_size: int | None = None,
    always: bool = False,
) -> list[Recorded]:
    """What this process does in `steps`; `always`: it reduces in its last backward whether it may or not."""
    opened, analysis = open_for_its_stages(plan)
    model = new_model(read_config(config), torch.float32, seed=1)
    stage = make_stage(rank, opened, analysis, model, machine_size=machine_size)
    groups, found = stage.groups, []
    spread = (groups.machines.within, groups.machines.across) if groups.machines else ()
    reducing = [group.group_name for group in (groups.replicas.get_group(), *spread)]
    recorder = _Recorder()
    for index, layer in stage.model.own_layers.items():
        layer.mlp.down_proj.register_full_backward_pre_hook(
            lambda *_, index=index: recorder.events.append(Event("layer", index, 0))
        )
    for step in steps:
        with patch.object(stream, "may_reduce", lambda *_: True) if always else nullcontext():
            work = stage.work(step)
        recorder.events = []
        with recorder:
            stage.run(work)
        stage.model.model.zero_grad()
        found.append(Recorded(recorder.events, reducing, list(stage.model.own_layers), work.reduces_early))
    return found


def launched_in_one_order(processes: Sequence[Recorded]) -> TopologicalSorter[tuple[Any, ...]]:
    """A graph of what all processes launch, which has no circle if there is an order that all of them keep to.

    What the members of a group do together is one node, by its place among all that the group does. A send comes before
    its receive, and does not wait for it.
    """
    order: TopologicalSorter[tuple[Any, ...]] = TopologicalSorter()
    for process in processes:
        before, counts = None, dict[tuple[str, str], int]()
        for event in process.events:
            if event.what == "layer":
                continue
            kind = event.what if event.what in ("send", "recv_") else "together"
            place = counts[kind, event.where] = counts.get((kind, event.where), -1) + 1
            node = (kind, event.where, place)
            order.add(node, *([] if before is None else [before]))
            if kind == "recv_":
                order.add(node, ("send", event.where, place))
            before = node
    return order


def step_gradients(
    rank: int, *, plan: Path, config: Path, machine_sizes: Sequence[int | None]
) -> list[dict[str, np.ndarray]]:
    """Those of the first step, on machines of so many processes each, one after another."""
    opened, analysis = open_for_its_stages(plan)
    found = []
    for machine_size in machine_sizes:
        model = new_model(read_config(config), torch.float64, seed=1)
        with evaluate_in_float64(model.model):
            stage = make_stage(rank, opened, analysis, model, machine_size=machine_size)
            stage.run(stage.work(0))
            gradients, _ = stage.finish_gradients(stage.weights)
        found.append({name: gradient.numpy().copy() for name, gradient in gradients.items()})
    return found
