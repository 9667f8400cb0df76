"""A training run's configuration: every option with its default, what it may be, and the words of its help.

Options are declared and checked here, without torch, so that a mistake is found at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from chunkplan.config.losses import LOSSES
from chunkplan.cost.fused import FusedKernels
from chunkplan.cost.hardware import KERNELS
from chunkplan.cost.model import CostModel
from chunkplan.domains import FLAG, Domain, number, one_of, path, several, text, whole
from chunkplan.errors import UsageError
from chunkplan.options import Advanced, Options, option, options_of, same
from chunkplan_runtime.models import ROUTER_LOSSES

#: The names that `chunkplan_runtime.attention.kernels` knows; which of them run depends on the machine.
ATTENTION = ("auto", *KERNELS)

DEVICE = Domain(
    lambda value: isinstance(value, str) and re.fullmatch(r"auto|cpu|cuda(:\d+)?", value) is not None,
    "auto, cpu, cuda or cuda:N",
    metavar="NAME",
    completed=("auto", "cpu", "cuda"),
)
REPOSITORY = Domain(
    lambda value: isinstance(value, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", value) is not None,
    expected="USER/NAME",
    metavar="USER/NAME",
)
KERNEL = text("KERNEL", expected="the name of an attention kernel", completed=ATTENTION)

PRECISIONS = ("fp32", "fp64", "bf16", "bf16-pure")

#: What metrics are reported to, each by its integration in transformers.
TRACKERS = ("tensorboard", "wandb", "mlflow")

#: Shardings of data-parallel processes, each with all before it too.
SHARED = ("optimizer", "gradients", "weights")

#: Learning rates where none is given: of all weights, and of adapters.
FULL_LR, LORA_LR = 1e-5, 2e-4

#: Learning-rate schedules: (steps done after the warm-up, how many there are) -> what is left of the way down.
#: They are those of transformers, to the last bit: `ChunkTrainer` and the trainer give a step the same rate.
LR_SCHEDULES: dict[str, Callable[[int, int], float]] = {
    "constant": lambda done, steps: 1.0,
    "linear": lambda done, steps: (steps - done) / steps,
    "cosine": lambda done, steps: 0.5 * (1 + math.cos(math.pi * (done / steps))),
}

DATA, MODEL, LORA, LEARNING = "what to train on", "what to train", "adapters", "how to learn"
LENGTH, KEPT = "how long", "what is kept"
_model = partial(option, group=MODEL)
_lora = partial(option, group=LORA)
_learning = partial(option, group=LEARNING)
_length = partial(option, group=LENGTH)
_log = partial(option, group=KEPT)
_more_model, _more_lora, _more_learning, _more_length, _more_log = (
    partial(option, group=Advanced(group)) for group in (MODEL, LORA, LEARNING, LENGTH, KEPT)
)


def _unset(words: str | None = None) -> Any:
    """Declare an option that may be left out; `words` say what then holds."""
    return {"default": None, "default_words": words}


_PLANNED = _unset("as planned")
_DIR, _NAME = path("DIR"), text("NAME")
_ABOVE_0 = number(lambda value: value > 0, "a number above 0, such as 1e-4")
_FROM_0 = number(lambda value: value >= 0, "a number from 0")
_BELOW_1 = number(lambda value: 0 <= value < 1, "a number from 0 to below 1")
_SHARE = number(lambda value: 0 <= value <= 1, "a share from 0 to 1")
_SPIKE = number(lambda value: value == 0 or value > 1, "a number above 1, or 0 for none")
_WARMUP = number(
    lambda value: value >= 0 and (value < 1 or value.is_integer()), "a number of steps, or a share below 1", metavar="N"
)
_LAYERS = several(whole(1), metavar="N,N,...", example="7,7,6")
_TARGETS = several(_NAME, metavar="NAMES", example="q_proj,v_proj")
_FREEZE = several(text("PATTERN"), metavar="PATTERNS", example="'model.embed_tokens*'")
_TRAIN_ONLY = several(text("PATTERN"), metavar="PATTERNS", example="'*.mlp.*,lm_head*'")
_TRACKERS = several(one_of(*TRACKERS), metavar="NAMES", example="tensorboard,wandb")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Options):
    """A training run. Exactly one of `model_config` (random weights) and `model` (saved weights) is given.

    The help of each option is in its field.

    Raises:
        UsageError: an option is not what it may be; the message names its flag.
    """

    plan: Path = option(_DIR, "The plan, from `chunkplan build`.", group=DATA)
    analysis: Path | None = option(_DIR, "The plan's analysis, if it was moved.", default=None, group=Advanced(DATA))
    eval_plan: Path | None = option(
        _DIR, "The held-out plan.", **_unset("that of `build --holdout`, beside the plan"), group=Advanced(DATA)
    )
    reference: Path | None = option(
        _DIR, "Log-probabilities of a reference model, from `chunkplan score`.", default=None, group=Advanced(DATA)
    )
    output: Path = option(_DIR, "The run's folder: metrics, checkpoints, final/.", group=DATA)
    model: str | None = _model(_NAME, "A saved model: a folder, or a name on the Hugging Face Hub.", default=None)
    model_config: Path | None = option(
        path("FILE"),
        "A config.json, or its folder, in place of --model: training starts from random weights.",
        default=None,
        group=MODEL,
    )
    tokenizer: str | None = _more_model(
        _NAME, "The tokenizer that is saved with the weights: a folder or a name on the Hub.", **_unset("the model's")
    )
    device: str = _more_model(DEVICE, "The device: auto, cpu, cuda or cuda:N.", default="auto")
    attention: str = _more_model(KERNEL, "Name of the attention kernel, or auto.", default="auto")
    kv_offload: bool | None = _more_model(FLAG, "Keep keys and values of split sequences in host memory.", **_PLANNED)
    checkpointing: str | None = same(CostModel, "checkpointing", **_more_model.keywords, **_PLANNED)
    fused_kernels: FusedKernels | None = same(CostModel, "fused_kernels", **_more_model.keywords, **_PLANNED)
    compile: bool | None = same(CostModel, "compile", **_more_model.keywords, **_PLANNED)
    stage_layers: tuple[int, ...] | None = _more_model(
        _LAYERS,
        "Layers of each stage, first to last; with virtual stages, of each model stage.",
        **_unset("as even as possible"),
    )
    sharding: str | None = _more_model(
        one_of(*SHARED),
        "What data-parallel processes share: optimizer (states, ZeRO-1), gradients (2) or weights (3).",
        **_PLANNED,
    )
    lora_rank: int | None = _lora(whole(), "Train adapters (LoRA) of this rank; 0: all weights.", **_PLANNED)
    load_in_4bit: bool | None = _more_lora(FLAG, "Keep the weights below the adapters in 4 bits (QLoRA).", **_PLANNED)
    lora_alpha: float = _more_lora(_ABOVE_0, "The output of an adapter is multiplied by alpha / rank.", default=16.0)
    lora_dropout: float = _more_lora(_BELOW_1, "Dropout on the input of an adapter.", default=0.0)
    lora_targets: tuple[str, ...] = _more_lora(
        _TARGETS,
        "Layers that get an adapter: names, with commas; all-linear: all but the head and, with experts, MLPs.",
        default=("all-linear",),
    )
    freeze: tuple[str, ...] | None = _more_learning(
        _FREEZE,
        "Do not train weights whose names match one of these patterns, with commas; * is any text.",
        **_unset("all are trained"),
    )
    train_only: tuple[str, ...] | None = _more_learning(
        _TRAIN_ONLY, "Train only weights whose names match one of these patterns.", default=None
    )
    optimizer: str | None = same(CostModel, "optimizer", **_more_learning.keywords, **_PLANNED)
    lr: float | None = _learning(
        _ABOVE_0, "The highest learning rate.", **_unset(f"{FULL_LR:g}, of adapters {LORA_LR:g}")
    )
    lr_schedule: str = _learning(
        one_of(*LR_SCHEDULES), "Learning rate after the warm-up: constant, linear or cosine.", default="cosine"
    )
    warmup: float = _learning(
        _WARMUP, "Steps in which the learning rate rises from 0; below 1: a share of all steps.", default=0.03
    )
    min_lr: float = _more_learning(_SHARE, "Learning rate at the end, as a share of --lr.", default=0.0)
    weight_decay: float = _more_learning(_FROM_0, "Weight decay, for all weights but norms and biases.", default=0.01)
    beta1: float = _more_learning(_BELOW_1, "AdamW's decay rate for the mean of gradients.", default=0.9)
    beta2: float = _more_learning(_BELOW_1, "AdamW's decay rate for the mean of their squares.", default=0.999)
    eps: float = _more_learning(_ABOVE_0, "AdamW's epsilon, added to the root of that mean.", default=1e-08)
    max_grad_norm: float = _learning(_FROM_0, "Largest gradient norm; 0: no clipping.", default=1.0)
    precision: str | None = _more_learning(
        one_of(*PRECISIONS),
        "Precision of the weights: fp32, fp64, bf16 (with fp32 master weights) or bf16-pure (without).",
        **_unset("bf16 on a GPU, fp32 on a CPU"),
    )
    label_smoothing: float = _more_learning(
        _BELOW_1, "Share of each target that training spreads over the whole vocabulary.", default=0.0
    )
    loss: str | None = _more_learning(
        text("NAME"),
        f"The loss of a step: {', '.join(LOSSES)}; or FILE:NAME, a function of a Python file.",
        **_PLANNED,
    )
    loss_options: tuple[str, ...] | None = _more_learning(
        several(text("NAME=VALUE"), example="beta=0.1"), "Options of the loss, with commas.", default=None
    )
    router_loss: str | None = _more_learning(
        one_of(*ROUTER_LOSSES),
        "Load-balancing loss of a mixture of experts: none, over the whole batch, or over each sequence.",
        **_unset("batch if the model's config has output_router_logits, else none"),
    )
    seed: int = _more_learning(whole(), "Seed of random weights, dropout and noise of routers.", default=0)
    max_steps: int | None = _length(whole(1), "Stop after N steps.", **_unset("the whole plan"))
    max_epochs: int | None = _more_length(whole(1), "Stop after N epochs of the plan.", default=None)
    early_stopping: int | None = _more_length(
        whole(1), "Stop after N evaluations in a row whose loss is not lower than the lowest before.", **_unset("never")
    )
    eval_every: int = _log(whole(), "Evaluate every N steps; 0: only at the end.", default=0)
    save_every: int = _log(whole(), "Write a checkpoint every N steps, and on Ctrl-C; 0: none.", default=100)
    keep_last: int = _more_log(whole(1), "Keep the last N checkpoints.", default=3)
    keep_best: bool | None = _more_log(
        FLAG,
        "Also keep the checkpoint with the lowest evaluation loss, and write its weights to final/.",
        **_unset("with --early-stopping"),
    )
    merge_adapters: bool = _more_log(
        FLAG, "Write to final/ the whole weights with the adapters added, in place of the adapters.", default=False
    )
    resume: bool = _log(FLAG, "Go on from the last checkpoint of --output, or start if there is none.", default=False)
    report_to: tuple[str, ...] | None = _log(
        _TRACKERS, "Trackers that get the metrics, with commas: tensorboard, wandb, mlflow.", **_unset("none")
    )
    run_name: str | None = _more_log(_NAME, "The run's name for the trackers.", **_unset("that of --output"))
    wandb_project: str | None = _more_log(_NAME, "The W&B project.", **_unset("WANDB_PROJECT, then huggingface"))
    push_to_hub: str | None = _more_log(REPOSITORY, "Upload final/ to this repository of the Hub.", default=None)
    sample_every: int = _more_log(whole(), "Generate from --sample-prompt every N steps; 0: never.", default=0)
    sample_prompt: str | None = _more_log(text("TEXT"), "A prompt, or with a chat template a message.", default=None)
    log_sequences: bool = _more_log(FLAG, "Write the loss of each sequence to sequences.jsonl.", default=False)
    loss_spike_factor: float = _more_log(
        _SPIKE,
        "Name the worst sequences of a step whose loss is above X times the median of 50 before it; 0: never.",
        default=2.0,
    )

    def check_together(self) -> None:
        """Refuse no model or two, and what would do nothing or lose precision together with other options."""
        if (self.model is None) == (self.model_config is None):
            found = "neither is given" if self.model is None else "both are given"
            raise UsageError(f"--model or --model-config: {found}", hint="give one of them")
        self._check_adapters()
        if self.loss not in (None, "sft") and self.label_smoothing:
            hint = "leave one out: log-probabilities are not of smoothed targets; dpo has an option label_smoothing"
            raise UsageError("--loss and --label-smoothing exclude each other", hint=hint)
        if self.sharding in SHARED[1:] and self.precision == "bf16-pure":
            raise UsageError(
                f"--sharding {self.sharding} with --precision bf16-pure would sum gradients in bf16",
                hint="use --precision bf16, or --sharding optimizer",
            )
        if self.optimizer in ("sgd", "adafactor"):
            for flag in self._changed("beta1", "beta2", "eps"):
                hint = f"leave {flag} out, or use --optimizer adamw"
                raise UsageError(f"{flag} with --optimizer {self.optimizer} would do nothing", hint=hint)
        for flag, given in (("--early-stopping", self.early_stopping), ("--keep-best", self.keep_best)):
            if given and not self.eval_every:
                hint = "for example --eval-every 100"
                raise UsageError(f"{flag} without --eval-every: there is one evaluation, at the end", hint=hint)

        for name, asks, needed, there in (
            ("--run-name", self.run_name, "--report-to wandb", self.report_to),
            ("--wandb-project", self.wandb_project, "--report-to wandb", "wandb" in (self.report_to or ())),
            ("--sample-every", self.sample_every, "--sample-prompt TEXT", self.sample_prompt),
            ("--sample-prompt", self.sample_prompt, "--sample-every 100", self.sample_every),
        ):
            if asks and not there:
                other = needed.partition(" ")[0]
                raise UsageError(f"{name} without {other} would do nothing", hint=f"give {needed} too")

    def _check_adapters(self) -> None:
        if self.lora_rank and self.model is None:
            hint = "adapters need a saved model: give --model"
            raise UsageError("--lora-rank with --model-config: random weights that nothing keeps", hint=hint)
        if self.lora_rank == 0:  # None: as planned, which is not known yet
            for flag in self._changed("lora_alpha", "lora_dropout", "lora_targets", "load_in_4bit", "merge_adapters"):
                raise UsageError(f"{flag} without --lora-rank would do nothing", hint="give --lora-rank too")
        flags = [flag for flag, given in (("--freeze", self.freeze), ("--train-only", self.train_only)) if given]
        if len(flags) == 2:
            raise UsageError("--freeze and --train-only are both given", hint="give one of them")
        if flags and self.lora_rank:
            raise UsageError(
                f"{flags[0]} with adapters of rank {self.lora_rank}: these alone are trained, all weights are frozen",
                hint=f"leave {flags[0]} out, or give --lora-rank 0; --lora-targets names the layers with adapters",
            )
        if self.merge_adapters and self.load_in_4bit:
            raise UsageError(
                "--merge-adapters with weights in 4 bits: rounding them to 4 bits again would lose what is added",
                hint="leave it out: peft merges the adapter in final/ into weights that are whole (merge_and_unload); "
                "or give --no-load-in-4bit",
            )

    def _changed(self, *names: str) -> list[str]:
        """The flags of those of these options that are neither off nor as by default."""
        declared = [options_of(TrainConfig)[name] for name in names]
        return [one.flag for one in declared if getattr(self, one.name) not in (one.default, False)]

    def learning_rate(self, step: int, num_steps: int) -> float:
        """The learning rate of step `step` (from 0) of `num_steps`, without any state that a resumed run would need.

        Over the warm-up it rises linearly from 0, which is that of the first step, to the highest, which is that of the
        first step after it. Then the schedule takes it down, to the lowest one step after the last.
        """
        num_warmup = self.num_warmup(num_steps)
        if step < num_warmup:
            return self.highest_lr * (step / num_warmup)
        left = LR_SCHEDULES[self.lr_schedule](step - num_warmup, max(num_steps - num_warmup, 1))
        return self.highest_lr * (left * (1 - self.min_lr) + self.min_lr)

    def num_warmup(self, num_steps: int) -> int:
        """The number of warm-up steps of a run of `num_steps`."""
        return math.ceil(self.warmup * num_steps) if self.warmup < 1 else int(self.warmup)

    @property
    def highest_lr(self) -> float:
        """The learning rate that is given, or that of what is trained."""
        return self.lr or (LORA_LR if self.lora_rank else FULL_LR)

    @property
    def keeps_best(self) -> bool:
        """True if the checkpoint of the lowest evaluation loss is kept."""
        return self.early_stopping is not None if self.keep_best is None else self.keep_best


#: Options of a run that scores data, and trains nothing.
SCORING = (
    *("plan", "analysis", "output", "model", "device", "attention", "kv_offload", "precision", "stage_layers"),
    *("sharding",),
)


def fixed_options(config: TrainConfig) -> dict[str, Any]:
    """The options that have to stay the same when a run is resumed, by flag."""
    declared = options_of(TrainConfig).items()
    return {one.flag: getattr(config, name) for name, one in declared if one.group in (LORA, LEARNING, LENGTH)}


def shared_options(config: TrainConfig) -> dict[str, Any]:
    """The options that have to be the same on all processes, by flag: all but paths, which machines may differ in."""
    paths = ("plan", "analysis", "eval_plan", "output", "model", "model_config", "tokenizer", "device", "reference")
    return {one.flag: getattr(config, name) for name, one in options_of(TrainConfig).items() if name not in paths}
