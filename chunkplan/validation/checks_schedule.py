"""The invariants of a schedule, each a function over a block of ranks that says what is wrong first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from chunkplan.arrays import BoolArray, Int32Array, Int64Array
from chunkplan.operations import OPS
from chunkplan.validation.order import BACKWARDS, FORWARDS, run_rows
from chunkplan.validation.schedule_columns import Block


@dataclass(frozen=True)
class Complaint:
    """What is wrong first, with which chunk and rank, and the ranks [num_ranks] that it is wrong with."""

    message: str
    chunk_id: int
    rank: int
    bad: BoolArray


def _lookup(*ops: str) -> BoolArray:
    """Whether an op, by its code, is one of these."""
    return np.array([op in ops for op in OPS])


_IS_FORWARD, _IS_BACKWARD = _lookup(*FORWARDS), _lookup(*BACKWARDS)
#: A chunk holds activations from the first to its last backward half.
_HOLDS, _RELEASES = _lookup("forward", "recompute"), _lookup("backward", "backward_weight")
_FORWARD, _RECOMPUTE = OPS.index("forward"), OPS.index("recompute")

#: What a chunk does on a model part beside recomputes, counted in these kinds: one of two sets.
_KINDS = (*FORWARDS, "backward", "backward_input", "backward_weight")
_KIND = np.array([max(_KINDS.index(op) - 1, 0) if op in _KINDS else -1 for op in OPS])
_WHOLE, _HALVES = np.array([1, 1, 0, 0]), np.array([1, 0, 1, 1])


def check_actions(block: Block) -> Complaint | None:
    """Each chunk has exactly one first forward and one backward (or input before weight) on every model part."""
    strange = (block.virtual_stage < 0) | (block.virtual_stage >= block.num_virtual)
    strange |= block.op >= len(OPS)
    absent = (block.chunk_id < 0) | (block.chunk_id >= block.num_chunks[block.rank])
    complete = _complete_slots(block)
    slots = np.flatnonzero(~complete)
    slot_rank = np.searchsorted(block.first_slot, slots, side="right") - 1
    bad = np.zeros(block.num_ranks, bool)
    bad[block.rank[strange | absent]] = True
    bad[slot_rank] = True
    if not bad.any():
        return None
    rank = int(np.argmax(bad))
    actions = slice(block.first_action[rank * block.pp], block.first_action[(rank + 1) * block.pp])
    for action in np.flatnonzero(strange[actions])[:1] + actions.start:
        return Complaint(_describe_strange(block, action), int(block.chunk_id[action]), rank, bad)
    absentees = np.flatnonzero(absent[actions]) + actions.start
    absentees = absentees[np.argsort(block.part[absentees], kind="stable")]
    slots = slots[slot_rank == rank]
    if slots.size:
        part, chunk_id = divmod(int(slots[0] - block.first_slot[rank]), int(block.num_chunks[rank]))
        if not absentees.size or part < block.part[absentees[0]]:
            ops = [block.schedule.ops[op] for op in block.op[actions][block.slot[actions] == slots[0]]]
            where = f"({part % block.pp}, {part // block.pp})"
            message = f"model part {where} does {ops}, expected one forward, then one backward"
            return Complaint(message, chunk_id, rank, bad)
    action = absentees[0]
    message = f"stage {block.stage[action]} does `{_op(block, action)}` with a chunk that is not there"
    return Complaint(message, int(block.chunk_id[action]), rank, bad)


def _complete_slots(block: Block) -> BoolArray:
    """Whether the actions of each slot are those that it should have, in their order; [num_slots]."""
    kind = np.append(_KIND, -1)[np.minimum(block.op, len(OPS))]
    counted = np.flatnonzero((kind >= 0) & (block.slot >= 0))
    kind, slot = kind[counted], block.slot[counted]
    num_slots = int(block.first_slot[-1])
    counts = np.bincount(slot * 4 + kind, minlength=num_slots * 4).reshape(-1, 4)
    at = np.zeros((4, num_slots), np.int64)
    at[kind, slot] = counted
    whole = (counts == _WHOLE).all(axis=1) & (at[0] < at[1])
    halves = (counts == _HALVES).all(axis=1) & (at[0] < at[2]) & (at[2] < at[3])
    complete: BoolArray = whole | halves
    return complete


def _describe_strange(block: Block, action: int) -> str:
    if not 0 <= block.virtual_stage[action] < block.num_virtual:
        return f"stage {block.stage[action]} names virtual stage {block.virtual_stage[action]}"
    return f"stage {block.stage[action]} does `{_op(block, action)}`, expected one of {', '.join(OPS)}"


def check_recompute(block: Block) -> Complaint | None:
    """keeps_activations exactly where the first op is `forward`; recompute exactly where not, right before backward."""
    order = block.by_part
    op, chunk, lane = block.op[order], block.chunk[order], block.lane[order]
    keeps = block.keeps_activations[chunk]
    contradicts = _IS_FORWARD[op] & ((op == _FORWARD) != keeps)
    is_last = np.diff(lane, append=-1) != 0  # of its model part
    follows = np.zeros(op.size, bool)  # directly after a recompute
    follows[1:] = (op[:-1] == _RECOMPUTE) & ~is_last[:-1]
    recomputed = follows & (chunk == np.roll(chunk, 1))
    unmet = _IS_BACKWARD[op] & (recomputed == keeps)
    idle = follows & ~(recomputed & _IS_BACKWARD[op])
    idle_at_end = is_last & (op == _RECOMPUTE)

    def describe(position: int, stage: int) -> str:
        if contradicts[position]:
            return f"stage {stage} does `{_op(block, order[position])}`, keeps_activations says otherwise"
        if unmet[position]:
            wanted = "no recompute" if recomputed[position] else "a recompute directly before its backward"
            return f"stage {stage}: expected {wanted}"
        return f"stage {stage} recomputes without a backward directly after"

    named = np.arange(op.size) - (idle & ~contradicts & ~unmet)
    return _first_by_part(block, contradicts | unmet | idle | idle_at_end, describe, named)


def check_part_order(block: Block) -> Complaint | None:
    """Part i+1 of a group forwards after part i, and part i backwards after part i+1, on every model part."""
    positions, run = block.by_group
    actions = block.by_part[positions]
    op, rows = block.op[actions], block.chunk_rows[block.chunk[actions]]
    index = block.columns.chunks["group_index"][rows].astype(np.int64)
    size = block.columns.chunks["group_size"][rows].astype(np.int64)
    bad = np.zeros(block.op.size, bool)
    forwards, backwards = np.flatnonzero(_IS_FORWARD[op]), np.flatnonzero(_IS_BACKWARD[op])
    first = _first_of_runs(run[forwards])
    bad[positions[forwards]] = index[forwards] != np.arange(forwards.size) - first
    first = _first_of_runs(run[backwards])
    expected = size[backwards][first] - 1 - (np.arange(backwards.size) - first)
    bad[positions[backwards]] = index[backwards] != expected

    def describe(position: int, stage: int) -> str:
        action = block.by_part[position]
        part = block.columns.chunks["group_index"][block.chunk_rows[block.chunk[action]]]
        if _IS_FORWARD[block.op[action]]:
            return f"stage {stage} forwards part {part} before an earlier part"
        return f"stage {stage} backwards part {part} before a later part"

    return _first_by_part(block, bad, describe)


def check_holders(block: Block) -> Complaint | None:
    """At most K chunks of a group hold activations on a stage, from forward or recompute to the last backward half."""
    positions, _ = block.by_group
    op = block.op[block.by_part[positions]]
    holders = np.zeros(block.op.size, np.int64)
    holders[positions] = _held(op, 1)  # at the end of a group's run all is released
    k = block.columns.k[block.chunk_rows[block.chunk[block.by_part]]]
    return _first_by_part(
        block,
        holders > k,
        lambda position, stage: f"stage {stage}: {holders[position]} chunks hold activations, K is {k[position]}",
    )


def check_links(block: Block) -> Complaint | None:
    """Both ends of every link between model parts name the same chunks in the same order."""
    found: list[tuple[int, int, str]] = []
    bad = np.zeros(block.num_ranks, bool)
    slot_rank = np.repeat(np.arange(block.num_ranks), np.diff(block.first_slot))
    num_chunks = block.num_chunks[slot_rank]
    linked = np.flatnonzero(np.arange(slot_rank.size) < block.first_slot[slot_rank + 1] - num_chunks)
    op, chunk_ids = block.op[block.by_part], block.chunk_id[block.by_part]
    for table, what in ((_IS_FORWARD, "activations"), (_IS_BACKWARD, "gradients")):
        ids = chunk_ids[table[op]]  # as many as there are slots, model part after model part
        crossed = linked[ids[linked] != ids[linked + num_chunks[linked]]]
        bad[slot_rank[crossed]] = True
        for slot in crossed[:1].tolist():
            first, size = int(block.first_slot[slot_rank[slot]]), int(num_chunks[slot])
            part = (slot - first) // size
            stages = f"stages {part % block.pp} and {(part + 1) % block.pp}"
            found.append((first + part * size, int(ids[slot]), f"{stages} exchange {what} in different orders"))
    if not found:
        return None
    slot, chunk_id, message = min(found, key=lambda each: each[0])  # of two on the same link, activations
    return Complaint(message, chunk_id, int(slot_rank[slot]), bad)


def check_acyclic(block: Block) -> Complaint | None:
    """The action graph over stages has an order in which everything finds what it waits for."""
    waits_for = np.full(block.op.size, -1)
    num_chunks, last_part = block.num_chunks[block.rank], block.num_parts[block.rank] - 1
    for table, step, waits in ((_IS_FORWARD, -1, block.part > 0), (_IS_BACKWARD, 1, block.part < last_part)):
        mine = table[block.op]
        at = np.zeros(block.first_slot[-1], np.int64)
        at[block.slot[mine]] = np.flatnonzero(mine)
        waiting = np.flatnonzero(mine & waits)
        waits_for[waiting] = at[block.slot[waiting] + step * num_chunks[waiting]]
    if (waits_for < 0).all():
        return None
    reached = run_rows(block.first_action, block.pp, waits_for)
    stuck = np.flatnonzero(reached < block.first_action[1:])
    if not stuck.size:
        return None
    bad = np.zeros(block.num_ranks, bool)
    bad[stuck // block.pp] = True
    rank, stage = divmod(int(stuck[0]), block.pp)
    position = reached[stuck[0]] - block.first_action[stuck[0]]
    message = f"stage {stage} waits for ever at action {position}: a deadlock"
    return Complaint(message, int(block.chunk_id[reached[stuck[0]]]), rank, bad)


def check_memory(block: Block) -> Complaint | None:
    """No stage retains activations of more tokens than its step states, nor than the plan's bound, where it has one."""
    bound = block.columns.steps["peak_retained_tokens"]
    if block.columns.config.memory_tokens is not None:
        bound = np.minimum(bound, block.columns.config.memory_tokens)
    allowed = bound[block.ranks.place // block.columns.config.dp][block.rank]
    retained = _retained(block)
    over = np.flatnonzero(retained > allowed)
    if not over.size:
        return None
    bad = np.zeros(block.num_ranks, bool)
    bad[block.rank[over]] = True
    action = over[0]
    stage = f"stage {block.stage[action]}"
    message = f"{stage} holds {retained[action]} tokens of activations, the bound is {allowed[action]}"
    return Complaint(message, int(block.chunk_id[action]), int(block.rank[action]), bad)


def peak_retained(block: Block) -> Int64Array:
    """The most tokens whose activations a stage of each rank retains at once, int64 [num_ranks]."""
    return np.maximum.reduceat(_retained(block), block.first_action[: -1 : block.pp])


def _retained(block: Block) -> Int64Array:
    """What the stage retains after each action, in tokens; a virtual stage counts as its share of the stage's layers.

    At the end of a stage all is released.
    """
    tokens = block.columns.chunks["num_tokens"][block.chunk_rows[block.chunk]].astype(np.int64)
    retained: Int64Array = -(-_held(block.op, tokens) // block.num_virtual)
    return retained


def _held(op: Int32Array, amounts: Int64Array | int) -> Int64Array:
    """What is held after each of these actions, where each holds or releases its amount."""
    held: Int64Array = np.cumsum(_HOLDS[op] * amounts - _RELEASES[op] * amounts)
    return held


def _first_of_runs(run: Int64Array) -> Int64Array:
    """Where the run of each value begins; equal values lie together."""
    firsts = np.flatnonzero(np.diff(run, prepend=-1))
    return np.repeat(firsts, np.diff(np.append(firsts, run.size)))


def _first_by_part(
    block: Block, bad: BoolArray, describe: Callable[[int, int], str], named: Int64Array | None = None
) -> Complaint | None:
    """The complaint of the first position in `by_part` where `bad` holds; `named` is the one whose chunk to name."""
    positions = np.flatnonzero(bad)
    if not positions.size:
        return None
    bad_ranks = np.zeros(block.num_ranks, bool)
    bad_ranks[block.rank[block.by_part[positions]]] = True
    position = int(positions[0])
    action = block.by_part[position]
    chunk_id = block.chunk_id[action if named is None else block.by_part[named[position]]]
    message = describe(position, int(block.stage[action]))
    return Complaint(message, int(chunk_id), int(block.rank[action]), bad_ranks)


def _op(block: Block, action: int) -> str:
    return block.schedule.ops[int(block.op[action])]


#: Run in this order; the first one that complains ends the checks of a rank, because the others rely on it.
SCHEDULE_CHECKS: dict[str, Callable[[Block], Complaint | None]] = {
    "actions": check_actions,
    "recompute": check_recompute,
    "part-order": check_part_order,
    "holders": check_holders,
    "links": check_links,
    "acyclic": check_acyclic,
    "memory": check_memory,
}
