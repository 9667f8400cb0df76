"""State-aware 1F1B of ChunkFlow (arXiv 2503.02356, section 4.3).

1F1B over chunks as micro-batches, with the order of backwards that dependent chunks ask for: descending within a
group. A stage recomputes locally, from its own saved input, directly before the backward, so nothing is sent twice.
"""

from __future__ import annotations

from chunkplan.schedule.actions import ChunkStates, StageActions


def state_aware_1f1b(chunks: ChunkStates, pp: int) -> list[StageActions]:
    """The actions of stages 0..pp-1.

    Stage s warms up with pp - s forwards, then alternates backward and forward; where the next backward lacks its
    forward, it forwards instead.
    """
    forwards = [chunk_id for unit in chunks.units() for chunk_id in unit]
    backwards = [chunk_id for unit in chunks.units() for chunk_id in reversed(unit)]
    place = {chunk_id: position for position, chunk_id in enumerate(forwards)}
    return [_stage(chunks, forwards, backwards, place, warm_up=pp - stage) for stage in range(pp)]


def _stage(
    chunks: ChunkStates, forwards: list[int], backwards: list[int], place: dict[int, int], warm_up: int
) -> StageActions:
    actions: StageActions = []
    forwarded = 0
    backwarded = 0
    backward_is_due = False
    while backwarded < len(backwards):
        forwards_left = forwarded < len(forwards)
        can_backward = place[backwards[backwarded]] < forwarded
        if can_backward and (backward_is_due or not forwards_left):
            actions += chunks.backward(backwards[backwarded])
            backwarded += 1
            backward_is_due = False
        else:
            actions.append(chunks.first_forward(forwards[forwarded]))
            forwarded += 1
            backward_is_due = forwarded >= warm_up
    return actions
