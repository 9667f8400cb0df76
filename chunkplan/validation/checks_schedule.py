"""The invariants of a schedule, each a function over a block of ranks that says what is wrong first.

What a stage holds and in which order slots are over is found out here by itself, and not with `chunkplan.schedule`, on
purpose: checks that share no code with the planner and the schedules find a mistake that is made there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from chunkplan.arrays import BoolArray, Int32Array, Int64Array, offsets_of, run_starts
from chunkplan.operations import BACKWARDS, FORWARDS, OPS
from chunkplan.validation.schedule_columns import Complaint, RankBlock, ranges

# The action graph over the stages of ranks: an order in which all find what they wait for, or where it stalls.
#
# A model stage forwards a chunk after the model stage before it did, and backwards it after
# the one behind it did. Within a stage actions run in the order they are written. What ranks do with a chunk that they
# share they do together: that is one node of the graph, a *meeting*.


class ActionGraph(NamedTuple):
    """Dependencies of the actions of some stages; int64.

    `offsets` [num_stages + 1]: where the actions of each stage begin. `unit` [num_stages]: stages wait for none but
    those with the same number. `waits_for` [num_actions]: the action that has to be done before, -1 for none.
    `meeting` [num_actions]: the meeting that each is part of, -1 for none.
    """

    offsets: Int64Array
    unit: Int64Array
    waits_for: Int64Array
    meeting: Int64Array


def run_stages(graph: ActionGraph) -> Int64Array:
    """Run the actions of many stages side by side, each stage in order; returns where each stops.

    Returns:
        int64 [num_stages], the first action of each stage that is never done, or where its actions end.
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


def _lookup(*ops: str) -> BoolArray:
    """True for the codes of these ops, bool [num_ops]."""
    return np.array([op in ops for op in OPS])


_IS_FORWARD, _IS_BACKWARD = _lookup(*FORWARDS), _lookup(*BACKWARDS)
#: A chunk holds activations from the first to its last backward half.
_HOLDS, _RELEASES = _lookup("forward", "recompute"), _lookup("backward", "backward_weight")
_FORWARD, _RECOMPUTE = OPS.index("forward"), OPS.index("recompute")

#: What a chunk does on a model stage beside recomputes, counted in these kinds: one of two sets.
_KINDS = (*FORWARDS, "backward", "backward_input", "backward_weight")
_KIND = np.array([max(_KINDS.index(op) - 1, 0) if op in _KINDS else -1 for op in OPS])
_WHOLE, _HALVES = np.array([1, 1, 0, 0]), np.array([1, 0, 1, 1])


def check_actions(block: RankBlock) -> Complaint | None:
    """Each chunk has exactly one first forward and one backward (or input before weight) on every model stage."""
    strange = (block.virtual_stage < 0) | (block.virtual_stage >= block.num_virtual_stages)
    strange |= block.op >= len(OPS)
    absent = (block.chunk_id < 0) | (block.chunk_id >= block.num_chunks[block.rank])
    complete = _complete_slots(block)
    slots = np.flatnonzero(~complete)
    slot_rank = np.searchsorted(block.slot_offsets, slots, side="right") - 1
    bad = np.zeros(block.num_ranks, bool)
    bad[block.rank[strange | absent]] = True
    bad[slot_rank] = True
    if not bad.any():
        return None
    rank = int(np.argmax(bad))
    actions = slice(block.action_offsets[rank * block.pp], block.action_offsets[(rank + 1) * block.pp])
    for action in np.flatnonzero(strange[actions])[:1] + actions.start:
        return Complaint(_describe_strange(block, action), int(block.chunk_id[action]), rank, bad)
    absentees = np.flatnonzero(absent[actions]) + actions.start
    absentees = absentees[np.argsort(block.model_stage[absentees], kind="stable")]
    slots = slots[slot_rank == rank]
    if slots.size:
        model_stage, chunk_id = divmod(int(slots[0] - block.slot_offsets[rank]), int(block.num_chunks[rank]))
        if not absentees.size or model_stage < block.model_stage[absentees[0]]:
            ops = [block.schedule.ops[op] for op in block.op[actions][block.slot[actions] == slots[0]]]
            message = f"model stage {block.place_of(model_stage)} does {ops}, expected one forward, then one backward"
            return Complaint(message, chunk_id, rank, bad)
    action = absentees[0]
    message = f"stage {block.stage[action]} does `{_op(block, action)}` with a chunk that is not there"
    return Complaint(message, int(block.chunk_id[action]), rank, bad)


