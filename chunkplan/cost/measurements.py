"""What is measured on a device to calibrate the cost model: times of chunks, and what the device does on its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from chunkplan.cost.attention_rates import AttentionRates
from chunkplan.cost.durations import attention_pairs_of
from chunkplan.cost.shape import FULL, Sight


@dataclass(frozen=True, kw_only=True)
class ChunkTime:
    """How long a chunk of `segments` takes, the first of which sees `prefix_tokens` earlier ones; in nanoseconds.

    `forward_kv_ns` is a forward without the loss that keeps no activations, `train_ns` a forward and a backward, with
    the loss. `spread` says how far repetitions of the latter are apart: their median distance from their median, as a
    share of it.
    """

    segments: tuple[int, ...]
    prefix_tokens: int
    forward_kv_ns: float
    train_ns: float
    spread: float

    @property
    def num_tokens(self) -> int:
        """The tokens of all segments."""
        return sum(self.segments)

    def attention_pairs(self, sights: Sequence[Sight] = FULL) -> float:
        """The attention pairs of all segments, see `durations.attention_pairs_of`."""
        prefixes = np.array([self.prefix_tokens] + [0] * (len(self.segments) - 1))
        return float(attention_pairs_of(np.array(self.segments), prefixes, sights).sum())


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """What a device does on its own, per second.

    `flops` and `fp32_flops` of a large matrix product in bf16 and in float32, `copy_bytes` read and written by a large
    copy, `host_bytes` of one to host memory or back. `layer_overhead_ns`: a forward of a layer so narrow that it has
    next to nothing to compute. `attention`: in the precision of the chunks, by size of heads, the model's own first.
    """

    device: str
    flops: float
    fp32_flops: float
    copy_bytes: float
    host_bytes: float
    layer_overhead_ns: float
    memory_bytes: int
    attention: tuple[AttentionRates, ...]
