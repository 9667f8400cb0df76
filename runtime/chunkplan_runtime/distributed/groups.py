"""Process groups of a layout: who talks to whom, and about what."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from chunkplan_runtime.distributed.reduction import MachineGroups
from chunkplan_runtime.exchange import Exchanges, all_gather, reduce_scatter
from chunkplan_runtime.execution.links import Link, Links, Wire
from chunkplan_runtime.layout import RankLayout
from chunkplan_runtime.sharing import Block

#: On a GPU, the most multiprocessors that a send or a receive may hold while it waits, of more than a hundred. Hidden
#: states are small: a few of them send as fast as is needed. Not measured.
_LINK_CTAS = 4


@dataclass(frozen=True)
class Groups:
    """The groups that this process is in.

    Attributes:
        replicas: the mesh of the replicas of its stage, one in each pipeline; None where there is one.
        machines: of these, where they lie on several machines, as many on each and more than one; else None.
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
    machines: MachineGroups | None
    links_by_border: dict[int, Link]
    ends: dist.ProcessGroup | None
    control: dist.ProcessGroup
    exchanges: Exchanges
    seconds: float

    @property
    def num_groups(self) -> int:
        """How many they are; a link is two, one for each direction."""
        spread = (self.machines.within, self.machines.across) if self.machines else ()
        single = (self.replicas, self.ends, self.control, *spread)
        num_single = sum(group is not None for group in single)
        return num_single + 2 * len(self.links_by_border) + len(self.exchanges.groups)

    def links(self, wire: Wire) -> Links | None:
        """The links of this process's stage, connected; None where there is one stage. All processes have to ask."""
        return Links(wire, self.layout.model_stages(), self.links_by_border) if self.layout.pp > 1 else None


def make_groups(
    layout: RankLayout,
    device: torch.device,
    timeout: timedelta,
    blocks: Sequence[Block] = (),
    machine_size: int | None = None,
) -> Groups:
    """Make the groups and use each of them once; all processes have to, at the same time, after `init_process_group`.

    The first use of a group of NCCL connects its processes and waits for the device, which must not be in the middle of
    a step; so does the first use for something else, as NCCL connects by what is asked for. Those of links are used
    once by `Links`, which begins with the sends and receives that they are for.

    Every process calls `new_group` for every group, also for those of others, which costs it some microseconds and no
    message: so torch counts them alike on all. (With `use_local_synchronization` only members would call it, but the
    name by which they find each other has the number of groups that each has made so far, and a stage in the middle
    makes more than one at the end.)

    `blocks`: those of ranks that share sequences, see `sharing.used_blocks`. `machine_size`: how many processes each
    machine has, numbered in a row; None if that is not so, or not known.
    """
    started = time.perf_counter()
    control = dist.group.WORLD
    assert control is not None

    def own(members: list[list[int]], *, is_link: bool = False) -> dist.ProcessGroup | None:
        """The one of these groups that this process is in; all of them make all."""
        groups = [
            (each, dist.new_group(each, timeout=timeout, **(link_options(device, timeout) if is_link else {})))
            for each in members
        ]
        return next((group for each, group in groups if layout.process in each), None)

    def pairs(stage: int, other: int) -> list[list[int]]:
        return [[layout.process_of(stage, replica), layout.process_of(other, replica)] for replica in range(layout.dp)]

    replicas, machines, ends = None, None, None
    if layout.dp > 1:
        stages = [[layout.process_of(stage, replica) for replica in range(layout.dp)] for stage in range(layout.pp)]
        group = own(stages)
        assert group is not None
        replicas = DeviceMesh.from_group(group, device.type, mesh_dim_names=("dp",))
        spread = [layout.replicas_by_machine(stage, machine_size or layout.world_size) for stage in range(layout.pp)]
        within = own([row for rows in spread for row in rows])
        across = own([list(column) for rows in spread for column in zip(*rows, strict=True)])
        machines = MachineGroups(within, across) if within and across else None
    stages_of = [layout.stage_of(model_stage) for model_stage in range(layout.num_model_stages)]
    links: dict[int, Link] = {}
    for border, (above, below) in enumerate(pairwise(stages_of)):
        if above == below:
            continue  # both are on one process
        down, up = own(pairs(above, below), is_link=True), own(pairs(above, below), is_link=True)
        if down is not None and up is not None:
            other = below if layout.stage == above else above
            links[border] = Link(layout.process_of(other, layout.replica), down, up)
    if stages_of[0] != stages_of[-1]:
        ends = own(pairs(stages_of[0], stages_of[-1]))
    for group in filter(None, (control, ends)):
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    spread_groups = (machines.within, machines.across) if machines else ()
    for group in filter(None, (replicas.get_group() if replicas else None, *spread_groups)):
        rows = torch.zeros(group.size(), 1, device=device)
        all_gather(rows, rows[:1].clone(), group=group)
        reduce_scatter(rows[:1].clone(), rows, group=group)
    dist.all_reduce(torch.zeros(1), group=control)

    members = {group for block in blocks for group in (*block.groups_of_heads(), *block.groups_of_pages())}
    shared: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for group_members in sorted(each for each in members if len(each) > 1):
        made = own([[layout.process_of(stage, each) for each in group_members] for stage in range(layout.pp)])
        if made is not None:
            shared[group_members] = made
    exchanges = Exchanges(layout, shared)
    exchanges.greet(device)

    seconds = time.perf_counter() - started
    return Groups(layout, device, replicas, machines, links, ends, control, exchanges, seconds)


class GroupOptions(TypedDict, total=False):
    """Arguments of `new_group` beside its members; `pg_options` are the backend's own, which torch has no types for."""

    backend: str
    pg_options: Any


def link_options(device: torch.device, timeout: timedelta) -> GroupOptions:
    """For `new_group` of one link: between GPUs, what waits there holds few of their multiprocessors."""
    if device.type != "cuda":
        return {}
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout  # as `new_group` will set it, which otherwise warns of another one
    if hasattr(getattr(options, "config", None), "max_ctas"):  # not with every NCCL that torch was built for
        options.config.max_ctas = _LINK_CTAS
    return {"backend": "nccl", "pg_options": options}
