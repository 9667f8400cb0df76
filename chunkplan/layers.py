"""How many layers each model stage of a pipeline has, and on which stage it lies."""

from __future__ import annotations


def split_layers(num_layers: int, num_model_stages: int) -> tuple[int, ...]:
    """As even as they come; the last ones, the vocabulary head's among them, have fewer."""
    fewest, rest = divmod(num_layers, num_model_stages)
    return tuple(fewest + (model_stage < rest) for model_stage in range(num_model_stages))


#: Schedules whose second virtual stages lie on the stages in descending order, so that the last model stage is on the
#: first stage (ZB-V: Qi et al., arXiv 2401.10241, section 6).
V_SHAPED = ("zero-bubble-v",)


def model_stage_of(stage: int, virtual_stage: int, pp: int, v_shaped: bool) -> int:
    """Which part of a model a virtual stage of one of `pp` stages is: from 0, in the order of its layers."""
    return virtual_stage * pp + (pp - 1 - stage if v_shaped and virtual_stage % 2 else stage)
