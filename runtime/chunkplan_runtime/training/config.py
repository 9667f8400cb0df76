"""A training run's configuration: every option with its default, what it may be, and the words of its help.

Options are read from here (`options`) and checked here, without torch, so that a mistake is found at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chunkplan.cost.model import CostModel
from chunkplan.domains import FLAG, number, one_of, path, several, text, whole
from chunkplan.errors import UsageError
from chunkplan.options import Options, option, options_of, same
from chunkplan_runtime.domains import DEVICE, KERNEL, ROUTER_LOSSES
from chunkplan_runtime.training.learning_rate import LR_SCHEDULES

#: Options that had another name, by that one. Flags, files and checkpoints may still have it, until the next version.
RENAMED = {"schedule": "lr-schedule"}

#: What data-parallel processes can share, each all before it too.
SHARED = ("optimizer", "gradients", "weights")

PRECISIONS = ("fp32", "fp64", "bf16", "bf16-pure")

DATA, MODEL, LORA = "what to train on", "what to train", "adapters"
LEARNING, LENGTH, LOG = "how to learn", "how long", "what is kept"

ABOVE_0 = number(lambda value: value > 0, "a number above 0, such as 1e-4")
BELOW_1 = number(lambda value: 0 <= value < 1, "a number from 0 to below 1")
FROM_0 = number(lambda value: value >= 0, "a number from 0")
WARMUP = number(
    lambda value: value >= 0 and (value < 1 or value.is_integer()), "a number of steps, or a share below 1", metavar="N"
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Options):
    """A training run. Exactly one of `model_config` (random weights) and `model` (saved weights) is given.

    The help of each option is in its field.

    Raises:
        UsageError: an option is not what it may be; the message names its flag.
    """

    plan: Path = option(
        path("DIR"),
        "The plan, from `chunkplan build`.",
        group=DATA,
    )
    analysis: Path | None = option(
        path("DIR"),
        "Its analysis, if that is not where it was.",
        group=DATA,
        default=None,
    )
    eval_plan: Path | None = option(
        path("DIR"),
        "The plan of held-out sequences.",
        group=DATA,
        default=None,
        default_words="what `build --holdout` left beside the plan",
    )
    output: Path = option(
        path("DIR"),
        "The run's folder: metrics, checkpoints, final/.",
        group=DATA,
    )
    model: str | None = option(
        text("NAME"),
        "A saved model: a folder, or a name on the Hugging Face Hub.",
        group=MODEL,
        default=None,
    )
    model_config: Path | None = option(
        path("FILE"),
        "A config.json, or its folder, in place of --model; weights start random.",
        group=MODEL,
        default=None,
    )
    tokenizer: str | None = option(
        text("NAME"),
        "A folder or Hub name whose tokenizer goes with the weights.",
        group=MODEL,
        default=None,
        default_words="the model's",
    )
    device: str = option(
        DEVICE,
        "The device: auto, cpu, cuda or cuda:N.",
        group=MODEL,
        default="auto",
    )
    attention: str = option(
        KERNEL,
        "The attention kernel's name, or auto.",
        group=MODEL,
        default="auto",
    )
    kv_offload: bool | None = option(
        FLAG,
        "Keep keys and values of split sequences in host memory.",
        group=MODEL,
        default=None,
        default_words="as planned",
    )
    checkpointing: str | None = same(CostModel, "checkpointing", group=MODEL, default=None, default_words="as planned")
    stage_layers: tuple[int, ...] | None = option(
        several(whole(1), metavar="N,N,...", example="7,7,6"),
        "Layers of each pipeline stage, or of each model stage, with commas.",
        group=MODEL,
        default=None,
        default_words="as even as it goes",
    )
    sharding: str | None = option(
        one_of(*SHARED),
        "What data-parallel processes share: optimizer states (ZeRO-1), also gradients (2), also weights (3).",
        group=MODEL,
        default=None,
        default_words="as planned",
    )
    lora_rank: int | None = option(
        whole(),
        "Train adapters of this rank in place of the weights, 0: off.",
        group=LORA,
        default=None,
        default_words="as planned",
    )
    load_in_4bit: bool | None = option(
        FLAG,
        "Keep the weights that have adapters in 4 bits (QLoRA).",
        group=LORA,
        default=None,
        default_words="as planned",
    )
    lora_alpha: float = option(
        ABOVE_0,
        "What an adapter adds counts alpha / rank.",
        group=LORA,
        default=16.0,
    )
    lora_dropout: float = option(
        BELOW_1,
        "Dropout of what goes into an adapter.",
        group=LORA,
        default=0.0,
    )
    lora_targets: tuple[str, ...] = option(
        several(text("NAME"), metavar="NAMES", example="q_proj,v_proj"),
        "Names of the layers that get one, with commas; all-linear: all but the head.",
        group=LORA,
        default=("all-linear",),
    )
    lr: float = option(
        ABOVE_0,
        "AdamW's highest learning rate.",
        group=LEARNING,
        default=0.0001,
    )
    lr_schedule: str = option(
        one_of(*LR_SCHEDULES),
        "Shape of the learning rate after the warm-up.",
        group=LEARNING,
        default="constant",
    )
    warmup: float = option(
        WARMUP,
        "Steps over which it rises from 0, the rate of the first; below 1 a share of all.",
        group=LEARNING,
        default=0.0,
    )
    min_lr: float = option(
        number(lambda value: 0 <= value <= 1, "a share from 0 to 1"),
        "Where --lr-schedule ends, as a share of --lr.",
        group=LEARNING,
        default=0.0,
    )
    weight_decay: float = option(
        FROM_0,
        "AdamW's weight decay, of all weights but norms and biases.",
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
        "Largest gradient norm, 0: any.",
        group=LEARNING,
        default=1.0,
    )
    precision: str | None = option(
        one_of(*PRECISIONS),
        "Precision of the weights; bf16 has fp32 master weights, bf16-pure has none.",
        group=LEARNING,
        default=None,
        default_words="bf16 on a GPU, fp32 on a CPU",
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
    eval_every: int = option(
        whole(),
        "Evaluate every N steps, 0: at the end only.",
        group=LOG,
        default=0,
    )
    save_every: int = option(
        whole(),
        "Write a checkpoint every N steps, 0: none.",
        group=LOG,
        default=100,
    )
    keep_last: int = option(
        whole(1),
        "Keep the last N checkpoints.",
        group=LOG,
        default=3,
    )
    resume: bool = option(
        FLAG,
        "Go on from the last checkpoint of --output, or start if there is none.",
        group=LOG,
        default=False,
    )
    log_sequences: bool = option(
        FLAG,
        "Write the loss of each sequence to sequences.jsonl.",
        group=LOG,
        default=False,
    )
    spike: float = option(
        number(lambda value: value == 0 or value > 1, "a number above 1, or 0 for none"),
        "Name the worst sequences where a step's loss is above X times the median of 50 before it, 0: never.",
        group=LOG,
        default=2.0,
    )

    def check_together(self) -> None:
        """Refuse no model or two, and what would do nothing or lose precision together with the others."""
        if (self.model is None) == (self.model_config is None):
            found = "neither is given" if self.model is None else "both are given"
            raise UsageError(f"--model or --model-config: {found}", hint="give one of them")
        if self.sharding in SHARED[1:] and self.precision == "bf16-pure":
            raise UsageError(
                f"--sharding {self.sharding} with --precision bf16-pure would sum gradients in bf16",
                hint="use --precision bf16, or --sharding optimizer",
            )
        if self.lora_rank and self.model is None:
            raise UsageError(
                "--lora-rank with --model-config: random weights that nothing keeps",
                hint="adapters need a saved model: give --model",
            )
        declared = options_of(TrainConfig)
        for name in ("lora_alpha", "lora_dropout", "lora_targets", "load_in_4bit"):
            changed = getattr(self, name) not in (declared[name].default, False)
            if changed and self.lora_rank == 0:  # None: as planned, which is not known yet
                flag = declared[name].flag
                raise UsageError(f"{flag} without --lora-rank would do nothing", hint="give --lora-rank too")


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