def _complete_slots(block: RankBlock) -> BoolArray:
    """True for slots whose actions are the expected ones in order; bool [num_slots]."""
    kind = np.append(_KIND, -1)[np.minimum(block.op, len(OPS))]
    counted = np.flatnonzero((kind >= 0) & (block.slot >= 0))
    kind, slot = kind[counted], block.slot[counted]
    num_slots = int(block.slot_offsets[-1])
    counts = np.bincount(slot * 4 + kind, minlength=num_slots * 4).reshape(-1, 4)
    at = np.zeros((4, num_slots), np.int64)
    at[kind, slot] = counted
    whole = (counts == _WHOLE).all(axis=1) & (at[0] < at[1])
    halves = (counts == _HALVES).all(axis=1) & (at[0] < at[2]) & (at[2] < at[3])
    complete: BoolArray = whole | halves
    return complete


def _describe_strange(block: RankBlock, action: int) -> str:
    if not 0 <= block.virtual_stage[action] < block.num_virtual_stages:
        return f"stage {block.stage[action]} names virtual stage {block.virtual_stage[action]}"
    return f"stage {block.stage[action]} does `{_op(block, action)}`, expected one of {', '.join(OPS)}"


def check_recompute(block: RankBlock) -> Complaint | None:
    """A chunk keeps its activations exactly where its first op is `forward`; others recompute right before backward."""
    order = block.by_model_stage
    op, chunk, lane = block.op[order], block.chunk[order], block.lane[order]
    keeps = block.keeps_activations[chunk]
    contradicts = _IS_FORWARD[op] & ((op == _FORWARD) != keeps)
    is_last = np.diff(lane, append=-1) != 0  # of its model stage
    follows = np.zeros(op.size, bool)  # directly after a recompute
    follows[1:] = (op[:-1] == _RECOMPUTE) & ~is_last[:-1]
    recomputed = follows & (chunk == np.roll(chunk, 1))
    unmet = _IS_BACKWARD[op] & (recomputed == keeps)
    idle = follows & ~(recomputed & _IS_BACKWARD[op])
    idle_at_end = is_last & (op == _RECOMPUTE)

    def describe(position: int) -> str:
        stage = block.stage[order[position]]
        if contradicts[position]:
            return f"stage {stage} does `{_op(block, order[position])}`, keeps_activations says otherwise"
        if unmet[position]:
            wanted = "no recompute" if recomputed[position] else "a recompute directly before its backward"
            return f"stage {stage}: expected {wanted}"
        return f"stage {stage} recomputes without a backward directly after"

    named = np.arange(op.size) - (idle & ~contradicts & ~unmet)
    return block.at(contradicts | unmet | idle | idle_at_end, describe, order, named)


def check_part_order(block: RankBlock) -> Complaint | None:
    """Part i+1 of a group forwards after part i, and part i backwards after part i+1, on every model stage.

    In a tree a part backwards once all do that depend on it: as from a stack on which the parts are laid in order.
    """
    positions, run = block.by_group
    actions = block.by_model_stage[positions]
    op, rows = block.op[actions], block.chunk_rows[block.chunk[actions]]
    index = block.columns.chunks["group_index"][rows].astype(np.int64)
    size = block.columns.chunks["group_size"][rows].astype(np.int64)
    turn = np.where(block.columns.is_tree[rows], block.columns.group_order.turn[rows], size - 1 - index)
    bad = np.zeros(block.op.size, bool)
    forwards, backwards = np.flatnonzero(_IS_FORWARD[op]), np.flatnonzero(_IS_BACKWARD[op])
    start = run_starts(run[forwards])
    bad[positions[forwards]] = index[forwards] != np.arange(forwards.size) - start
    start = run_starts(run[backwards])
    bad[positions[backwards]] = turn[backwards] != np.arange(backwards.size) - start

    def describe(position: int) -> str:
        action = block.by_model_stage[position]
        stage, part = block.stage[action], block.columns.chunks["group_index"][block.chunk_rows[block.chunk[action]]]
        if _IS_FORWARD[block.op[action]]:
            return f"stage {stage} forwards part {part} before an earlier part"
        return f"stage {stage} backwards part {part} before a later part"

    return block.at(bad, describe, block.by_model_stage)


