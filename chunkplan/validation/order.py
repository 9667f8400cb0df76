"""The action graph over the stages of ranks: an order in which all find what they wait for, or where it stalls.

A model stage forwards a chunk after the model stage before it did, and backwards it after
the one behind it did. Within a stage actions run in the order they are written. What ranks do with a chunk that they
share they do together: that is one node of the graph, a *meeting*.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from chunkplan.arrays import Int64Array


class ActionGraph(NamedTuple):
    """What the actions of some stages wait for; int64.

    `offsets` [num_stages + 1]: where the actions of each stage begin. `unit` [num_stages]: stages wait for none but
    those with the same number. `waits_for` [num_actions]: the action that has to be done before, -1 for none.
    `meeting` [num_actions]: the meeting that each is part of, -1 for none.
    """

    offsets: Int64Array
    unit: Int64Array
    waits_for: Int64Array
    meeting: Int64Array


def run_stages(graph: ActionGraph) -> Int64Array:
    """Do the actions of many stages side by side, those of each stage one after another, and say where each ends.

    Returns:
        int64 [num_stages], the first action of each stage that waits for ever, or where its actions end.
    """
    position, stop = graph.offsets[:-1].copy(), graph.offsets[1:]
    done = np.zeros(graph.waits_for.size + 1, bool)
    done[-1] = True
    absent = np.append(np.bincount(graph.meeting[graph.meeting >= 0]), 0)  # of each meeting; the last one is none
    is_there = np.zeros(position.size, bool)  # at the meeting that the stage's action is part of
    moved = np.zeros(int(graph.unit.max(initial=-1)) + 1, np.int64)  # the last turn in which a stage of it went on
    active = np.flatnonzero(position < stop)
    turn = 0
    while active.size:
        turn += 1
        actions = position[active]
        ready, meeting = done[graph.waits_for[actions]], graph.meeting[actions]
        comes = ready & (meeting >= 0) & ~is_there[active]
        if comes.any():
            np.subtract.at(absent, meeting[comes], 1)
            is_there[active[comes]] = True
        ready &= absent[meeting] == 0
        going = active[ready]
        done[actions[ready]] = True
        is_there[going] = False
        position[going] += 1
        moved[graph.unit[going]] = turn
        active = active[(position[active] < stop[active]) & (moved[graph.unit[active]] == turn)]
    return position


def find_cycle(graph: ActionGraph, reached: Int64Array) -> list[int]:
    """Stages each of which waits for the next one, and the last one for the first; `reached`: see `run_stages`."""
    waiting = [int(np.argmax(reached < graph.offsets[1:]))]
    while (other := _stage_waited_for(graph, reached, int(reached[waiting[-1]]))) not in waiting:
        waiting.append(other)
    return waiting[waiting.index(other) :]


def _stage_waited_for(graph: ActionGraph, reached: Int64Array, action: int) -> int:
    """The stage that the one stalled at `action` waits for: at a link, or the first that is not at the meeting."""

    def stage_of(action: int) -> int:
        return int(np.searchsorted(graph.offsets, action, side="right")) - 1

    def is_ready(action: int) -> bool:
        needed = int(graph.waits_for[action])
        return needed < 0 or needed < reached[stage_of(needed)]

    if not is_ready(action):
        return stage_of(int(graph.waits_for[action]))
    members = np.flatnonzero(graph.meeting == graph.meeting[action]).tolist()
    return next(stage_of(each) for each in members if reached[stage_of(each)] != each or not is_ready(each))
