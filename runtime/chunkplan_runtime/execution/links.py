"""A stage's links to others: hidden states go down the pipeline, their gradients come up.

What comes in which order, and of which shape, is known from the plan. A receive is posted when it is waited for, and
nobody waits for a send before the links are closed, so that a valid plan, whose actions wait for each other in no
circle, cannot deadlock. Each link has a group of its two processes for each direction, as on a GPU what a group does
runs in the order in which it was issued.

On a GPU no receive is posted ahead: it would be a kernel that waits there, and whatever waits for the device would wait
for this process's own next action. Nothing is lost by it, as the host runs ahead of the device. What would wait for the
device is refused while links are open (`devices.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from chunkplan.errors import DataError
from chunkplan.operations import BACKWARDS, FORWARDS
from chunkplan.planfile.plan import VALIDATE_HINT, Action
from chunkplan_runtime.devices import no_device_waits


@dataclass(frozen=True)
class Wire:
    """What goes over a link: rows of `hidden_size` numbers of a dtype, on a device."""

    hidden_size: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Link:
    """The other process, and groups of the two: for hidden states, and for their gradients."""

    process: int
    down: dist.ProcessGroup
    up: dist.ProcessGroup


class Links:
    """Links of `model_stages`, those of this process by virtual stage, to the ones before and after each.

    `links`: to other processes, by border: m is that between the model stages m and m + 1. Where both are here, what
    one sends the other one receives without any process group.

    Each is used once at the beginning, in which NCCL connects two processes, so that they wait for each other. All
    processes take their borders in ascending order, of each first the way down and then the way up: in one order that
    is the same for all, so that nobody waits in a circle.
    """

    def __init__(self, wire: Wire, model_stages: Sequence[int], links: Mapping[int, Link]) -> None:
        self._inputs: dict[int, _Inbox | _Here] = {}  # by virtual stage, as all of these
        self._outputs: dict[int, _Outbox | _Here] = {}
        self._gradients: dict[int, _Inbox | _Here] = {}
        self._input_gradients: dict[int, _Outbox | _Here] = {}
        greeting = torch.zeros(1, wire.hidden_size, dtype=wire.dtype, device=wire.device)  # [1, hidden_size]
        virtual_stages = {model_stage: place for place, model_stage in enumerate(model_stages)}
        for border in sorted({*links} | {each for each in virtual_stages if each + 1 in virtual_stages}):
            above, below = virtual_stages.get(border), virtual_stages.get(border + 1)
            if above is not None and below is not None:
                self._outputs[above] = self._inputs[below] = _Here()
                self._input_gradients[below] = self._gradients[above] = _Here()
                continue
            link = links[border]
            if above is not None:
                outputs = self._outputs[above] = _Outbox(link.process, link.down)
                gradients = self._gradients[above] = _Inbox(wire, link.process, link.up)
                outputs.greet(greeting)
                gradients.be_greeted()
            elif below is not None:
                inputs = self._inputs[below] = _Inbox(wire, link.process, link.down)
                input_gradients = self._input_gradients[below] = _Outbox(link.process, link.up)
                inputs.be_greeted()
                input_gradients.greet(greeting)

    @contextmanager
    def open(self, actions: Iterable[Action], num_tokens: Mapping[int, int]) -> Iterator[None]:
        """Within the block `actions` are done, of chunks of so many tokens; at its end all that was sent has arrived.

        Of a chunk that is not in `num_tokens` nothing is received.
        """
        actions = [each for each in actions if each.chunk_id in num_tokens]
        for inboxes, ops in ((self._inputs, FORWARDS), (self._gradients, BACKWARDS)):
            for virtual_stage, inbox in inboxes.items():
                own = [each.chunk_id for each in actions if each.op in ops and each.virtual_stage == virtual_stage]
                inbox.expect([(chunk_id, num_tokens[chunk_id]) for chunk_id in own])
        with no_device_waits():
            yield
            for outbox in (*self._outputs.values(), *self._input_gradients.values()):
                outbox.wait()

    def receive_input(self, virtual_stage: int, chunk_id: int) -> Tensor:
        """Wait for the hidden states [num_tokens, hidden_size] of a chunk after the model stage before."""
        return self._inputs[virtual_stage].take(chunk_id)

    def receive_gradient(self, virtual_stage: int, chunk_id: int) -> Tensor:
        """Wait for the gradient [num_tokens, hidden_size] of what a virtual stage here sent on of a chunk."""
        return self._gradients[virtual_stage].take(chunk_id)

    def send_output(self, virtual_stage: int, chunk_id: int, hidden: Tensor) -> None:
        """Send hidden states [num_tokens, hidden_size] on, without waiting.

        They are kept until they have arrived; with gloo, until the links are closed.
        """
        self._outputs[virtual_stage].put(chunk_id, hidden)

    def send_input_gradient(self, virtual_stage: int, chunk_id: int, gradient: Tensor) -> None:
        """Send the gradient [num_tokens, hidden_size] of what the model stage before sent back, without waiting."""
        self._input_gradients[virtual_stage].put(chunk_id, gradient)


class _Inbox:
    def __init__(self, wire: Wire, source: int, group: dist.ProcessGroup) -> None:
        self._wire, self._source, self._group = wire, source, group
        self._expected: deque[tuple[int, int]] = deque()

    def be_greeted(self) -> None:
        self.expect([(0, 1)])
        self.take(0)

    def expect(self, chunks: Iterable[tuple[int, int]]) -> None:
        self._expected = deque(chunks)

    def take(self, chunk_id: int) -> Tensor:
        if not self._expected or self._expected[0][0] != chunk_id:
            raise DataError(
                f"chunk {chunk_id} is not what comes next from process {self._source}",
                where="schedule.parquet",
                hint=VALIDATE_HINT,
            )
        _, num_tokens = self._expected.popleft()
        wire = self._wire
        # [num_tokens, hidden_size]
        tensor = torch.empty(num_tokens, wire.hidden_size, dtype=wire.dtype, device=wire.device)
        dist.recv(tensor, self._source, self._group)  # on a GPU its stream waits, not the host
        return tensor


class _Outbox:
    def __init__(self, target: int, group: dist.ProcessGroup) -> None:
        self._target, self._group = target, group
        self._sent: deque[tuple[Tensor, dist.Work]] = deque()

    def greet(self, greeting: Tensor) -> None:
        self.put(0, greeting)
        self.wait()

    def put(self, chunk_id: int, tensor: Tensor) -> None:
        while self._sent and self._sent[0][1].is_completed():  # which gloo says of none before it is waited for
            self._sent.popleft()
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self._target, self._group)
        if work is not None:
            self._sent.append((tensor, work))  # which has to stay as it is until it has arrived

    def wait(self) -> None:
        while self._sent:
            self._sent.popleft()[1].wait()


class _Here:
    """Both ends of a border within one process, in whatever order it puts and takes."""

    def __init__(self) -> None:
        self._tensors: dict[int, Tensor] = {}

    def expect(self, _: Iterable[tuple[int, int]]) -> None:
        self._tensors.clear()  # of a run that raised

    def put(self, chunk_id: int, tensor: Tensor) -> None:
        self._tensors[chunk_id] = tensor

    def take(self, chunk_id: int) -> Tensor:
        if chunk_id not in self._tensors:
            raise DataError(
                f"chunk {chunk_id} comes to a virtual stage before the one before it has done it",
                where="schedule.parquet",
                hint=VALIDATE_HINT,
            )
        return self._tensors.pop(chunk_id)

    def wait(self) -> None:
        pass
