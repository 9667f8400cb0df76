"""Which chunk runs when on a rank's pipeline, and how long that takes."""

from __future__ import annotations

from chunkplan.schedule.actions import ChunkStates, StageActions
from chunkplan.schedule.algorithm2 import algorithm2
from chunkplan.schedule.state_aware_1f1b import state_aware_1f1b


def make_schedule(chunks: ChunkStates, pp: int) -> list[StageActions]:
    """The actions of every stage of a rank: Algorithm 2 on one stage, state-aware 1F1B on more."""
    return [algorithm2(chunks)] if pp == 1 else state_aware_1f1b(chunks, pp)
