"""Learning-rate schedules: pure functions of the step, so that a run that goes on needs no state of them."""

from __future__ import annotations

import math
from collections.abc import Callable

#: By name: progress after the warm-up, from 0 to below 1, -> share of the way from the highest rate to the lowest.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 0.0,
    "linear": lambda progress: progress,
    "cosine": lambda progress: (1 - math.cos(math.pi * progress)) / 2,
}


def learning_rate_factor(schedule: str, step: int, num_steps: int, *, warmup: float, lowest: float) -> float:
    """What the learning rate of step `step` (from 0) of `num_steps` is multiplied by: above 0, at most 1.

    `warmup` counts steps, or below 1 is a share of all; over them the factor rises linearly to 1. Then the schedule
    takes it down, to `lowest` one step after the last.
    """
    num_warmup = math.ceil(warmup * num_steps) if warmup < 1 else int(warmup)
    if step < num_warmup:
        return (step + 1) / num_warmup
    progress = (step - num_warmup) / max(num_steps - num_warmup, 1)
    return 1 - (1 - lowest) * SCHEDULES[schedule](progress)
