"""A training run's configuration: every option with its default, what it may be, and the words of its help.

Options are read from here (`options`) and checked here, without torch, so that a mistake is told at once.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from chunkplan.errors import UsageError
from chunkplan_runtime.training.schedules import SCHEDULES

PRECISIONS = ("fp32", "fp64", "bf16", "bf16-pure")


def _about(group: str, help: str, metavar: str | None = None, choices: tuple[str, ...] | None = None) -> dict[str, Any]:
    """What the metadata of a field says of its flag."""
    return {"group": group, "help": help, "metavar": metavar, "choices": choices}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run. Exactly one of `model_config` (random weights) and `model` (saved weights) is given.

    The help of each option is in its field's metadata.

    Raises:
        UsageError: an option is not what it may be; the message names its flag.
    """

    plan: Path = field(metadata=_about("data", "the plan, from `chunkplan build`", "DIR"))
    analysis: Path | None = field(
        default=None, metadata=_about("data", "its analysis, if that is not where it was", "DIR")
    )
    eval_plan: Path | None = field(
        default=None,
        metadata=_about(
            "data", "the plan of held-out sequences (default: what `build --holdout` left beside the plan)", "DIR"
        ),
    )
    output: Path = field(metadata=_about("data", "the run's folder: metrics, checkpoints, final/", "DIR"))

    model: str | None = field(
        default=None, metadata=_about("model", "a saved model: a folder, or a name on the Hugging Face Hub", "NAME")
    )
    model_config: Path | None = field(
        default=None,
        metadata=_about("model", "a config.json, or its folder, in place of --model; weights start random", "FILE"),
    )
    tokenizer: str | None = field(
        default=None,
        metadata=_about(
            "model", "a folder or Hub name whose tokenizer goes with the weights (default: the model's)", "NAME"
        ),
    )
    device: str = field(default="auto", metadata=_about("model", "auto, cpu, cuda or cuda:N", "NAME"))
    attention: str = field(default="auto", metadata=_about("model", "the attention kernel's name, or auto", "NAME"))
    kv_offload: bool | None = field(
        default=None,
        metadata=_about("model", "keep keys and values of split sequences in host memory (default: as planned)"),
    )
    checkpointing: bool | None = field(
        default=None,
        metadata=_about("model", "recompute layers inside a chunk's backward, for less memory (default: as planned)"),
    )

    stage_layers: tuple[int, ...] | None = field(
        default=None,
        metadata=_about("model", "layers of each pipeline stage, with commas (default: as even as it goes)", "N,N,..."),
    )

    reshard: bool = field(
        default=False,
        metadata=_about(
            "model", "share weights among data-parallel processes also during a step (ZeRO-3); needs K 1, equal chunks"
        ),
    )

    lora_rank: int = field(
        default=0, metadata=_about("LoRA", "train adapters of this rank in place of the weights, 0: off", "N")
    )
    lora_alpha: float = field(default=16.0, metadata=_about("LoRA", "what an adapter adds counts alpha / rank", "X"))
    lora_dropout: float = field(default=0.0, metadata=_about("LoRA", "dropout of what goes into an adapter", "X"))
    lora_targets: tuple[str, ...] = field(
        default=("all-linear",),
        metadata=_about("LoRA", "names of the layers that get one, with commas; all-linear: all but the head", "NAMES"),
    )

    lr: float = field(default=1e-4, metadata=_about("learning", "AdamW's highest learning rate", "X"))
    schedule: str = field(
        default="constant",
        metadata=_about("learning", "shape of the learning rate after the warm-up", choices=tuple(SCHEDULES)),
    )
    warmup: float = field(
        default=0.0,
        metadata=_about(
            "learning", "steps over which it rises from 0, the rate of the first; below 1 a share of all", "N"
        ),
    )
    min_lr: float = field(default=0.0, metadata=_about("learning", "where the schedule ends, as a share of --lr", "X"))
    weight_decay: float = field(default=0.01, metadata=_about("learning", "of all weights but norms and biases", "X"))
    beta1: float = field(default=0.9, metadata=_about("learning", "AdamW's, of the mean of gradients", "X"))
    beta2: float = field(default=0.999, metadata=_about("learning", "AdamW's, of the mean of their squares", "X"))
    eps: float = field(default=1e-8, metadata=_about("learning", "AdamW's, added to the root of that", "X"))
    clip: float = field(default=1.0, metadata=_about("learning", "largest gradient norm, 0: any", "X"))
    precision: str | None = field(
        default=None,
        metadata=_about(
            "learning",
            "of the weights; bf16 has fp32 masters, bf16-pure has none (default: bf16 on a GPU, fp32 on a CPU)",
            choices=PRECISIONS,
        ),
    )
    seed: int = field(default=0, metadata=_about("learning", "of random weights and dropout", "N"))

    max_steps: int | None = field(
        default=None, metadata=_about("length", "stop after N steps (default: the whole plan)", "N")
    )
    max_epochs: int | None = field(default=None, metadata=_about("length", "stop after N epochs of the plan", "N"))

    eval_every: int = field(default=0, metadata=_about("log", "evaluate every N steps, 0: at the end only", "N"))
    save_every: int = field(default=100, metadata=_about("log", "write a checkpoint every N steps, 0: none", "N"))
    keep_last: int = field(default=3, metadata=_about("log", "keep the last N checkpoints", "N"))
    resume: bool = field(
        default=False, metadata=_about("log", "go on from the last checkpoint of --output, or start if there is none")
    )
    log_sequences: bool = field(
        default=False, metadata=_about("log", "write the loss of each sequence to sequences.jsonl")
    )
    spike: float = field(
        default=2.0,
        metadata=_about(
            "log",
            "name the worst sequences where a step's loss is above X times the median of 50 before it, 0: never",
            "X",
        ),
    )

    def __post_init__(self) -> None:
        if (self.model is None) == (self.model_config is None):
            found = "neither is given" if self.model is None else "both are given"
            raise UsageError(f"--model or --model-config: {found}", hint="give one of them")
        for option in fields(self):
            choices, value = option.metadata["choices"], getattr(self, option.name)
            if choices and value is not None:
                self._check(option.name, value in choices, f"one of {', '.join(choices)}")
        device = re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device)
        self._check("device", device is not None, "auto, cpu, cuda or cuda:N")
        self._check("lr", 0 < self.lr < math.inf, "a number above 0, such as 1e-4")
        whole = self.warmup < 1 or float(self.warmup).is_integer()
        self._check("warmup", 0 <= self.warmup < math.inf and whole, "a number of steps, or a share below 1")
        self._check("eps", 0 < self.eps < math.inf, "a number above 0, such as 1e-8")
        self._check("min_lr", 0 <= self.min_lr <= 1, "a share from 0 to 1")
        for name in ("beta1", "beta2", "lora_dropout"):
            self._check(name, 0 <= getattr(self, name) < 1, "a number from 0 to below 1")
        for name in ("weight_decay", "clip"):
            self._check(name, 0 <= getattr(self, name) < math.inf, "a number from 0")
        self._check("lora_alpha", 0 < self.lora_alpha < math.inf, "a number above 0")
        self._check("spike", self.spike == 0 or 1 < self.spike < math.inf, "a number above 1, or 0 for none")
        self._check("seed", 0 <= self.seed < 2**63, "a whole number from 0")
        self._check("lora_targets", bool(self.lora_targets), "all-linear, or names such as q_proj,v_proj")
        for name in ("max_steps", "max_epochs", "keep_last"):
            value = getattr(self, name)
            self._check(name, value is None or value >= 1, "a whole number from 1")
        for name in ("lora_rank", "eval_every", "save_every"):
            self._check(name, getattr(self, name) >= 0, "a whole number from 0")
        if self.reshard and self.precision == "bf16-pure":
            raise UsageError(
                "--reshard with --precision bf16-pure would sum gradients in bf16", hint="use --precision bf16"
            )
        self._check_adapters()

    def _check_adapters(self) -> None:
        if self.lora_rank and self.model is None:
            raise UsageError(
                "--lora-rank with --model-config: random weights that nothing keeps",
                hint="adapters need a saved model: give --model",
            )
        defaults = {option.name: option.default for option in fields(self)}
        idle = [
            name for name in ("lora_alpha", "lora_dropout", "lora_targets") if getattr(self, name) != defaults[name]
        ]
        if idle and not self.lora_rank:
            raise UsageError(f"{flag(idle[0])} without --lora-rank would do nothing", hint="give --lora-rank too")

    def _check(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise UsageError(
                f"{flag(name)} is {getattr(self, name)}, expected {expected}",
                hint="change it, or leave it out for its default",
            )


def flag(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def what_it_learns_by(config: TrainConfig) -> dict[str, Any]:
    """The options that have to stay the same for a run to go on, by flag."""
    return {
        flag(option.name): getattr(config, option.name)
        for option in fields(config)
        if option.metadata["group"] in ("LoRA", "learning", "length")
    }


def what_all_have(config: TrainConfig) -> dict[str, Any]:
    """The options that have to be the same on all processes, by flag: all but places, which machines may differ in."""
    places = ("plan", "analysis", "eval_plan", "output", "model", "model_config", "tokenizer", "device")
    return {flag(option.name): getattr(config, option.name) for option in fields(config) if option.name not in places}
