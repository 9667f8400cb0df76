"""How gradients are summed over the replicas of a stage: what FSDP2 calls in place of its own reduce-scatter.

A sum is only launched where FSDP2 asks for it, in the backward that has just found the gradients, and waited for at
the end of the step: a process that comes early to its last backward goes on with it, while others are still to come to
theirs. All processes ask for the same sums in the same order, so they are launched in one order, each on the same
group; that this goes with all else that they launch is for `feed.order.may_reduce` to say.

Where the replicas lie on several machines, several on each, a sum is done in two parts: within each machine, after
which the j-th process of a machine has what this machine adds to the shards of the j-th processes of all of them, and
then across machines among the j-th ones. Each process ends with the shard that it has otherwise too. The second part is
launched when the next layer's first part is, so that one runs on the links within machines while the other one runs
between them. Parts, members and their order are the same in every step: so are the bits of a sum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from chunkplan_runtime.exchange import reduce_scatter


@dataclass(frozen=True)
class MachineGroups:
    """The groups of a replica: with those on its machine, and with those that have its place on the other machines."""

    within: dist.ProcessGroup
    across: dist.ProcessGroup


@dataclass(frozen=True)
class _Launched:
    """A sum on its way into `out`; what is sent has to stay until it is there."""

    out: Tensor
    sent: Tensor
    work: dist.Work


class Reductions:
    """Reduce-scatters in the form that FSDP2 takes them (`FSDPModule.set_custom_reduce_scatter`).

    `machines`: None where one group of all replicas does. `waits`: until a sum is there, before it goes on, for what
    FSDP2 does with the result then; otherwise nobody may look at it before `finish`.
    """

    def __init__(self, machines: MachineGroups | None) -> None:
        self.waits = False
        self._machines = machines
        self._launched: deque[_Launched] = deque()
        #: What is summed within machines, and the shard that it is for.
        self._within: tuple[_Launched, Tensor] | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory that FSDP2 fills with what is sent, or that it gets a shard in."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Launch the sum over `group` of input_tensor [replicas x shard], of which this process gets its shard."""
        self._launch_across()
        while self._launched and self._launched[0].work.is_completed():
            self._launched.popleft().work.wait()  # so that its memory is free
        if self._machines is None:
            self._launched.append(_launch(output_tensor, input_tensor, group))
        else:
            within, num_machines = self._machines.within, self._machines.across.size()
            shards = input_tensor.view(num_machines, within.size(), -1)  # [machines, places, shard]
            by_place = shards.transpose(0, 1).contiguous().flatten()
            partial = input_tensor.new_empty(by_place.numel() // within.size())  # [machines x shard]
            self._within = _launch(partial, by_place, within), output_tensor
        if self.waits:
            self.finish()

    def finish(self) -> None:
        """Wait until all sums are there; on a GPU its stream waits, not the host."""
        self._launch_across()
        while self._launched:
            self._launched.popleft().work.wait()

    def _launch_across(self) -> None:
        """Sum across machines what is summed within them."""
        if self._within is not None and self._machines is not None:
            partial, shard = self._within
            partial.work.wait()
            self._launched.append(_launch(shard, partial.out, self._machines.across))
            self._within = None


def _launch(out: Tensor, rows: Tensor, group: dist.ProcessGroup) -> _Launched:
    return _Launched(out, rows, reduce_scatter(out, rows, group=group, async_op=True))
