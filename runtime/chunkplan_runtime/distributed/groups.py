"""Process groups of a layout: who talks to whom, and about what."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from chunkplan_runtime.distributed.links import Links, Wire
from chunkplan_runtime.layout import Layout


@dataclass(frozen=True)
class Groups:
    """The groups that this process is in.

    `copies`: the mesh of its stage's copies, one of each pipeline. `down` and `up`: its pipeline, once for each
    direction. `ends`: the first and last stage of its pipeline, None on the others and where there is one stage.
    `control`: everybody, for objects on the CPU.
    """

    layout: Layout
    copies: DeviceMesh
    down: dist.ProcessGroup
    up: dist.ProcessGroup
    ends: dist.ProcessGroup | None
    control: dist.ProcessGroup

    def links(self, wire: Wire) -> Links | None:
        """The links of this process's stage; None where there is one stage."""
        layout = self.layout
        if layout.pp == 1:
            return None
        before = None if layout.is_first else layout.rank_of(layout.stage - 1, layout.copy)
        after = None if layout.is_last else layout.rank_of(layout.stage + 1, layout.copy)
        return Links(wire, before=before, after=after, down=self.down, up=self.up)


def make_groups(layout: Layout, device: torch.device, timeout: timedelta) -> Groups:
    """Make the groups; all processes have to, at the same time, after `init_process_group`."""
    mesh = init_device_mesh(device.type, (layout.pp, layout.dp), mesh_dim_names=("pp", "dp"))
    pipelines = [[layout.rank_of(stage, copy) for stage in range(layout.pp)] for copy in range(layout.dp)]
    ends = None
    if layout.pp > 1:
        found = _own([[stages[0], stages[-1]] for stages in pipelines], layout.rank, timeout)
        ends = found if layout.is_first or layout.is_last else None
    down, up = (_own(pipelines, layout.rank, timeout) for _ in range(2))
    assert down is not None and up is not None
    control = dist.new_group(backend="gloo", timeout=timeout)
    assert control is not None
    return Groups(layout, mesh["dp"], down, up, ends, control)


def _own(members: list[list[int]], rank: int, timeout: timedelta) -> dist.ProcessGroup | None:
    """Make all of these groups, and return the one that `rank` is in."""
    own = None
    for ranks in members:
        group = dist.new_group(ranks, timeout=timeout)
        if rank in ranks:
            own = group
    return own
