"""Properties of schedules, the layers of each model stage of a pipeline, and the stage it is on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from chunkplan.arrays import Int64Array


def split_layers(num_layers: int, num_model_stages: int) -> tuple[int, ...]:
    """Split layers as evenly as possible; the last stages, that of the vocabulary head among them, have fewer."""
    fewest, rest = divmod(num_layers, num_model_stages)
    return tuple(fewest + (model_stage < rest) for model_stage in range(num_model_stages))


class StagePlacement(NamedTuple):
    """Placement of the model stages of a pipeline: each stage has one of each row of them, its `virtual_stages`.

    Rows go through the stages in ascending order; where the placement `turns`, every other one in descending order, so
    that the model stages at a turn lie on one stage.
    """

    virtual_stages: int = 1
    turns: bool = False


#: A stage is a model stage.
STRAIGHT = StagePlacement()


class ScheduleFamily(NamedTuple):
    """Properties that all orders of a schedule have in common.

    `placement`: where model stages lie, unless a number of virtual stages is given; `splits`: backwards are done in two
    halves; `meets`: ranks that share chunks meet in one order.
    """

    placement: StagePlacement = STRAIGHT
    splits: bool = False
    meets: bool = False


#: Every schedule by name: first that of one stage, then those of pipelines. `schedule.families` has their rules.
#: zero-bubble-v has the last model stage on the first stage (ZB-V: Qi et al., arXiv 2401.10241, section 6).
FAMILIES = {
    "algorithm2": ScheduleFamily(meets=True),
    "auto": ScheduleFamily(meets=True),
    "1f1b": ScheduleFamily(meets=True),
    "interleaved": ScheduleFamily(StagePlacement(virtual_stages=2)),
    "zero-bubble": ScheduleFamily(splits=True, meets=True),
    "zero-bubble-v": ScheduleFamily(StagePlacement(virtual_stages=2, turns=True), splits=True),
    "search": ScheduleFamily(),
}


def family_of(schedule: str) -> ScheduleFamily:
    """The properties of a schedule; plans of other tools may name one that is not in `FAMILIES`."""
    return FAMILIES.get(schedule, ScheduleFamily())


_Part = TypeVar("_Part")
_Index = TypeVar("_Index", int, "Int64Array")


def model_stage_of(stage: _Index, virtual_stage: _Index, pp: int, placement: StagePlacement) -> _Index:
    """The model stage, from 0 in order of layers, of a virtual stage of one of `pp` stages."""
    return virtual_stage * pp + stage + placement.turns * (virtual_stage % 2) * (pp - 1 - 2 * stage)


def links_before(model_stage: _Index, pp: int, placement: StagePlacement) -> _Index:
    """Links between a model stage and the one before it: 1, or 0 where both are on one stage."""
    links: _Index = (pp > 1) * (1 - placement.turns * (model_stage % pp == 0))
    return links


def stage_of(model_stage: int, pp: int, placement: StagePlacement) -> tuple[int, int]:
    """The one of `pp` stages that has a model stage, and which of its virtual stages that is."""
    row, place = divmod(model_stage, pp)
    return (pp - 1 - place if placement.turns and row % 2 else place), row


def last_stage(pp: int, placement: StagePlacement) -> int:
    """The one of `pp` stages that has the last model stage, and with it the vocabulary head."""
    return stage_of(pp * placement.virtual_stages - 1, pp, placement)[0]


def stage_parts(parts: Sequence[_Part], pp: int, placement: StagePlacement) -> list[list[_Part]]:
    """Group values of model stages by pipeline stage: for each of `pp` stages those of its virtual stages in turn."""
    virtual_stages = range(len(parts) // pp)
    return [
        [parts[model_stage_of(stage, virtual_stage, pp, placement)] for virtual_stage in virtual_stages]
        for stage in range(pp)
    ]
