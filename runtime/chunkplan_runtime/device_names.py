"""What a device is called, and which hardware profiles are of it: those that ship, and those that were measured."""

from __future__ import annotations

import platform
import re

import torch

_SHIPPED = ("h100", "h200", "a100")

#: Words in the names of GPUs that are slower than their namesakes, which the profiles are of.
_SLOWER = ("pcie", "nvl", "mig")


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
    return re.search(rf"\b{re.escape(profile)}\b", device) is not None


def shipped_profile(device: str) -> str | None:
    """The name of the profile that ships for the device of that name, if there is one."""
    return next((name for name in _SHIPPED if is_profile_of(name, device)), None)
