"""How many layers each model stage of a pipeline has, and on which stage it lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar


def split_layers(num_layers: int, num_model_stages: int) -> tuple[int, ...]:
    """As even as they come; the last ones, the vocabulary head's among them, have fewer."""
    fewest, rest = divmod(num_layers, num_model_stages)
    return tuple(fewest + (model_stage < rest) for model_stage in range(num_model_stages))


#: Schedules whose second virtual stages lie on the stages in descending order, so that the last model stage is on the
#: first stage (ZB-V: Qi et al., arXiv 2401.10241, section 6).
V_SHAPED = ("zero-bubble-v",)

_Part = TypeVar("_Part")


def model_stage_of(stage: int, virtual_stage: int, pp: int, v_shaped: bool) -> int:
    """Which part of a model a virtual stage of one of `pp` stages is: from 0, in the order of its layers."""
    return virtual_stage * pp + (pp - 1 - stage if v_shaped and virtual_stage % 2 else stage)


def last_stage(pp: int, v_shaped: bool) -> int:
    """The one of `pp` stages that has the last model stage, and with it the vocabulary head."""
    return 0 if v_shaped else pp - 1


def stage_parts(parts: Sequence[_Part], pp: int, v_shaped: bool) -> list[list[_Part]]:
    """Of something of each model stage, what each of `pp` stages has: that of its virtual stages in turn."""
    virtual_stages = range(len(parts) // pp)
    return [
        [parts[model_stage_of(stage, virtual_stage, pp, v_shaped)] for virtual_stage in virtual_stages]
        for stage in range(pp)
    ]
