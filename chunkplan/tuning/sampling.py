"""A few steps of a dataset that stand for all of them, and those that need most memory.

They are steps of the plan itself: the same shuffle, cut into the same global batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from chunkplan.arrays import Int32Array, Int64Array, offsets_of
from chunkplan.config.plan import PlanConfig
from chunkplan.cost.durations import Float64Array, whole_pairs, work_ns
from chunkplan.cost.model import CostModel
from chunkplan.planning.batches import SampleGroups, epoch_steps

#: Length classes end at powers of two, the first one here or, where that is smaller, at ChunkSize.
_FIRST_CLASS = 1024


class LengthClass(NamedTuple):
    """Sequences of more than `over` tokens, up to the next class; `step`, of the sample, has the longest of them."""

    over: int
    longest: int
    step: int


@dataclass(frozen=True)
class Sample:
    """Steps, each with its sequences.

    `num_tokens` int32 [n], step after step; `sizes` int64 [num_steps], sequences of each; `weights` [num_steps], the
    share of all steps that each stands for, 0 of those that are here for their memory only. `classes` ascend by length.
    `has_reference`: as in `Dataset`.
    """

    num_tokens: Int32Array
    sizes: Int64Array
    weights: Float64Array
    classes: tuple[LengthClass, ...]
    has_reference: bool = False

    @property
    def tokens_per_step(self) -> float:
        """Tokens of a step, on average over all steps."""
        return float(self.weights @ np.add.reduceat(self.num_tokens.astype(np.float64), self.first_of_step[:-1]))

    def attention_pairs_per_step(self, cost: CostModel) -> float:
        """Attention pairs of a step, on average over all steps, see `attention_pairs_of`."""
        return float(self.weights @ np.add.reduceat(whole_pairs(cost, self.num_tokens), self.first_of_step[:-1]))

    @property
    def first_of_step(self) -> Int64Array:
        """Offsets of each step's sequences, int64 [num_steps + 1]."""
        return offsets_of(self.sizes)


def sample_steps(
    num_tokens: Int32Array,
    config: PlanConfig,
    cost: CostModel,
    num_strata: int,
    num_heaviest: int = 0,
    groups: SampleGroups | None = None,
) -> Sample:
    """Choose steps of the first epoch of a plan of sequences of `num_tokens` with seed and global batch of `config`.

    Steps are sorted by their work and cut into `num_strata` strata of equal work; each is stood for by the step whose
    work is nearest to its mean. The few steps with long sequences, which take much of the time, so count as what they
    are. Added are the steps with the longest sequence of each length class, and the `num_heaviest` with most work.
    `groups`: sequences that come in one step.
    """
    order, sizes = epoch_steps(np.ones(num_tokens.size, np.int32), config, 0, groups)
    first = np.cumsum(sizes) - sizes
    tokens = num_tokens[order]
    work = np.add.reduceat(work_ns(cost, tokens, whole_pairs(cost, tokens)).astype(np.float64), first)
    steps, weights = _stratify(work, num_strata)
    classes = []
    heaviest = np.argsort(-work, kind="stable")[:num_heaviest]
    extra: list[int] = [int(step) for step in heaviest if step not in set(steps.tolist())]
    over = min(_FIRST_CLASS, 1 << config.chunk_size.bit_length() - 1)
    position = {int(step): index for index, step in enumerate([*steps, *extra])}
    while over < tokens.max():
        members = np.where((tokens > over) & (tokens <= 2 * over), tokens, 0)
        longest = int(members.argmax())
        if members[longest]:
            step = int(np.searchsorted(first, longest, side="right")) - 1
            if step not in position:
                position[step] = steps.size + len(extra)
                extra.append(step)
            classes.append(LengthClass(over, int(tokens[longest]), position[step]))
        over *= 2
    chosen = np.concatenate([steps, np.array(extra, np.int64)])
    return Sample(
        num_tokens=np.concatenate([tokens[first[step] : first[step] + sizes[step]] for step in chosen]),
        sizes=sizes[chosen],
        weights=np.concatenate([weights, np.zeros(len(extra))]),
        classes=tuple(classes),
    )


def _stratify(work: Float64Array, num_strata: int) -> tuple[Int64Array, Float64Array]:
    """Return at most `num_strata` steps, and the share of all steps that each stands for."""
    if work.size <= num_strata:
        return np.arange(work.size), np.full(work.size, 1 / work.size)
    order = np.argsort(work, kind="stable")
    done = np.cumsum(work[order])
    stratum = np.minimum(((done - work[order] / 2) / done[-1] * num_strata).astype(np.int64), num_strata - 1)
    steps, weights = [], []
    for members in np.split(order, np.flatnonzero(np.diff(stratum)) + 1):
        steps.append(members[np.abs(work[members] - work[members].mean()).argmin()])
        weights.append(members.size / work.size)
    return np.array(steps, np.int64), np.array(weights)


def length_class(num_tokens: int) -> int:
    """Return the power of two that a sequence does not exceed."""
    return 1 << max(num_tokens - 1, 0).bit_length()


def token_histogram(num_tokens: npt.NDArray[np.int32]) -> dict[int, float]:
    """Return the share of all tokens in sequences of up to each power of two, from the shortest to the longest."""
    tokens = num_tokens.astype(np.float64)
    exponent = np.ceil(np.log2(np.maximum(tokens, 1))).astype(np.int64)
    sums = np.bincount(exponent, weights=tokens)
    return {1 << power: float(share) for power, share in enumerate(sums / max(tokens.sum(), 1)) if share > 0}
