"""Learning-rate schedules: pure functions of the step, so that a run that goes on needs no state of them.

They are those of transformers, to the last bit: `ChunkTrainer` and the trainer give a step the same rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable

#: By name: (steps done after the warm-up, how many there are) -> what is left of the way down to the lowest rate.
LR_SCHEDULES: dict[str, Callable[[int, int], float]] = {
    "constant": lambda done, steps: 1.0,
    "linear": lambda done, steps: (steps - done) / steps,
    "cosine": lambda done, steps: 0.5 * (1 + math.cos(math.pi * (done / steps))),
}


def learning_rate_factor(schedule: str, step: int, num_steps: int, *, warmup: float, lowest: float) -> float:
    """What the learning rate of step `step` (from 0) of `num_steps` is multiplied by: from 0 to 1.

    `warmup` counts steps, or below 1 is a share of all; over them the factor rises linearly from 0, which is that of
    the first step, to 1, which is that of the first step after them. Then the schedule takes it down, to `lowest` one
    step after the last.
    """
    num_warmup = math.ceil(warmup * num_steps) if warmup < 1 else int(warmup)
    if step < num_warmup:
        return step / num_warmup
    left = LR_SCHEDULES[schedule](step - num_warmup, max(num_steps - num_warmup, 1))
    return left * (1 - lowest) + lowest
