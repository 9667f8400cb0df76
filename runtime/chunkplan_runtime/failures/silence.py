"""How long nothing changed, as one process sees it."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable


class Silence:
    """Measures, in seconds, how long values have stayed the same.

    At most `longest` seconds count between two calls of `tick`: what passes while this process itself is suspended,
    alone or with the whole job, is not the others' silence.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._now = 0.0
        self._ticked = time.monotonic()
        self._pause, self._pause_ended = 0.0, -math.inf
        self._since: dict[Hashable, tuple[object, float]] = {}

    def tick(self) -> None:
        """Let the time pass that has passed."""
        now = time.monotonic()
        passed = now - self._ticked
        self._now += min(passed, self._longest)
        self._ticked = now
        if passed > self._longest:
            self._pause, self._pause_ended = passed, self._now

    def of(self, key: Hashable, value: object) -> float:
        """How long `key` has had this value; 0 where it is new."""
        if key not in self._since or self._since[key][0] != value:
            self._since[key] = value, self._now
        return self._now - self._since[key][1]

    def has_paused(self, seconds: float) -> bool:
        """Whether this process itself was suspended for so long or longer, until twice as long ago at the most."""
        return self._pause >= seconds and self._now - self._pause_ended <= 2 * seconds
