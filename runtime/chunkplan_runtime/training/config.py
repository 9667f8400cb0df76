"""A training run's configuration: every option with its default, what it may be, and the words of its help.

Options are read from here (`options`) and checked here, without torch, so that a mistake is found at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chunkplan.cost.model import CostModel
from chunkplan.domains import FLAG, number, one_of, several, whole
from chunkplan.errors import UsageError
from chunkplan.options import option, options_of, same
from chunkplan_runtime.domains import ROUTER_LOSSES
from chunkplan_runtime.training.learning_rate import LR_SCHEDULES
from chunkplan_runtime.training.model_options import ABOVE_0, BELOW_1, LEARNING, LORA, SHARED, ModelOptions

#: Options that had another name, by that one. Flags, files and checkpoints may still have it, until the next version.
RENAMED = {"schedule": "lr-schedule"}

#: What runs did before there was an option for it, by flag, where its default does not say so.
EARLIER = {"--optimizer": "adamw"}

PRECISIONS = ("fp32", "fp64", "bf16", "bf16-pure")

#: What metrics are reported to, each by its integration in transformers.
TRACKERS = ("tensorboard", "wandb", "mlflow")

LENGTH, LOG = "how long", "what is kept"

FROM_0 = number(lambda value: value >= 0, "a number from 0")
WARMUP = number(
    lambda value: value >= 0 and (value < 1 or value.is_integer()), "a number of steps, or a share below 1", metavar="N"
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ModelOptions):
    """A training run. Exactly one of `model_config` (random weights) and `model` (saved weights) is given.

    The help of each option is in its field.

    Raises:
        UsageError: an option is not what it may be; the message names its flag.
    """

    optimizer: str | None = same(CostModel, "optimizer", group=LEARNING, default=None, default_words="as planned")
    lr: float = option(
        ABOVE_0,
        "The highest learning rate.",
        group=LEARNING,
        default=0.0001,
    )
    lr_schedule: str = option(
        one_of(*LR_SCHEDULES),
        "Learning rate after the warm-up: constant, linear or cosine.",
        group=LEARNING,
        default="constant",
    )
    warmup: float = option(
        WARMUP,
        "Steps in which the learning rate rises from 0; below 1: a share of all steps.",
        group=LEARNING,
        default=0.0,
    )
    min_lr: float = option(
        number(lambda value: 0 <= value <= 1, "a share from 0 to 1"),
        "Learning rate at the end of --lr-schedule, as a share of --lr.",
        group=LEARNING,
        default=0.0,
    )
    weight_decay: float = option(
        FROM_0,
        "Weight decay, for all weights but norms and biases.",
        group=LEARNING,
        default=0.01,
    )
    beta1: float = option(
        BELOW_1,
        "AdamW's decay rate for the mean of gradients.",
        group=LEARNING,
        default=0.9,
    )
    beta2: float = option(
        BELOW_1,
        "AdamW's decay rate for the mean of their squares.",
        group=LEARNING,
        default=0.999,
    )
    eps: float = option(
        ABOVE_0,
        "AdamW's epsilon, added to the root of that mean.",
        group=LEARNING,
        default=1e-08,
    )
    clip: float = option(
        FROM_0,
        "Largest gradient norm; 0: no clipping.",
        group=LEARNING,
        default=1.0,
    )
    precision: str | None = option(
        one_of(*PRECISIONS),
        "Precision of the weights: fp32, fp64, bf16 (with fp32 master weights) or bf16-pure (without).",
        group=LEARNING,
        default=None,
        default_words="bf16 on a GPU, fp32 on a CPU",
    )
    label_smoothing: float = option(
        BELOW_1,
        "Share of each target that training spreads over the whole vocabulary.",
        group=LEARNING,
        default=0.0,
    )
    router_loss: str | None = option(
        one_of(*ROUTER_LOSSES),
        "Load-balancing loss of a mixture of experts: none, over the whole batch, or over each sequence.",
        group=LEARNING,
        default=None,
        default_words="batch if the model's config has output_router_logits, else none",
    )
    seed: int = option(
        whole(),
        "Seed of random weights, dropout and noise of routers.",
        group=LEARNING,
        default=0,
    )
    max_steps: int | None = option(
        whole(1),
        "Stop after N steps.",
        group=LENGTH,
        default=None,
        default_words="the whole plan",
    )
    max_epochs: int | None = option(
        whole(1),
        "Stop after N epochs of the plan.",
        group=LENGTH,
        default=None,
    )
    early_stopping: int | None = option(
        whole(1),
        "Stop after N evaluations in a row whose loss is not lower than the lowest before.",
        group=LENGTH,
        default=None,
        default_words="never",
    )
    eval_every: int = option(
        whole(),
        "Evaluate every N steps; 0: only at the end.",
        group=LOG,
        default=0,
    )
    save_every: int = option(
        whole(),
        "Write a checkpoint every N steps; 0: none.",
        group=LOG,
        default=100,
    )
    keep_last: int = option(
        whole(1),
        "Keep the last N checkpoints.",
        group=LOG,
        default=3,
    )
    keep_best: bool | None = option(
        FLAG,
        "Also keep the checkpoint with the lowest evaluation loss, and write its weights to final/.",
        group=LOG,
        default=None,
        default_words="with --early-stopping",
    )
    merge_adapters: bool = option(
        FLAG,
        "Write to final/ the whole weights with the adapters added, in place of the adapters.",
        group=LOG,
        default=False,
    )
    resume: bool = option(
        FLAG,
        "Go on from the last checkpoint of --output, or start if there is none.",
        group=LOG,
        default=False,
    )
    report_to: tuple[str, ...] | None = option(
        several(one_of(*TRACKERS), metavar="NAMES", example="tensorboard,wandb"),
        "Trackers that get the metrics, with commas: tensorboard, wandb, mlflow.",
        group=LOG,
        default=None,
        default_words="none",
    )
    log_sequences: bool = option(
        FLAG,
        "Write the loss of each sequence to sequences.jsonl.",
        group=LOG,
        default=False,
    )
    spike: float = option(
        number(lambda value: value == 0 or value > 1, "a number above 1, or 0 for none"),
        "Name the worst sequences of a step whose loss is above X times the median of 50 before it; 0: never.",
        group=LOG,
        default=2.0,
    )

    def check_together(self) -> None:
        """Refuse what would do nothing or lose precision together with other options."""
        super().check_together()
        if self.sharding in SHARED[1:] and self.precision == "bf16-pure":
            raise UsageError(
                f"--sharding {self.sharding} with --precision bf16-pure would sum gradients in bf16",
                hint="use --precision bf16, or --sharding optimizer",
            )
        for name in ("beta1", "beta2", "eps") if self.optimizer in ("sgd", "adafactor") else ():
            one = options_of(TrainConfig)[name]
            if getattr(self, name) != one.default:
                raise UsageError(
                    f"{one.flag} with --optimizer {self.optimizer} would do nothing",
                    hint=f"leave {one.flag} out, or use --optimizer adamw",
                )
        if self.merge_adapters and self.lora_rank == 0:
            raise UsageError("--merge-adapters without --lora-rank would do nothing", hint="give --lora-rank too")
        if self.merge_adapters and self.load_in_4bit:
            raise UsageError(
                "--merge-adapters with weights in 4 bits: rounding them to 4 bits again would lose what is added",
                hint="leave it out: peft merges the adapter in final/ into weights that are whole (merge_and_unload); "
                "or give --no-load-in-4bit",
            )
        for flag, asked in (("--early-stopping", self.early_stopping), ("--keep-best", self.keep_best)):
            if asked and not self.eval_every:
                raise UsageError(
                    f"{flag} without --eval-every: there is one evaluation, at the end",
                    hint="for example --eval-every 100",
                )

    @property
    def keeps_best(self) -> bool:
        """Whether the checkpoint of the lowest evaluation loss is kept."""
        return self.early_stopping is not None if self.keep_best is None else self.keep_best


def what_it_learns_by(config: TrainConfig) -> dict[str, Any]:
    """The options that have to stay the same for a run to go on, by flag."""
    return {
        one.flag: getattr(config, name)
        for name, one in options_of(TrainConfig).items()
        if one.group in (LORA, LEARNING, LENGTH)
    }


def what_all_have(config: TrainConfig) -> dict[str, Any]:
    """The options that have to be the same on all processes, by flag: all but places, which machines may differ in."""
    places = ("plan", "analysis", "eval_plan", "output", "model", "model_config", "tokenizer", "device")
    return {one.flag: getattr(config, name) for name, one in options_of(TrainConfig).items() if name not in places}
