"""The order that actions need: of a chunk on a stage, of chunks over links, and for reducing in last backwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from chunkplan.errors import DataError
from chunkplan.operations import BACKWARDS, FORWARDS, KEPT_ATTENTION, OPS
from chunkplan.planfile.plan import VALIDATE_HINT, Action, Chunk, PlanStep
from chunkplan.visible import one_line
from chunkplan_runtime.layout import RankLayout, block_of

#: Per op, what must have happened to a chunk before (nothing: None) for the op to come next.
_BEFORE = {
    "forward": (None,),
    "forward_kv": (None,),
    "recompute": ("forward_kv",),
    "backward": ("forward", "recompute"),
    "backward_input": ("forward", "recompute"),
    "backward_weight": ("backward_input",),
}


def checked(action: Action, done: Mapping[tuple[int, int], str | None], where: str) -> tuple[int, int]:
    """The virtual stage and chunk of an action, whose chunks have last `done` these ops, if it may come next.

    Raises:
        DataError: it may not come next.
    """
    place = action.virtual_stage, action.chunk_id
    if place not in done:
        raise broken(f"{action.op} of {_named(place)}, which does not exist", where)
    before = done[place]
    if before not in _BEFORE[action.op]:
        raise broken(f"{action.op} of {_named(place)} after {before or 'nothing'}", where)
    return place


def check_done(done: Mapping[tuple[int, int], str | None], where: str) -> None:
    """Refuse that a chunk is left without a backward, or the half of one.

    Raises:
        DataError: naming it.
    """
    for place, op in done.items():
        if op not in ("backward", "backward_weight"):
            missing = "backward_weight" if op == "backward_input" else "backward"
            raise broken(f"no {missing} of {_named(place)}", where)


def check_words(step: PlanStep, dp_rank: int) -> None:
    """Refuse words that are not known here.

    Raises:
        DataError: naming the first chunk of which there is one.
    """
    words: list[tuple[str, Sequence[str], str, int]] = []
    for chunk in step.chunks.get(dp_rank, []):
        words.append(("kept_attention", KEPT_ATTENTION, chunk.kept_attention, chunk.chunk_id))
    for (of_rank, _), actions in step.actions.items():
        words += [("op", OPS, action.op, action.chunk_id) for action in actions if of_rank == dp_rank]
    for name, known, word, chunk_id in words:
        if word not in known:
            expected = ", ".join(f'"{each}"' for each in known)
            where = f"step {step.step}, rank {dp_rank}, chunk {chunk_id}"
            raise broken(f'{name} is "{one_line(word)}", expected one of {expected}', where)


def check_links(step: PlanStep, dp_rank: int, layout: RankLayout) -> None:
    """Refuse stages that exchange chunks in different orders: they would take one for another, or wait for ever.

    Raises:
        DataError: naming the first two.
    """
    for ops, what in ((FORWARDS, "activations"), (BACKWARDS, "gradients")):
        orders: dict[int, list[int]] = {each: [] for each in range(layout.num_model_stages)}  # chunks by model stage
        for stage in range(layout.pp):
            model_stages = layout.model_stages(stage)
            for action in step.actions.get((dp_rank, stage), []):
                # The executor refuses other virtual stages.
                if action.op in ops and 0 <= action.virtual_stage < layout.virtual_stages:
                    orders[model_stages[action.virtual_stage]].append(action.chunk_id)
        for model_stage, (order, after) in enumerate(pairwise(orders.values())):
            if order != after and layout.stage_of(model_stage) != layout.stage_of(model_stage + 1):
                kind = "stages" if layout.virtual_stages == 1 else "model stages"
                message = f"{kind} {model_stage} and {model_stage + 1} exchange {what} in different orders"
                raise broken(message, f"step {step.step}, rank {dp_rank}")


def broken(message: str, where: str) -> DataError:
    """An error of a plan whose actions do not belong together."""
    return DataError(message, where=where, hint=VALIDATE_HINT)


def _named(place: tuple[int, int]) -> str:
    virtual_stage, chunk_id = place
    return f"chunk {chunk_id}" + (f" on virtual stage {virtual_stage}" if virtual_stage else "")


def may_reduce(last: Sequence[Chunk | None]) -> bool:
    """Whether the replicas of a stage may reduce gradients, layer by layer, while their last backwards run.

    `last`: the chunk that each of them runs backward last; None where it has no chunk. They may if no last backward is
    of a chunk that another process shares without having it last: docs/context-parallel.md proves that nobody waits in
    a circle then. Otherwise a process that is done would reduce a layer that another one reaches only after it has met
    the first one in the layers below, so that all reduce after their last backwards.
    """
    named = [None if chunk is None else (chunk.group_id, chunk.group_index) for chunk in last]  # as all ranks name it
    blocks = [block_of(chunk) for chunk in last if chunk is not None]
    return not any(block.size > 1 and len({named[rank] for rank in block.ranks}) > 1 for block in blocks)
