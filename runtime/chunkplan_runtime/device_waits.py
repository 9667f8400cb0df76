"""What makes the host wait for all that a GPU has to do, or may: never while links between stages are open.

On a GPU a send is a kernel that waits there for the other process to receive, and a receive one that waits for it to
send. Who waits for the whole device waits for them too; if the other process does the same, neither gets to what the
other one waits for. CUDA waits so when it is asked to, and when it takes page-locked memory from the system. All of
that is done here, and refused where it must not be, on a CPU as well, where none of it would wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

#: Whether links are open. There is one pipeline in a process, and the thread that reads ahead is in it too.
_forbidden = False


@contextmanager
def no_device_waits() -> Iterator[None]:
    """Within the block nothing may wait for the device: whoever tries is refused by an AssertionError."""
    global _forbidden
    _forbidden = True
    try:
        yield
    finally:
        _forbidden = False


def may_wait() -> bool:
    """Whether something may wait for the device now: no links are open."""
    return not _forbidden


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all that it was given; a CPU has."""
    _refuse("waiting for the device")
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def new_host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory on the host that is not set to anything; page-locked if `device` is a GPU."""
    _refuse("taking host memory")
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type == "cuda")


def pinned(tensor: Tensor) -> Tensor:
    """`tensor` in page-locked memory, where there is CUDA."""
    _refuse("pinning memory")
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` of host memory on `device`, on its way there when this returns.

    From page-locked memory where that may be taken. Else CUDA copies a few KiB aside before they are on their way.
    """
    if device.type == "cuda" and may_wait() and not tensor.is_pinned():
        tensor = pinned(tensor)
    return tensor.to(device, non_blocking=True)


def _refuse(what: str) -> None:
    if _forbidden:
        raise AssertionError(f"{what} while links are open: two stages may then wait for each other for ever")
