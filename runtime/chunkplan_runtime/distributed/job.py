"""The processes that train together, as one of them sees it: its place, its groups, and objects sent between all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from chunkplan.errors import ChunkplanError
from chunkplan_runtime.distributed.groups import Groups
from chunkplan_runtime.exchange import Activity, is_lost_connection
from chunkplan_runtime.failures.watchdog import Watchdog
from chunkplan_runtime.layout import RankLayout

T = TypeVar("T")


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
            hint="check the network between the machines; --resume goes on from the last checkpoint",
        ) from error
