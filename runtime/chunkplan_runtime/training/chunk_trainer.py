"""`ChunkTrainer`: the `Trainer` of transformers with a plan's steps for its training steps.

One training step of transformers is one step of the plan: all chunks of a global batch run through the `Executor`,
which leaves the gradients of the whole sequences. Everything around it is transformers' own and stays as it is:
clipping, optimizers, schedules, callbacks, logging, checkpoints. What could only be left out is refused by name.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, cast

import pyarrow.compute as pc
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput, TrainOutput
from transformers.training_args import OptimizerNames

from chunkplan.cost.fused import FusedKernels
from chunkplan.cost.model import CostModel, Sharding
from chunkplan.domains import one_of
from chunkplan.errors import UsageError
from chunkplan.options import options_of
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.likeness import how_to_build_like, samples_of
from chunkplan.planfile.load import load_held_out, load_plan
from chunkplan.planfile.plan import Plan
from chunkplan_runtime import world_size
from chunkplan_runtime.distributed.job import Job
from chunkplan_runtime.execution.losses import NamedLoss, check_loss, find_loss
from chunkplan_runtime.feed.scores import Scores
from chunkplan_runtime.feed.stream import StepWork, open_plan
from chunkplan_runtime.layout import choose_layout, used_blocks
from chunkplan_runtime.models.checks import plan_stream
from chunkplan_runtime.models.fused import fuse
from chunkplan_runtime.models.parts import whole_of
from chunkplan_runtime.training.checkpoint import PlanIdentity, checkpoint_of_plan
from chunkplan_runtime.training.config import SHARED
from chunkplan_runtime.training.executor import Executor, check_argument
from chunkplan_runtime.training.metrics import mean_of_steps
from chunkplan_runtime.training.processes import make_job
from chunkplan_runtime.training.sharded_trainer import ShardedTrainer

LOSS_HINT = "the loss is the mean cross-entropy of a step's target tokens, which `chunkplan analyze` chose"

_NO_EVALUATION, _EVALUATION_HINT = "there is no evaluation plan", "build the plan with --holdout, or give eval_plan="

_METRICS_HINT = "chunks never hold the logits of a sequence; evaluation reports the loss"

#: Arguments of `Trainer` that it gets as they are.
PASSED_ON = ("processing_class", "optimizers", "optimizer_cls_and_kwargs")

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
    **dict.fromkeys(("deepspeed", "fsdp"), 'leave it out, and give ChunkTrainer sharding="weights", or "gradients"'),
    "parallelism_config": "the plan has the layout: `chunkplan build --dp N`, with `--cp auto` ranks share sequences",
    "auto_find_batch_size": "activations take memory by ChunkSize and K: `chunkplan build --chunk-size N --k K`",
    "ignore_data_skip": "a resumed run goes on at the right step of the plan at once; leave it out",
    "torch_empty_cache_steps": "call torch.cuda.empty_cache() in a callback's on_step_end",
}

#: What is no setting at all, though it is not false.
_NEUTRAL = {"gradient_accumulation_steps": 1, "train_sampling_strategy": "random"}

#: Parts of optimizer names: these step inside every backward, of which a step has many.
_STEPPING_IN_BACKWARD = ("lomo", "layerwise")

_logger = logging.getLogger(__name__)


class _PlanSteps(IterableDataset[dict[str, object]]):
    """The epochs of a plan; a batch is a step: `work`, and what transformers counts tokens and FLOPs by.

    It starts with step `position()` of the plan. Before a step in the middle of an epoch come empty batches, one for
    each step that is done: when transformers resumes, it drops as many, whatever they hold.
    """

    def __init__(
        self, plan: Plan, analysis: Analysis, model: Any, position: Callable[[], int], *, job: Job, pin_memory: bool
    ) -> None:
        self._is_main = job.is_main
        self.batch_size: int = plan.config.global_batch
        self._num_steps: int = plan.manifest["totals"]["num_steps"] // plan.manifest["epochs"]
        in_steps = plan.steps().column("num_sequences").slice(0, self._num_steps)
        self.num_sequences: int = pc.sum(in_steps).as_py()  # of an epoch
        self._position = position
        self._stream = plan_stream(model.config, plan, analysis, pin_memory=pin_memory, layout=job.layout)

    def __len__(self) -> int:
        return self._num_steps

    def __iter__(self) -> Iterator[dict[str, object]]:
        position = self._position()
        done = position % len(self)
        yield from ({} for _ in range(done))
        self._stream.load_state_dict({**self._stream.state_dict(), "step": position})
        for work in islice(self._stream, len(self) - done):
            # As many elements as there are tokens, without their memory; those of all processes are added up.
            tokens = torch.ones(1, dtype=torch.int64).expand(work.step.num_tokens * self._is_main)
            yield {"work": work, "input_ids": tokens, "attention_mask": tokens}


class ChunkTrainer(ShardedTrainer):
    """Trains a causal language model with a plan; the model is any of transformers' on the list, or peft's around one.

    Of a plan in which ranks share sequences it builds one like it, of the same steps, in the output folder.

    `eval_plan` None: the plan of held-out sequences that `chunkplan build --holdout` left beside the plan, if there.
    `analysis`: where the plan's analysis is, if it is not where it was. `sharding`: what processes share, "optimizer",
    also "gradients", or also "weights"; None: as the plan was timed. `kv_offload`: keys and values of split sequences
    lie in host memory. `router_loss`: what the load-balancing loss of a mixture of experts is over, "batch", "sequence"
    or "none"; None: what the model's config asks for. `fused_kernels`: modules that compute what kernels of "torch" or
    "liger" do call these, also after training; "none". `others` may be `loss`, as in `Executor.step`, with metrics that
    are logged; `reference`, a folder of `chunkplan score`; `processing_class`, `optimizers` and
    `optimizer_cls_and_kwargs`. Arguments that `Trainer` has too are as there; `args` is copied, and the copy has what
    the plan decides.

    Raises:
        UsageError: an argument or a setting would have no effect, the model is not one that gradients are exact for,
            there is no such plan, or it is not one for so many processes, or these have different models.
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
        callbacks: Sequence[Any] | None = None,
        sharding: str | None = None,
        kv_offload: bool = False,
        router_loss: str | None = None,
        fused_kernels: FusedKernels = "none",
        **others: Any,
    ) -> None:
        loss, scores = others.pop("loss", None), others.pop("reference", None)
        for name, value in others.items():
            if name in REFUSED_ARGUMENTS and value is not None:
                raise UsageError(f"ChunkTrainer takes no {name}", hint=REFUSED_ARGUMENTS[name])
            if name not in {*REFUSED_ARGUMENTS, *PASSED_ON}:
                raise UsageError(f"ChunkTrainer has no argument {name!r}", hint="`help(ChunkTrainer)` has them")
        args = TrainingArguments() if args is None else args
        _check_settings(args)
        check_argument("fused_kernels", fused_kernels, options_of(CostModel)["fused_kernels"].domain, "torch")
        if type(self).compute_loss is not ChunkTrainer.compute_loss:
            raise UsageError(f"{type(self).__name__}.compute_loss would never be called", hint=LOSS_HINT)
        self._executor = Executor.from_model(model, kv_offload=kv_offload, router_loss=router_loss, seed=args.seed)
        base, output = whole_of(model), Path(args.output_dir or "trainer_output")
        self._plan, found = _open(plan, analysis, output / "plan", args)
        evaluation = load_held_out(self._plan) if eval_plan is None else load_plan(eval_plan)
        if evaluation is None and (args.eval_strategy != "no" or args.eval_on_start):
            raise UsageError(_NO_EVALUATION, hint=_EVALUATION_HINT)
        shared = _find_sharding(sharding, self._plan, base, args)
        job = Job()
        if args.world_size > 1:
            job = make_job([each for each in (self._plan, evaluation) if each], args.device, args.ddp_timeout_delta)
        how: Any = {"job": job, "pin_memory": args.dataloader_pin_memory and args.device.type == "cuda"}
        self._reference = None if scores is None else Scores(scores)
        self._loss = self._plan.config.loss if loss is None else loss
        check_loss(find_loss(self._loss), self._plan, found.samples, self._reference, token_columns=found.token_columns)
        if self._reference is not None:
            self._reference.check_covers([self._plan, evaluation], found.num_target_tokens)
        train_data = _PlanSteps(self._plan, found, base, lambda: self.state.global_step, **how)
        eval_data = None
        if evaluation is not None:
            same = evaluation.manifest["analysis"]["content_hash"] == found.content_hash
            opened = _open(evaluation.path, found.path if same else None, output / "eval-plan", args)
            eval_data = _PlanSteps(*opened, base, lambda: 0, **how)
        super().__init__(
            model=model,
            args=_settings_of_plan(args, self._plan, train_data, eval_data),
            train_dataset=train_data,
            eval_dataset=eval_data,
            callbacks=[*(callbacks or ()), PlanIdentity(samples_of(self._plan.manifest))],
            **{name: value for name, value in others.items() if name in PASSED_ON},
        )
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:  # asked for by `accelerate launch`
            raise UsageError("deepspeed or FSDP is configured for accelerate", hint=REFUSED_SETTINGS["fsdp"])
        fuse(base, fused_kernels, self.args.device)
        if job.groups is not None:
            self.join(job, shared)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """A loader of one batch a step of the plan, from the step that comes next."""
        return DataLoader(cast(Any, self.train_dataset), batch_size=None, collate_fn=_as_it_is)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """A loader of one batch a step of the evaluation plan.

        Raises:
            UsageError: there is no evaluation plan, or `eval_dataset` is given.
        """
        if eval_dataset is not None and eval_dataset is not self.eval_dataset:
            raise UsageError("evaluate takes no eval_dataset", hint="give eval_plan= to ChunkTrainer")
        if self.eval_dataset is None:
            raise UsageError(_NO_EVALUATION, hint=_EVALUATION_HINT)
        return DataLoader(cast(Any, self.eval_dataset), batch_size=None, collate_fn=_as_it_is)

    def num_examples(self, dataloader: Any) -> int:
        """The number of sequences of an epoch of the loader's plan."""
        num_sequences: int = dataloader.dataset.num_sequences
        return num_sequences

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train like `Trainer.train`. A resumed run goes on at the plan's next step, bit for bit on a CPU.

        Raises:
            UsageError: there is no checkpoint, or it is of another plan, or of learning rates that this run has not.
        """
        if resume_from_checkpoint:
            samples, num_steps = samples_of(self._plan.manifest), self._plan.manifest["totals"]["num_steps"]
            resume_from_checkpoint = checkpoint_of_plan(resume_from_checkpoint, self, samples, num_steps)
        with self._watched():
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run a step of the plan; gradients are then those of its loss, a scalar.

        That is the mean over its target tokens, and with it the load-balancing loss of routers, where there is one.
        """
        if not inputs:
            hint = "set control.should_training_stop, or build a plan with fewer steps an epoch"
            raise UsageError("a callback stopped an epoch early, and a plan is run in its order", hint=hint)
        work: StepWork = inputs["work"]
        self._switch("train")
        self._executor.job.at_step(work.step.step)
        with self.accelerator.autocast():
            loss = self._executor.step(work, self._loss, reference=self._reference)
        return torch.tensor(loss, dtype=torch.float64, device=self.args.device)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log like `Trainer.log`, of training steps also the metrics of the loss."""
        super().log({**logs, **self._executor.metrics} if "loss" in logs else logs, *args, **kwargs)

    def evaluation_loop(
        self, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> EvalLoopOutput:
        """The loss of the evaluation plan: the mean over all its target tokens, or of `loss=` over its sequences."""
        self._switch("eval")
        self.callback_handler.eval_dataloader = dataloader
        rows: list[dict[str, float]] = []
        weights: list[int] = []
        is_named = isinstance(find_loss(self._loss), NamedLoss)
        with self._watched():
            for inputs in dataloader:
                work: StepWork = inputs["work"]
                self._executor.metrics = {}
                with self.accelerator.autocast():
                    loss = self._executor.evaluate(work, self._loss if is_named else None, reference=self._reference)
                if work.step.num_target_tokens:
                    rows.append({"loss": loss, **self._executor.metrics})
                    weights.append(work.step.num_sequences if is_named else work.step.num_target_tokens)
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        means = {"loss": 0.0, **mean_of_steps(rows, weights)}
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in means.items()}
        return EvalLoopOutput(cast(Any, None), None, metrics, num_samples=self.num_examples(dataloader))

    def predict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to predict, by a UsageError: chunks never hold the outputs of a sequence."""
        hint = "evaluate() gives the loss; for outputs call the model itself"
        raise UsageError("ChunkTrainer predicts nothing", hint=hint)

    def compute_loss(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to compute a loss, by a UsageError: it is part of the executor's work."""
        raise UsageError("a chunk has no loss of its own to compute", hint=LOSS_HINT)

    def _switch(self, mode: str) -> None:
        """Put the model, and an optimizer that has modes, into "train" or "eval"."""
        for switched in (self.model, self.optimizer):
            getattr(switched, mode, lambda: None)()


def _check_settings(args: TrainingArguments) -> None:
    """Refuse settings that would have no effect, or a wrong one."""
    for name, hint in REFUSED_SETTINGS.items():
        value = getattr(args, name, None)  # not every version has every setting
        if value and value != _NEUTRAL.get(name):
            raise UsageError(f"{name}={value!r} cannot be done with a plan", hint=hint)
    if getattr(args.accelerator_config, "gradient_accumulation_kwargs", None):
        hint = REFUSED_SETTINGS["gradient_accumulation_steps"]
        raise UsageError("accelerator_config with gradient_accumulation_kwargs cannot be done with a plan", hint=hint)
    if args.mixed_precision not in ("no", "bf16"):
        raise UsageError(
            f"mixed precision {args.mixed_precision!r} needs loss scaling, which this runtime has not",
            hint="use bf16=True, or load the model in bfloat16",
        )
    refuse_stepping_in_backward(args)
    if (started := world_size()) > args.world_size:
        hint = "without a GPU for each give TrainingArguments use_cpu=True"
        raise UsageError(f"{started} processes were started, and each takes itself for the only one", hint=hint)


def refuse_stepping_in_backward(args: TrainingArguments) -> None:
    """Refuse optimizers that step in a backward; raises UsageError."""
    optimizer = OptimizerNames(args.optim).value
    if any(part in optimizer for part in _STEPPING_IN_BACKWARD):
        hint = 'use an optimizer that steps once a step, such as optim="adamw_torch"'
        raise UsageError(f"optim={optimizer!r} steps in every backward, of which a step has one a chunk", hint=hint)


def _settings_of_plan(
    args: TrainingArguments, plan: Plan, train_data: _PlanSteps, eval_data: _PlanSteps | None
) -> TrainingArguments:
    """A copy of `args` that says what the plan decides; what was set otherwise is reported in one line."""
    defaults = {field.name: field.default for field in fields(TrainingArguments)}
    epochs, num_steps = plan.manifest["epochs"], plan.manifest["totals"]["num_steps"]
    if args.max_steps > num_steps:
        hint = "build the plan with more --epochs, or leave max_steps out"
        raise UsageError(f"max_steps={args.max_steps:,}, the plan has {num_steps:,} steps", hint=hint)
    if args.max_steps <= 0 and args.num_train_epochs not in (epochs, defaults["num_train_epochs"]):
        hint = "build the plan with other --epochs, or stop earlier with max_steps"
        raise UsageError(f"num_train_epochs={args.num_train_epochs:g}, the plan has {epochs}", hint=hint)
    decided = {
        "num_train_epochs": epochs,
        "per_device_train_batch_size": -(-train_data.batch_size // args.world_size),
        "per_device_eval_batch_size": 1 if eval_data is None else -(-eval_data.batch_size // args.world_size),
        "dataloader_num_workers": 0,
    }
    copied, overruled = copy.copy(args), []
    for name, value in decided.items():
        given = getattr(args, name)
        # transformers goes by max_steps where these are given
        is_unset = args.max_steps > 0 if name == "num_train_epochs" else given == defaults[name]
        if given != value and not is_unset:
            overruled.append(f"{name}={value} (not {given:g})")
        setattr(copied, name, value)
    if args.n_gpu > 1:
        overruled.append(f"one GPU (not {args.n_gpu})")
    if overruled and args.process_index == 0:
        _logger.warning("set by the plan %s: %s", plan.path, ", ".join(overruled))
    copied._n_gpu = min(args.n_gpu, 1)  # more would have transformers run the model on all of them
    return copied


def _find_sharding(asked: str | None, plan: Plan, model: PreTrainedModel, args: TrainingArguments) -> Sharding:
    """The sharding: as `asked`, or as the plan was timed."""
    planned = plan.manifest["predictions"]["cost_model"].get("sharding")
    found = asked or (planned if planned in SHARED and args.world_size > 1 else SHARED[0])
    check_argument("sharding", found, one_of(*SHARED), "weights")
    if found != SHARED[0] and args.world_size == 1:
        raise UsageError(f"sharding={found!r} with one process", hint="start more: `torchrun --nproc-per-node N`")
    if found != SHARED[0] and model.dtype == torch.bfloat16:
        hint = 'load the model with dtype=torch.float32, or give sharding="optimizer"'
        raise UsageError(f"sharding={found!r} of weights in bfloat16 would sum gradients in bfloat16", hint=hint)
    return cast(Sharding, found)


def _open(
    plan: str | Path, analysis: str | Path | None, output: Path, args: TrainingArguments
) -> tuple[Plan, Analysis]:
    """Open a plan and its analysis: for one process where ranks share sequences, one like it, built at `output`."""
    opened, found = open_plan(plan, analysis, dp=args.world_size)
    if args.world_size > 1:
        choose_layout(opened, args.world_size, args.process_index, then="give that in its place")
    if args.world_size > 1 or not used_blocks(opened):
        return opened, found
    try:
        from chunkplan import build_like  # the planner, which executing a plan does not need

        build_like(opened.path, output, analysis=found.path, dp=1)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"ranks of the plan share sequences, and {error.name} is missing, to build one like it for this process",
            where=str(opened.path),
            hint=f"`{how_to_build_like(opened, 1, 1)}` builds it where chunkplan is installed with its planner",
        ) from error
    _logger.warning("ranks share sequences in %s: trained with %s, like it and for one process", opened.path, output)
    return open_plan(output, found.path)


def _as_it_is(batch: Any) -> Any:
    return batch
