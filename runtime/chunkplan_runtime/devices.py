"""Which device a name means."""

from __future__ import annotations

import torch

from chunkplan.errors import UsageError


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
