"""What processes do in tests of distributed training: the trainer, as torchrun would start it on each of them."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import signal
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pandas  # noqa: F401  # which pyarrow imports as soon as it is there
import torch
import torch.distributed as dist
import transformers.models.qwen2.modeling_qwen2  # noqa: F401  # before processes are forked
from transformers import TrainerCallback

from chunkplan_runtime import devices
from chunkplan_runtime.attention.kernels import KERNELS
from chunkplan_runtime.distributed import job
from chunkplan_runtime.distributed.sharding import Shards
from chunkplan_runtime.execution import links
from chunkplan_runtime.kv import host_memory
from chunkplan_runtime.models import compiled
from chunkplan_runtime.train import main, read_options
from chunkplan_runtime.training.processes import train_together  # all that a run imports, before processes are forked
from chunkplan_runtime.training.train_step import TrainStep
from tests.support.alive import Alive
from tests.support.ports import free_port
from tests.support.process_pool import ProcessPool


def together(pool: ProcessPool, size: int, *arguments: list[str], run: Any = None, **how: Any) -> list[Any]:
    """Exit codes and stderr of trainers by rank, and more from other `run`s; one command line for all, or for each."""
    return pool.run(size, run or run_main, size=size, port=free_port(), arguments=list(arguments), **how)


def all_well(pool: ProcessPool, size: int, arguments: list[str]) -> str:
    """What the main process said; the others have nothing to say."""
    told = together(pool, size, arguments)
    assert [code for code, _ in told] == [0] * size, told
    assert [text for _, text in told[1:]] == [""] * (size - 1)
    return told[0][1]


def run_main_on_gpus(rank: int, *, uuids: list[str], **arguments: Any) -> tuple[int, str]:
    """`run_main` where the driver shows this process one GPU; as far as the first use of it, for there is none."""
    join = dist.init_process_group
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda device: None
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=uuids[rank])
    dist.init_process_group = lambda backend, **how: join("gloo", **how)  # this torch may have no NCCL
    return run_main(rank, **arguments)


def run_main_counting_reductions(rank: int, **arguments: Any) -> tuple[int, str, int]:
    """`run_main`; also how many layers it reduces beside its backwards."""
    layers = []
    reduce = Shards._reduce

    def counted(shards: Shards, layer: Any) -> None:
        layers.extend([layer] if layer is not shards._head else [])  # which is, after all backwards
        reduce(shards, layer)

    with patch.object(Shards, "_reduce", counted):
        return *run_main(rank, **arguments), len(layers)


def run_main_compiled(rank: int, **arguments: Any) -> tuple[int, str]:
    """`run_main` where graphs of layers are run as they are found: what makes code of them is slow."""
    with patch.object(compiled, "BACKEND", {"backend": "aot_eager"}):
        return run_main(rank, **arguments)


def run_main_without(rank: int, *, missing: list[str], **arguments: Any) -> tuple[int, str]:
    """`run_main` where each process is without an attention kernel."""
    with patch.object(KERNELS[missing[rank]], "why_not", lambda *_: "it is not there"):
        return run_main(rank, **arguments)


def run_main_interrupted(rank: int, *, who: int, step: int, **arguments: Any) -> tuple[int, str]:
    """`run_main` where one process gets Ctrl-C when it is in a step."""
    compute = TrainStep.compute_gradients

    def interrupted(train_step: TrainStep, work: Any) -> Any:
        if rank == who and work.step.step == step:
            signal.raise_signal(signal.SIGINT)
        return compute(train_step, work)

    with patch.object(TrainStep, "compute_gradients", interrupted):
        return run_main(rank, **arguments)


def run_main_with_versions(rank: int, *, versions: list[str], **arguments: Any) -> tuple[int, str]:
    """`run_main` where each process has a transformers that says it is of another version."""
    with patch.object(job, "transformers", SimpleNamespace(__version__=versions[rank])):
        return run_main(rank, **arguments)


class _StopsAt(TrainerCallback):
    """Stops after so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == self.steps


def run_with_one_callback(rank: int, *, size: int, port: int, arguments: list[list[str]], steps: int) -> None:
    """A run from Python, where the last process alone has a callback: it stops after `steps`."""
    join(rank, size, port)
    with contextlib.redirect_stderr(io.StringIO()):
        train_together(read_options(arguments[0]), [_StopsAt(steps)] if rank == size - 1 else [])


def run_main(rank: int, *, size: int, port: int, arguments: list[list[str]], **how: Any) -> tuple[int, str]:
    """One command line for all, or one for each: (exit code, stderr); `how`: of `main`."""
    join(rank, size, port)
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        try:
            code = main(arguments[min(rank, len(arguments) - 1)], **how)
        except SystemExit as end:
            code = int(str(end.code))
    return code, told.getvalue()


def run_main_and_count(rank: int, **arguments: Any) -> tuple[int, str, int, int]:
    """`run_main`; also the bytes that are held between the last two steps, and the most in the last of them.

    What was sent to another stage is left out: gloo keeps it until the end of a step, NCCL until it has arrived. So is
    what a GPU would have in host memory.
    """
    held = []
    update, send, make = TrainStep.update, links._Remote.send, devices.new_host_memory
    with Alive() as alive:

        def on_host(*args: Any) -> torch.Tensor:
            made = make(*args)
            alive.forget(made)
            return made

        def sent(channel: links._Remote, chunk_id: int, tensor: torch.Tensor) -> None:
            send(channel, chunk_id, tensor)
            for kept, _ in channel._sent:
                alive.forget(kept)

        def counted(train_step: TrainStep, step: Any) -> float:
            in_step = alive.peak
            rate = update(train_step, step)
            gc.collect()
            held.append((alive.num_bytes(), in_step))
            alive.peak = 0
            return rate

        with (
            patch.object(TrainStep, "update", counted),
            patch.object(links._Remote, "send", sent),
            patch.object(host_memory, "new_host_memory", on_host),
        ):
            code, told = run_main(rank, **arguments)
    return code, told, *(held[-1] if held else (0, 0))


def join(rank: int, size: int, port: int) -> None:
    """Say to this process which one it is, as torchrun would."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
