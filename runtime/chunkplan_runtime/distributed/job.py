"""The processes that train together, as one of them sees it: its place, its groups, and what all tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from chunkplan_runtime.distributed.groups import Groups
from chunkplan_runtime.failures.watch import Watch
from chunkplan_runtime.layout import Layout

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """One process of a job; without arguments the only one, which has no groups."""

    layout: Layout = field(default_factory=Layout)
    groups: Groups | None = None
    watch: Watch | None = None

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that speaks and writes for all."""
        return self.layout.rank == 0

    def tell_all(self, mine: T) -> list[T]:
        """What each process has, by rank; all have to call it."""
        if self.groups is None:
            return [mine]
        told: list[Any] = [None] * self.layout.world_size
        dist.all_gather_object(told, mine, group=self.groups.control)
        return told

    def ask_main(self, mine: T) -> T:
        """What the main process has; all have to call it."""
        if self.groups is None:
            return mine
        told = [mine]
        dist.broadcast_object_list(told, src=0, group=self.groups.control)
        return told[0]

    def at_step(self, step: int) -> None:
        """Say where this process is, for those who find it dead."""
        if self.watch is not None:
            self.watch.at_step(step)

    def wait_for_all(self) -> None:
        """Until all processes are here."""
        if self.groups is not None:
            dist.barrier(group=self.groups.control)
