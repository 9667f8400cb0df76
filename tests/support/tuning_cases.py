"""Data and options of small tunings."""

from __future__ import annotations

from typing import Any

import numpy as np

from chunkplan.cost.hardware import load_hardware
from chunkplan.cost.shape import QWEN2_5_7B
from chunkplan.tuning.options import TuneOptions

GIB = 1 << 30


def long_tail(count: int, longest: int = 200_000, seed: int = 0) -> np.ndarray:
    """Many short sequences, few long ones."""
    tokens = np.random.default_rng(seed).lognormal(6.3, 1.5, count).astype(np.int32)
    return np.clip(tokens, 1, longest)


def options_with(**changes: Any) -> TuneOptions:
    given: dict[str, Any] = {
        "shape": QWEN2_5_7B,
        "hardware": load_hardware("h100"),
        "gpu_memory": 80 * GIB,
        "tp": 4,
        "pp": 2,
        "global_batch": 64,
        "chunk_sizes": (2048, 8192, 32768),
        "ks": (1, 4, 16),
        "schedules": ("1f1b",),
        "cp": "off",
        "thorough": True,
    }
    return TuneOptions(**(given | changes))
