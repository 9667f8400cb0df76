"""Devices: which one a name means, which profiles are of it, when the host may wait for it, dtypes of sums on it.

On a GPU a send or a receive is a kernel that waits there for the other process. Two processes that wait for their whole
devices may so deadlock. CUDA waits when it is asked to, and when it takes page-locked memory from the system. All of
that is done here, and refused while links are open, on a CPU as well, where none of it would wait.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from chunkplan.cost.hardware import SHIPPED
from chunkplan.errors import UsageError

#: Words in the names of GPUs that are slower than their namesakes, which the profiles are of.
_SLOWER = ("pcie", "nvl", "mig", "laptop", "d")

#: Whether links are open. There is one pipeline in a process, and the thread that reads ahead is in it too.
_links_are_open = False


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over many blocks are kept: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def find_device(name: str) -> torch.device:
    """The device of "auto", "cpu", "cuda" or "cuda:N"; of a GPU with its number.

    Raises UsageError: it is not there.
    """
    num_gpus = torch.cuda.device_count()
    device = torch.device(("cuda" if num_gpus else "cpu") if name == "auto" else name)
    if device.type == "cpu":
        return device
    if (device.index or 0) >= num_gpus:
        raise UsageError(
            f"--device is {name}, this torch ({torch.__version__}) sees {num_gpus} GPUs",
            hint="choose another, such as cpu, or install a torch that was built for CUDA",
        )
    return torch.device("cuda", device.index or 0)


def local_device_index() -> int:
    """The index of this process's GPU among those it sees: the only one, or that of its number on its machine."""
    local_rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)
    return 0 if torch.cuda.device_count() == 1 else local_rank


def device_name(device: torch.device) -> str:
    """The name of the device; a CPU's is its kind and the threads that compute on it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    num_threads = torch.get_num_threads()
    return f"{platform.machine()} CPU with {num_threads} {'thread' if num_threads == 1 else 'threads'}"


def calibrated_name(name: str, device: str) -> str:
    """The full name of a profile called `name` that was measured on the device of that name."""
    return f"{name} ({device})"


def is_profile_of(profile: str, device: str) -> bool:
    """True if the profile of that name is of the device of that name: measured on one such, or a GPU's by its name."""
    if profile.endswith(calibrated_name("", device)):
        return True
    profile, device = profile.lower(), device.lower()
    words = re.findall(r"\w+", device)
    if not profile or "cpu" in words or any(word in words and word not in profile for word in _SLOWER):
        return False
    pieces = re.findall(r"[^\W\d_]+|\d+", profile)  # "rtx4090" and "rtx-4090" are an RTX 4090
    pattern = r"[\s-]*".join(pieces)
    return pattern != "" and re.search(rf"\b{pattern}\b", device) is not None


def shipped_profile(device: str) -> str | None:
    """The name of the profile that ships for the device of that name, if there is one."""
    return next((name for name in SHIPPED if is_profile_of(name, device)), None)


@contextmanager
def no_device_waits() -> Iterator[None]:
    """Within the block links are open, and whoever tries to wait for the device is refused by an AssertionError."""
    global _links_are_open
    _links_are_open = True
    try:
        yield
    finally:
        _links_are_open = False


def may_wait() -> bool:
    """True if the host may wait for the device now: no links are open."""
    return not _links_are_open


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
    if _links_are_open:
        raise AssertionError(f"{what} while links are open: two stages may then deadlock")
