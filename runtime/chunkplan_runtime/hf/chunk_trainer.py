"""`ChunkTrainer`: the `Trainer` of transformers with a plan's steps for its training steps.

One training step of transformers is one step of the plan: all chunks of a global batch run through the `Executor`,
which leaves the gradients of the whole sequences. Everything around it is transformers' own and stays as it is:
clipping, optimizers, schedules, callbacks, logging, checkpoints. What could only be left out is refused by name.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput, TrainOutput
from transformers.training_args import OptimizerNames

from chunkplan.cost.fused import FusedKernels
from chunkplan.cost.model import CostModel
from chunkplan.errors import UsageError
from chunkplan.options import options_of
from chunkplan.planfile.likeness import samples_of
from chunkplan.planfile.plan import Plan
from chunkplan_runtime.feed.stream import StepWork
from chunkplan_runtime.hf.data import PlanData, evaluation_plan, loader, nothing_to_evaluate, open_own
from chunkplan_runtime.models.fused import fuse
from chunkplan_runtime.models.parts import whole_of
from chunkplan_runtime.training.checkpoint import PlanIdentity, checkpoint_of_plan
from chunkplan_runtime.training.executor import Executor, check_argument

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
    **dict.fromkeys(("fp16_full_eval", "bf16_full_eval"), "evaluation computes as training does; leave it out"),
    "torch_compile": "chunks call the modules of the model, which would stay as they are; leave it out",
    "use_liger_kernel": 'give ChunkTrainer fused_kernels="liger"; logits are never held whole here either',
    **dict.fromkeys(("deepspeed", "fsdp", "parallelism_config"), "this runtime runs on one process; leave it out"),
    "auto_find_batch_size": "activations take memory by ChunkSize and K: `chunkplan build --chunk-size N --k K`",
    "ignore_data_skip": "a resumed run goes on at the right step of the plan at once; leave it out",
    "torch_empty_cache_steps": "call torch.cuda.empty_cache() in a callback's on_step_end",
}

#: What is no setting at all, though it is not false.
_NEUTRAL = {"gradient_accumulation_steps": 1, "train_sampling_strategy": "random"}

#: Parts of optimizer names: these step inside every backward, of which a step has many.
_STEPPING_IN_BACKWARD = ("lomo", "layerwise")

_logger = logging.getLogger(__name__)


class ChunkTrainer(Trainer):
    """Trains a causal language model with a plan; the model is any of transformers' on the list, or peft's around one.

    Of a plan in which ranks share sequences it builds one like it, of the same steps, in the output folder.

    `eval_plan` None: the plan of held-out sequences that `chunkplan build --holdout` left beside the plan, if there.
    `analysis`: where the plan's analysis is, if it is not where it was. `kv_offload`: keys and values of split
    sequences lie in host memory. `router_loss`: what the load-balancing loss of a mixture of experts is over, "batch",
    "sequence" or "none"; None: what the model's config asks for. `fused_kernels`: modules that compute what kernels of
    "torch" or "liger" do call these, also after training; "none". `others` may be `optimizers` and
    `optimizer_cls_and_kwargs`. Arguments that `Trainer` has too are as there; `args` is copied, and the copy has what
    the plan decides.

    Raises:
        UsageError: an argument or a setting would have no effect, the model is not one that gradients are exact for, or
            there is no such plan.
        DataError: plan or analysis are damaged or do not belong together.
    """

    def __init__(
        self,
        model: Any,
        args: TrainingArguments | None = None,
        *,
        plan: str | Path,
        analysis: str | Path | None = None,
        eval_plan: str | Path | None = None,
        processing_class: Any = None,
        callbacks: Sequence[Any] | None = None,
        kv_offload: bool = False,
        router_loss: str | None = None,
        fused_kernels: FusedKernels = "none",
        **others: Any,
    ) -> None:
        passed_on = _accepted_arguments(others)
        args = TrainingArguments() if args is None else args
        _check_settings(args)
        check_argument("fused_kernels", fused_kernels, options_of(CostModel)["fused_kernels"].domain, "torch")
        if type(self).compute_loss is not ChunkTrainer.compute_loss:
            raise UsageError(f"{type(self).__name__}.compute_loss would never be called", hint=LOSS_HINT)
        self._executor = Executor.from_model(model, kv_offload=kv_offload, router_loss=router_loss, seed=args.seed)
        base = whole_of(model)
        output = Path(args.output_dir or "trainer_output")
        opened, found = open_own(plan, analysis, output / "plan")
        pin_memory = args.dataloader_pin_memory and args.device.type == "cuda"
        train_data = PlanData(opened, found, base, lambda: self.state.global_step, pin_memory=pin_memory)
        evaluation = evaluation_plan(opened, found, eval_plan, output / "eval-plan")
        eval_data = None if evaluation is None else PlanData(*evaluation, base, lambda: 0, pin_memory=pin_memory)
        if eval_data is None and (args.eval_strategy != "no" or args.eval_on_start):
            raise nothing_to_evaluate()
        batch_sizes = [data.batch_size for data in (train_data, eval_data) if data is not None]
        super().__init__(
            model=model,
            args=_settings_of_plan(args, opened, *batch_sizes),
            train_dataset=train_data,
            eval_dataset=eval_data,
            processing_class=processing_class,
            callbacks=[*(callbacks or ()), PlanIdentity(samples_of(opened.manifest))],
            **passed_on,
        )
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:  # asked for by `accelerate launch`
            raise UsageError("deepspeed or FSDP is configured for accelerate", hint="start it with python")
        fuse(base, fused_kernels, self.args.device)
        self._plan = opened

    def get_train_dataloader(self) -> DataLoader[Any]:
        """A loader of one batch a step of the plan, from the step that comes next."""
        return loader(self.train_dataset)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """A loader of one batch a step of the evaluation plan.

        Raises:
            UsageError: there is no evaluation plan, or `eval_dataset` is given.
        """
        if eval_dataset is not None and eval_dataset is not self.eval_dataset:
            raise UsageError("evaluate takes no eval_dataset", hint="give eval_plan= to ChunkTrainer")
        if self.eval_dataset is None:
            raise nothing_to_evaluate()
        return loader(self.eval_dataset)

    def num_examples(self, dataloader: Any) -> int:
        """How many sequences an epoch of the loader's plan has."""
        data: PlanData = dataloader.dataset
        return data.num_sequences

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """As `Trainer.train`. A resumed run goes on at the step of the plan that comes next, bit for bit on a CPU.

        Raises:
            UsageError: there is no checkpoint, or it is of another plan, or of learning rates that this run has not.
        """
        if resume_from_checkpoint:
            is_given = self.lr_scheduler is not None and not self._created_lr_scheduler
            resume_from_checkpoint = checkpoint_of_plan(
                resume_from_checkpoint, self.args, self._plan, has_own_rates=is_given
            )
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run a step of the plan; gradients are then those of its loss, a scalar.

        That is the mean over its target tokens, and with it the load-balancing loss of routers, where there is one.
        """
        if not inputs:
            raise UsageError(
                "a callback stopped an epoch early, and a plan is run in its order",
                hint="set control.should_training_stop, or build a plan with fewer steps an epoch",
            )
        work: StepWork = inputs["work"]
        self._switch("train")
        with self.accelerator.autocast():
            loss = self._executor.step(work)
        return torch.tensor(loss, dtype=torch.float64, device=self.args.device)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The loss of the evaluation plan: the mean over all its target tokens."""
        self._switch("eval")
        self.callback_handler.eval_dataloader = dataloader
        total, num_targets, num_sequences = 0.0, 0, 0
        for inputs in dataloader:
            work: StepWork = inputs["work"]
            with self.accelerator.autocast():
                total += self._executor.evaluate(work) * work.step.num_target_tokens
            num_targets += work.step.num_target_tokens
            num_sequences += work.step.num_sequences
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        metrics = {f"{metric_key_prefix}_loss": total / max(num_targets, 1)}
        nothing: Any = None
        return EvalLoopOutput(predictions=nothing, label_ids=None, metrics=metrics, num_samples=num_sequences)

    def predict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to predict: chunks never hold the outputs of a sequence.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "ChunkTrainer predicts nothing", hint="evaluate() gives the loss; for outputs call the model itself"
        )

    def compute_loss(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to compute a loss: it is part of the executor's work.

        Raises:
            UsageError: always.
        """
        raise UsageError("a chunk has no loss of its own to compute", hint=LOSS_HINT)

    def _switch(self, mode: str) -> None:
        """Put the model, and an optimizer that has modes, into "train" or "eval"."""
        for switched in (self.model, self.optimizer):
            switch = getattr(switched, mode, None)
            if callable(switch):
                switch()


def _accepted_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse arguments of `Trainer` that would have no effect; returns those that it gets as they are."""
    for name, value in given.items():
        if name not in {*REFUSED_ARGUMENTS, *PASSED_ON}:
            raise UsageError(f"ChunkTrainer has no argument {name!r}", hint="`help(ChunkTrainer)` has them")
        if name in REFUSED_ARGUMENTS and value is not None:
            raise UsageError(f"ChunkTrainer takes no {name}", hint=REFUSED_ARGUMENTS[name])
    return {name: value for name, value in given.items() if name in PASSED_ON}


def _check_settings(args: TrainingArguments) -> None:
    """Refuse settings that would have no effect, or a wrong one."""
    for name, hint in REFUSED_SETTINGS.items():
        value = getattr(args, name, None)  # not every version has every setting
        if value and value != _NEUTRAL.get(name):
            raise UsageError(f"{name}={value!r} cannot be done with a plan", hint=hint)
    optimizer, message, hint = OptimizerNames(args.optim).value, "", ""
    if getattr(args.accelerator_config, "gradient_accumulation_kwargs", None):
        message = "accelerator_config with gradient_accumulation_kwargs cannot be done with a plan"
        hint = REFUSED_SETTINGS["gradient_accumulation_steps"]
    elif args.mixed_precision not in ("no", "bf16"):
        message = f"mixed precision {args.mixed_precision!r} needs loss scaling, which this runtime has not"
        hint = "use bf16=True, or load the model in bfloat16"
    elif any(part in optimizer for part in _STEPPING_IN_BACKWARD):
        message = f"optim={optimizer!r} steps in every backward, of which a step has one a chunk"
        hint = 'use an optimizer that steps once a step, such as optim="adamw_torch"'
    elif args.world_size > 1:
        message = f"this runtime runs on one process, found {args.world_size}"
        hint = "start it with python; a plan for several data-parallel ranks runs on one process too"
    if message:
        raise UsageError(message, hint=hint)


def _settings_of_plan(
    args: TrainingArguments, plan: Plan, batch_size: int, eval_batch_size: int = 1
) -> TrainingArguments:
    """A copy of `args` that says what the plan decides: epochs, sequences a step, one GPU, no loader processes.

    What was set otherwise is reported in one line.
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
