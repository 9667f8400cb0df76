"""Options that say which model runs on which GPUs, the same for every command that predicts times or memory."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chunkplan_cli.completion import HARDWARE, one_of

if TYPE_CHECKING:
    from chunkplan.cost.model import CostModel
    from chunkplan.tuning.options import TuneOptions

ModelConfig = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="The model's config.json, or its folder. Default: Qwen2.5-7B.", show_default=False
    ),
]
HardwareName = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        metavar="NAME|FILE",
        help="a100, h100, h200 or a profile. Default: h100.",
        autocompletion=one_of(HARDWARE),
    ),
]
GpuMemory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Memory of a GPU, such as 80GiB. Default: the hardware's.")
]
Gpus = Annotated[int | None, typer.Option(metavar="N", help="GPUs in all, laid out as dp x tp x pp as is fastest.")]
TensorParallel = Annotated[
    int | None, typer.Option("--tp", metavar="N", help="GPUs that share each layer. Default: 1.")
]


class Precision(StrEnum):
    """Of weights and activations."""

    BF16 = "bf16"
    FP32 = "fp32"


class Sharding(StrEnum):
    """What data-parallel ranks share."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"
    WEIGHTS = "weights"


PrecisionOption = Annotated[Precision | None, typer.Option("--precision", help="Default: bf16.")]
ShardingOption = Annotated[
    Sharding | None,
    typer.Option(
        "--sharding",
        metavar="WHAT",
        help="What data-parallel ranks share: none, optimizer (ZeRO-1), gradients (2) or weights (3). "
        "Default: optimizer.",
    ),
]

_SIZES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_size(text: str) -> int:
    """Bytes of "80GiB"."""
    from chunkplan.errors import UsageError

    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([A-Za-z]+)", text.strip())
    units = {unit.lower(): size for unit, size in _SIZES.items()}
    if not match or match[2].lower() not in units:
        raise UsageError(f"{text!r} is not a size of memory", hint=f"for example 80GiB; units are {', '.join(_SIZES)}")
    return int(float(match[1]) * units[match[2].lower()])


def cost_model(
    *,
    model_config: Path | None,
    hardware: str | None,
    tp: int | None,
    precision: Precision | None = None,
    checkpointing: StrEnum | None = None,
) -> CostModel:
    """The one of the options given; what is not given takes its default."""
    from chunkplan.cost.hardware import load_hardware
    from chunkplan.cost.model import CostModel
    from chunkplan.cost.model_config import read_model_config

    given: dict[str, Any] = {
        "shape": None if model_config is None else read_model_config(model_config),
        "hardware": None if hardware is None else load_hardware(hardware),
        "tp": tp,
        "precision": precision.value if precision else None,
        "checkpointing": checkpointing.value if checkpointing else None,
    }
    return CostModel(**{name: value for name, value in given.items() if value is not None})


def tune_options(
    *,
    model_config: Path | None,
    hardware: str | None,
    gpu_memory: str | None,
    gpus: int | None,
    dp: int | None,
    tp: int | None,
    pp: int | None,
    precision: Precision | None,
    sharding: Sharding | None,
    global_batch: int | None,
    seed: int | None,
    chunk_sizes: tuple[int, ...] | None = None,
    ks: tuple[int, ...] | None = None,
    schedules: tuple[str, ...] | None = None,
) -> TuneOptions:
    """What to tune for; what is not given takes its default."""
    from chunkplan.cost.hardware import load_hardware
    from chunkplan.cost.model_config import read_model_config
    from chunkplan.cost.shape import QWEN2_5_7B
    from chunkplan.errors import UsageError
    from chunkplan.tuning.options import TuneOptions

    if gpus is not None and not (dp is None and tp is None and pp is None):
        raise UsageError("--gpus and --dp, --tp, --pp exclude each other", hint="give --gpus alone, or the others")
    profile = load_hardware(hardware or "h100")
    given: dict[str, Any] = {
        "gpus": gpus,
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "precision": precision.value if precision else None,
        "sharding": sharding.value if sharding else None,
        "global_batch": global_batch,
        "seed": seed,
        "chunk_sizes": chunk_sizes,
        "ks": ks,
        "schedules": schedules,
    }
    return TuneOptions(
        shape=read_model_config(model_config) if model_config else QWEN2_5_7B,
        hardware=profile,
        gpu_memory=parse_size(gpu_memory) if gpu_memory is not None else profile.memory_bytes,
        **{name: value for name, value in given.items() if value is not None},
    )


def parse_numbers(text: str | None, option: str) -> tuple[int, ...] | None:
    """Whole numbers of "1024,2048"."""
    from chunkplan.errors import UsageError

    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) < 10 for word in words):
        raise UsageError(f"{option} is {text!r}, expected whole numbers", hint=f"for example {option} 1024,2048")
    return tuple(int(word) for word in words)
