"""What chunks would gain on a dataset, in one line, before anybody has said for which model."""

from __future__ import annotations

from typing import NamedTuple

from chunkplan.cost.hardware import load_hardware
from chunkplan.cost.shape import QWEN2_5_7B
from chunkplan.errors import UsageError
from chunkplan.planfile.analysis import Analysis
from chunkplan.tuning.baselines import Baseline
from chunkplan.tuning.grid import Choice
from chunkplan.tuning.options import TuneOptions
from chunkplan.tuning.tune import tune

#: Little enough to look at in a moment.
_CHUNK_SIZES, _KS = (2048, 4096, 8192, 16384, 32768), (1, 4, 16)


class Headline(NamedTuple):
    """The model and GPUs it is of, what people run today, and the chunked choice."""

    options: TuneOptions
    today: Baseline
    chunked: Choice


def headline(analysis: Analysis) -> Headline | None:
    """One sequence a micro-batch against chunks, with state-aware 1F1B; None where neither fits.

    For the cluster of the paper's tables: Qwen2.5-7B with four stages of four GPUs (ChunkFlow, arXiv 2503.02356,
    section 6).
    """
    hardware = load_hardware("h100")
    options = TuneOptions(
        shape=QWEN2_5_7B,
        hardware=hardware,
        gpu_memory=hardware.memory_bytes,
        tp=4,
        pp=4,
        chunk_sizes=_CHUNK_SIZES,
        ks=_KS,
        schedules=("1f1b",),
    )
    try:
        tuning = tune(analysis, options)
    except UsageError:
        return None
    return Headline(options, tuning.baselines[0], tuning.chosen)
