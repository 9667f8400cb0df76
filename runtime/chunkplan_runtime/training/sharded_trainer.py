"""`Trainer` of transformers with a model that is sharded over its processes, as `chunkplan train` shards it.

Accelerate never wraps the model: its wrapper would reduce gradients in every backward, of which processes have unequal
numbers. Checkpoints are those of one process: the main one writes all, and any number of processes goes on from them.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.training_args import OptimizerNames, ParallelMode

from chunkplan.cost.model import Sharding
from chunkplan.errors import UsageError
from chunkplan_runtime.distributed.job import Job, clip, gradient_norm
from chunkplan_runtime.models.parts import has_adapters
from chunkplan_runtime.training.callbacks import agree
from chunkplan_runtime.training.executor import Executor
from chunkplan_runtime.training.processes import watched

#: Optimizers of transformers that go by numbers, and not by whole rows or columns of a weight, nor by its memory.
ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "adagrad", "rmsprop", "sgd")


class ShardedTrainer(Trainer):
    """A `Trainer` of the model of an `Executor`; a plain one until it has joined other processes."""

    _executor: Executor

    def join(self, job: Job, sharding: Sharding) -> None:
        """Shard the model over the processes of `job`; UsageError: its optimizer cannot be, or see `Executor.join`."""
        optimizer, name = cast(Any, self.optimizer), OptimizerNames(self.args.optim).value
        if optimizer is None and self.optimizer_cls_and_kwargs is None and name not in ELEMENTWISE:
            hint = f"use one of {', '.join(ELEMENTWISE)}, or give optimizers= or optimizer_cls_and_kwargs="
            raise UsageError(f"optim={name!r} is not known to work on rows of weights, which processes have", hint=hint)
        if optimizer is not None and optimizer.state:
            raise UsageError("the optimizer has a state already", hint="make a new one, or resume from a checkpoint")
        before = dict((model := cast(Any, self.model)).named_parameters())
        self._executor.join(job, sharding)
        places = {before[name]: weight for name, weight in model.named_parameters()}
        for group in () if optimizer is None else optimizer.param_groups:
            group["params"] = [places.get(each, each) for each in group["params"]]
        model.register_load_state_dict_pre_hook(_take_rows)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Within the block, of several processes the first that fails or dies ends the others."""
        job = self._executor.job
        is_main_thread = threading.current_thread() is threading.main_thread()  # others get no signals
        if job.groups is None or job.watchdog is not None or not is_main_thread:
            yield
            return
        with watched(resume="`trainer.train(resume_from_checkpoint=True)` goes on", stops=(signal.SIGINT,)) as watchdog:
            self._executor.job = replace(job, watchdog=watchdog)
            yield
        self._executor.job = job

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        if self.args.world_size == 1:  # else its rows are brought there
            super()._move_model_to_device(model, device)

    def _wrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """A container of the model, around which accelerate then puts nothing."""
        is_plain = self.args.parallel_mode != ParallelMode.DISTRIBUTED or model is not self.model
        return super()._wrap_model(model, *args, **kwargs) if is_plain else nn.ModuleList([model])

    def _clip_grad_norm(self, model: Any, largest: float | None = None) -> Any:
        if self._executor.job.groups is None:
            return super()._clip_grad_norm(model)  # type: ignore[no-untyped-call]
        weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        norm = gradient_norm(weights, None, self._executor.job.groups)
        clip(weights.values(), norm, largest or self.args.max_grad_norm)
        return norm

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if grad_norm is None and self._executor.job.groups:
            grad_norm = self._clip_grad_norm(model, math.inf)
        return super()._get_grad_norm(model, grad_norm)  # type: ignore[no-untyped-call]

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        agree(self.control, self._executor.job)
        super()._maybe_log_save_evaluate(*args, **kwargs)
        agree(self.control, self._executor.job)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self._executor.job.groups:
            state_dict = _whole_weights(self.model, kept=self.args.should_save)
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save whole states, which all processes gather."""
        optimizer, is_kept = cast(Any, self.optimizer).optimizer, self.args.should_save

        def gather(_: object, found: Any) -> None:
            for number, state in found["state"].items():
                found["state"][number] = {name: _whole(each, kept=is_kept) for name, each in state.items()}

        handle = None if self._executor.job.groups is None else optimizer.register_state_dict_post_hook(gather)
        if handle is not None and not is_kept:
            optimizer.state_dict()
        super()._save_optimizer_and_scheduler(output_dir)
        if handle is not None:
            handle.remove()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load whole states, of which each process reads its rows."""
        states, schedule = (Path(checkpoint or "") / name for name in (OPTIMIZER_NAME, SCHEDULER_NAME))
        if self._executor.job.groups is None or checkpoint is None or not (states.is_file() and schedule.is_file()):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        optimizer, scheduler = cast(Any, self.optimizer).optimizer, cast(Any, self.lr_scheduler)
        found: Any = torch.load(states, map_location="cpu", weights_only=True, mmap=True)
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        numbers = [number for group in found["param_groups"] for number in group["params"]]
        like = dict(zip(numbers, weights, strict=True))
        for number, state in found["state"].items():
            found["state"][number] = {name: _rows(each, like[number]) for name, each in state.items()}
        optimizer.load_state_dict(found)
        scheduler.load_state_dict(torch.load(schedule, weights_only=True))


def _whole_weights(model: Any, *, kept: bool) -> dict[str, Tensor]:
    """Weights and buffers of a whole model on the CPU, where they are `kept`; of one with adapters, what is trained."""
    weights = model.state_dict(keep_vars=True)
    if has_adapters(model):
        weights = {name: weight for name, weight in weights.items() if weight.requires_grad}
    gathered = {weight: _whole(weight, kept=kept) for weight in weights.values()}  # one that modules share stays shared
    return {name: gathered[weight] for name, weight in weights.items()}


def _take_rows(module: nn.Module, weights: Any, prefix: str, *_: object) -> None:
    """Before a model loads whole weights, put the rows that this process has of them in their place."""
    for name, own in module.named_parameters(remove_duplicate=False):
        if (given := weights.get(prefix + name)) is not None:
            weights[prefix + name] = _rows(given, own)


def _whole(value: Any, *, kept: bool) -> Any:
    """All of a tensor of which processes have rows, on the CPU; where it is not `kept`, only what others need."""
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().cpu() if kept and isinstance(whole, Tensor) else whole if kept else None


def _rows(given: Any, like: Tensor) -> Any:
    """The rows of a tensor that this process has, if it is a whole one of the shape of `like`, which is sharded."""
    if isinstance(given, DTensor) or not isinstance(like, DTensor) or getattr(given, "shape", None) != like.shape:
        return given
    return distribute_tensor(given, like.device_mesh, like.placements, src_data_rank=None)
