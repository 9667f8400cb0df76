"""Decides which ranks share which sequences of a step: context-parallel groups (docs/context-parallel.md).

A sequence with more work than a rank's share of a step would keep the other ranks waiting. An aligned block of ranks
runs it together: each has a slice of its chunks, of ChunkSize tokens at most. Blocks are nested, and ranks start with
the sequences of the widest block, so that no rank waits for another: the ranks of a block have the same work until it
is done. What is left is to choose the number of ranks of each sequence, and the block: malleable jobs, widest first,
then longest processing time first (Turek, Wolf and Yu, SPAA 1992, bound the result of such a two-phase choice).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from chunkplan.arrays import BoolArray, Int64Array, offsets_of, sum_runs
from chunkplan.compiled import compiled, copy_to
from chunkplan.config.plan import PlanConfig
from chunkplan.cost.durations import attention_pairs_of, seen_pairs, whole_ns
from chunkplan.cost.exchange import exchange_times
from chunkplan.cost.model import CostModel
from chunkplan.planning.ranks import SLICES, Sequences, Shares
from chunkplan.planning.splitting import k_for_length, max_chunk_tokens, split_sequences

#: Sequences of less than this part of a rank's share of a step are not shared: others even out what they leave. Those
#: that fit a chunk do so themselves, unless they are a larger part of it.
_LEAST_PART, _LEAST_PART_OF_SHORT = 16, 4

#: Sharing is looked for where the slowest rank takes longer than the bound by more than one part in _GAP_PARTS of it.
_GAP_PARTS = 256

#: Time of a sequence on a number of ranks that may not share it.
_NEVER = np.int64(1) << 53

#: See `_near_enough`.
_CHUNK_SHARE = 48

#: Where ranks meet in slots, all of them share a sequence or none do, unless a step takes more than this many times as
#: long then: ranks that share with fewer have other chunks, and wait for each other in most slots.
_EVEN_SLOWDOWN = 1.08

#: When all ranks are to be done, in parts of the bound: each is tried.
_TARGETS = np.array([1.0, 1.005, 1.01, 1.02, 1.03, 1.05, 1.08, 1.12, 1.2, 1.3, 1.4, 1.55, 1.7, 2.0, 2.5])

#: The dearest sequences of a step, of which one at a time is shared by more or fewer ranks, and how many times.
_TRIED, _ROUNDS = 24, 24


def share_sequences(
    step_starts: Int64Array, sequences: Sequences, necessary_ns: Int64Array, config: PlanConfig, cost: CostModel
) -> tuple[Shares, Int64Array]:
    """Choose how ranks share the sequences of some steps, which `cut_sequences` has cut for one rank each.

    `necessary_ns` int64 [n]: time of each as a whole, without the overhead of chunks. Also returns a lower bound in ns
    of the slowest rank of any plan with group sizes of `config` and chunks of ChunkSize, int64 [num_steps]: the larger
    of the mean least work of ranks (each sequence on the number of ranks with least work, in as few chunks as its
    tokens fill), and the time of the longest sequence on the number of ranks that is fastest for it.
    """
    sizes, dp, chunk_ns = np.array(config.cp_sizes), config.dp, cost.chunk_ns
    num_parts = np.diff(sequences.parts)  # [n]
    is_short = num_parts == 0  # [n]
    alone = sequences.work + np.where(is_short, chunk_ns * sequences.tokens // config.chunk_size, 0)  # [n]
    step = np.repeat(np.arange(step_starts.size - 1), np.diff(step_starts))  # [n]
    least_part = np.where(is_short, _LEAST_PART_OF_SHORT, _LEAST_PART)  # [n]
    is_large = alone * (least_part * dp) > sum_runs(alone, step_starts)[step]  # [n]
    large = np.flatnonzero(is_large)  # [m]
    times = np.empty((sizes.size, large.size), np.int64)  # [num_sizes, m]
    heads = np.ones((sizes.size, large.size), np.int64)  # [num_sizes, m]
    times[0] = alone[large]
    work = necessary_ns.copy()  # [n]
    work[large] = sequences.work[large] - num_parts[large] * chunk_ns  # as it is cut: with what is recomputed of it
    for index, size in enumerate(sizes[1:].tolist(), 1):
        times[index], heads[index], num_chunks = shared_times(sequences.tokens[large], size, config, cost)
        is_possible = times[index] < _NEVER  # of others the product would not fit 64 bits
        least = size * np.where(is_possible, times[index] - num_chunks * chunk_ns, 0)
        work[large] = np.where(is_possible, np.minimum(work[large], least), work[large])
    num_chunks = np.maximum(-(-sum_runs(sequences.tokens, step_starts) // config.chunk_size), dp)  # [num_steps]
    bounds = (sum_runs(work, step_starts) + num_chunks * chunk_ns) // dp  # [num_steps]
    np.maximum.at(bounds, step[large], times.min(axis=0))

    chosen, first_rank = np.zeros(large.size, np.int64), np.full(large.size, -1)  # [m] both; places in `sizes`
    short_tokens = np.maximum(sum_runs(is_short * sequences.tokens, step_starts), 1)  # [num_steps]
    full_chunk = sum_runs(is_short * alone, step_starts) * config.chunk_size // short_tokens  # [num_steps]
    of_steps = (
        offsets_of(np.bincount(step[large], minlength=bounds.size)),
        SharingProblem(times, is_short[large], sizes, 0, 0, chunk_ns, 0, dp),
        sum_runs(~is_large * alone, step_starts),
        np.maximum(full_chunk, chunk_ns + 1),
        bounds,
    )
    slowest = _choose_steps(*of_steps, chosen, first_rank)
    if cost.shares("gradients") and sizes.size > 2:
        by_all, all_first = np.zeros(large.size, np.int64), np.full(large.size, -1, np.int64)  # [m] both
        ends = np.array([0, sizes.size - 1])
        few = of_steps[1]._replace(times=times[ends], sizes=sizes[ends])
        is_even = _choose_steps(of_steps[0], few, *of_steps[2:], by_all, all_first) <= _EVEN_SLOWDOWN * slowest
        chosen = np.where(is_even[step[large]], ends[by_all], chosen)
        first_rank = np.where(is_even[step[large]], all_first, first_rank)
    shares = Shares(*(np.copy(values) for values in Shares.none(sequences.tokens.size)))
    shares.size[large] = sizes[chosen]
    shares.heads[large] = heads[chosen, np.arange(large.size)]
    shares.first_rank[large] = first_rank
    shares.work[large] = times[chosen, np.arange(large.size)]
    return shares, bounds


def shared_times(
    tokens: Int64Array, size: int, config: PlanConfig, cost: CostModel
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Time of each of `size` ranks for sequences of `tokens` [m], in ns, ranks that share heads, and chunks.

    All int64 [m]. Of all ways to share a sequence by heads and by pages the fastest one.
    """
    ranks = np.full(tokens.size, size)
    num_parts, stops = split_sequences(tokens, max_chunk_tokens(config.chunk_size, ranks), config.split, cost, ranks)
    starts = offsets_of(num_parts)
    index = np.arange(stops.size) - np.repeat(starts[:-1], num_parts)  # [num_parts]
    begins = np.where(index == 0, 0, np.concatenate([[0], stops[:-1]]))  # [num_parts]
    k = k_for_length(tokens, config.k, config.k_by_length)
    is_again = index < np.repeat(num_parts - k, num_parts)  # [num_parts]
    own, rates, num_layers = stops - begins, cost.rates, cost.shape.num_layers
    more = rates.again.token - rates.frozen.token, rates.again.chunk - rates.frozen.chunk
    all_pairs = attention_pairs_of(own, begins, cost.shape.attention_patterns)  # [num_parts]
    pairs = seen_pairs(rates, own / size, all_pairs / size)
    of_work = rates.of_work(own / size, pairs)
    own_forward, own_backward = (work + passes * rates.chunk for passes, work in enumerate(of_work, 1))
    own_backward = own_backward + more[0] * own / size + more[1] + rates.again.pair * pairs
    best, by_heads = np.full(tokens.size, _NEVER), np.ones(tokens.size, np.int64)
    for heads in head_degrees(size, cost):
        degrees = np.array([size]), np.array([heads])
        exchange = exchange_times(cost, own, begins, index + 1, *degrees, attention_pairs=all_pairs)
        forward = again = num_layers * (own_forward + exchange.forward)
        if config.keep_attention != "off":
            again = num_layers * (rates.token * own / size + rates.chunk + exchange.by_heads)
        backward = num_layers * (own_backward + exchange.with_again(rates.again))
        head = rates.trained_head * own / size + rates.sums.of_chunk(num_layers)
        times = sum_runs(whole_ns(forward + is_again * again + backward + head), starts)
        by_heads[times < best] = heads
        best = np.minimum(best, times)
    least = np.minimum.reduceat(own, starts[:-1]) if own.size else own
    return np.where(least < SLICES * size, _NEVER, best), by_heads, num_parts


