"""The order that the ops of a chunk have on a stage, and errors of a plan that does not keep to it."""

from __future__ import annotations

from collections.abc import Mapping

from chunkplan.errors import DataError, UsageError
from chunkplan.planfile.plan import VALIDATE_HINT, Action
from chunkplan_runtime.models.weight_halves import Place

#: Per op, what must have happened to a chunk before (nothing: None) for the op to come next.
_BEFORE = {
    "forward": (None,),
    "forward_kv": (None,),
    "recompute": ("forward_kv",),
    "backward": ("forward", "recompute"),
    "backward_input": ("forward", "recompute"),
    "backward_weight": ("backward_input",),
}

#: What a chunk ends with.
_LAST = ("backward", "backward_weight")


def checked(action: Action, done: Mapping[Place, str | None], where: str) -> Place:
    """The chunk and virtual stage of an action, whose chunks have last `done` these ops, if it may come next.

    Raises:
        UsageError: an op is not known here.
        DataError: it may not come next.
    """
    if action.op not in _BEFORE:
        raise UsageError(
            f"{action.op} is not supported by this runtime", where=where, hint="build the plan with `--schedule auto`"
        )
    place = action.virtual_stage, action.chunk_id
    if place not in done:
        raise broken(f"{action.op} of {_named(place)}, which does not exist", where)
    before = done[place]
    if before not in _BEFORE[action.op]:
        raise broken(f"{action.op} of {_named(place)} after {before or 'nothing'}", where)
    return place


def check_done(done: Mapping[Place, str | None], where: str) -> None:
    """Refuse that a chunk is left without a backward, or the half of one.

    Raises:
        DataError: naming it.
    """
    left = [(place, op) for place, op in done.items() if op not in _LAST]
    if left:
        place, op = left[0]
        missing = "backward_weight" if op == "backward_input" else "backward"
        raise broken(f"no {missing} of {_named(place)}", where)


def broken(message: str, where: str) -> DataError:
    """An error of a plan whose actions do not belong together."""
    return DataError(message, where=where, hint=VALIDATE_HINT)


def _named(place: Place) -> str:
    virtual_stage, chunk_id = place
    return f"chunk {chunk_id}" + (f" on virtual stage {virtual_stage}" if virtual_stage else "")
