"""The trainer: opens everything that a run needs, refuses what cannot be done, and trains."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.utils.logging import disable_progress_bar

from chunkplan.errors import ChunkplanError, DataError, UsageError
from chunkplan.planfile.likeness import samples_of
from chunkplan.planfile.plan import Plan
from chunkplan_runtime.distributed.job import Job, refuse_other_processes
from chunkplan_runtime.models.checks import check_plan
from chunkplan_runtime.proof.prove import exact_router_loss
from chunkplan_runtime.training.callbacks import Callbacks, trackers
from chunkplan_runtime.training.checkpoint import BestLoss, restore_random_states
from chunkplan_runtime.training.comparison import compare
from chunkplan_runtime.training.config import TrainConfig, what_all_have, what_it_learns_by
from chunkplan_runtime.training.data import TrainingData, compare_tokens, open_data
from chunkplan_runtime.training.final import check_mergeable, check_tokenizer, find_tokenizer
from chunkplan_runtime.training.flops import FlopCounter
from chunkplan_runtime.training.losses import SpikeWatch
from chunkplan_runtime.training.metrics import RunLog, evaluations_before
from chunkplan_runtime.training.model_setup import build_model, check_layout, fingerprint, read_model_config
from chunkplan_runtime.training.resume import find_earlier, refuse_other_run
from chunkplan_runtime.training.run_folder import RunFolder, RunLock
from chunkplan_runtime.training.run_summary import describe_run, other_kernels
from chunkplan_runtime.training.screen import Screen
from chunkplan_runtime.training.train_step import TrainStep
from chunkplan_runtime.training.training_run import TrainingRun


def train(config: TrainConfig, job: Job, callbacks: Sequence[TrainerCallback] = ()) -> None:
    """Train, and leave metrics, checkpoints and the model in `config.output`. Everything refusable is refused first.

    `config` is as `choose_device` left it. All processes of `job` call this with the same one. `callbacks`: of
    transformers, called on the processes that are given them.

    Raises:
        ChunkplanError: loss or gradients are not finite, or the disk is full.
        UsageError: an option, a path, the model or the plan cannot be used, or a run cannot be resumed.
        DataError: plan, analysis, model files or a checkpoint are damaged or do not belong together.
    """
    disable_progress_bar()  # type: ignore[no-untyped-call]  # a run has one of its own
    folder = RunFolder(config.output)
    lock = RunLock(config.output)
    try:
        if job.is_main:
            lock.take()  # first: what a run at work has written is not of an earlier one
            folder.check(config.resume)
        trackers(config)
        open_run(config, folder, lock, job, callbacks).finish()
    except torch.OutOfMemoryError as error:
        raise ChunkplanError(
            f"the GPU's memory is full: {str(error).splitlines()[0]}",
            hint="use --checkpointing full or --kv-offload, or build the plan with a smaller --chunk-size or --k; "
            + folder.how_to_resume(),
        ) from error
    finally:
        lock.release()


def open_run(
    config: TrainConfig, folder: RunFolder, lock: RunLock, job: Job, callbacks: Sequence[TrainerCallback] = ()
) -> TrainingRun:
    """Open data and model, compare them with those of the other processes, and go to the last checkpoint.

    Raises:
        UsageError, DataError: as `train`.
    """
    model_config = read_model_config(config)
    where = str(config.model or config.model_config)
    router_loss = exact_router_loss(model_config, config.router_loss, where, job.layout.pp)
    data = open_data(config, model_config, job.layout)
    tokenizer = find_tokenizer(config)
    check_tokenizer(tokenizer, data.analysis, model_config.vocab_size)
    config = _resolve(config, data, tokenizer, job)
    check_layout(config, job.layout)
    stream, num_steps = data.stream(data.plan), data.num_steps(config)
    fixed = {**samples_of(data.plan.manifest), **_essence(data), **what_it_learns_by(config)}
    hashes = {"plan": data.plan.content_hash, "evaluation plan": _hash_of(data.evaluation)}
    refuse_other_processes({**hashes, **fixed, **what_all_have(config)}, job)
    earlier = find_earlier(folder, config, data, job)
    tokens_note = compare_tokens(data.analysis, job)
    if data.evaluation is not None:
        data.stream(data.evaluation)  # refused now if it cannot be used
    elif config.early_stopping or config.keep_best:
        raise UsageError(
            f"{'--early-stopping' if config.early_stopping else '--keep-best'} without a plan of held-out sequences",
            hint="build the plan with --holdout 0.01, or give --eval-plan",
        )
    for plan in (data.plan, data.evaluation):
        if plan is not None:
            check_plan(model_config, plan, router_loss)
    model = build_model(config, model_config, data.plan, job)
    if config.merge_adapters:
        check_mergeable(model.whole.model)  # refused now if they cannot be merged
    refuse_other_processes({"weights": model.identity}, job)
    fixed["frozen weights"] = fingerprint(model.own, model.whole, job, only_frozen=True)
    if earlier is not None:
        refuse_other_run(earlier, fixed, config, num_steps)
        stream.load_state_dict({**stream.state_dict(), "step": earlier.state["step"]})
    start = earlier.state["step"] if earlier is not None else 0
    flops = FlopCounter(model.whole)
    comparison = compare(config, data, job)
    description = describe_run(config, data, model, num_steps, tokenizer, comparison, job.groups)
    description += other_kernels(config, model.whole, job) + tokens_note
    train_step = TrainStep(model.own, config, num_steps, job)
    if earlier is not None:
        train_step.restore(earlier.checkpoint)
        restore_random_states(earlier.state, train_step.model.device)
    best = BestLoss(config.early_stopping, job.broadcast_object(evaluations_before(folder.evaluations, start)))
    return TrainingRun(
        config=config,
        data=data,
        tokenizer=tokenizer,
        job=job,
        folder=folder,
        lock=lock,
        log=RunLog(folder, config, data.plan),
        screen=Screen(start, num_steps, silent=not job.is_main),
        stream=stream,
        start=start,
        num_steps=num_steps,
        fixed=fixed,
        whole=model.whole,
        train_step=train_step,
        spikes=SpikeWatch(config.spike, earlier.state["losses"] if earlier else ()),
        flops=flops,
        comparison=comparison,
        description=description,
        best=best,
        callbacks=Callbacks(callbacks, config, job, train_step, num_steps),
    )


def _resolve(config: TrainConfig, data: TrainingData, tokenizer: list[Path], job: Job) -> TrainConfig:
    """`config` with what was found in place of what was left open.

    Raises:
        UsageError: the plan is for adapters, which these weights cannot have.
    """
    cost = data.plan.manifest["predictions"]["cost_model"]
    planned_rank = cost.get("lora_rank", 0)
    if config.lora_rank is None and planned_rank and config.model is None:
        raise UsageError(
            f"the plan is for adapters of rank {planned_rank}, and random weights need to be trained themselves",
            where=str(data.plan.path),
            hint="give --model in place of --model-config, or --lora-rank 0",
        )
    lora_rank = planned_rank if config.lora_rank is None else config.lora_rank
    in_4bit = cost.get("load_in_4bit", False) and lora_rank > 0 if config.load_in_4bit is None else config.load_in_4bit
    return replace(
        config,
        kv_offload=cost["kv_offload"] if config.kv_offload is None else config.kv_offload,
        sharding=_sharding(config, data.plan, job),
        checkpointing=cost["checkpointing"] if config.checkpointing is None else config.checkpointing,
        lora_rank=lora_rank,
        load_in_4bit=in_4bit,
        optimizer=cost.get("optimizer", "adamw") if config.optimizer is None else config.optimizer,
        fused_kernels=config.fused_kernels or cost.get("fused_kernels", "none"),
        compile=cost.get("compile", False) if config.compile is None else config.compile,
        analysis=data.analysis.path,
        eval_plan=data.evaluation.path if data.evaluation is not None else None,
        tokenizer=str(tokenizer[0].parent) if tokenizer else None,
    )


def _sharding(config: TrainConfig, plan: Plan, job: Job) -> str:
    """What processes share: what is asked for, or what the plan counts on; optimizer states at least, if anything."""
    if config.sharding is not None:
        return config.sharding
    if job.layout.dp == 1:
        return "optimizer"
    try:
        planned = plan.cost.sharding
    except DataError:  # `compare` says so
        planned = "optimizer"
    return "optimizer" if planned == "none" else planned


def _essence(data: TrainingData) -> dict[str, Any]:
    """The model's config, without what says only where it came from."""
    origin = ("transformers_version", "_name_or_path", "dtype", "architectures")
    entries = json.loads(data.model_config.to_json_string(use_diff=False))  # in which infinity has a name
    return {f"model.{name}": value for name, value in entries.items() if name not in origin}


def _hash_of(plan: Plan | None) -> str | None:
    return None if plan is None else plan.content_hash
