"""The torch runtime: streams a plan and does its actions, with gradients equal to those of whole sequences.

`ChunkTrainer`, `Distillation`, `Executor`, `PlanStream`, `Scores`, `TargetTokens` and `open_plan` are imported when
they are asked for: without them this package needs no torch, and says what of it is missing, or has to be set before it
is there.
"""

from __future__ import annotations

import logging
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from chunkplan.errors import UsageError
from chunkplan.extras import not_installed, pip_install

if TYPE_CHECKING:
    from chunkplan_runtime.execution.losses import Distillation
    from chunkplan_runtime.execution.step_loss import TargetTokens
    from chunkplan_runtime.feed.scores import Scores
    from chunkplan_runtime.feed.stream import PlanStream, open_plan
    from chunkplan_runtime.training.chunk_trainer import ChunkTrainer
    from chunkplan_runtime.training.executor import Executor

__all__ = ["ChunkTrainer", "Distillation", "Executor", "PlanStream", "Scores", "TargetTokens", "open_plan"]

_MODULES = {
    "ChunkTrainer": "training.chunk_trainer",
    "Distillation": "execution.losses",
    "Executor": "training.executor",
    "PlanStream": "feed.stream",
    "Scores": "feed.scores",
    "TargetTokens": "execution.step_loss",
    "open_plan": "feed.stream",
}

#: What is set where there are several processes. A GPU waits in sends and receives for other processes. By default CUDA
#: loads a kernel when it is first asked for, and waits for the device to do so; and it has 8 queues, so that what is in
#: a ninth stream may come behind a receive that waits.
_OF_SEVERAL = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}

#: How torch takes memory on a GPU, under both of its names: a chunk takes what others of other sizes have given back.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def set_environment() -> None:
    """Set what torch and CUDA read when they begin, for a process that trains, unless it is set already."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else a page of C++ stack about a process that is gone
    if os.environ.get("WORLD_SIZE", "1") != "1":
        set_for_several_processes()
    if not any(name in os.environ for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"


def set_for_several_processes() -> None:
    """Set what CUDA reads when it is first asked for something, unless it is set already."""
    for name, value in _OF_SEVERAL.items():
        os.environ.setdefault(name, value)


def world_size() -> int:
    """The number of processes by the environment; raises UsageError where it says too little, or no number."""
    size = os.environ.get("WORLD_SIZE") or "1"
    if not size.isdecimal() or int(size) < 1:
        raise UsageError(f"WORLD_SIZE is {size!r}", hint="start it with torchrun, or with WORLD_SIZE from 1")
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if int(size) > 1 and missing:
        raise UsageError(
            f"WORLD_SIZE is {size}, and {', '.join(missing)} is not set", hint="start it with torchrun, which sets all"
        )
    return int(size)


def require_torch() -> None:
    """Import torch and transformers.

    Raises UsageError: one is not installed, or its installation is broken.
    """
    # peft imports bitsandbytes wherever it is installed, and this part of it then warns, on every process, of a package
    # that would have made 4 bits on a CPU faster.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        for name in ("tokenizers", "torch", "transformers"):  # without the first the last ends in a TypeError
            import_module(name)
    except (ImportError, OSError) as error:  # OSError: a shared library of torch is missing
        raise not_installed(error) or UsageError(
            f"torch and transformers are needed ({error})", hint=pip_install("runtime")
        ) from error


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_torch()
    if name == "ChunkTrainer":
        if os.environ.get("WORLD_SIZE", "1") != "1":
            set_for_several_processes()
        try:
            import_module("accelerate")
        except ImportError as error:
            told = f"ChunkTrainer needs accelerate, as transformers' Trainer does ({error})"
            raise UsageError(told, hint=pip_install("hf")) from error
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
