"""Time of a forward pass from a model's shape: a linear part, a quadratic attention part, a fixed part for every chunk.

The formulas are the ones the field uses (FLOPs of the matrix products of a gated-MLP decoder; a backward pass is twice
its forward). Times are whole nanoseconds, so that sums of them are exact and a plan is the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chunkplan.arrays import Int64Array, IntArray

#: Times end here, so that sums of a step's fit 64 bits: 104 days, for a segment.
_MOST_NS = 2.0**53

#: A backward pass does two matrix products for each one of its forward pass.
BACKWARD = 2


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a dense decoder that its FLOPs depend on; widths count elements per token."""

    num_layers: int
    hidden_size: int
    query_width: int
    kv_width: int
    mlp_width: int
    vocab_size: int


QWEN2_5_7B = ModelShape(
    num_layers=28, hidden_size=3584, query_width=3584, kv_width=512, mlp_width=18944, vocab_size=152064
)


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Nanoseconds of a forward pass on one device that sustains `flops_per_second`.

    `chunk_overhead_ns` is what a chunk costs however few tokens it has: by default the launch of about 16 kernels a
    layer at 5 microseconds each, an estimate and not a measurement.
    """

    shape: ModelShape = QWEN2_5_7B
    flops_per_second: float = 400e12
    chunk_overhead_ns: int = 28 * 16 * 5000

    def coefficients(self) -> tuple[float, float]:
        """FLOPs of a whole sequence of t tokens are linear * t + quadratic * t^2 (causal attention)."""
        shape = self.shape
        per_token = 2 * shape.hidden_size * (2 * shape.query_width + 2 * shape.kv_width + 3 * shape.mlp_width)
        linear = float(shape.num_layers * per_token + 2 * shape.hidden_size * shape.vocab_size)
        return linear, 2.0 * shape.num_layers * shape.query_width

    def forward_ns(self, num_tokens: IntArray, prefix_tokens: IntArray) -> Int64Array:
        """Time of segments of `num_tokens` that each see `prefix_tokens` earlier ones; both [n]. Without overhead."""
        linear, quadratic = self.coefficients()
        tokens = num_tokens.astype(np.float64)
        flops = linear * tokens + quadratic * (2 * tokens * prefix_tokens + tokens * tokens)
        return np.rint(np.minimum(flops / self.flops_per_second * 1e9, _MOST_NS)).astype(np.int64)
