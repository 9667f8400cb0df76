"""The action graph of a rank's stages: an order in which every action finds what it waits for, or where it stalls.

A model stage (virtual_stage x pp + stage) forwards a chunk after the model stage before it did, and backwards it after
the one behind it did. Within a stage actions run in the order they are written.
"""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import Int64Array

FORWARDS = frozenset({"forward", "forward_kv"})
#: A split backward sends its gradient on with the first half.
BACKWARDS = frozenset({"backward", "backward_input"})


def run_stages(offsets: Int64Array, pp: int, waits_for: Int64Array) -> Int64Array:
    """Do the actions of many ranks side by side, those of each stage one after another, and say where each stage ends.

    Args:
        offsets: int64 [num_ranks x pp + 1], where the actions of each stage of each rank begin.
        waits_for: int64 [num_actions], the action, of the same rank, that has to be done before; -1 for none.

    Returns:
        int64 [num_ranks x pp], the first action of each stage that waits for ever, or where its actions end.
    """
    position, stop = offsets[:-1].copy(), offsets[1:]
    done = np.zeros(waits_for.size + 1, bool)
    done[-1] = True
    moved = np.zeros(position.size // pp, np.int64)  # the last turn in which a stage of the rank went on
    active = np.flatnonzero(position < stop)
    turn = 0
    while active.size:
        turn += 1
        actions = position[active]
        ready = done[waits_for[actions]]
        going = active[ready]
        done[actions[ready]] = True
        position[going] += 1
        moved[going // pp] = turn
        active = active[(position[active] < stop[active]) & (moved[active // pp] == turn)]
    return position
