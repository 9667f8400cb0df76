"""What processes that share sequences send each other, and in words what they are at, for those who wait.

All processes of a group ask for the same in the same order, that of the plan's actions, so that what runs on a GPU in
the order in which it was asked for waits for nobody in a circle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from chunkplan.errors import UsageError
from chunkplan_runtime.layout import RankLayout

# Newer names of the same; the old ones warn.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Activity(NamedTuple):
    """What a process is at, in words, and the processes that it waits for in an exchange with them."""

    words: str = ""
    waits_for: tuple[int, ...] = ()


#: What is not known, or waits for nobody.
NO_ACTIVITY = Activity()


@dataclass
class Exchanges:
    """The groups of processes that share heads or pages with this one.

    `groups`: by their places among the replicas of a stage, ascending. `at`: what is waited for, in words that go on
    with a sentence, and the processes that have to come; nothing if nothing is.
    """

    layout: RankLayout = field(default_factory=RankLayout)
    groups: Mapping[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    at: Activity = NO_ACTIVITY

    @contextmanager
    def waiting(self, what: str, members: tuple[int, ...]) -> Iterator[None]:
        """Within the block this process waits for the others of `members`, and says for what."""
        others = [member for member in members if member != self.layout.replica]
        processes = tuple(self.layout.process_of(self.layout.stage, member) for member in others)
        self.at = Activity(f", {what} {named_processes(processes)}", processes)
        yield
        self.at = NO_ACTIVITY  # after an error it stays

    def all_to_all(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int], members: tuple[int, ...]
    ) -> Tensor:
        """Send each of `members` the next so many of `rows` [num_rows, width], and get as many as it says."""
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows, list(received), list(sent), group=self.groups[members])
        return out

    def gather(self, rows: Tensor, members: tuple[int, ...]) -> Pending:
        """Start to fetch the rows [num_rows, width] of all `members`, of whom each gives as many."""
        out = rows.new_empty(len(members) * rows.shape[0], rows.shape[1])
        work = all_gather(out, rows, group=self.groups[members], async_op=True)
        return Pending(out, rows, work)

    def reduce(self, rows: Tensor, members: tuple[int, ...]) -> Tensor:
        """The sum over `members` of what they have of this one's rows: [num_rows / members, width]."""
        out = rows.new_empty(rows.shape[0] // len(members), rows.shape[1])
        reduce_scatter(out, rows, group=self.groups[members])
        return out

    def use_once(self, device: torch.device) -> None:
        """Use every group once for all that it is for; all processes have to, at the same time.

        Raises:
            UsageError: its backend cannot do that with tensors on this device.
        """
        for members in sorted(self.groups):
            rows, ones = torch.zeros(len(members), 1, device=device), [1] * len(members)
            with _supported("all-to-all", self.groups[members], device):
                self.all_to_all(rows, ones, ones, members)
            with _supported("all-gather", self.groups[members], device):
                self.gather(rows[:1], members).wait()
            with _supported("reduce-scatter", self.groups[members], device):
                self.reduce(rows, members)


@contextmanager
def _supported(collective: str, group: dist.ProcessGroup, device: torch.device) -> Iterator[None]:
    """Refuse a backend that does not do within the block what is tried there for the first time."""
    try:
        yield
    except RuntimeError as error:
        if is_lost_connection(error):
            raise
        raise UsageError(
            f"processes cannot share sequences: the backend {dist.get_backend(group)} has no {collective} of tensors "
            f"on {device} ({str(error).splitlines()[0]})",
            hint="build the plan with `--cp off`, or train with a torch that has gloo for CPUs and NCCL for GPUs",
        ) from error


def is_lost_connection(error: RuntimeError) -> bool:
    """Whether that is what torch.distributed raises when another process is gone."""
    # gloo raises plain RuntimeErrors, with the place in its source
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def named_processes(processes: Sequence[int]) -> str:
    """Processes by their numbers, in words."""
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"


@dataclass(frozen=True)
class Pending:
    """Rows on their way, [num_rows of all members, width]; those sent have to stay until then."""

    rows: Tensor
    _sent: Tensor
    _work: dist.Work

    def wait(self) -> Tensor:
        """Wait until they are here; on a GPU its stream waits, not the host."""
        self._work.wait()
        return self.rows
