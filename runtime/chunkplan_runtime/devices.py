"""Devices: which one a name means, what it is called, and which hardware profiles are of it."""

from __future__ import annotations

import platform
import re

import torch

from chunkplan.cost.hardware import SHIPPED
from chunkplan.errors import UsageError

#: Words in the names of GPUs that are slower than their namesakes, which the profiles are of.
_SLOWER = ("pcie", "nvl", "mig", "laptop", "d")


def find_device(name: str) -> torch.device:
    """The device of "auto", "cpu", "cuda" or "cuda:N"; of a GPU with its number.

    Raises:
        UsageError: it is not there.
    """
    num_gpus = torch.cuda.device_count()
    device = torch.device(("cuda" if num_gpus else "cpu") if name == "auto" else name)
    if device.type == "cpu":
        return device
    index = device.index or 0
    if index >= num_gpus:
        raise UsageError(
            f"--device is {name}, this torch ({torch.__version__}) sees {num_gpus} GPUs",
            hint="choose another, such as cpu, or install a torch that was built for CUDA",
        )
    return torch.device("cuda", index)


def device_name(device: torch.device) -> str:
    """What the device is called; a CPU by its kind and the threads that compute on it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    num_threads = torch.get_num_threads()
    return f"{platform.machine()} CPU with {num_threads} {'thread' if num_threads == 1 else 'threads'}"


def calibrated_name(name: str, device: str) -> str:
    """What a profile called `name` is called in full that was measured on the device of that name."""
    return f"{name} ({device})"


def is_profile_of(profile: str, device: str) -> bool:
    """Whether the profile of that name is of the device of that name: measured on one such, or a GPU's by its name."""
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
