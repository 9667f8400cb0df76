"""Losses of a step by sequence and by source, and a look-out for spikes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

import numpy as np

from chunkplan.planfile.analysis import Analysis
from chunkplan_runtime.execution.loss import SequenceLoss

#: How many losses the median is of, and how few are too few for one.
_WINDOW, _FEWEST = 50, 5


def source_losses(losses: Sequence[SequenceLoss], analysis: Analysis) -> dict[str, float]:
    """The mean loss of a target token, by path of the source, of sources that have some."""
    sources = analysis.manifest.get("sources") or []
    if not sources:
        return {}
    source = analysis.source[[loss.sequence_id for loss in losses]]
    sums = np.bincount(source, [loss.loss for loss in losses], len(sources))
    counts = np.bincount(source, [loss.num_target_tokens for loss in losses], len(sources))
    return {sources[i]["path"]: float(sums[i] / counts[i]) for i in np.flatnonzero(counts)}


def add_up(losses: Sequence[SequenceLoss]) -> list[SequenceLoss]:
    """One entry a sequence, ascending: processes that share one have each the loss of its own slices."""
    sums: dict[int, SequenceLoss] = {}
    for each in sorted(losses, key=lambda loss: loss.sequence_id):
        before = sums.get(each.sequence_id, SequenceLoss(each.sequence_id, 0.0, 0))
        num_target_tokens = before.num_target_tokens + each.num_target_tokens
        sums[each.sequence_id] = SequenceLoss(each.sequence_id, before.loss + each.loss, num_target_tokens)
    return list(sums.values())


def mean_loss(loss: SequenceLoss) -> float:
    """The mean loss of a target token of a sequence; 0 without target tokens."""
    return loss.loss / max(loss.num_target_tokens, 1)


def describe_worst(losses: Sequence[SequenceLoss], analysis: Analysis, most: int = 3) -> list[str]:
    """The sequences whose loss is not finite, else those with the highest, in words."""
    broken = [loss for loss in losses if not math.isfinite(loss.loss)]
    worst = broken or sorted(losses, key=mean_loss, reverse=True)
    words = [
        f"sequence {loss.sequence_id} ({analysis.place(loss.sequence_id)}), loss {mean_loss(loss):.4g}"
        for loss in worst[:most]
    ]
    return words + ([f"and {len(broken) - most} more"] if len(broken) > most else [])


class SpikeWatch:
    """Knows the losses of the last steps; a loss above `factor` times their median is a spike, with 0 none is."""

    def __init__(self, factor: float, losses: Sequence[float] = ()) -> None:
        self._factor = factor
        self._losses = deque(losses, maxlen=_WINDOW)

    @property
    def losses(self) -> list[float]:
        """The losses of the last steps, for a checkpoint."""
        return list(self._losses)

    def is_spike(self, loss: float) -> bool:
        """Whether a step's loss is a spike beside those before; from then on it is one of them."""
        enough = self._factor > 0 and len(self._losses) >= _FEWEST
        spike = enough and loss > self._factor * median(self._losses)
        self._losses.append(loss)
        return spike
