"""The lowest evaluation loss of a run so far: which checkpoint is the best one, and whether it is time to stop.

It follows from the evaluations alone, so a run that goes on reads it from their file again.
"""

from __future__ import annotations

from collections.abc import Iterable


class BestLoss:
    """Knows the evaluations of a run in their order; after `patience` of them without a lower loss it stops.

    `patience` None: it never stops. One without targets has no loss, and counts for nothing.
    """

    def __init__(self, patience: int | None = None, before: Iterable[tuple[int, float | None]] = ()) -> None:
        self._patience = patience
        #: The lowest loss; None before the first.
        self.loss: float | None = None
        #: How many steps were done when it was found: the step that its checkpoint goes on with.
        self.step = 0
        #: How many evaluations have been no lower since.
        self.since = 0
        for step, loss in before:
            self.add(step, loss)

    def add(self, step: int, loss: float | None) -> bool:
        """Take the loss that was found when `step` steps were done; returns whether it is the lowest so far."""
        if loss is None:
            return False
        if self.loss is not None and loss >= self.loss:
            self.since += 1
            return False
        self.loss, self.step, self.since = loss, step, 0
        return True

    @property
    def should_stop(self) -> bool:
        """Whether the last evaluations have been no lower, as many as are waited for."""
        return self._patience is not None and self.since >= self._patience
