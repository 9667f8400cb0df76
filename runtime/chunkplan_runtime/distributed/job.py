"""The processes that train together: their groups, one of them as it sees itself, what all compare at the start."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh

from chunkplan.errors import ChunkplanError, UsageError
from chunkplan.options import in_words
from chunkplan.planfile.plan import Plan
from chunkplan.version import __version__
from chunkplan_runtime.execution.links import Link, Links, Wire
from chunkplan_runtime.failures.watchdog import RESUME, Watchdog
from chunkplan_runtime.layout import Block, RankLayout
from chunkplan_runtime.sharing import (
    Activity,
    Exchanges,
    all_gather,
    is_lost_connection,
    named_processes,
    reduce_scatter,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Groups:
    """The groups that this process is in, beside the default one of all, for objects on the CPU and sums.

    `replicas`: of its stage, one in each pipeline; None where there is one. `links_by_border`: to other processes; m is
    the border between the model stages m and m + 1. `ends`: the stages of its pipeline with the first and the last
    model stage; None on the others, and where one has both. `seconds`: how long making them took, and using each once.
    """

    layout: RankLayout
    device: torch.device
    replicas: DeviceMesh | None
    links_by_border: dict[int, Link]
    ends: dist.ProcessGroup | None
    exchanges: Exchanges
    seconds: float

    @property
    def num_groups(self) -> int:
        """How many they are, with that of all; a link is two, one for each direction."""
        num_single = 1 + (self.replicas is not None) + (self.ends is not None)
        return num_single + 2 * len(self.links_by_border) + len(self.exchanges.groups)

    def links(self, wire: Wire) -> Links | None:
        """The links of this process's stage, connected; None where there is one stage. All processes have to ask."""
        return Links(wire, self.layout.model_stages(), self.links_by_border) if self.layout.pp > 1 else None


def make_groups(layout: RankLayout, device: torch.device, timeout: timedelta, blocks: Sequence[Block] = ()) -> Groups:
    """Make the groups and use each of them once; all processes have to, at the same time, after `init_process_group`.

    The first use of a group of NCCL, for each thing that it is used for, connects its processes and waits for the
    device, which must not be in the middle of a step. Those of links are used once by `Links`. `blocks`: see
    `layout.used_blocks`.
    """
    started = time.perf_counter()
    pipelines = range(layout.dp)

    def own_group(members: list[list[int]]) -> dist.ProcessGroup | None:
        """The one of these groups that this process is in; all processes make all, so that torch counts them alike."""
        groups = [(each, dist.new_group(each, timeout=timeout)) for each in members]
        return next((group for each, group in groups if layout.process in each), None)

    def of_stages(*stages: int) -> list[list[int]]:
        """By pipeline, the processes of these stages."""
        return [[layout.process_of(stage, replica) for stage in stages] for replica in pipelines]

    replicas = None
    if layout.dp > 1:
        stages = [[layout.process_of(stage, replica) for replica in pipelines] for stage in range(layout.pp)]
        own: Any = own_group(stages)
        replicas = DeviceMesh.from_group(own, device.type, mesh_dim_names=("dp",))
    first, *_ = stages_of = [layout.stage_of(model_stage) for model_stage in range(layout.num_model_stages)]
    links: dict[int, Link] = {}
    for border, (above, below) in enumerate(pairwise(stages_of)):
        if above != below:  # else both are on one process
            down, up = own_group(of_stages(above, below)), own_group(of_stages(above, below))
            if down is not None and up is not None:
                other = below if layout.stage == above else above
                links[border] = Link(layout.process_of(other, layout.replica), down, up)
    ends = own_group(of_stages(first, stages_of[-1])) if first != stages_of[-1] else None
    dist.all_reduce(torch.zeros(1, device=device))
    if ends is not None:
        dist.all_reduce(torch.zeros(1, device=device), group=ends)
    if replicas is not None:
        rows = torch.zeros(layout.dp, 1, device=device)
        all_gather(rows, rows[:1].clone(), group=replicas.get_group())
        reduce_scatter(rows[:1].clone(), rows, group=replicas.get_group())
    dist.all_reduce(torch.zeros(1))

    shared: dict[tuple[int, ...], dist.ProcessGroup] = {}
    wanted = {group for block in blocks for group in (*block.groups_of_heads(), *block.groups_of_pages())}
    for members in sorted(group for group in wanted if len(group) > 1):
        made = own_group([[layout.process_of(stage, each) for each in members] for stage in range(layout.pp)])
        if made is not None:
            shared[members] = made
    exchanges = Exchanges(layout, shared)
    exchanges.use_once(device)
    return Groups(layout, device, replicas, links, ends, exchanges, time.perf_counter() - started)


