"""What attention gave in a chunk's forward for its keys and values alone, which its recompute takes.

It stands in for attention where that is one operator (`attention.operator`): a recompute in which layers are
checkpoints holds it as it would hold what attention gives.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any

from torch import Tensor

from chunkplan_runtime.attention.operator import Attend
from chunkplan_runtime.kv.host_tensors import HostTensor, HostTensors, on_its_way


class KeptResults:
    """Out and log-sum-exp of each attention of a chunk, in the order of its layers; on the device, or in host memory.

    `num_held`: how many tensors there are. A layer's are let go of as the recompute's layer takes them.
    """

    def __init__(self, host: HostTensors) -> None:
        self._host = host
        self._held: deque[HostTensor] = deque()
        self._is_taken = False

    @property
    def num_held(self) -> int:
        """See `KeptResults`."""
        return len(self._held)

    def take(self) -> None:
        """Hand them out from now on; those of the first layer are on their way."""
        self._is_taken = True
        for each in islice(self._held, 2):
            on_its_way(each)

    def attend(self, attend: Attend, *given: Any) -> tuple[Tensor, Tensor]:
        """What `attend` gives, which is kept; then what is kept. A layer that its backward runs again attends anew."""
        if self._held and self._is_taken:
            return self._next(), self._next()
        out, lse = attend(*given)
        if not self._is_taken:
            self._held += self._host.sent(out), self._host.sent(lse)
        return out, lse

    def _next(self) -> Tensor:
        asked = self._held.popleft()
        return self._host.fetched(asked, *islice(self._held, 2))