def head_degrees(size: int, cost: CostModel) -> list[int]:
    """Numbers of ranks, of `size`, that can share the key and value heads among them: only 1 with latents."""
    heads = 1 if cost.shape.keeps_latents else cost.shape.num_kv_heads // cost.tp
    return [degree for degree in range(1, size + 1) if size % degree == 0 and heads % degree == 0]


class SharingProblem(NamedTuple):
    """The large sequences of a step, and the total of the others, which can be divided at will to fill chunks.

    `times` int64 [num_sizes, m]: time of each on each of `sizes` [num_sizes] ranks; `is_short` bool [m]: true if it is
    packed with others unless shared. `rest`: time of all others, with the overhead of the chunks that they fill. A full
    chunk takes `full_chunk`, of which `chunk_ns` is overhead. `bound`: lower bound of the step. All in ns.
    """

    times: Int64Array
    is_short: BoolArray
    sizes: Int64Array
    rest: int
    full_chunk: int
    chunk_ns: int
    bound: int
    dp: int


@compiled
def _choose_steps(
    first: Int64Array,
    large: SharingProblem,
    rest: Int64Array,
    full_chunk: Int64Array,
    bounds: Int64Array,
    chosen: Int64Array,
    first_rank: Int64Array,
) -> Int64Array:
    """`choose_groups` for some steps: `large` are those of all of them, which begin at `first` [num_steps + 1].

    Returns when the ranks of each are done, [num_steps].
    """
    slowest = np.zeros(bounds.size, np.int64)
    for index in range(bounds.size):
        own = slice(first[index], first[index + 1])
        times, is_short = large.times[:, own], large.is_short[own]
        totals = rest[index], full_chunk[index], large.chunk_ns, bounds[index]
        slowest[index] = choose_groups(
            SharingProblem(times, is_short, large.sizes, *totals, large.dp), chosen[own], first_rank[own]
        )
    return slowest


