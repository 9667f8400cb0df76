"""A stage's links to its neighbours: hidden states go down the pipeline, their gradients come up.

What comes in which order, and of which shape, is known from the plan. A receive is posted when it is waited for, and
nobody waits for a send before the links are closed, so that a valid plan, whose actions wait for each other in no
circle, cannot deadlock. Each link has a group of its two processes for each direction: on a GPU, what a group does runs
in the order in which it was issued.

On a GPU no receive is posted ahead: it would be a kernel that waits there, from the beginning of the step if it is for
a gradient, and whatever waits for the device would wait for this process's own next action. Nothing is lost by it, as
the host runs ahead of the device. What would wait for the device is refused while links are open (`device_waits.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from chunkplan.errors import DataError
from chunkplan.operations import BACKWARDS, FORWARDS
from chunkplan.planfile.plan import VALIDATE_HINT, Action
from chunkplan_runtime.device_waits import no_device_waits


@dataclass(frozen=True)
class Wire:
    """What goes over a link: rows of `hidden_size` numbers of a dtype, on a device."""

    hidden_size: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Link:
    """The neighbour's rank, and groups of the two processes: for hidden states, and for their gradients."""

    rank: int
    down: dist.ProcessGroup
    up: dist.ProcessGroup


class Links:
    """Links to the stages before and after; None where the pipeline ends.

    Each is used once at the beginning, the first one first: on a GPU two processes meet when they do so, and those of
    later ones would meet in no order.
    """

    def __init__(self, wire: Wire, before: Link | None, after: Link | None) -> None:
        self._inputs = _Inbox(wire, before, before.down if before else None)
        self._gradients = _Inbox(wire, after, after.up if after else None)
        self._outputs = _Outbox(after, after.down if after else None)
        self._input_gradients = _Outbox(before, before.up if before else None)
        greeting = torch.zeros(1, wire.hidden_size, dtype=wire.dtype, device=wire.device)  # [1, hidden_size]
        for inbox, outbox in ((self._inputs, self._outputs), (self._gradients, self._input_gradients)):
            inbox.expect([(0, 1)])
            if inbox.is_open:
                inbox.take(0)
            if outbox.is_open:
                outbox.put(greeting)
                outbox.wait()

    @contextmanager
    def open(self, actions: Iterable[Action], num_tokens: Mapping[int, int]) -> Iterator[None]:
        """Within the block `actions` are done, of chunks of so many tokens; at its end all that was sent has arrived.

        Of a chunk that is not in `num_tokens` nothing is received.
        """
        actions = [each for each in actions if each.chunk_id in num_tokens]
        forwards = [each.chunk_id for each in actions if each.op in FORWARDS]
        backwards = [each.chunk_id for each in actions if each.op in BACKWARDS]
        self._inputs.expect([(chunk_id, num_tokens[chunk_id]) for chunk_id in forwards])
        self._gradients.expect([(chunk_id, num_tokens[chunk_id]) for chunk_id in backwards])
        with no_device_waits():
            yield
            self._outputs.wait()
            self._input_gradients.wait()

    def receive_input(self, chunk_id: int) -> Tensor:
        """Wait for the hidden states [num_tokens, hidden_size] of a chunk after the stage before."""
        return self._inputs.take(chunk_id)

    def receive_gradient(self, chunk_id: int) -> Tensor:
        """Wait for the gradient [num_tokens, hidden_size] of what this stage sent on of a chunk."""
        return self._gradients.take(chunk_id)

    def send_output(self, hidden: Tensor) -> None:
        """Send hidden states [num_tokens, hidden_size] on, without waiting.

        They are kept until they have arrived; with gloo, until the links are closed.
        """
        self._outputs.put(hidden)

    def send_input_gradient(self, gradient: Tensor) -> None:
        """Send back to the stage before the gradient [num_tokens, hidden_size] of what it sent, without waiting."""
        self._input_gradients.put(gradient)


class _Inbox:
    def __init__(self, wire: Wire, link: Link | None, group: dist.ProcessGroup | None) -> None:
        self._wire, self._source, self._group = wire, link.rank if link else None, group
        self._expected: deque[tuple[int, int]] = deque()

    @property
    def is_open(self) -> bool:
        return self._source is not None

    def expect(self, chunks: Iterable[tuple[int, int]]) -> None:
        self._expected = deque(chunks if self.is_open else ())

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
    def __init__(self, link: Link | None, group: dist.ProcessGroup | None) -> None:
        self._target, self._group = link.rank if link else None, group
        self._sent: deque[tuple[Tensor, dist.Work]] = deque()

    @property
    def is_open(self) -> bool:
        return self._target is not None

    def put(self, tensor: Tensor) -> None:
        while self._sent and self._sent[0][1].is_completed():  # which gloo says of none before it is waited for
            self._sent.popleft()
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self._target, self._group)
        if work is not None:
            self._sent.append((tensor, work))  # which has to stay as it is until it has arrived

    def wait(self) -> None:
        while self._sent:
            self._sent.popleft()[1].wait()
