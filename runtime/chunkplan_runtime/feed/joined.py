"""The work of a process that runs several data-parallel ranks, in a step of which ranks share sequences.

Ranks cannot be run one after another there: what one of them shares with another process, that process may share with
the next one. So the chunks of all ranks of a process become those of one rank. What it shares with other processes
comes first, widest blocks first: a process of the same block has numbered the same chunks so far, so that a shared
chunk has one number on all processes, and by the rule of the plan's schedule nobody waits for ever
(docs/context-parallel.md). Slices of a chunk that several of its ranks have are one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from chunkplan.operations import OPS
from chunkplan.planfile.plan import Action, Chunk, Plan, PlanStep, Segment
from chunkplan_runtime.sharing import own_slices


def is_shared(step: PlanStep) -> bool:
    """Whether ranks share a chunk of the step."""
    return any(chunk.cp_size > 1 for chunks in step.chunks.values() for chunk in chunks)


def join_chunks(step: PlanStep, ranks: range) -> list[Chunk]:
    """The chunks of `ranks` as those of one rank, numbered anew: those shared with other processes first."""
    return [
        _joined([chunk for _, chunk in pieces], ranks, number) for number, pieces in enumerate(pieces_of(step, ranks))
    ]


def pieces_of(step: PlanStep, ranks: range) -> list[list[tuple[int, Chunk]]]:
    """What each chunk of `join_chunks` is made of: (rank, its chunk)."""
    found: dict[tuple[int, ...], list[tuple[int, Chunk]]] = {}
    for place, rank in enumerate(ranks):
        for chunk in step.chunks.get(rank, []):
            if chunk.cp_size == 1:
                key = (-1, place, chunk.chunk_id)
            else:  # those that lie within the process come after those that do not, as these have wider blocks
                assert chunk.group_id is not None
                key = (-chunk.cp_size, chunk.group_id, chunk.group_index)
            found.setdefault(key, []).append((rank, chunk))
    return [found[key] for key in sorted(found)]


def _joined(chunks: Sequence[Chunk], ranks: range, number: int) -> Chunk:
    """A chunk of one rank, or of what several ranks have of a shared one, under another number."""
    first = chunks[0]
    if first.cp_size == 1:
        return replace(first, chunk_id=number)
    sequence = first.segments[0].sequence_id
    return replace(
        first,
        chunk_id=number,
        num_tokens=sum(chunk.num_tokens for chunk in chunks),
        num_target_tokens=sum(chunk.num_target_tokens for chunk in chunks),
        cost=sum(chunk.cost for chunk in chunks),
        segments=tuple(Segment(sequence, *run) for run in own_slices(first, ranks)),
    )


def schedule_chunks(chunks: Sequence[Chunk], plan: Plan, stage: int) -> list[Action]:
    """What a stage does with the chunks of one rank, of a plan in which ranks share sequences: state-aware 1F1B."""
    # Compiled loops, which a run without such steps does not load.
    from chunkplan.cost.durations import ChunkTimes
    from chunkplan.planfile.chunks import chunks_without_segments
    from chunkplan.schedule.actions import empty_actions
    from chunkplan.schedule.templates import ALGORITHM2, ONE_FORWARD_ONE_BACKWARD, write_template

    config = plan.config
    # Rules that every process can follow by itself. What `auto` found is not for the chunks of these ranks as one.
    template = ALGORITHM2 if config.pp == 1 else ONE_FORWARD_ONE_BACKWARD
    table = chunks_without_segments(
        [0, len(chunks)],
        [chunk.num_tokens for chunk in chunks],
        [-1 if chunk.group_id is None else chunk.group_id for chunk in chunks],
        [chunk.keeps_activations for chunk in chunks],
    )
    times = ChunkTimes(np.zeros((len(OPS), config.pp, len(chunks)), np.int64), np.zeros(len(chunks), np.int64))
    actions = empty_actions(table.keeps_activations, config.pp, config.pp, False)
    write_template(template, table, times, config.pp, actions)
    own = slice(*actions.stages[stage : stage + 2])
    ops, chunk_ids = actions.ops[own].tolist(), actions.chunk_ids[own].tolist()
    return [Action(OPS[op], chunk_id, 0) for op, chunk_id in zip(ops, chunk_ids, strict=True)]


def process_actions(step: PlanStep, plan: Plan, ranks: range, stage: int) -> list[Action]:
    """What a stage of a process that runs `ranks` does in a step, one rank after another or all of them as one."""
    if len(ranks) > 1 and is_shared(step):
        return schedule_chunks(join_chunks(step, ranks), plan, stage)
    return [action for rank in ranks for action in step.actions.get((rank, stage), ())]


def chunk_groups(chunks: Sequence[Chunk]) -> dict[int, list[tuple[int, int]]]:
    """By its group, where each chunk of a shared sequence lies in it: [start, stop)."""
    groups: dict[int, list[tuple[int, int]]] = {}
    for chunk in chunks:
        if chunk.cp_size > 1 and chunk.group_id is not None:
            groups.setdefault(chunk.group_id, []).append((chunk.prefix_tokens, chunk.prefix_tokens + chunk.cp_tokens))
    return groups
