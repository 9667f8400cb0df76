"""Whether the gradients of a step may be reduced while the last backwards of its processes run.

The last action of a process in a step is a backward, as every forward has one. There the gradients of a layer are
complete when the backward has come through it, and the replicas of the stage reduce them, layer by layer from the last
to the first, while it goes on. So the last backwards of the replicas of a stage belong together, whatever chunks they
are of. *They may be reduced there if no last backward is of a chunk that another process shares without having it
last.* Then nobody waits in a circle, and there is one order in which all processes launch all that they launch:

- Without reductions there is one, as the plan is valid and as docs/context-parallel.md proves it.
- All stages of a pipeline take backwards in one order (`feed.stream` checks it), so the last one is of the same chunk
  on each. What comes after a last backward is only its gradient for the stage before, which goes into the last backward
  there. With the rule, whom it meets has it last as well. So from a reduction the order leads to last backwards of
  earlier stages alone, and to their reductions; never back to its own stage, nor to an action that is not a last one.
- Within the last backwards of a stage, what is exchanged in a layer comes before the reduction of this layer, which
  comes before what is exchanged in the layer below, on all of them.

*Where stages have several virtual stages,* each has a last backward and reduces its layers in that, and other actions
come after it. No sequence is shared there, as no schedule of virtual stages takes context-parallel groups, so replicas
meet in reductions alone. A chunk runs backward through the model stages in descending order. So the last backward of a
model stage comes after that of the next one in every pipeline, whatever the order of its actions: all reduce model
stages in descending order, and the last backward of one of them waits for no reductions but those of later ones. So
nobody waits in a circle, and each process reduces its virtual stages from the last to the first.

A process without a chunk reduces zeros in place of a last backward; it meets nobody. What a stage reduces after
its last backwards (embeddings and head) and across stages comes when links are closed, on all processes in one order.

Of a backward that is split (`models.products`) the gradients of norms and biases are complete after the input half
and those of matrices after the weight half, so that no layer is before the last weight half. What a process does last
is one, where a schedule splits; nothing is reduced in it: as a process without a chunk it reduces after all else, its
layers in the same order. It meets nobody there, nor in its weight halves, so the
order above stands; a stage may have processes of both kinds.

Where the rule does not hold, a process that is done would reduce a layer that another process reaches only after it
has met the first one in the layers below. Then all processes reduce after their last backwards.
"""

from __future__ import annotations

from collections.abc import Sequence

from chunkplan.planfile.plan import Chunk
from chunkplan_runtime.sharing import block_of


def may_reduce(last: Sequence[Chunk | None]) -> bool:
    """Whether the replicas of a stage may reduce gradients in their last backwards.

    `last`: the chunk that each of them runs backward last; None where it has no chunk.
    """
    for chunk in last:
        block = None if chunk is None else block_of(chunk)
        if block and block.size > 1 and len({_shared_as(last[rank]) for rank in block.ranks}) > 1:
            return False
    return True


def _shared_as(chunk: Chunk | None) -> tuple[int | None, int] | None:
    """What a chunk is called on all ranks that share it."""
    return None if chunk is None else (chunk.group_id, chunk.group_index)
