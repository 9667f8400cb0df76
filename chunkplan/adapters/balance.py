"""Balances sequences of known work over ranks and micro-batches: what the modules of all frameworks call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chunkplan.adapters import value_errors
from chunkplan.arrays import Int64Array
from chunkplan.planning.step import whole_numbers
from chunkplan.planning.whole import assign_step, fewest_micro_batches

#: Work is counted in this many parts of its sum, whatever its unit.
_PARTS = 1 << 52


def token_counts(lengths: Sequence[int]) -> Int64Array:
    """`lengths` as int64 [n].

    Raises:
        ValueError: one is no whole number from 1, or there are none.
    """
    with value_errors():
        return whole_numbers(lengths, "lengths", 1).astype(np.int64)


def balance(
    lengths: Sequence[int], work: Sequence[float], ranks: int, count: int, cap: int, *, equal_sequences: bool = False
) -> list[list[list[int]]] | None:
    """The places in `lengths` of the sequences of each micro-batch of each rank, ascending; None where none was found.

    Args:
        lengths: tokens of each sequence, [n].
        work: of each sequence, [n], in any unit. The heaviest rank gets as little as possible.
        ranks: how many ranks there are.
        count: micro-batches of each rank. None is empty: there are `ranks * count` sequences at least.
        cap: most tokens of a micro-batch.
        equal_sequences: whether every rank gets as many sequences; n is then a multiple of `ranks`.

    Raises:
        ValueError: a length is no whole number from 1, or some work no number from 0.
    """
    tokens, exact = token_counts(lengths), np.asarray(work, np.float64)
    wrong = np.flatnonzero(~(np.isfinite(exact) & (exact >= 0)))
    if wrong.size:
        raise ValueError(f"item {wrong[0]} is {work[wrong[0]]!r}, expected a number from 0; leave it out or mend it")
    parts = (exact * (_PARTS / max(float(exact.sum()), 1.0))).astype(np.int64)
    order = np.argsort(-parts, kind="stable")
    found = assign_step(tokens[order], parts[order], ranks, cap, count, equal_sequences=equal_sequences)
    if found is None:
        return None
    batches: list[list[list[int]]] = [[[] for _ in range(count)] for _ in range(ranks)]
    for place, rank, micro_batch in sorted(zip(order.tolist(), *(each.tolist() for each in found), strict=True)):
        batches[rank][micro_batch].append(place)
    return batches


def spread(lengths: Sequence[int], work: Sequence[float], count: int, cap: int) -> list[list[int]]:
    """The places of the sequences in each of `count` micro-batches of one rank, of work as even as the cap allows.

    None of them where more are needed, or there are fewer sequences.
    """
    apart = balance(lengths, work, count, 1, cap)
    if apart is not None:
        return [places for (places,) in apart]
    [together] = balance(lengths, work, 1, count, cap) or [[]]
    return together


def balance_in_fewest(
    lengths: Sequence[int], work: Sequence[float], ranks: int, cap: int, *, least: int = 1, multiple: int = 1
) -> list[list[list[int]]] | None:
    """Micro-batches of `balance`, as few a rank as hold the sequences: `least` or more, and a `multiple`.

    None where there are too few sequences for so many.
    """
    fewest = max(-(-fewest_micro_batches(token_counts(lengths), cap) // ranks), least)
    for count in range(-(-fewest // multiple) * multiple, len(lengths) // ranks + 1, multiple):
        found = balance(lengths, work, ranks, count, cap)
        if found is not None:
            return found
    return None
