"""The slots of a step as its processes run it, and what each of them takes part in without an action of its own.

Which slots there are, and why nobody waits for ever in them, is in `chunkplan/schedule/alignment.py`. Every process
works them out from the plan by itself, and all find the same. A process that runs several data-parallel ranks is one
rank there.

Where processes share a chunk, they exchange heads or pages of it within each of its layers, between two fetches. They
are in the same slot then, so that all launch fetches, exchanges and sums in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from chunkplan.cost.model import Sharding
from chunkplan.errors import DataError
from chunkplan.operations import FORWARDS, OPS
from chunkplan.planfile.plan import VALIDATE_HINT, Action, Chunk
from chunkplan_runtime.feed.joined import is_shared, join_chunks, process_actions
from chunkplan_runtime.feed.stream import StepWork
from chunkplan_runtime.layout import RankLayout
from chunkplan_runtime.sharing import block_of

#: What other processes do in a slot: its op, and the virtual stage.
Padding = tuple[str, int]


class Aligned:
    """Has a process take part in the slots between its actions, by calling `run` with each."""

    def __init__(self, paddings: Sequence[Sequence[Padding]], run: Callable[[Padding], None]) -> None:
        self._paddings = [list(before) for before in paddings]
        self._run = run
        self._next = 0

    def meet(self, action: Action | None) -> None:
        """Take part in all that comes before `action`, the next one; with None too, but it comes only later.

        A process that has sent something does so before it waits until that has arrived, as others may be unable to
        receive it before.
        """
        due = self._paddings[self._next]
        while due:
            self._run(due.pop(0))
        if action is not None:
            self._next += 1


def paddings_of(
    work: StepWork, layout: RankLayout, sharding: Sharding, *, only_forwards: bool = False
) -> list[list[Padding]]:
    """What the process of `layout` takes part in before each of its actions in a step, and after its last one.

    Raises:
        DataError: actions of the plan wait for each other for ever, or it does not say what its times are for.
    """
    # Compiled loops, which a run that does not share so much does not load.
    from chunkplan.arrays import offsets_of
    from chunkplan.cost.durations import chunk_times
    from chunkplan.planfile.chunks import chunks_of_rows, exchange_of
    from chunkplan.schedule.actions import Actions
    from chunkplan.schedule.alignment import align, meeting_of

    plan, cost = work.plan, replace(work.plan.cost, sharding=sharding)
    processes = [_of_process(work, own, layout.pp) for own in layout.rows(plan.config.dp)]
    rows = [actions for _, stages in processes for actions in stages]
    if only_forwards:
        rows = [[action for action in actions if action.op in FORWARDS] for actions in rows]
    flat = [action for actions in rows for action in actions]
    actions = Actions(
        np.array([OPS.index(action.op) for action in flat], np.int8),
        np.array([action.chunk_id for action in flat], np.int32),
        np.array([action.virtual_stage for action in flat], np.int32),
        offsets_of([len(actions) for actions in rows]),
    )
    blocks = [block_of(chunk).on_processes(plan.config.dp // layout.dp) for chunks, _ in processes for chunk in chunks]
    chunks = chunks_of_rows([chunk for chunks, _ in processes for chunk in chunks], cost.shape.sights)
    chunks = chunks._replace(
        rank_chunks=offsets_of([len(chunks) for chunks, _ in processes]),
        cp_first_rank=np.array([block.first for block in blocks], np.int32),
        cp_size=np.array([block.size for block in blocks], np.int32),
    )
    layers = plan.config.layers(cost.shape.num_layers)
    # Ranks that are joined exchange otherwise than the plan has it.
    exchange = exchange_of(chunks, cost) if layout.dp == plan.config.dp else None
    times = chunk_times(chunks.num_tokens, chunks.attention_pairs, cost.rates_on(layout.dp), layers, exchange)
    meeting = meeting_of(sharding)
    slots = align(chunks, actions, times, meeting, layout.dp, layout.pp, layout.placement)
    if (slots.ends < 0).any():
        raise DataError("actions wait for each other for ever", where=f"step {work.step.step}", hint=VALIDATE_HINT)
    own = slice(*slots.stages[layout.stage : layout.stage + 2])
    ops, virtual_stages = slots.ops[own].tolist(), slots.virtual_stages[own].tolist()
    of_stage = [(OPS[op], virtual_stage) for op, virtual_stage in zip(ops, virtual_stages, strict=True)]
    row = layout.dp_rank * layout.pp + layout.stage
    mine = slice(*actions.stages[row : row + 2])
    begins = slots.before[mine]
    over = begins + (meeting[actions.ops[mine]] >= 0)
    return [of_stage[start:stop] for start, stop in zip([0, *over], [*begins, len(of_stage)], strict=True)]


def _of_process(work: StepWork, ranks: range, pp: int) -> tuple[list[Chunk], list[list[Action]]]:
    """The chunks of a process of so many ranks, and the actions of its stages, with their places among these."""
    step = work.step
    if len(ranks) > 1 and is_shared(step):
        return join_chunks(step, ranks), [process_actions(step, work.plan, ranks, stage) for stage in range(pp)]
    chunks: list[Chunk] = []
    stages: list[list[Action]] = [[] for _ in range(pp)]
    for rank in ranks:
        for stage, actions in enumerate(stages):
            own = step.actions.get((rank, stage), ())
            actions += [replace(action, chunk_id=len(chunks) + action.chunk_id) for action in own]
        chunks += step.chunks.get(rank, ())
    return chunks, stages
