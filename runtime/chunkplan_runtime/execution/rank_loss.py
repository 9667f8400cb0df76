"""What a rank lost in a step, by sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from chunkplan_runtime.feed.stream import NO_TARGET, RankWork


@dataclass(frozen=True)
class SequenceLoss:
    """The loss of one sequence in a step: summed over its `num_target_tokens`.

    More than one rank may have it: because it occurs more than once, or because they share it.
    """

    sequence_id: int
    loss: float
    num_target_tokens: int


@dataclass(frozen=True)
class RankLoss:
    """What a rank lost in a step: `loss` is its share of the mean over the step's target tokens."""

    loss: float
    sequences: list[SequenceLoss]


def rank_loss(work: RankWork, losses: dict[int, Tensor], num_target_tokens: int) -> RankLoss:
    """Sum losses of tokens, [num_tokens] by chunk_id, by sequence; they come from the device at once."""
    order = [chunk_id for chunk_id in sorted(losses) if work.chunks[chunk_id].segments]
    if not order:
        return RankLoss(0.0, [])
    by_token = torch.cat([losses[chunk_id] for chunk_id in order]).double().cpu().numpy()
    is_target = torch.cat([work.tensors[chunk_id].labels for chunk_id in order]).numpy() != NO_TARGET
    spans = [span for chunk_id in order for span in work.tensors[chunk_id].spans]
    lengths = np.array([span.stop - span.start for span in spans])  # [num_spans]
    starts = np.cumsum(lengths) - lengths
    sequence_ids, which = np.unique([span.sequence_id for span in spans], return_inverse=True)
    sums = np.bincount(which, np.add.reduceat(by_token, starts))
    counts = np.bincount(which, np.add.reduceat(is_target.astype(np.int64), starts)).astype(np.int64)
    sequences = [
        SequenceLoss(*values) for values in zip(sequence_ids.tolist(), sums.tolist(), counts.tolist(), strict=True)
    ]
    return RankLoss(float(by_token.sum()) / max(num_target_tokens, 1), sequences)
