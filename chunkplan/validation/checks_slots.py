"""The invariant of slots: all ranks of a stage walk through one list of them, and nothing deadlocks.

As the other checks it shares no code with the planner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from chunkplan.arrays import BoolArray, Int64Array, offsets_of, run_starts
from chunkplan.operations import OPS
from chunkplan.validation.checks_schedule import Complaint, op_of_chunk, waits_for
from chunkplan.validation.schedule_columns import RankBlock, ranges

#: What a slot is for, by the op of any action in it: all that goes forward through layers may be in one.
_FOR = np.array([0 if op in ("forward", "forward_kv", "recompute") else code for code, op in enumerate(OPS)])


def check_slots(block: RankBlock) -> Complaint | None:
    """Slots go up on every stage of a rank, each has an action, and all actions in one are alike.

    Ranks that share a chunk do it in one slot, and stages that walk through their slots do not wait for each other for
    ever. Steps of which a rank is broken otherwise are left out.
    """
    dp, place = block.columns.config.dp, block.ranks.place
    if dp == 1 or not place.size:
        return None
    is_whole: BoolArray = np.bincount(place // dp)[place // dp] == dp
    if is_whole.all():
        return _check(block, block.rank // dp * block.pp + block.stage)
    found, kept = check_slots(block.without(~is_whole)), np.flatnonzero(is_whole)
    if found is None:
        return None
    bad = np.zeros(block.num_ranks, bool)
    bad[kept] = found.bad
    return replace(found, rank=int(kept[found.rank]), bad=bad)


def _check(block: RankBlock, unit: Int64Array) -> Complaint | None:
    """The same of whole steps; `unit` int64 [num_actions]: a number for the step and stage of each action."""
    num_slots, num_actions = block.schedule.num_slots[block.ranks.rows.ravel()], np.diff(block.action_offsets)
    if (other := num_slots != num_actions).any():
        row = int(np.argmax(other))  # a stage of a rank
        message = f"stage {row % block.pp} has {num_slots[row]} slots for {num_actions[row]} actions"
        return replace(_complaint(block, np.repeat(other, num_actions), str), message=message, chunk_id=None)
    slots, within = block.schedule.slots[block.action_rows], np.ones(unit.size, bool)
    within[block.action_offsets[:-1]] = False
    before = np.where(within, np.roll(slots, 1), -1)
    if (found := slots <= before).any():
        return _complaint(block, found, lambda at: f"in slot {slots[at]}, expected one from {before[at] + 1} on")
    order = np.lexsort((slots, unit))
    is_new = np.diff(unit[order] << 32 | slots[order], prepend=-1) != 0  # [num_actions]
    node = np.empty(unit.size, np.int64)  # [num_actions], the slot of each, counted over all stages
    node[order] = np.cumsum(is_new) - 1
    stages = offsets_of(np.bincount(unit[order[is_new]]))  # where the slots of each stage of each step begin
    if (found := node - stages[unit] != slots).any():
        return _complaint(block, found, lambda at: f"in slot {slots[at]}, but no action is in one before it")
    first = order[is_new][node]  # [num_actions], one in the same slot
    if (found := (_FOR[block.op] != _FOR[block.op[first]]) | (block.virtual_stage != block.virtual_stage[first])).any():
        return _complaint(
            block,
            found,
            lambda at: f"in slot {slots[at]}, in which another rank does {op_of_chunk(block, int(first[at]))}",
        )
    met = np.flatnonzero(block.meeting >= 0)
    met = met[np.argsort(block.meeting[met], kind="stable")]
    leader = met[run_starts(block.meeting[met])]  # one that shares the chunk
    found = np.zeros(unit.size, bool)
    found[met] = slots[met] != slots[leader]
    if found.any():
        return _complaint(block, found, lambda at: f"in slot {slots[at]}, a rank that shares it in another")
    reached = _walk(stages, node, waits_for(block))
    if (found := node == reached[unit]).any():
        return _complaint(block, found, lambda at: f"in slot {slots[at]}, which is never over: a deadlock")
    return None


def _walk(stages: Int64Array, node: Int64Array, needed: Int64Array) -> Int64Array:
    """Do the slots of all stages, those of each one after another, and say which one of each never ends.

    Args:
        stages: int64 [num_units + 1], where the slots of each stage of each step begin.
        node, needed: int64 [num_actions], the slot of each action, and the action that it waits for (-1: none).

    Returns:
        int64 [num_units]: that slot, or where those of the stage end.
    """
    position, stop = stages[:-1].copy(), stages[1:]
    waiting = np.flatnonzero(needed >= 0)
    sender, receiver = node[needed[waiting]], node[waiting]
    receiver = receiver[np.argsort(sender, kind="stable")]
    sent = offsets_of(np.bincount(sender, minlength=stages[-1]))  # where what waits for each slot begins
    missing = np.bincount(receiver, minlength=stages[-1])
    active = np.flatnonzero(position < stop)
    while (going := active[missing[position[active]] == 0]).size:
        done = position[going]
        np.subtract.at(missing, receiver[ranges(sent[done], sent[done + 1] - sent[done])], 1)
        position[going] += 1
        active = active[position[active] < stop[active]]
    return position


def _complaint(block: RankBlock, wrong: BoolArray, describe: Callable[[int], str]) -> Complaint:
    """About the first action that is `wrong`, bool [num_actions]; all ranks of a step that has one are bad."""
    dp, action = block.columns.config.dp, int(np.argmax(wrong))
    bad = np.zeros(block.num_ranks // dp, bool)
    bad[block.rank[wrong] // dp] = True
    message = f"stage {block.stage[action]} does {op_of_chunk(block, action)} {describe(action)}"
    return Complaint(message, int(block.chunk_id[action]), int(block.rank[action]), np.repeat(bad, dp))