def check_holders(block: RankBlock) -> Complaint | None:
    """At most K chunks of a group hold activations on a stage, from forward or recompute to the last backward half.

    In a tree at most K - 1 on which others depend, where each runs backward as soon as it can; and the one at work.
    """
    (positions, _), order = block.by_group, block.by_model_stage
    rows = block.chunk_rows[block.chunk[order]]
    is_tree = block.columns.is_tree[rows]
    holders = np.zeros(block.op.size, np.int64)
    own = positions[~is_tree[positions]]
    holders[own] = _held(block.op[order[own]], 1)  # at the end of a group's run all is released
    holders[is_tree] = block.columns.group_order.holders[rows[is_tree]] + 1
    k = block.columns.k[rows]
    return block.at(
        holders > k,
        lambda at: f"stage {block.stage[order[at]]}: {holders[at]} chunks hold activations, K is {k[at]}",
        order,
    )


def check_links(block: RankBlock) -> Complaint | None:
    """Both ends of every link between model stages name the same chunks in the same order."""
    found: list[tuple[int, int, str]] = []
    bad = np.zeros(block.num_ranks, bool)
    slot_rank = np.repeat(np.arange(block.num_ranks), np.diff(block.slot_offsets))
    num_chunks = block.num_chunks[slot_rank]
    linked = np.flatnonzero(np.arange(slot_rank.size) < block.slot_offsets[slot_rank + 1] - num_chunks)
    op, chunk_ids = block.op[block.by_model_stage], block.chunk_id[block.by_model_stage]
    for table, what in ((_IS_FORWARD, "activations"), (_IS_BACKWARD, "gradients")):
        ids = chunk_ids[table[op]]  # [num_slots], model stage after model stage
        crossed = linked[ids[linked] != ids[linked + num_chunks[linked]]]
        bad[slot_rank[crossed]] = True
        for slot in crossed[:1].tolist():
            start, size = int(block.slot_offsets[slot_rank[slot]]), int(num_chunks[slot])
            model_stage = (slot - start) // size
            stages = f"stages {block.place_of(model_stage)[0]} and {block.place_of(model_stage + 1)[0]}"
            found.append((start + model_stage * size, int(ids[slot]), f"{stages} exchange {what} in different orders"))
    if not found:
        return None
    slot, chunk_id, message = min(found, key=lambda each: each[0])  # of two on the same link, activations
    return Complaint(message, chunk_id, int(slot_rank[slot]), bad)


def waits_for(block: RankBlock) -> Int64Array:
    """The action on another stage that each one waits for, -1 for none: int64 [num_actions]."""
    needed = np.full(block.op.size, -1)
    num_chunks, model_stage = block.num_chunks[block.rank], block.model_stage
    is_last = model_stage == block.num_model_stages[block.rank] - 1
    for table, step, waits in ((_IS_FORWARD, -1, model_stage > 0), (_IS_BACKWARD, 1, ~is_last)):
        is_in_table = table[block.op]
        at = np.zeros(block.slot_offsets[-1], np.int64)  # [num_slots], the action of each
        at[block.slot[is_in_table]] = np.flatnonzero(is_in_table)
        waiting = np.flatnonzero(is_in_table & waits)
        needed[waiting] = at[block.slot[waiting] + step * num_chunks[waiting]]
    return needed