@dataclass(frozen=True)
class Job:
    """One process of a job; without arguments the only one, which has no groups."""

    layout: RankLayout = field(default_factory=RankLayout)
    groups: Groups | None = None
    watchdog: Watchdog | None = None

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that prints and writes for all."""
        return self.layout.process == 0

    def all_gather_object(self, value: T) -> list[T]:
        """The values of all processes, in their order; all of them have to call it."""
        return [value] if self.groups is None else gather_objects(value)

    def broadcast_object(self, value: T) -> T:
        """The value of the main process; all processes have to call it, what the others give is ignored."""
        values = [value]
        if self.groups is not None:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def at_step(self, step: int) -> None:
        """Have the watchdog know which step this process is at, for its messages; -1 is before the first."""
        if self.watchdog is not None:
            self.watchdog.at_step(step)

    def telling(
        self, activity: Callable[[], Activity], on_device: Callable[[], str | None]
    ) -> AbstractContextManager[None]:
        """Within the block, have the watchdog tell what this process is at: see `Heartbeat.telling`."""
        return nullcontext() if self.watchdog is None else self.watchdog.heartbeat.telling(activity, on_device)

    def barrier(self) -> None:
        """Wait until all processes have called this."""
        if self.groups is not None:
            dist.barrier()


def gather_objects(value: T) -> list[T]:
    """The values of all processes of the default group, in their order; all of them have to call it."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def versions_with(plan: Plan) -> dict[str, str]:
    """What processes have to have alike: with another plan or version, making groups might never end."""
    packages = {"chunkplan": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return {**packages, "plan": plan.content_hash}


def refuse_differences(given: Sequence[Mapping[str, Any]]) -> None:
    """Raise UsageError, on all processes, if these were not `given` the same: of each what it was, by name."""
    names = {name: None for each in given for name in each}
    texts = {name: [json.dumps(each.get(name)) for each in given] for name in names}
    differ = [name for name, own in texts.items() if len({*own}) > 1]
    if differ:
        [name, *more] = differ
        holders = {text: [process for process, own in enumerate(texts[name]) if own == text] for text in texts[name]}
        told = [f"{shorten(json.loads(text))} on {named_processes(who)}" for text, who in holders.items()]
        raise UsageError(
            f"the processes do not have the same {name}: {'; '.join(told)}" + f"; {len(more)} more differ" * bool(more),
            hint="start all processes with the same options, files and versions",
        )


@contextmanager
def lost_peers(watchdog: Watchdog) -> Iterator[None]:
    """Around what waits for other processes: if one vanishes, `watchdog` names it and ends this process.

    Raises ChunkplanError if a connection broke, or nothing came over it in time, and yet nobody died.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        watchdog.await_end()
        first_line = str(error).partition("\n")[0]
        raise ChunkplanError(
            f"the connection to another process broke: {first_line}",
            where=watchdog.heartbeat.activity().words or None,
            hint=f"check the network between the machines; {RESUME}",
        ) from error


def shorten(value: object) -> str:
    """A value as a message has it: hashes, and all else that is long, by the first 12 characters."""
    text = in_words(value)
    return text if len(text) <= 40 else f"{text[:12]}..."
