"""What processes do in tests of reductions: record what they launch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from chunkplan.cost.model import Sharding
from chunkplan_runtime.distributed.sharding import dummy_collectives
from chunkplan_runtime.feed import stream
from chunkplan_runtime.models.model import new_model, read_config
from tests.support.distributed_cases import make_stage, open_for_its_stages
from tests.support.process_pool import ProcessPool


class Event(NamedTuple):
    """A process launches an operation of a group, or its backward comes to a layer ("layer", its index)."""

    what: str
    where: str | int
    num_numbers: int


class Recorded(NamedTuple):
    """What a process does in a step in order, the name of the group that gradients are reduced in, its layers.

    `num_backwards`: of chunks of the plan, through all virtual stages.
    """

    events: list[Event]
    reducing: str
    layers: list[int]
    num_backwards: int
    reduces_early: bool

    @property
    def reductions(self) -> list[Event]:
        """Those of gradients."""
        return [event for event in self.events if event.where == self.reducing and "reduce_scatter" in event.what]


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []

    def begin_layer(self, index: int, *_: Any) -> None:
        self.events.append(Event("layer", index, 0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            boxed = [each for each in args if isinstance(each, torch.ScriptObject)]
            [group] = [each for each in boxed if str(each._type()).endswith("ProcessGroup")]
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            name = dist.ProcessGroup.unbox(group).group_name
            self.events.append(Event(func._opname, name, sum(tensor.numel() for tensor in tensors)))
        return func(*args, **(kwargs or {}))


def record_step(rank: int, *, plan: Path, config: Path, always: bool = False) -> Recorded:
    """What this process does in the first step; `always`: it reduces in its last backward whether it may or not."""
    opened, analysis = open_for_its_stages(plan)
    model = new_model(read_config(config), torch.float32, seed=1)
    stage = make_stage(rank, opened, analysis, model)
    assert stage.groups.replicas is not None
    reducing = stage.groups.replicas.get_group().group_name
    recorder = _Recorder()
    for index, layer in stage.model.own_layers.items():
        begun = partial(recorder.begin_layer, index)
        cast(Any, layer).mlp.down_proj.register_full_backward_pre_hook(begun)
    with patch.object(stream, "may_reduce", lambda *_: True) if always else nullcontext():
        work = stage.work(0)
    with recorder:
        stage.run(work)
    backwards = [action for each in work.ranks for action in each.actions if action.op == "backward"]
    num_backwards = sum(action.virtual_stage == 0 for action in backwards)
    return Recorded(recorder.events, reducing, list(stage.model.own_layers), num_backwards, work.reduces_early)


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


def record(pool: ProcessPool, plan: dict[str, Path], world_size: int = 4, **how: Any) -> list[Recorded]:
    """What processes do in the first step, which they launch in one order; all replicas reduce the same.

    Nothing goes through the layers but chunks.
    """
    processes = pool.run(world_size, record_step, **plan, **how)
    launched_in_one_order(processes).prepare()
    for process in processes:
        num_layers = sum(event.what == "layer" for event in process.events)
        assert num_layers == process.num_backwards * len(process.layers)
        same = [other.reductions for other in processes if other.reducing == process.reducing]
        sizes = [[event.num_numbers for event in reductions] for reductions in same]
        assert all(found == sizes[0] for found in sizes)
    return processes


def layers_ahead(process: Recorded) -> list[int]:
    """To how many layers the last backward has yet to come when each reduction is launched."""
    ahead, found = 0, []
    for event in reversed(process.events):
        ahead += event.what == "layer"
        if event.where == process.reducing and "reduce_scatter" in event.what:
            found.append(ahead)
    return found[::-1]


class Counted(NamedTuple):
    """What a process launches with the replicas of its stage in a step, and what its slots say it does: how many."""

    launched: list[tuple[str, int]]
    gathers: int
    reductions: int
    expected_gathers: int
    expected_reductions: int


def count_of_slots(rank: int, *, plan: Path, config: Path, sharding: Sharding) -> Counted:
    """Those of the first step. Embeddings and head are gathered and reduced once each, on stages that have any."""
    opened, analysis = open_for_its_stages(plan)
    stage = make_stage(rank, opened, analysis, new_model(read_config(config), torch.float32, seed=1), sharding=sharding)
    work, layout = stage.work(0), stage.groups.layout
    paddings = dummy_collectives(work, layout, sharding)
    own = [(action.op, action.virtual_stage) for each in work.ranks for action in each.actions]
    slots = [*itertools.chain.from_iterable(paddings), *own]
    layers = [len(part.own_layers) for part in stage.model.by_stage]
    num_ends = layout.is_first + layout.is_last
    if stage.model.config.tie_word_embeddings:
        num_ends = min(num_ends, 1)
    recorder = _Recorder()
    with recorder:
        stage.run(work)
    assert stage.groups.replicas is not None
    name = stage.groups.replicas.get_group().group_name
    launched = [(event.what, event.num_numbers) for event in recorder.events if event.where == name]
    gathering = [virtual_stage for op, virtual_stage in slots if op != "backward_weight"]
    reducing = [virtual_stage for op, virtual_stage in slots if op in ("backward", "backward_weight")]
    return Counted(
        launched,
        sum("allgather" in what for what, _ in launched),
        sum("reduce_scatter" in what for what, _ in launched),
        num_ends + sum(layers[each] for each in (gathering if sharding == "weights" else range(len(layers)))),
        num_ends + sum(layers[each] for each in reducing),
    )
