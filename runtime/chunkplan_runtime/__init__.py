"""The torch runtime: streams a plan and does its actions, with gradients equal to those of whole sequences.

`ChunkTrainer`, `Executor`, `PlanStream` and `open_plan` are imported when they are asked for: without them this package
needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chunkplan_runtime.feed.stream import PlanStream, open_plan
    from chunkplan_runtime.training.chunk_trainer import ChunkTrainer
    from chunkplan_runtime.training.executor import Executor

__all__ = ["ChunkTrainer", "Executor", "PlanStream", "open_plan"]

_MODULES = {
    "ChunkTrainer": "training.chunk_trainer",
    "Executor": "training.executor",
    "PlanStream": "feed.stream",
    "open_plan": "feed.stream",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from chunkplan_runtime.requirements import require_torch

    require_torch()
    if name == "ChunkTrainer":
        _require_accelerate()
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__


def _require_accelerate() -> None:
    try:
        import_module("accelerate")
    except ImportError as error:
        from chunkplan.errors import UsageError
        from chunkplan.extras import pip_install

        raise UsageError(
            f"ChunkTrainer needs accelerate, as transformers' Trainer does ({error})",
            hint=pip_install("hf"),
        ) from error
