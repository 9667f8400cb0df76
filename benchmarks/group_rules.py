"""How others share sequences among ranks: rules of theirs as functions of lengths, timed by our cost model.

Each says for one step when its slowest rank is done. All of them run sequences whole and keep all activations: none
recomputes, and what a GPU has room for is not looked at, so the most tokens that a rank has at once are reported.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from math import ceil, log2
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.balance.assign import assign
from chunkplan.cost.durations import Float64Array, attention_pairs_of, seen_pairs
from chunkplan.cost.exchange import exchange_times
from chunkplan.cost.model import CostModel
from chunkplan.packing import pack_lengths
from chunkplan.planning.sharing import head_degrees


class Step(NamedTuple):
    """When the slowest rank is done, in ns, and the most tokens of a chunk that a rank has."""

    ns: float
    tokens: int


#: The step of sequences of some lengths, int64 [n] descending.
Rule = Callable[[Int64Array], Step]


def chunk_ns(cost: CostModel, tokens: Int64Array, pairs: Float64Array, size: int) -> Float64Array:
    """Forward and backward of chunks of `tokens` [n] with so many attention pairs [n], on `size` ranks: [n].

    By heads and by pages as is fastest.
    """
    rates, num_layers = cost.rates, cost.shape.num_layers
    own = tokens / size
    seen = seen_pairs(rates, own, pairs / size)
    again = rates.again.token * own + rates.again.pair * seen
    work = sum(rates.of_work(own, seen), again) + cost.forward_equivalents * rates.chunk
    best = np.full(tokens.size, np.inf)
    for heads in head_degrees(size, cost):
        one = np.ones(tokens.size, np.int64)
        exchange = exchange_times(cost, tokens, 0 * tokens, one, size * one, heads * one, attention_pairs=pairs)
        best = np.minimum(best, work + exchange.forward + exchange.with_again(rates.again))
    return num_layers * best + rates.trained_head * tokens / size + rates.sums.of_chunk(num_layers)


def pairs_of(tokens: Int64Array) -> Float64Array:
    """The attention pairs of whole sequences of `tokens` [n]."""
    return attention_pairs_of(tokens, 0 * tokens)


def longest_first(work: Float64Array, num_bins: int) -> Int64Array:
    """Longest processing time first: the bin of each of `work` [n]."""
    order = np.argsort(-work, kind="stable")
    bins = np.empty(work.size, np.int64)
    whole = np.rint(work[order]).astype(np.int64)
    bins[order] = assign(whole, np.ones(work.size, np.bool_), np.zeros(num_bins, np.int64))
    return bins


def static_groups(cost: CostModel, dp: int, degree: int, chunk_size: int) -> Rule:
    """Make the rule of one degree of context parallelism for everything: dp / degree groups that run whole sequences.

    Sequences are assigned to groups by their time on one, and packed into chunks of `degree` x `chunk_size` tokens;
    longer ones are a chunk each.
    """

    def step(tokens: Int64Array) -> Step:
        group_of = longest_first(chunk_ns(cost, tokens, pairs_of(tokens), degree), dp // degree)
        slowest, most = 0.0, 0
        for group in range(dp // degree):
            own = tokens[group_of == group]
            if own.size == 0:
                continue
            fits = own <= degree * chunk_size
            bins = np.arange(own.size)
            if fits.any():
                bins[fits] = own.size + pack_lengths(own[fits], degree * chunk_size, "bfd", certify=False).bin_of
            chunk_tokens, chunk_pairs = _chunks(own, np.unique(bins, return_inverse=True)[1])
            slowest = max(slowest, float(chunk_ns(cost, chunk_tokens, chunk_pairs, degree).sum()))
            most = max(most, int(chunk_tokens.max()))
        return Step(slowest, -(-most // degree))

    return step


def skrull(cost: CostModel, dp: int, degree: int, bucket: int) -> Rule:
    """Make the rule of Skrull (arXiv 2505.19609): groups of `degree` ranks; a sequence is on one of them or on all.

    Simplified: a group's micro-batches are dealt from the longest sequence to the shortest, there and back, so that
    each has long and short ones; in each the shortest sequences come first, to the rank with least to do, while they
    fit its `bucket` of tokens, and what fits nowhere is spread over the group. Nothing is rolled back, and what spread
    sequences exchange hides behind their own attention only, not behind what is local.
    """
    shape = cost.shape
    linear = 20 * shape.hidden_size**2 + 4 * shape.hidden_size * shape.kinds[0].key_width

    def step(tokens: Int64Array) -> Step:
        work = linear * tokens.astype(np.float64) + 4.0 * shape.hidden_size * tokens.astype(np.float64) ** 2
        group_of = longest_first(work, dp // degree)
        found = [
            _skrull_group(cost, tokens[group_of == group], work[group_of == group], degree, bucket)
            for group in range(dp // degree)
        ]
        return Step(max(each.ns for each in found), max(each.tokens for each in found))

    return step


def _skrull_group(cost: CostModel, tokens: Int64Array, work: Float64Array, degree: int, bucket: int) -> Step:
    """The micro-batches of one group, one after another; `tokens` and `work` [n] descend."""
    num_batches = max(1, -(-int(tokens.sum()) // (degree * bucket)))
    turn = np.arange(tokens.size) % (2 * num_batches)
    batch_of = np.minimum(turn, 2 * num_batches - 1 - turn)
    ns, most = 0.0, 0
    for batch in range(num_batches):
        own = np.flatnonzero(batch_of == batch)[::-1]  # shortest first
        rank_of = np.full(own.size, degree)  # `degree`: spread over all
        loads, held = np.zeros(degree), np.zeros(degree, np.int64)
        for index, sequence in enumerate(own):
            rank = int(np.argmin(loads))
            if held[rank] + tokens[sequence] > bucket:
                continue
            rank_of[index] = rank
            loads[rank] += work[sequence]
            held[rank] += tokens[sequence]
        chunk_tokens, chunk_pairs = _chunks(tokens[own], rank_of, degree + 1)
        local = chunk_ns(cost, chunk_tokens[:degree], chunk_pairs[:degree], 1).max()
        spread = chunk_ns(cost, chunk_tokens[degree:], chunk_pairs[degree:], degree)[0] if chunk_tokens[-1] else 0.0
        ns += local + spread - (cost.chunk_ns if spread else 0)  # both are one chunk
        most = max(most, int(chunk_tokens[:degree].max() + -(-chunk_tokens[degree] // degree)))
    return Step(float(ns), most)


def _chunks(tokens: Int64Array, chunk_of: Int64Array, num_chunks: int = 0) -> tuple[Int64Array, Float64Array]:
    """The tokens and attention pairs of chunks, [num_chunks] both, that sequences of `tokens` [n] are packed into."""
    sums = np.bincount(chunk_of, weights=tokens, minlength=num_chunks).astype(np.int64)
    return sums, np.bincount(chunk_of, weights=pairs_of(tokens), minlength=num_chunks)


def megatron(source: Path, cost: CostModel, dp: int, most: int) -> Rule:
    """Make the rule of Megatron-LM's dynamic context parallelism, read from `source`, its `hybrid_cp_schedule.py`.

    As many ranks share a sequence as have room for it, `most` tokens each, a power of two. Ranks wait for each other
    after every round. What the same ranks have in a round is one chunk here, where Megatron runs it one by one.
    """
    scheduler = _scheduler_in(source)(most, SimpleNamespace(size=lambda: dp))

    def step(tokens: Int64Array) -> Step:
        _, rounds = scheduler.get_groups_and_subsamples(list(enumerate(tokens.tolist())), None)
        ns, longest = 0.0, 0
        for by_rank in rounds:
            ranks: dict[int, list[int]] = {}
            for rank, own in enumerate(by_rank):
                for sequence in own:
                    ranks.setdefault(sequence, []).append(rank)
            blocks: dict[tuple[int, ...], list[int]] = {}
            for sequence, shared_by in ranks.items():
                blocks.setdefault(tuple(shared_by), []).append(sequence)
            loads = np.zeros(dp)
            for block, sequences in blocks.items():
                chunk_tokens, chunk_pairs = _chunks(tokens[sequences], np.zeros(len(sequences), np.int64))
                loads[list(block)] += chunk_ns(cost, chunk_tokens, chunk_pairs, len(block))[0]
                longest = max(longest, -(-int(chunk_tokens[0]) // len(block)))
            ns += loads.max()
        return Step(float(ns), longest)

    return step


def _scheduler_in(source: Path) -> Any:
    """The class BalancedCPScheduler of a file, without what the file imports: the class itself needs little."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "BalancedCPScheduler"]
    if not classes:
        raise SystemExit(f"{source} has no class BalancedCPScheduler: it is in hybrid_cp_schedule.py of Megatron-LM")
    later = ast.parse("from __future__ import annotations").body  # so that no annotation is looked up
    names: dict[str, Any] = {"deque": deque, "lru_cache": lru_cache, "ceil": ceil, "log2": log2}
    exec(compile(ast.Module([*later, *classes], []), str(source), "exec"), names)
    return names["BalancedCPScheduler"]
