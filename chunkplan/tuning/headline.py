"""What chunks would gain on a dataset, before anybody has said for which model: for those who ask, it takes seconds."""

from __future__ import annotations

from chunkplan.cost.hardware import load_hardware
from chunkplan.cost.shape import QWEN2_5_7B
from chunkplan.planfile.analysis import Analysis
from chunkplan.tuning.options import TuneOptions
from chunkplan.tuning.tune import Tuning, tune

#: Little enough to look at in a moment.
_CHUNK_SIZES, _KS = (2048, 4096, 8192, 16384, 32768), (1, 4, 16)


def headline(analysis: Analysis) -> Tuning:
    """A small tuning for the cluster of the paper's tables.

    Qwen2.5-7B with four stages of four GPUs (ChunkFlow, arXiv 2503.02356, section 6), state-aware 1F1B.

    Raises:
        UsageError: nothing fits.
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
        schedules=("auto",),
    )
    return tune(analysis, options)
