"""Options of `chunkplan calibrate`; the measuring needs torch and is in `calibration.calibrate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from chunkplan.cost.hardware import SHIPPED
from chunkplan.cost.model import MODEL_SOURCE, Precision
from chunkplan.domains import one_of, several, text, tokens, whole
from chunkplan.options import Options, option
from chunkplan_runtime.training.config import DEVICE, KERNEL

_WHAT, _HOW = "What is measured", "How it is measured"


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions(Options):
    """The sizes to measure; None: those that suit the device.

    `model`: a name, a config.json or its folder; weights are random. `name` is the profile's, to which the device's is
    added. `layers`: measure the model's first ones only, as the profile is that of any number. `base`: the profile of
    what one device cannot tell, by name or file.

    Raises:
        UsageError: an option is not what it may be; the message names its flag.
    """

    model: Path | str = option(
        MODEL_SOURCE,
        "The model: its name on the Hugging Face Hub, or its config.json or folder. Its weights are not needed.",
        group=_WHAT,
    )
    name: str = option(text("NAME"), "Name of the profile.", group=_WHAT, flag="")
    device: str = option(DEVICE, "The device: auto, cpu, cuda or cuda:N.", group=_WHAT, default="auto")
    precision: Precision | None = option(
        one_of("bf16", "fp32"),
        "Precision of weights and activations: bf16 or fp32.",
        group=_WHAT,
        default=None,
        default_words="bf16, on a CPU fp32",
    )
    chunk_sizes: tuple[int, ...] | None = option(
        several(tokens(), metavar="N,N,...", example="1024,2048,4096"),
        "ChunkSizes to measure, three or more.",
        group=_HOW,
        default=None,
        default_words="1024 to 32768, on a CPU 256 to 2048",
    )
    prefixes: tuple[int, ...] | None = option(
        several(tokens(), metavar="N,N,...", example="8192,65536"),
        "Numbers of tokens before a chunk, to measure.",
        group=_HOW,
        default=None,
        default_words="8192 to 262144, on a CPU to 8192",
    )
    layers: int | None = option(
        whole(1),
        "Measure the model's first N layers.",
        group=_HOW,
        default=None,
        default_words="all that fit, on a CPU two at most",
    )
    repeats: int = option(whole(1), "How often each chunk is measured.", group=_HOW, default=3)
    base: str | None = option(
        text("NAME|FILE", completed=SHIPPED),
        "Profile with what cannot be measured on one device.",
        group=_HOW,
        default=None,
        default_words="by the GPU's name, or h100",
    )
    attention: str = option(KERNEL, "Name of the attention kernel, or auto.", group=_HOW, default="auto")
    seed: int = option(whole(), "Seed of weights, tokens and held-out chunks.", group=_HOW, default=0)
