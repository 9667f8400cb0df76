"""Cuts sequences into parts of at most ChunkSize tokens, and counts the target tokens that are predicted in them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from chunkplan.arrays import BoolArray, Int64Array, IntArray, offsets_of, sum_runs
from chunkplan.config.plan import KByLength, PlanConfig, Split
from chunkplan.cost.durations import Float64Array, attention_pairs_of, recompute_ns, seen_pairs, whole_pairs, work_ns
from chunkplan.cost.model import CostModel
from chunkplan.cost.shape import FULL
from chunkplan.planning.ranks import SLICES, Sequences, Shares

#: Given a sequence_id, the target mask of that sequence, bool [num_tokens].
TargetMask = Callable[[int], BoolArray]


def cut_sequences(
    tokens: Int64Array, necessary_ns: Int64Array, config: PlanConfig, cost: CostModel, shares: Shares | None = None
) -> Sequences:
    """Cut sequences of `tokens` [n] that are longer than ChunkSize; the last K parts of each keep their activations.

    `necessary_ns` int64 [n]: time of each as a whole, without the overhead of chunks (`work_ns`). Ranks that share a
    sequence have a slice of each part each, and `work` is that of one rank.
    """
    if shares is None:
        shares = Shares.none(tokens.size)
    chunk_size = max_chunk_tokens(config.chunk_size, shares.size)  # [n]
    work = necessary_ns.copy()
    split = np.flatnonzero((tokens > chunk_size) | (shares.size > 1))
    num_parts, stops = split_sequences(tokens[split], chunk_size[split], config.split, cost, shares.size[split])
    index = np.arange(stops.size) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)  # [num_parts]
    starts = np.where(index == 0, 0, np.concatenate([[0], stops[:-1]]))  # [num_parts]
    k = k_for_length(tokens[split], config.k, config.k_by_length)
    keeps = index >= np.repeat(num_parts - k, num_parts)  # [num_parts]
    part_tokens = stops - starts  # [num_parts]
    pairs = attention_pairs_of(part_tokens, starts, cost.shape.attention_patterns)
    part_ns, again_ns = times_of_parts(part_tokens, pairs, config, cost)
    part_ns[~keeps] += again_ns[~keeps]
    work[split] = sum_runs(part_ns, offsets_of(num_parts))
    is_shared = shares.size > 1
    work[is_shared] = shares.work[is_shared]
    parts = np.zeros(tokens.size + 1, np.int64)
    parts[split + 1] = num_parts
    return Sequences(tokens, work, np.cumsum(parts), part_tokens, keeps, shares.size, shares.heads, shares.first_rank)


def times_of_parts(
    tokens: Int64Array, pairs: Float64Array, config: PlanConfig, cost: CostModel
) -> tuple[Int64Array, Int64Array]:
    """The time of parts with `tokens` and attention `pairs` in chunks of their own, in ns; all [num_parts].

    That of forward and backward, and of what those run again that keep no activations.
    """
    seen = seen_pairs(cost.rates, tokens.astype(np.float64), pairs)
    again = recompute_ns(cost, tokens, pairs, keeps_attention=config.keep_attention != "off")
    return work_ns(cost, tokens, seen) + cost.chunk_ns, again + cost.chunk_overhead_ns


def max_chunk_tokens(chunk_size: int, num_ranks: Int64Array) -> Int64Array:
    """The most tokens of a chunk such that each of `num_ranks` [n] ranks has at most ChunkSize.

    A rank may have two slices of a shared chunk, each of at most half of ChunkSize rounded down, as both may be rounded
    up.
    """
    halved = max(chunk_size // SLICES * SLICES, 1)
    most: Int64Array = np.where(num_ranks > 1, halved, chunk_size) * num_ranks
    return most


def k_for_length(num_tokens: IntArray, k: int, k_by_length: KByLength | None) -> Int64Array:
    """K of sequences of `num_tokens` [n]: `k`, or that of the last of `k_by_length` whose length they exceed.

    `k_by_length` has pairs (tokens, K), ascending by tokens: sequences of more than that many tokens.
    """
    lengths = np.array([tokens for tokens, _ in k_by_length or ()], np.int64)
    values = np.array([k, *(longer for _, longer in k_by_length or ())], np.int64)
    return values[np.searchsorted(lengths, num_tokens, side="left")]


def count_parts(lengths: Int64Array, chunk_size: int | Int64Array, split: Split, cost: CostModel) -> Int64Array:
    """Number of parts that `split_sequences` cuts sequences of `lengths` [n] into."""
    fewest = -(-lengths // chunk_size)
    if split != "cost" or not cost.shape.attention_patterns:
        return fewest
    equal = np.ceil(_time(lengths, cost) / _time(np.asarray(chunk_size), cost)).astype(np.int64)
    num_parts: Int64Array = np.minimum(np.maximum(equal, fewest), lengths)
    return num_parts


def split_sequences(
    lengths: Int64Array,
    chunk_size: int | Int64Array,
    split: Split,
    cost: CostModel,
    num_ranks: int | Int64Array = 1,
) -> tuple[Int64Array, Int64Array]:
    """Parts of at most `chunk_size` tokens (one or [n]): how many each sequence has, int64 [n], and where each stops.

    "full": every part but the last has ChunkSize tokens (ChunkFlow, arXiv 2503.02356, Algorithm 1). "even": as many
    parts, whose lengths differ by one at most. "cost": parts of equal predicted forward time: as few as keep the first,
    which attends to least and so is the longest, within ChunkSize. The last of n full parts does 2n - 1 times the
    attention of the first, so their number grows with the length squared. (Parts of equal length take their place in a
    sequence so long that some would have no token.)

    Where several of `num_ranks` (one or [n]) share a sequence, "full" cuts as "even" does, for every rank takes up to
    two slices of a part, none of which may be empty.
    """
    chunk_size, num_ranks = np.broadcast_to(chunk_size, lengths.shape), np.broadcast_to(num_ranks, lengths.shape)
    num_parts = count_parts(lengths, chunk_size, split, cost)
    sequence = np.repeat(np.arange(num_parts.size), num_parts)  # [num_parts]
    starts = np.cumsum(num_parts) - num_parts
    done = np.arange(sequence.size) - starts[sequence] + 1  # [num_parts], parts up to and with each
    even = done * lengths[sequence] // num_parts[sequence]
    if split == "full":
        full = np.minimum(done * chunk_size[sequence], lengths[sequence])
        return num_parts, np.where(num_ranks[sequence] > 1, even, full)
    if split == "even" or not cost.shape.attention_patterns:  # without attention all parts of a length take as long
        return num_parts, even
    stops = _tokens_within(_time(lengths, cost)[sequence] * (done / num_parts[sequence]), cost)
    stops[starts + num_parts - 1] = lengths
    sizes = np.diff(stops, prepend=0)
    sizes[starts] = stops[starts]
    least = np.where(num_ranks > 1, SLICES * num_ranks, 1)[sequence]
    is_odd = (sizes < least) | (sizes > chunk_size[sequence])
    lacking = np.bincount(sequence, weights=is_odd, minlength=lengths.size) > 0
    return num_parts, np.where(lacking[sequence], even, stops)


def _time(lengths: Int64Array, cost: CostModel) -> Float64Array:
    """Forward time of the first `lengths` tokens of a sequence, in attention pairs."""
    return cost.linear_to_attention_ratio * lengths + whole_pairs(cost, lengths)


def _tokens_within(time: Float64Array, cost: CostModel) -> Int64Array:
    """The most tokens of a sequence that take no longer than `time`: the inverse of `_time`, rounded down so that parts
    stay within ChunkSize."""
    ratio = cost.linear_to_attention_ratio
    if cost.shape.attention_patterns == FULL:  # ratio * t + t^2
        return np.floor((np.sqrt(ratio * ratio + 4 * time) - ratio) / 2).astype(np.int64)
    low, high = np.zeros(time.shape, np.int64), np.full(time.shape, 1 << 31, np.int64)  # low takes no longer, high does
    while (high - low > 1).any():
        middle = (low + high) // 2
        fits = _time(middle, cost) <= time
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    return low


def count_part_targets(
    sequence_ids: IntArray, starts: Int64Array, stops: Int64Array, lengths: Int64Array, mask: TargetMask | None
) -> Int64Array:
    """Predictions made in each part [start, stop) of a sequence of `length` tokens; all [num_parts], in order.

    The parts of a sequence follow one another. Without `mask` every token but a sequence's first is a target.
    """
    if mask is None:
        whole: Int64Array = stops - starts - (stops == lengths)
        return whole
    counts = np.empty(starts.size, np.int64)
    first = np.flatnonzero(starts == 0)
    for parts in np.split(np.arange(starts.size), first[1:]):
        if parts.size:
            counts[parts] = count_masked_targets(mask(int(sequence_ids[parts[0]])), starts[parts], stops[parts])
    return counts


def count_masked_targets(target: BoolArray, start: Int64Array, stop: Int64Array) -> Int64Array:
    """Predictions made in parts [start, stop) of a sequence with mask `target`: those in [start + 1, stop + 1).

    `target` bool [num_tokens]; the others and the result int64 [num_parts].
    """
    before = offsets_of(target)  # before[i]: targets among the first i tokens
    counts: Int64Array = before[np.minimum(stop + 1, target.size)] - before[start + 1]
    return counts
