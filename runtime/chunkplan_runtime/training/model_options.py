"""The part of a training run's configuration that says what is trained: on which data, which model, which weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from chunkplan.cost.fused import FusedKernels
from chunkplan.cost.model import CostModel
from chunkplan.domains import FLAG, number, one_of, path, several, text, whole
from chunkplan.errors import UsageError
from chunkplan.options import Options, option, options_of, same
from chunkplan_runtime.domains import DEVICE, KERNEL

#: What data-parallel processes can share, each all before it too.
SHARED = ("optimizer", "gradients", "weights")

DATA, MODEL, LORA, LEARNING = "what to train on", "what to train", "adapters", "how to learn"

ABOVE_0 = number(lambda value: value > 0, "a number above 0, such as 1e-4")
BELOW_1 = number(lambda value: 0 <= value < 1, "a number from 0 to below 1")


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """What is trained. Exactly one of `model_config` (random weights) and `model` (saved weights) is given.

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
        "The plan's analysis, if it is not where it was.",
        group=DATA,
        default=None,
    )
    eval_plan: Path | None = option(
        path("DIR"),
        "The plan of held-out sequences.",
        group=DATA,
        default=None,
        default_words="that of `build --holdout`, beside the plan",
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
        "A config.json, or its folder, in place of --model: training starts from random weights.",
        group=MODEL,
        default=None,
    )
    tokenizer: str | None = option(
        text("NAME"),
        "The tokenizer that is saved with the weights: a folder or a name on the Hub.",
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
        "Name of the attention kernel, or auto.",
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
    fused_kernels: FusedKernels | None = same(
        CostModel, "fused_kernels", group=MODEL, default=None, default_words="as planned"
    )
    compile: bool | None = same(CostModel, "compile", group=MODEL, default=None, default_words="as planned")
    stage_layers: tuple[int, ...] | None = option(
        several(whole(1), metavar="N,N,...", example="7,7,6"),
        "Layers of each stage, first to last; with virtual stages, of each model stage.",
        group=MODEL,
        default=None,
        default_words="as even as possible",
    )
    sharding: str | None = option(
        one_of(*SHARED),
        "What data-parallel processes share: optimizer (states, ZeRO-1), gradients (2) or weights (3).",
        group=MODEL,
        default=None,
        default_words="as planned",
    )
    lora_rank: int | None = option(
        whole(),
        "Train adapters (LoRA) of this rank in place of the weights; 0: all weights.",
        group=LORA,
        default=None,
        default_words="as planned",
    )
    load_in_4bit: bool | None = option(
        FLAG,
        "Keep the weights below the adapters in 4 bits (QLoRA, NF4).",
        group=LORA,
        default=None,
        default_words="as planned",
    )
    lora_alpha: float = option(
        ABOVE_0,
        "The output of an adapter is multiplied by alpha / rank.",
        group=LORA,
        default=16.0,
    )
    lora_dropout: float = option(
        BELOW_1,
        "Dropout on the input of an adapter.",
        group=LORA,
        default=0.0,
    )
    lora_targets: tuple[str, ...] = option(
        several(text("NAME"), metavar="NAMES", example="q_proj,v_proj"),
        "Layers that get an adapter: names, with commas; all-linear: all but the head and, with experts, MLPs.",
        group=LORA,
        default=("all-linear",),
    )
    freeze: tuple[str, ...] | None = option(
        several(text("PATTERN"), metavar="PATTERNS", example="'model.embed_tokens*'"),
        "Do not train weights whose names match one of these patterns, with commas; * is any text.",
        group=LEARNING,
        default=None,
        default_words="all are trained",
    )
    train_only: tuple[str, ...] | None = option(
        several(text("PATTERN"), metavar="PATTERNS", example="'*.mlp.*,lm_head*'"),
        "Train only weights whose names match one of these patterns.",
        group=LEARNING,
        default=None,
    )

    def check_together(self) -> None:
        """Refuse no model or two, and what would do nothing together with the others."""
        if (self.model is None) == (self.model_config is None):
            found = "neither is given" if self.model is None else "both are given"
            raise UsageError(f"--model or --model-config: {found}", hint="give one of them")
        if self.lora_rank and self.model is None:
            raise UsageError(
                "--lora-rank with --model-config: random weights that nothing keeps",
                hint="adapters need a saved model: give --model",
            )
        declared = options_of(type(self))
        for name in ("lora_alpha", "lora_dropout", "lora_targets", "load_in_4bit"):
            changed = getattr(self, name) not in (declared[name].default, False)
            if changed and self.lora_rank == 0:  # None: as planned, which is not known yet
                flag = declared[name].flag
                raise UsageError(f"{flag} without --lora-rank would do nothing", hint="give --lora-rank too")
        flags = [flag for flag, given in (("--freeze", self.freeze), ("--train-only", self.train_only)) if given]
        if len(flags) == 2:
            raise UsageError("--freeze and --train-only are both given", hint="give one of them")
        if flags and self.lora_rank:
            raise UsageError(
                f"{flags[0]} with adapters of rank {self.lora_rank}: these alone are trained, all weights are frozen",
                hint=f"leave {flags[0]} out, or give --lora-rank 0; --lora-targets names the layers with adapters",
            )
