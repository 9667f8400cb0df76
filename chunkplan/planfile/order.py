"""The action graph of a rank's stages: an order in which everything finds what it waits for, or the place it is stuck.

A model part (virtual_stage x pp + stage) forwards a chunk after the part before it did, and backwards it after the part
behind it did. Within a stage actions run in the order they are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

FORWARDS = frozenset({"forward", "forward_kv"})
#: A split backward sends its gradient on with the first half.
BACKWARDS = frozenset({"backward", "backward_input"})

#: (op, chunk_id, virtual_stage)
StageAction = tuple[str, int, int]


class StuckError(ValueError):
    """No stage can go on. `stage` and `position` name the first action that waits for ever."""

    def __init__(self, stage: int, position: int) -> None:
        super().__init__(f"stage {stage} waits for ever at action {position}")
        self.stage = stage
        self.position = position


def execution_order(stages: Sequence[Sequence[StageAction]]) -> Iterator[tuple[int, int]]:
    """Yield (stage, position) of every action in an order that respects every link.

    Raises:
        StuckError: the graph has a cycle, or an action waits for one that does not exist.
    """
    pp = len(stages)
    last_part = pp * (1 + max((action[2] for stage in stages for action in stage), default=0)) - 1
    done: set[tuple[str, int, int]] = set()  # (direction, chunk_id, model part)
    position = [0] * pp
    progress = True
    while progress:
        progress = False
        for stage, actions in enumerate(stages):
            while position[stage] < len(actions):
                op, chunk_id, virtual_stage = actions[position[stage]]
                part = virtual_stage * pp + stage
                if op in FORWARDS:
                    if part > 0 and ("forward", chunk_id, part - 1) not in done:
                        break
                    done.add(("forward", chunk_id, part))
                elif op in BACKWARDS:
                    if part < last_part and ("backward", chunk_id, part + 1) not in done:
                        break
                    done.add(("backward", chunk_id, part))
                yield stage, position[stage]
                position[stage] += 1
                progress = True
    for stage, actions in enumerate(stages):
        if position[stage] < len(actions):
            raise StuckError(stage, position[stage])
