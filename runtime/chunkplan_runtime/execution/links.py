"""A stage's links to others: hidden states go down the pipeline, their gradients come up.

The order of messages is known from the plan. A receive is posted when it is waited for, and no send is waited for
before the links are closed, so that a valid plan, whose actions form no cycle, cannot deadlock. Each link has a group
of its two processes for each direction, as operations of a group run on a GPU in the order in which they were issued.
No receive is posted ahead: on a GPU it would be a waiting kernel, and a synchronization with the device would wait for
this process's own next action. That is refused while links are open (`devices.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from chunkplan_runtime.devices import no_device_waits
from chunkplan_runtime.feed.stream import broken_plan


@dataclass(frozen=True)
class Link:
    """The other process, and groups of the two: for hidden states, and for their gradients."""

    process: int
    down: dist.ProcessGroup
    up: dist.ProcessGroup


class Links:
    """Links of `model_stages`, those of this process by virtual stage, to the ones before and after each.

    `row` [1, hidden_size]: of the dtype and on the device of what goes over them. `links`: to other processes, by
    border: m is that between the model stages m and m + 1.

    Each is used once at the beginning, in which NCCL connects two processes, so that they wait for each other: all take
    borders in ascending order, of each first the way down and then the way up, so that there is no cycle of waits.
    """

    def __init__(self, row: Tensor, model_stages: Sequence[int], links: Mapping[int, Link]) -> None:
        #: By what goes over it, "inputs" or "gradients", and the virtual stage that sends or receives it.
        self._outgoing: dict[tuple[str, int], _Channel] = {}
        self._incoming: dict[tuple[str, int], _Channel] = {}
        virtual_stages = {model_stage: place for place, model_stage in enumerate(model_stages)}
        for border in sorted({*links} | {each for each in virtual_stages if each + 1 in virtual_stages}):
            above, below = virtual_stages.get(border), virtual_stages.get(border + 1)
            for what, sender, receiver in (("inputs", above, below), ("gradients", below, above)):
                channel = _Channel()
                if sender is None or receiver is None:
                    link = links[border]
                    channel = _Remote(row, link.process, link.down if what == "inputs" else link.up)
                if sender is not None:
                    self._outgoing[what, sender] = channel
                    channel.send(0, row)
                    channel.wait()
                if receiver is not None:
                    self._incoming[what, receiver] = channel
                    channel.receive(0, 1)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Within the block chunks are sent and received; at its end all that was sent has arrived."""
        for channel in self._outgoing.values():
            channel.begin()
        with no_device_waits():
            yield
            for channel in self._outgoing.values():
                channel.wait()

    def receive(self, what: str, virtual_stage: int, chunk_id: int, num_tokens: int) -> Tensor:
        """Wait for [num_tokens, hidden_size] of a chunk: "inputs" of a virtual stage, or "gradients" of its output."""
        return self._incoming[what, virtual_stage].receive(chunk_id, num_tokens)

    def send(self, what: str, virtual_stage: int, chunk_id: int, tensor: Tensor) -> None:
        """Send [num_tokens, hidden_size] without waiting: "inputs" of the stage after, "gradients" to that before.

        They are kept until they have arrived; with gloo, until the links are closed.
        """
        self._outgoing[what, virtual_stage].send(chunk_id, tensor)


class _Channel:
    """One direction of a border between stages: here from one virtual stage of a process to another, in any order."""

    def __init__(self) -> None:
        self._tensors: dict[int, Tensor] = {}

    def begin(self) -> None:
        self._tensors.clear()  # of a run that raised

    def send(self, chunk_id: int, tensor: Tensor) -> None:
        self._tensors[chunk_id] = tensor

    def receive(self, chunk_id: int, num_tokens: int) -> Tensor:
        if chunk_id not in self._tensors:
            message = f"chunk {chunk_id} comes to a virtual stage before the one before it has done it"
            raise broken_plan(message, "schedule.parquet")
        return self._tensors.pop(chunk_id)

    def wait(self) -> None:
        pass


class _Remote(_Channel):
    """The same with another process, by a group of the two: what comes is what was sent next."""

    def __init__(self, row: Tensor, process: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._row, self._process, self._group = row, process, group
        self._sent: deque[tuple[Tensor, dist.Work]] = deque()

    def send(self, chunk_id: int, tensor: Tensor) -> None:
        while self._sent and self._sent[0][1].is_completed():  # which gloo says of none before it is waited for
            self._sent.popleft()
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self._process, self._group)
        if work is not None:
            self._sent.append((tensor, work))  # which has to stay as it is until it has arrived

    def receive(self, chunk_id: int, num_tokens: int) -> Tensor:
        tensor = self._row.new_empty(num_tokens, self._row.shape[1])
        dist.recv(tensor, self._process, self._group)  # on a GPU its stream waits, not the host
        return tensor

    def wait(self) -> None:
        while self._sent:
            self._sent.popleft()[1].wait()
