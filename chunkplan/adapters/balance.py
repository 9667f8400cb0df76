"""Balances sequences of known work over ranks and micro-batches: what the modules of all frameworks call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chunkplan.planning.whole import assign_step, fewest_micro_batches

#: Work is counted in this many parts of its sum, whatever its unit.
_PARTS = 1 << 52


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
    """
    exact = np.asarray(work, np.float64)
    parts = (exact * (_PARTS / max(float(exact.sum()), 1.0))).astype(np.int64)
    order = np.argsort(-parts, kind="stable")
    found = assign_step(
        np.asarray(lengths, np.int64)[order], parts[order], ranks, cap, count, equal_sequences=equal_sequences
    )
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
    fewest = max(-(-fewest_micro_batches(np.asarray(lengths, np.int64), cap) // ranks), least)
    for count in range(-(-fewest // multiple) * multiple, len(lengths) // ranks + 1, multiple):
        found = balance(lengths, work, ranks, count, cap)
        if found is not None:
            return found
    return None