@compiled
def choose_groups(problem: SharingProblem, chosen: Int64Array, first_rank: Int64Array) -> int:
    """Choose for each large sequence how many ranks share it, and which: writes `chosen` and `first_rank` [m].

    `chosen` are indices into `problem.sizes`, initially 0; `first_rank` is -1 for sequences that are not shared.
    Returns the time at which all ranks are done.
    """
    best = _assign_blocks(problem, chosen, first_rank, 2 * problem.bound)
    tried = chosen.copy()
    for target in _TARGETS:
        if best - problem.bound <= _near_enough(problem):
            break
        _degrees_for_target(problem, target * problem.bound, tried)
        slowest = _assign_blocks(problem, tried, first_rank, best)
        if slowest < best:
            best = slowest
            copy_to(chosen, tried)
    _improve(problem, best, chosen, first_rank)
    slowest = _assign_blocks(problem, chosen, first_rank, 0)
    first_rank[chosen == 0] = -1
    return slowest


@compiled
def _near_enough(problem: SharingProblem) -> int:
    """The excess over the bound within which a solution is accepted without further search.

    That ranks' last chunks are not full delays all of them, whatever is shared, by a part of `chunk_ns`; where this is
    much of a step, all is tried nevertheless.
    """
    return problem.bound // _GAP_PARTS + min(3 * problem.chunk_ns // 4, problem.bound // _CHUNK_SHARE)


@compiled
def _degrees_for_target(problem: SharingProblem, target: float, choice: Int64Array) -> None:
    """Choose for each sequence, longest first, the degree with least work that is done by `target`: writes `choice`.

    Where none are, by those that are done first.
    """
    sizes, dp = problem.sizes, problem.dp
    loads = np.zeros(dp, np.int64)
    for job in range(choice.size):
        found, first, is_late, least = 0, 0, True, np.int64(0)
        for index in range(sizes.size):
            size = sizes[index]
            block, before = 0, _max_load(loads, 0, size)
            for rank in range(size, dp, size):
                load = _max_load(loads, rank, size)
                if load < before:
                    block, before = rank, load
            end = before + problem.times[index, job]
            late = end > target
            value = end if late else problem.times[index, job] * size
            if index == 0 or (is_late and not late) or (late == is_late and value < least):
                found, first, is_late, least = index, block, late, value
        choice[job] = found
        loads[first : first + sizes[found]] += problem.times[found, job]


