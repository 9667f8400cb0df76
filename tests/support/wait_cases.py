"""What processes do in tests of who waits for what: devices that are waited for, groups, a process that stalls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.failures import watchdog as watching
from chunkplan_runtime.kv.host_memory import HostMemory
from chunkplan_runtime.models.model import CausalLM, new_model, read_config
from tests.support.distributed_cases import Compared, compare_steps, make_stage, open_for_its_stages
from tests.support.link_cases import StandIn, drive
from tests.support.training_cases import run_main


@contextmanager
def device_waits_everywhere() -> Iterator[None]:
    """A GPU that is waited for when memory is taken and when a forward begins: for all receives that are posted there.

    That is what taking page-locked memory, loading a kernel and making room for a tensor may do.
    """
    posted: list[dist.Work] = []
    receive, empty = dist.irecv, torch.empty

    def wait() -> None:
        while posted:
            posted.pop().wait()

    def irecv(*args: Any, **kwargs: Any) -> Any:
        posted.append(receive(*args, **kwargs))
        return posted[-1]

    def waiting_empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        wait()
        return empty(*args, **kwargs)

    def waiting(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wait_and_run(*args: Any) -> torch.Tensor:
            wait()
            return forward(*args)

        return wait_and_run

    with ExitStack() as patches:
        patches.enter_context(patch.object(dist, "irecv", irecv))
        patches.enter_context(patch.object(torch, "empty", waiting_empty))
        for model in (CausalLM, StandIn):
            patches.enter_context(patch.object(model, "hidden_states", waiting(model.hidden_states)))
        yield


def drive_waiting(rank: int, **how: Any) -> tuple[list[str], list[str]]:
    """`drive`, on such a GPU."""
    with device_waits_everywhere():
        return drive(rank, **how)


def compare_waiting(rank: int, **how: Any) -> list[Compared]:
    """`compare_steps`, on such a GPU."""
    with device_waits_everywhere():
        return compare_steps(rank, **how)


def compare_without_reserve(rank: int, **how: Any) -> list[Compared]:
    """`compare_steps` with host memory that is taken when it is needed."""
    with patch.object(HostMemory, "reserve", lambda *_: None):
        return compare_steps(rank, **how)


class _Groups(TorchDispatchMode):
    """Which groups are used, by whatever uses them, each with what for."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: set[tuple[str, str]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            boxed = [each for each in args if isinstance(each, torch.ScriptObject)]
            kinds = (str(each._type()) for each in boxed)
            found = [each for each, kind in zip(boxed, kinds, strict=True) if kind.endswith("ProcessGroup")]
            self.uses |= {(dist.ProcessGroup.unbox(each).group_name, str(func)) for each in found}
        return func(*args, **(kwargs or {}))


def used_groups(rank: int, *, plan: Path, config: Path) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """Which groups are used before the first step, and which in it, each with what for."""
    opened, analysis = open_for_its_stages(plan)
    model = new_model(read_config(config), torch.float32, seed=1)
    with _Groups() as before:
        stage = make_stage(rank, opened, analysis, model)
    work = stage.work(0)
    with _Groups() as during:
        stage.run(work)
        stage.finish_gradients(stage.weights)
    return before.uses, during.uses


def stalled_main(rank: int, **how: Any) -> tuple[int, str]:
    """`run_main` where the first process is late, and half a second is long."""
    run = RankExecutor.run

    def late(*args: Any) -> Any:
        if rank == 0:
            time.sleep(2)
        return run(*args)

    with patch.object(watching, "STALLED_AFTER", 0.5), patch.object(RankExecutor, "run", late):
        return run_main(rank, **how)
