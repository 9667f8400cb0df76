"""How many chunks of a group may hold activations: one K for all, or others for longer sequences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chunkplan.arrays import Int64Array, IntArray


def most_kept(num_tokens: IntArray, k: int, k_by_length: Sequence[Sequence[int]] | None) -> Int64Array:
    """K of sequences of `num_tokens` [n]: `k`, or that of the last of `k_by_length` whose length they exceed.

    `k_by_length` has pairs (tokens, K), ascending by tokens: sequences of more than that many tokens.
    """
    lengths = np.array([tokens for tokens, _ in k_by_length or ()], np.int64)
    values = np.array([k, *(longer for _, longer in k_by_length or ())], np.int64)
    return values[np.searchsorted(lengths, num_tokens, side="left")]
