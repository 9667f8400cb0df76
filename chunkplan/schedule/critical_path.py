"""The critical path of a schedule: the actions, one after the other, that make it take as long as it does."""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.schedule.actions import BACKWARD, BACKWARD_INPUT, FORWARD_KV, Actions


def critical_path(
    actions: Actions, starts: Int64Array, ends: Int64Array, link: Int64Array, num_model_stages: int
) -> list[int]:
    """The places of its actions in `actions`, in order of time.

    Every action starts when its stage is free and what it waits for has arrived, so one of the two ends, or is sent,
    just in time. Walks back over these from the last action to one that starts at 0; where both are just in time, it
    stays on the stage. What lies between two of its actions is the way over a link, so their times and those of the
    links add up to that of the schedule.

    Args:
        starts, ends: int64 [num_actions], see `simulate`.
        link: int64 [n], the time of each chunk's way from one stage to another.
        num_model_stages: of all stages together.
    """
    pp = actions.stages.size - 1
    stage = np.repeat(np.arange(pp), np.diff(actions.stages))
    model_stage = actions.virtual_stages * pp + stage
    is_forward = actions.ops <= FORWARD_KV
    is_backward = (actions.ops == BACKWARD) | (actions.ops == BACKWARD_INPUT)
    # [way, model stage, n], with an empty model stage before the first and after the last
    sender = np.full((2, num_model_stages + 2, link.size), -1, np.int64)
    for way, sends in enumerate((is_forward, is_backward)):
        places = np.flatnonzero(sends)
        sender[way, model_stage[places] + 1, actions.chunk_ids[places]] = places

    action = int(np.argmax(ends))
    path = [action]
    while starts[action] > 0:
        before = action - 1
        if action == actions.stages[stage[action]] or ends[before] != starts[action]:
            way, step = (0, 0) if is_forward[action] else (1, 2)
            before = int(sender[way, model_stage[action] + step, actions.chunk_ids[action]])
        assert before >= 0 and starts[before] <= starts[action], "an action that starts later than it has to"
        path.append(action := before)
    return path[::-1]