def check_acyclic(block: RankBlock) -> Complaint | None:
    """The action graph over stages, and over ranks that meet, has an order in which everything finds what it waits for.

    Ranks that meet do the same there.
    """
    needed = waits_for(block)
    if (needed < 0).all() and (block.meeting < 0).all():
        return None
    if found := _check_meetings(block):
        return found
    unit = np.repeat(run_starts(block.place // block.columns.config.dp), block.pp)
    graph = ActionGraph(block.action_offsets, unit, needed, block.meeting)
    reached = run_stages(graph)
    stalled = np.flatnonzero(reached < block.action_offsets[1:])
    if not stalled.size:
        return None
    bad = np.zeros(block.num_ranks, bool)
    bad[stalled // block.pp] = True
    cycle = find_cycle(graph, reached)
    rank, stage = divmod(cycle[0], block.pp)
    action = int(reached[cycle[0]])
    position = action - block.action_offsets[cycle[0]]
    message = f"stage {stage} is stuck at action {position}, {op_of_chunk(block, action)}: a deadlock"
    return Complaint(message + _describe_cycle(block, cycle, reached), int(block.chunk_id[action]), rank, bad)


#: Stages that a message about a deadlock names.
_NAMED = 4


def _describe_cycle(block: RankBlock, cycle: list[int], reached: Int64Array) -> str:
    """The message of a cycle: each of these stages waits for the next one, the last for the first."""
    others = [
        f"for {_stage_name(block, stage)} at {op_of_chunk(block, int(reached[stage]))}" for stage in cycle[1:_NAMED]
    ]
    others += [f"for {len(cycle) - _NAMED} more in turn"] if len(cycle) > _NAMED else []
    last = "for itself" if len(cycle) == 1 else f"for {_stage_name(block, cycle[0])}"
    return "; it waits " + ", which waits ".join([*others, last])


def _stage_name(block: RankBlock, stage: int) -> str:
    rank, stage = divmod(stage, block.pp)
    return f"rank {block.place[rank] % block.columns.config.dp}, stage {stage}"


def op_of_chunk(block: RankBlock, action: int) -> str:
    """An action in words."""
    return f"`{_op(block, action)}` of chunk {block.chunk_id[action]}"


def _check_meetings(block: RankBlock) -> Complaint | None:
    """All ranks that share a chunk run the same ops on it: they cannot meet in half of a backward."""
    actions = np.flatnonzero(block.meeting >= 0)
    order = actions[np.argsort(block.meeting[actions], kind="stable")]
    first = np.arange(block.op.size)
    first[order] = order[run_starts(block.meeting[order])]  # of the same meeting

    def describe(action: int) -> str:
        other = first[action]
        name = _stage_name(block, int(block.rank[other] * block.pp + block.stage[other]))
        return f"stage {block.stage[action]} does {op_of_chunk(block, action)}, with `{_op(block, other)}` on {name}"

    return block.at(block.op != block.op[first], describe)


def check_memory(block: RankBlock) -> Complaint | None:
    """No stage retains activations of more tokens than its step states, nor than the plan's bound, where it has one."""
    bound = block.columns.steps["peak_retained_tokens"]
    if block.columns.config.memory_tokens is not None:
        bound = np.minimum(bound, block.columns.config.memory_tokens)
    allowed = bound[block.place // block.columns.config.dp][block.rank]
    retained = _retained(block)
    return block.at(
        retained > allowed,
        lambda at: f"stage {block.stage[at]} holds {retained[at]} tokens of activations, the bound is {allowed[at]}",
    )


def peak_retained(block: RankBlock) -> Int64Array:
    """The most tokens whose activations a stage of each rank retains at once, int64 [num_ranks]."""
    return np.maximum.reduceat(_retained(block), block.action_offsets[: -1 : block.pp])


def _retained(block: RankBlock) -> Int64Array:
    """The tokens whose activations the stage retains after each action, int64 [num_actions].

    A virtual stage counts as its share of the stage's layers. At the end of a stage all is released.
    """
    tokens = block.columns.chunks["num_tokens"][block.chunk_rows[block.chunk]].astype(np.int64)
    retained: Int64Array = -(-_held(block.op, tokens) // block.num_virtual_stages)
    return retained


def _held(op: Int32Array, amounts: Int64Array | int) -> Int64Array:
    """The amount held after each of these actions, where each holds or releases its own; int64 [num_actions]."""
    held: Int64Array = np.cumsum(_HOLDS[op] * amounts - _RELEASES[op] * amounts)
    return held


def _op(block: RankBlock, action: int) -> str:
    return block.schedule.ops[int(block.op[action])]


# Slots: all ranks of a stage walk through one list of them, and nothing deadlocks.

#: What a slot is for, by the op of any action in it: all that goes forward through layers may be in one.
_FOR = np.array([0 if op in ("forward", "forward_kv", "recompute") else code for code, op in enumerate(OPS)])


def check_slots(block: RankBlock) -> Complaint | None:
    """Slots go up on every stage of a rank, each has an action, and all actions in one are alike.

    Ranks that share a chunk do it in one slot, and stages that walk through their slots do not wait for each other for
    ever. The block is of whole steps.
    """
    dp = block.columns.config.dp
    if dp == 1 or not block.num_ranks:
        return None
    num_slots, num_actions = block.schedule.num_slots[block.rows.ravel()], np.diff(block.action_offsets)
    if (other := num_slots != num_actions).any():
        row = int(np.argmax(other))  # a stage of a rank
        message = f"stage {row % block.pp} has {num_slots[row]} slots for {num_actions[row]} actions"
        found = block.at(np.repeat(other, num_actions), lambda at: message, whole_steps=True)
        return found and replace(found, chunk_id=None)
    unit = block.rank // dp * block.pp + block.stage  # [num_actions], a number for the step and stage of each
    slots, within = block.schedule.slots[block.action_rows], np.ones(unit.size, bool)
    within[block.action_offsets[:-1]] = False
    before = np.where(within, np.roll(slots, 1), -1)

    def complaint(wrong: BoolArray, describe: Callable[[int], str]) -> Complaint | None:
        return block.at(
            wrong,
            lambda at: f"stage {block.stage[at]} does {op_of_chunk(block, at)} in slot {slots[at]}, {describe(at)}",
            whole_steps=True,
        )

    if found := complaint(slots <= before, lambda at: f"expected one from {before[at] + 1} on"):
        return found
    order = np.lexsort((slots, unit))
    is_new = np.diff(unit[order] << 32 | slots[order], prepend=-1) != 0  # [num_actions]
    node = np.empty(unit.size, np.int64)  # [num_actions], the slot of each, counted over all stages
    node[order] = np.cumsum(is_new) - 1
    stages = offsets_of(np.bincount(unit[order[is_new]]))  # where the slots of each stage of each step begin
    if found := complaint(node - stages[unit] != slots, lambda at: "but no action is in one before it"):
        return found
    first = order[is_new][node]  # [num_actions], one in the same slot
    differs = (_FOR[block.op] != _FOR[block.op[first]]) | (block.virtual_stage != block.virtual_stage[first])
    if found := complaint(differs, lambda at: f"in which another rank does {op_of_chunk(block, int(first[at]))}"):
        return found
    met = np.flatnonzero(block.meeting >= 0)
    met = met[np.argsort(block.meeting[met], kind="stable")]
    apart = np.zeros(unit.size, bool)
    apart[met] = slots[met] != slots[met[run_starts(block.meeting[met])]]  # that of one that shares the chunk
    if found := complaint(apart, lambda at: "a rank that shares it in another"):
        return found
    reached = _walk(stages, node, waits_for(block))
    return complaint(node == reached[unit], lambda at: "which never ends: a deadlock")


def _walk(stages: Int64Array, node: Int64Array, needed: Int64Array) -> Int64Array:
    """Run the slots of all stages, each stage in order; returns the first slot of each stage that never ends.

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


#: Run in this order; the first one that complains ends the checks of a rank, because the others rely on it.
SCHEDULE_CHECKS: dict[str, Callable[[RankBlock], Complaint | None]] = {
    "actions": check_actions,
    "recompute": check_recompute,
    "part-order": check_part_order,
    "holders": check_holders,
    "links": check_links,
    "acyclic": check_acyclic,
    "memory": check_memory,
    "slots": check_slots,
}
