"""How long each action with each chunk takes on each model part: the one formula of time, whatever the model.

Times are whole nanoseconds, so that sums of them are exact and a plan is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from chunkplan.arrays import Int64Array, IntArray
from chunkplan.cost.model import CostModel
from chunkplan.cost.rates import Rates
from chunkplan.operations import OPS

Float64Array = npt.NDArray[np.float64]

#: Times end here, so that sums of a step's fit 64 bits: 104 days, for a chunk.
MOST_NS = 2.0**53


def squares_of(num_tokens: IntArray, prefix_tokens: IntArray) -> Float64Array:
    """The squares of segments of `num_tokens` that each see `prefix_tokens` earlier ones; both [n]."""
    tokens = num_tokens.astype(np.float64)
    return tokens * (2.0 * prefix_tokens + tokens)


def durations(num_tokens: IntArray, squares: Float64Array, rates: Rates, layers: Sequence[int]) -> Int64Array:
    """Time of each action, int64 [num_ops, num_parts, n], by the code of its op (its place in `operations.OPS`).

    Args:
        num_tokens, squares: [n], of each chunk, sums over its segments.
        layers: of each model part; the last one has the vocabulary head too.

    A chunk that keeps no activations needs no head when it is forwarded first, only when it is recomputed. A backward
    is its two halves: the gradients of inputs, attention among them, which the part before waits for, and those of
    weights.
    """
    times = np.empty((len(OPS), len(layers), num_tokens.size), np.int64)
    tokens = num_tokens.astype(np.float64)
    for part, num_layers in enumerate(layers):
        linear = num_layers * (rates.token * tokens + rates.chunk)
        layer_forward = linear + num_layers * rates.square * squares
        head = rates.head * tokens if part == len(layers) - 1 else 0.0
        backward = rates.layer_passes * layer_forward + 2 * head
        by_op = {
            "forward": layer_forward + head,
            "forward_kv": layer_forward,
            "recompute": layer_forward + head,
            "backward": backward,
            "backward_input": backward - linear - head,
            "backward_weight": linear + head,
        }
        for op, nanoseconds in by_op.items():
            least = 0.0 if op == "backward_weight" else num_layers * rates.gather
            times[OPS.index(op), part] = whole_ns(np.maximum(nanoseconds, least))
    return times


def work_ns(cost: CostModel, num_tokens: IntArray, squares: Float64Array) -> Int64Array:
    """Time of a forward and a backward through all model parts, without overhead and recompute; both [n]."""
    head = cost.rates.head * num_tokens.astype(np.float64)
    return whole_ns(cost.passes * _all_layers(cost, num_tokens, squares) + 3 * head)


def recompute_ns(cost: CostModel, num_tokens: IntArray, prefix_tokens: IntArray) -> Int64Array:
    """Time of what is done twice with segments whose chunks keep no activations, without overhead; both [n].

    That is a forward through all layers: the head is left out the first time, see `durations`.
    """
    return whole_ns(_all_layers(cost, num_tokens, squares_of(num_tokens, prefix_tokens)))


def _all_layers(cost: CostModel, num_tokens: IntArray, squares: Float64Array) -> Float64Array:
    rates = cost.rates
    return cost.shape.num_layers * (rates.token * num_tokens.astype(np.float64) + rates.square * squares)


def link_times(num_tokens: IntArray, rates: Rates) -> Int64Array:
    """Time of each chunk's way from one stage to the next, int64 [n]."""
    return whole_ns(rates.link + rates.link_token * num_tokens.astype(np.float64))


def whole_ns(nanoseconds: Float64Array) -> Int64Array:
    """Rounded, and no longer than sums allow."""
    return np.rint(np.minimum(nanoseconds, MOST_NS)).astype(np.int64)


def split_layers(num_layers: int, num_parts: int) -> tuple[int, ...]:
    """The layers of each model part, as even as they come; the last parts, the head's among them, have fewer."""
    return tuple(num_layers // num_parts + (part < num_layers % num_parts) for part in range(num_parts))
