"""How long each action with each chunk takes on each model part: the one formula of time, whatever the model.

Times are whole nanoseconds, so that sums of them are exact and a plan is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from chunkplan.arrays import Int64Array, IntArray
from chunkplan.planfile.schema import OPS

Float64Array = npt.NDArray[np.float64]

#: Times end here, so that sums of a step's fit 64 bits: 104 days, for a chunk.
MOST_NS = 2.0**53


class Rates(NamedTuple):
    """Nanoseconds of a forward through one layer: a token, a square, and whatever a chunk takes beside these.

    `squares` of a segment of t tokens that sees p earlier ones are t (2 p + t), twice the pairs of a query and a key
    under a causal mask. `head` is a token's in the vocabulary head, on the last model part only. `layer_passes`: a
    backward takes as long as that many forwards of its layers (2, and 1 more where layers are recomputed inside it).
    `link_token` and `link` are a token's and a message's between two stages. `gather` is what fetching the weights of a
    layer takes where they are sharded: it goes on beside the work of the layer before, so nothing takes less.
    """

    token: float
    square: float
    chunk: float
    head: float = 0.0
    layer_passes: int = 2
    link_token: float = 0.0
    link: float = 0.0
    gather: float = 0.0


#: Forward 1 and backward 2 a token on every model part, of one layer each, and nothing for links.
UNIT = Rates(token=1.0, square=0.0, chunk=0.0)


def squares_of(num_tokens: IntArray, prefix_tokens: IntArray) -> Float64Array:
    """The squares of segments of `num_tokens` that each see `prefix_tokens` earlier ones; both [n]."""
    tokens = num_tokens.astype(np.float64)
    return tokens * (2.0 * prefix_tokens + tokens)


def durations(num_tokens: IntArray, squares: Float64Array, rates: Rates, layers: Sequence[int]) -> Int64Array:
    """Time of each action, int64 [num_ops, num_parts, n], by the code of its op (its place in `schema.OPS`).

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


def link_times(num_tokens: IntArray, rates: Rates) -> Int64Array:
    """Time of each chunk's way from one stage to the next, int64 [n]."""
    return whole_ns(rates.link + rates.link_token * num_tokens.astype(np.float64))


def whole_ns(nanoseconds: Float64Array) -> Int64Array:
    """Rounded, and no longer than sums allow."""
    return np.rint(np.minimum(nanoseconds, MOST_NS)).astype(np.int64)


def split_layers(num_layers: int, num_parts: int) -> tuple[int, ...]:
    """The layers of each model part, as even as they come; the last parts, the head's among them, have fewer."""
    return tuple(num_layers // num_parts + (part < num_layers % num_parts) for part in range(num_parts))
