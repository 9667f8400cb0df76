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
from chunkplan_runtime.exchange import (
    Activity,
    Exchanges,
    all_gather,
    is_lost_connection,
    named_processes,
    reduce_scatter,
)
from chunkplan_runtime.execution.links import Link, Links, Wire
from chunkplan_runtime.failures.watchdog import RESUME, Watchdog
from chunkplan_runtime.layout import RankLayout
from chunkplan_runtime.sharing import Block

T = TypeVar("T")

_SAME_FOR_ALL = "start all processes with the same options, files and versions"


@dataclass(frozen=True)
class Groups:
    """The groups that this process is in.

    Attributes:
        replicas: the mesh of the replicas of its stage, one in each pipeline; None where there is one.
        links_by_border: its links to other processes, by border: m is that between the model stages m and m + 1.
        ends: the stages of its pipeline with the first and the last model stage; None on the others, and where one has
            both.
        control: all processes, for objects on the CPU. It is the default group: of a second one every process would
            connect to every other one again.
        exchanges: with the processes that share sequences with this one.
        seconds: how long making all but the default group took, and using each once.
    """

    layout: RankLayout
    device: torch.device
    replicas: DeviceMesh | None
    links_by_border: dict[int, Link]
    ends: dist.ProcessGroup | None
    control: dist.ProcessGroup
    exchanges: Exchanges
    seconds: float

    @property
    def num_groups(self) -> int:
        """How many they are; a link is two, one for each direction."""
        num_single = sum(group is not None for group in (self.replicas, self.ends, self.control))
        return num_single + 2 * len(self.links_by_border) + len(self.exchanges.groups)

    def links(self, wire: Wire) -> Links | None:
        """The links of this process's stage, connected; None where there is one stage. All processes have to ask."""
        return Links(wire, self.layout.model_stages(), self.links_by_border) if self.layout.pp > 1 else None


def make_groups(layout: RankLayout, device: torch.device, timeout: timedelta, blocks: Sequence[Block] = ()) -> Groups:
    """Make the groups and use each of them once; all processes have to, at the same time, after `init_process_group`.

    The first use of a group of NCCL, for each thing that it is used for, connects its processes and waits for the
    device, which must not be in the middle of a step. Those of links are used once by `Links`. Every process calls
    `new_group` for every group, also for those of others, so that torch counts them alike on all.

    `blocks`: those of ranks that share sequences, see `sharing.used_blocks`.
    """
    started = time.perf_counter()
    control = dist.group.WORLD
    assert control is not None

    def own_group(members: list[list[int]]) -> dist.ProcessGroup | None:
        """The one of these groups that this process is in; all of them make all."""
        groups = [(each, dist.new_group(each, timeout=timeout)) for each in members]
        return next((group for each, group in groups if layout.process in each), None)

    def pairs(stage: int, other: int) -> list[list[int]]:
        return [[layout.process_of(stage, replica), layout.process_of(other, replica)] for replica in range(layout.dp)]

    replicas, ends = None, None
    if layout.dp > 1:
        stages = [[layout.process_of(stage, replica) for replica in range(layout.dp)] for stage in range(layout.pp)]
        group = own_group(stages)
        assert group is not None
        replicas = DeviceMesh.from_group(group, device.type, mesh_dim_names=("dp",))
    stages_of = [layout.stage_of(model_stage) for model_stage in range(layout.num_model_stages)]
    links: dict[int, Link] = {}
    for border, (above, below) in enumerate(pairwise(stages_of)):
        if above == below:
            continue  # both are on one process
        down, up = own_group(pairs(above, below)), own_group(pairs(above, below))
        if down is not None and up is not None:
            other = below if layout.stage == above else above
            links[border] = Link(layout.process_of(other, layout.replica), down, up)
    if stages_of[0] != stages_of[-1]:
        ends = own_group(pairs(stages_of[0], stages_of[-1]))
    for used in filter(None, (control, ends)):
        dist.all_reduce(torch.zeros(1, device=device), group=used)
    if replicas is not None:
        rows = torch.zeros(layout.dp, 1, device=device)
        all_gather(rows, rows[:1].clone(), group=replicas.get_group())
        reduce_scatter(rows[:1].clone(), rows, group=replicas.get_group())
    dist.all_reduce(torch.zeros(1), group=control)

    members = {group for block in blocks for group in (*block.groups_of_heads(), *block.groups_of_pages())}
    shared: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for group_members in sorted(each for each in members if len(each) > 1):
        made = own_group([[layout.process_of(stage, each) for each in group_members] for stage in range(layout.pp)])
        if made is not None:
            shared[group_members] = made
    exchanges = Exchanges(layout, shared)
    exchanges.use_once(device)
    return Groups(layout, device, replicas, links, ends, control, exchanges, time.perf_counter() - started)


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
        if self.groups is None:
            return [value]
        gathered: list[Any] = [None] * self.layout.world_size
        dist.all_gather_object(gathered, value, group=self.groups.control)
        return gathered

    def broadcast_object(self, value: T) -> T:
        """The value of the main process; all processes have to call it, what the others give is ignored."""
        if self.groups is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.groups.control)
        return values[0]

    def at_step(self, step: int) -> None:
        """Have the watchdog know which step this process is at, for its messages; -1 is before the first."""
        if self.watchdog is not None:
            self.watchdog.at_step(step)

    def telling(self, activity: Callable[[], Activity]) -> AbstractContextManager[None]:
        """Within the block, have the watchdogs of the others know what this process is at."""
        return nullcontext() if self.watchdog is None else self.watchdog.heartbeat.telling(activity)

    def barrier(self) -> None:
        """Wait until all processes have called this."""
        if self.groups is not None:
            dist.barrier(group=self.groups.control)


def refuse_other_processes(given: Mapping[str, Any], job: Job) -> None:
    """Compare what this process was given, by the name that a message has for it, with what the main one was.

    Raises:
        UsageError: naming a process and what it has of its own. All raise it.
    """
    main, *others = job.all_gather_object(json.loads(json.dumps(given)))
    for process, other in enumerate(others, start=1):
        differ = [name for name in {**main, **other} if other.get(name) != main.get(name)]
        if differ:
            [name, *more] = differ
            raise UsageError(
                f"{job.layout.describe(process)} has {name} {shorten(other.get(name))}, "
                f"process 0 has {shorten(main.get(name))}" + (f"; and {len(more)} more differ" if more else ""),
                hint=_SAME_FOR_ALL,
            )


def refuse_other_versions(plan: Plan) -> None:
    """Compare the plan of this process, and versions of packages, with those of all others, before there are groups.

    Another plan may be for other groups, and another version may make them otherwise: making them would never end.

    Raises:
        UsageError: naming each process with what it has. All raise it.
    """
    versions = {"chunkplan": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    given: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(given, {**versions, "plan": plan.content_hash})
    for name in given[0]:
        holders: dict[str, list[int]] = {}
        for process, values in enumerate(given):
            holders.setdefault(shorten(values.get(name)), []).append(process)
        if len(holders) > 1:
            found = "; ".join(f"{value} on {named_processes(ranks)}" for value, ranks in holders.items())
            raise UsageError(f"the processes do not have the same {name}: {found}", hint=_SAME_FOR_ALL)


@contextmanager
def lost_peers(watchdog: Watchdog) -> Iterator[None]:
    """Around what waits for other processes: if one vanishes, `watchdog` names it and ends this process.

    Raises:
        ChunkplanError: a connection broke, or nothing came over it in time, and yet nobody died.
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
