"""What `ChunkTrainer` is given: refused by name where it could only be ignored, and completed by what the plan says."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from chunkplan.errors import UsageError
from chunkplan.planfile.plan import Plan

LOSS_HINT = "the loss is the mean cross-entropy of a step's target tokens, which `chunkplan analyze` chose"

_METRICS_HINT = "chunks never hold the logits of a sequence; evaluation reports the loss"

#: Arguments of `Trainer` that it gets as they are.
PASSED_ON = ("optimizers", "optimizer_cls_and_kwargs")

#: Arguments of `Trainer` that have no place here: what does their job.
REFUSED_ARGUMENTS = {
    "train_dataset": "the plan names the data: `chunkplan analyze`, `chunkplan build`, then plan=",
    "eval_dataset": "build the plan with --holdout, or give eval_plan=",
    "data_collator": "the plan's chunks are the batches",
    "model_init": "give the model itself",
    "compute_loss_func": LOSS_HINT,
    "compute_metrics": _METRICS_HINT,
    "preprocess_logits_for_metrics": _METRICS_HINT,
}

#: Settings of `TrainingArguments` that would have no effect, or a wrong one: what to do instead.
REFUSED_SETTINGS = {
    "gradient_accumulation_steps": "a step of the plan is a whole global batch: `chunkplan build --global-batch N`",
    "train_sampling_strategy": "the plan has an order already: `chunkplan build --seed N` is another one",
    "label_smoothing_factor": LOSS_HINT,
    "neftune_noise_alpha": "a chunk that is recomputed would get other noise; leave it out",
    "fp16_full_eval": "evaluation computes as training does; leave it out",
    "bf16_full_eval": "evaluation computes as training does; leave it out",
    "torch_compile": "chunks call the modules of the model, which would stay as they are; leave it out",
    "use_liger_kernel": 'give ChunkTrainer fused_kernels="liger"; logits are never held whole here either',
    "deepspeed": "this runtime runs on one process; leave it out",
    "fsdp": "this runtime runs on one process; leave it out",
    "parallelism_config": "this runtime runs on one process; leave it out",
    "auto_find_batch_size": "activations take memory by ChunkSize and K: `chunkplan build --chunk-size N --k K`",
    "ignore_data_skip": "a resumed run goes on at the right step of the plan at once; leave it out",
    "torch_empty_cache_steps": "call torch.cuda.empty_cache() in a callback's on_step_end",
}

#: What is no setting at all, though it is not false.
_NEUTRAL = {"gradient_accumulation_steps": 1, "train_sampling_strategy": "random"}

#: Parts of optimizer names: these step inside every backward, of which a step has many.
_STEPPING_IN_BACKWARD = ("lomo", "layerwise")

_logger = logging.getLogger(__name__)


def accepted_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse arguments of `Trainer` that would have no effect; returns those that it gets as they are.

    Raises:
        UsageError: naming one, and what does its job.
    """
    for name, value in given.items():
        if name not in {*REFUSED_ARGUMENTS, *PASSED_ON}:
            raise UsageError(f"ChunkTrainer has no argument {name!r}", hint="`help(ChunkTrainer)` has them")
        if name in REFUSED_ARGUMENTS and value is not None:
            raise UsageError(f"ChunkTrainer takes no {name}", hint=REFUSED_ARGUMENTS[name])
    return {name: value for name, value in given.items() if name in PASSED_ON}


def check_settings(args: TrainingArguments) -> None:
    """Refuse settings that would have no effect, or a wrong one.

    Raises:
        UsageError: naming one, and what to do instead.
    """
    for name, hint in REFUSED_SETTINGS.items():
        value = getattr(args, name, None)  # not every version has every setting
        if value and value != _NEUTRAL.get(name):
            raise UsageError(f"{name}={value!r} cannot be done with a plan", hint=hint)
    if getattr(args.accelerator_config, "gradient_accumulation_kwargs", None):
        raise UsageError(
            "accelerator_config with gradient_accumulation_kwargs cannot be done with a plan",
            hint=REFUSED_SETTINGS["gradient_accumulation_steps"],
        )
    if args.mixed_precision not in ("no", "bf16"):
        raise UsageError(
            f"mixed precision {args.mixed_precision!r} needs loss scaling, which this runtime has not",
            hint="use bf16=True, or load the model in bfloat16",
        )
    optimizer = OptimizerNames(args.optim).value
    if any(part in optimizer for part in _STEPPING_IN_BACKWARD):
        raise UsageError(
            f"optim={optimizer!r} steps in every backward, of which a step has one a chunk",
            hint='use an optimizer that steps once a step, such as optim="adamw_torch"',
        )
    if args.world_size > 1:
        raise UsageError(
            f"this runtime runs on one process, found {args.world_size}",
            hint="start it with python; a plan for several data-parallel ranks runs on one process too",
        )


def settings_of_plan(
    args: TrainingArguments, plan: Plan, batch_size: int, eval_batch_size: int = 1
) -> TrainingArguments:
    """A copy of `args` that says what the plan decides: epochs, sequences a step, one GPU, no loader processes.

    What was set otherwise is reported in one line.

    Raises:
        UsageError: more steps or epochs than the plan has, or fewer epochs.
    """
    defaults = {field.name: field.default for field in fields(TrainingArguments)}
    epochs, num_steps = plan.manifest["epochs"], plan.manifest["totals"]["num_steps"]
    if args.max_steps > num_steps:
        raise UsageError(
            f"max_steps={args.max_steps:,}, the plan has {num_steps:,} steps",
            hint="build the plan with more --epochs, or leave max_steps out",
        )
    if args.max_steps <= 0 and args.num_train_epochs not in (epochs, defaults["num_train_epochs"]):
        raise UsageError(
            f"num_train_epochs={args.num_train_epochs:g}, the plan has {epochs}",
            hint="build the plan with other --epochs, or stop earlier with max_steps",
        )
    decided = {
        "num_train_epochs": epochs,
        "per_device_train_batch_size": batch_size,
        "per_device_eval_batch_size": eval_batch_size,
        "dataloader_num_workers": 0,
    }
    unset = {name for name in decided if getattr(args, name) == defaults[name]} - {"num_train_epochs"}
    unset |= {"num_train_epochs"} if args.max_steps > 0 else set()  # transformers goes by max_steps then
    overruled = [
        f"{name}={value} (not {getattr(args, name):g})"
        for name, value in decided.items()
        if getattr(args, name) != value and name not in unset
    ]
    if args.n_gpu > 1:
        overruled.append(f"one GPU (not {args.n_gpu})")
    if overruled:
        _logger.warning("set by the plan %s: %s", plan.path, ", ".join(overruled))
    copied = copy.copy(args)
    for name, value in decided.items():
        setattr(copied, name, value)
    copied._n_gpu = min(args.n_gpu, 1)  # more would have transformers run the model on all of them
    return copied
