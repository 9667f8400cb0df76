"""Of the slots that a plan gives its actions, ranks meet in those that they need: when actions end then."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from chunkplan.operations import BACKWARDS, FORWARDS, OPS
from chunkplan.schedule.simulate import simulate
from chunkplan.schedule.slots import ends_in_slots, greedy_slots, slot_ops_of
from tests.schedule.test_alignment import Step, _needed, model_stages_of, random_step


def test_given_slots_take_what_they_took_when_they_were_chosen() -> None:
    """Of all ops, and of those that sum gradients alone, for which nobody then waits longer than for all."""
    for seed in range(40):
        step = random_step(seed)
        chosen = step.aligned("weights")
        given = step.chunks, step.actions, step.times
        ends = ends_in_slots(*given, slot_ops_of("weights"), chosen.before, step.dp, step.pp, step.placement)
        assert np.array_equal(ends, chosen.ends)
        sums = ends_in_slots(*given, slot_ops_of("gradients"), chosen.before, step.dp, step.pp, step.placement)
        alone = ends_in_slots(*given, slot_ops_of("optimizer"), chosen.before, step.dp, step.pp, step.placement)
        assert (alone >= 0).all() and (alone <= sums).all() and (sums <= ends).all()
        assert np.array_equal(alone, simulate(*given, step.pp, step.placement, step.dp))
        assert [sums[action] for action in range(sums.size)] == list(_sums_in_slots(step, chosen.before))


def test_slots_that_cost_nothing_are_those_of_the_simple_rule() -> None:
    """On one stage without playing event by event; and nothing deadlocks in them, on any pipeline."""
    for seed in range(60):
        step = random_step(seed)
        given = step.chunks, step.actions, step.times
        slots = greedy_slots(*given, slot_ops_of("weights"), step.dp, step.pp, step.placement)
        ends = ends_in_slots(*given, slot_ops_of("weights"), slots, step.dp, step.pp, step.placement)
        assert (ends >= 0).all()
        stage = np.repeat(np.arange(step.dp * step.pp) % step.pp, np.diff(step.actions.stages))
        for number in range(step.pp):
            assert np.array_equal(np.unique(slots[stage == number]), np.arange(slots[stage == number].max() + 1))
        assert ends.max(initial=0) >= step.aligned("weights").ends.max(initial=0), "the best of some rules is taken"
        if step.pp == 1 and not (step.chunks.cp_size > 1).any():
            assert slots.tolist() == _most_left_first(step)


def _most_left_first(step: Step) -> list[int]:
    """On one stage: a slot is for the next op of the rank with most left to do, and all whose next op is alike join."""
    queues = [list(step.row(rank, 0)) for rank in range(step.dp)]
    lasts = [
        int(
            step.times.durations[
                step.actions.ops[each], 0, step.chunks.rank_chunks[rank] + step.actions.chunk_ids[each]
            ]
        )
        for rank, queue in enumerate(queues)
        for each in queue
    ]
    meeting, slots, over = slot_ops_of("weights"), [-1] * len(lasts), 0
    while any(queues):
        longest = max((queue for queue in queues if queue), key=lambda queue: sum(lasts[each] for each in queue))
        op = meeting[step.actions.ops[longest[0]]]
        for queue in queues:
            if queue and meeting[step.actions.ops[queue[0]]] == op:
                slots[queue.pop(0)] = over
        over += 1
    return slots


def _sums_in_slots(step: Step, slots: np.ndarray) -> Iterator[int]:
    """When each action ends in slots of which only those that sum gradients are met in: the least of all times that
    hold what has to be, found by raising them until they do."""
    ops, stages = step.actions.ops, model_stages_of(step.actions, step.pp, step.placement)
    row = np.repeat(np.arange(step.dp * step.pp), np.diff(step.actions.stages))
    chunk = step.chunks.rank_chunks[row // step.pp] + step.actions.chunk_ids
    lasts = step.times.durations[ops, stages, chunk]
    meets = slot_ops_of("gradients")[ops] >= 0
    together: dict[object, list[int]] = {}
    for action in range(ops.size):
        shares = step.chunks.cp_size[chunk[action]] > 1 and OPS[ops[action]] != "backward_weight"
        key: object = ("alone", action)
        if meets[action]:
            key = ("slot", row[action] % step.pp, slots[action])
        elif shares:
            key = ("shared", stages[action], ops[action], step.actions.chunk_ids[action])
        together.setdefault(key, []).append(action)
    starts, ends, changed = np.zeros(ops.size, np.int64), lasts.copy(), True
    sent = {(OPS[ops[a]] in FORWARDS, int(stages[a]), int(chunk[a])): a for a in range(ops.size) if needs_link(ops[a])}
    while changed:
        changed = False
        chunk_of = {action: int(chunk[action]) for action in range(ops.size)}
        done = {key: int(ends[action]) for key, action in sent.items()}
        for actions in together.values():
            begin = 0
            for action in actions:
                begin = max(begin, _needed(step, stages, chunk_of, action, done) or 0)
                if action > step.actions.stages[row[action]]:
                    begin = max(begin, int(ends[action - 1]))
                of_stage = (row % step.pp == row[action] % step.pp) & (slots < slots[action])
                over = of_stage & meets if not meets[action] else of_stage
                begin = max(begin, int(ends[over].max(initial=0)))
            lasts_in = max(lasts[actions]) if meets[actions[0]] else None
            for action in actions:
                end = begin + int(lasts[action] if lasts_in is None else lasts_in)
                if (begin, end) != (starts[action], ends[action]):
                    starts[action], ends[action], changed = begin, end, True
    return iter(ends.tolist())


def needs_link(op: int) -> bool:
    return OPS[op] in (*FORWARDS, *BACKWARDS)
