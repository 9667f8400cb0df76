"""What chunks would gain on a dataset, before anybody has said for which model: it takes a minute."""

from __future__ import annotations

from chunkplan.cost.hardware import load_hardware
from chunkplan.cost.shape import QWEN2_5_7B
from chunkplan.planfile.analysis import Analysis
from chunkplan.tuning.options import TuneOptions
from chunkplan.tuning.tune import Tuning, tune

#: Little enough to look at in a moment.
_CHUNK_SIZES, _KS = (4096, 8192, 16384, 65536), (1, 4)


def headline(analysis: Analysis) -> Tuning:
    """A small tuning for Qwen2.5-7B on a node of eight H100s."""
    hardware = load_hardware("h100")
    options = TuneOptions(
        shape=QWEN2_5_7B,
        hardware=hardware,
        gpu_memory=hardware.memory_bytes,
        gpus=8,
        chunk_sizes=_CHUNK_SIZES,
        ks=_KS,
    )
    return tune(analysis, options)
