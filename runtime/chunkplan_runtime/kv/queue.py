"""Copies between a device and the host, one after another, beside the kernels."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch


class Queue:
    """A CUDA stream, or nothing where copies are done when they are asked for."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self.copies = stream is not None
        self._device = device

    @classmethod
    def new(cls, device: torch.device) -> Queue:
        """Make a queue of its own."""
        return cls(device, torch.cuda.Stream(device) if device.type == "cuda" else None)  # type: ignore[no-untyped-call]

    @classmethod
    def current(cls, device: torch.device) -> Queue:
        """Return the one that kernels are given to."""
        return cls(device, torch.cuda.current_stream(device) if device.type == "cuda" else None)

    def use(self) -> AbstractContextManager[object]:
        """Within the block copies go into it."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait(self, event: torch.cuda.Event | None) -> None:
        """What comes into it from now on waits for an event."""
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)

    def record(self) -> torch.cuda.Event | None:
        """Return the event that all it has been given until now is done."""
        return None if self._stream is None else self._stream.record_event()


@cache
def queues_of(device: torch.device) -> tuple[Queue, Queue]:
    """Of all copies from a device to the host, and of all copies from there: the link is one each way."""
    return Queue.new(device), Queue.new(device)
