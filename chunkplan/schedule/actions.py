"""What the schedules work on: the chunks of a rank in their order, and the actions of a stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from chunkplan.arrays import BoolArray, Int32Array

#: (op, chunk_id) in the order the stage does them; ops are those of `planfile.schema.OPS`.
StageActions = list[tuple[str, int]]


@dataclass(frozen=True)
class ChunkStates:
    """What a schedule needs of a rank's chunks, in chunk_id order; the parts of a group follow one another.

    group_id int32 [n], -1 for standalone; keeps_activations bool [n].
    """

    group_id: Int32Array
    keeps_activations: BoolArray

    def units(self) -> Iterator[list[int]]:
        """A standalone chunk alone, or all chunks of a group, ascending."""
        start = 0
        for chunk_id in range(1, len(self.group_id) + 1):
            same = chunk_id < len(self.group_id) and self.group_id[chunk_id] == self.group_id[start] >= 0
            if not same:
                yield list(range(start, chunk_id))
                start = chunk_id

    def first_forward(self, chunk_id: int) -> tuple[str, int]:
        """The forward that keeps activations, or the one that leaves only KV behind."""
        return ("forward" if self.keeps_activations[chunk_id] else "forward_kv"), chunk_id

    def backward(self, chunk_id: int) -> StageActions:
        """The backward, after a recompute where the forward kept nothing."""
        recompute = [] if self.keeps_activations[chunk_id] else [("recompute", chunk_id)]
        return [*recompute, ("backward", chunk_id)]
