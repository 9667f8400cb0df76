"""Batches: every epoch is shuffled and cut into global batches, the steps, of which some are planned at a time.

Sequences that come in one step, such as a preference pair, are a *group*: an epoch then shuffles groups, and a step
takes whole groups in that order while they fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from chunkplan.arrays import Int32Array, Int64Array, offsets_of
from chunkplan.compiled import compiled
from chunkplan.config.plan import PlanConfig

#: Random numbers drawn at once: fresh memory costs more time than drawing them.
_KEYS = 1 << 16

#: Sequences and steps of a block, at most, unless a single step has more: (step, tokens, position) of each sequence
#: then fits 63 bits; and steps times ranks times stages. Larger blocks waste less time between them; small ones do
#: where each step takes long, and progress is told block by block.
BLOCK_SEQUENCES, BLOCK_STEPS, BLOCK_STAGES = 1 << 18, 1 << 13, 1 << 13
SLOW_BLOCK_SEQUENCES = 1 << 10


@dataclass(frozen=True)
class StepBlock:
    """Steps `first_step`.. of an epoch: the sequence ids of all, and how many each has."""

    first_step: int
    epoch: int
    sequence_ids: Int32Array
    sizes: Int64Array


class SampleGroups(NamedTuple):
    """Sequences by the group that they come in: those of all groups, int32 [num_sequences], and where each begins.

    `starts` int64 [num_groups + 1]; groups are in order of their first sequence.
    """

    members: Int32Array
    starts: Int64Array

    @classmethod
    def of(cls, group: Int64Array | None) -> SampleGroups | None:
        """The groups of sequences by the first of each, [num_sequences]; None where there are none."""
        if group is None:
            return None
        members = np.argsort(group, kind="stable")
        starts = np.flatnonzero(np.diff(group[members], prepend=-1, append=-1))
        return cls(members.astype(np.int32), starts)


def epoch_order(copies: Int32Array, seed: int, epoch: int) -> Int32Array:
    """A shuffle, of its own for every (seed, epoch), of `copies` [num_sequences] of each sequence: their ids.

    A Fisher-Yates shuffle (Durstenfeld 1964) on PCG64's raw stream, which numpy keeps stable between versions as it
    does not `permutation`.
    """
    order = np.arange(copies.size, dtype=np.int32)
    if not copies.min() == copies.max() == 1:
        order = np.repeat(order, copies)
    stream = np.random.PCG64(np.random.SeedSequence([seed, epoch]))
    for stop in range(order.size, 0, -_KEYS):
        _shuffle(order, stop, stream.random_raw(min(stop, _KEYS)))
    return order


@compiled
def _shuffle(order: Int32Array, stop: int, keys: npt.NDArray[np.uint64]) -> None:
    """Exchange order[stop - 1] with any up to it, and so on downwards, one for every key."""
    for key in keys:
        stop -= 1
        other = np.int64(key % np.uint64(stop + 1))
        order[stop], order[other] = order[other], order[stop]


def batch_sizes(num_sequences: int, config: PlanConfig) -> Int64Array:
    """Sequences of each step of an epoch of `num_sequences`, int64 [num_steps]; only the last one may be short."""
    full, rest = divmod(num_sequences, config.global_batch)
    return np.array([config.global_batch] * full + ([rest] if rest and config.last_batch == "keep" else []), np.int64)


def epoch_steps(
    copies: Int32Array, config: PlanConfig, epoch: int, groups: SampleGroups | None = None
) -> tuple[Int32Array, Int64Array]:
    """The sequence ids of an epoch, step after step, and how many each step has, int64 [num_steps].

    A step ends before the first group that does not fit into `global_batch`. The last one is dropped, where short ones
    are, if the smallest group of the epoch would still fit.
    """
    if groups is None:
        order = epoch_order(copies, config.seed, epoch)
        sizes = batch_sizes(order.size, config)
        return order[: sizes.sum()], sizes
    order = epoch_order(copies[groups.members[groups.starts[:-1]]], config.seed, epoch)  # of groups
    counts = np.diff(groups.starts)[order]
    sizes = _fill_steps(counts, config.global_batch)
    if config.last_batch == "drop" and sizes.size and sizes[-1] + counts.min() <= config.global_batch:
        sizes = sizes[:-1]
    places = np.arange(counts.sum()) + np.repeat(groups.starts[order] - offsets_of(counts)[:-1], counts)
    return groups.members[places[: sizes.sum()]], sizes


@compiled
def _fill_steps(counts: Int64Array, most: int) -> Int64Array:
    """Sequences of each step that takes whole groups of `counts` sequences in order while they are at most `most`."""
    sizes, num_steps = np.zeros(counts.size, np.int64), 1
    for count in counts:
        num_steps += sizes[num_steps - 1] + count > most
        sizes[num_steps - 1] += count
    return sizes[:num_steps]


def step_blocks(
    copies: Callable[[int], Int32Array], config: PlanConfig, groups: SampleGroups | None = None
) -> Iterator[StepBlock]:
    """The steps of all epochs, as many together as fit a block. No step spans two epochs."""
    is_slow = config.balance == "search" or config.packing not in ("auto", "bfd")
    most_sequences = SLOW_BLOCK_SEQUENCES if is_slow else BLOCK_SEQUENCES
    most_steps = 1 if config.schedule == "search" else min(BLOCK_STAGES // (config.dp * config.pp), BLOCK_STEPS)
    per_block = max(1, min(most_sequences // config.global_batch, most_steps))
    first_step = 0
    for epoch in range(config.epochs):
        order, sizes = epoch_steps(copies(epoch), config, epoch, groups)
        starts = offsets_of(sizes)
        for step in range(0, sizes.size, per_block):
            block_sizes = sizes[step : step + per_block]
            start, stop = starts[step], starts[step + block_sizes.size]
            yield StepBlock(first_step + step, epoch, order[start:stop], block_sizes)
        first_step += sizes.size


def longest_first(block: StepBlock, num_tokens: Int32Array) -> tuple[Int32Array, Int64Array]:
    """The sequence ids of a block and their tokens, those of each step descending; equal ones stay in order.

    Sorts (step, -tokens, position) packed into one integer, which is several times faster than an indirect sort.
    """
    num_bits = int(block.sequence_ids.size).bit_length()
    longest = np.iinfo(np.int32).max
    step = np.repeat(np.arange(block.sizes.size), block.sizes)
    keys = (step << 31) + (longest - num_tokens[block.sequence_ids])
    keys = (keys << num_bits) + np.arange(block.sequence_ids.size)
    keys.sort()
    ids: Int32Array = block.sequence_ids[keys & ((1 << num_bits) - 1)]
    tokens: Int64Array = longest - ((keys >> num_bits) & longest)
    return ids, tokens