@compiled
def _max_load(loads: Int64Array, first: int, size: int) -> int:
    """The largest of a few loads; numpy would be slower."""
    most = loads[first]
    for rank in range(first + 1, first + size):
        most = max(most, loads[rank])
    return int(most)


@compiled
def _improve(problem: SharingProblem, best: int, choice: Int64Array, first_rank: Int64Array) -> None:
    """Change the degree of one of the longest sequences at a time, as long as that helps.

    Changes `choice`, which takes `best`.
    """
    for _ in range(_ROUNDS):
        if best - problem.bound <= _near_enough(problem):
            return
        found, to = -1, 0
        least = best - problem.bound // (4 * _GAP_PARTS)
        total = problem.rest
        for job in range(choice.size):
            total += problem.sizes[choice[job]] * problem.times[choice[job], job]
        for job in range(min(choice.size, _TRIED)):
            before = choice[job]
            others = total - problem.sizes[before] * problem.times[before, job]
            for index in range(problem.sizes.size):
                if index == before or problem.times[index, job] >= best:
                    continue
                if (others + problem.sizes[index] * problem.times[index, job]) // problem.dp >= least:
                    continue
                choice[job] = index
                slowest = _assign_blocks(problem, choice, first_rank, least)
                if slowest < least:
                    least, found, to = slowest, job, index
            choice[job] = before
        if found < 0:
            return
        choice[found] = to
        best = least


@compiled
def _assign_blocks(problem: SharingProblem, choice: Int64Array, first_rank: Int64Array, enough: int) -> int:
    """Assign sequences of given degrees to blocks of ranks, and fill up with the rest: returns the end of all ranks.

    Widest blocks first, and of one width the dearest sequence first, into the block that has least; each then begins at
    the rank that `first_rank` gets. A time that is not below `enough` may be too small.
    """
    loads, packed = np.zeros(problem.dp, np.int64), np.zeros(problem.dp, np.int64)
    for index in range(problem.sizes.size - 1, -1, -1):
        size = problem.sizes[index]
        for job in range(choice.size):
            if choice[job] != index:
                continue
            first = 0
            for rank in range(0, problem.dp, size):
                if loads[rank] < loads[first]:
                    first = rank
            first_rank[job] = first
            loads[first : first + size] += problem.times[index, job]
            if index == 0 and problem.is_short[job]:
                packed[first] += problem.times[0, job]
    level = max(int(loads.max()), (int(loads.sum()) + problem.rest) // problem.dp)
    return level if level >= enough else _water_fill(problem, loads, packed, level, enough)


@compiled
def _water_fill(problem: SharingProblem, loads: Int64Array, packed: Int64Array, level: int, enough: int) -> int:
    """The end of all ranks with `loads` [dp] filled up with the rest, whose last chunks are not full.

    `packed` [dp]: what of the loads is packed with the rest. `enough` where they are not done before it.
    """
    low, high = level, level + problem.chunk_ns
    if enough <= high and not _fits(problem, loads, packed, enough - 1):
        return enough
    while high - low > problem.bound // (4 * _GAP_PARTS):
        middle = (low + high) // 2
        if _fits(problem, loads, packed, middle):
            high = middle
        else:
            low = middle
    return high


@compiled
def _fits(problem: SharingProblem, loads: Int64Array, packed: Int64Array, end: int) -> bool:
    """True if ranks filled up with the rest are done by `end`; see `_water_fill`."""
    linear = 1 - problem.chunk_ns / problem.full_chunk
    room = 0.0
    for rank in range(problem.dp):
        num_full, left = divmod(end - loads[rank] + packed[rank], problem.full_chunk)
        own = num_full * problem.full_chunk + max(0, left - problem.chunk_ns) / linear - packed[rank]
        if own < 0:
            return False
        room += own
    return bool(room >= problem.rest)
