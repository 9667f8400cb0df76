"""What every process writes into the job's store about itself, again and again, and what it reads there about others.

Process 0 reads the beats of all, every other process those of process 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.distributed.distributed_c10d import Store

from chunkplan_runtime.exchange import NO_ACTIVITY, Activity
from chunkplan_runtime.failures.fate import Place

#: The states of a process: it works; it has come to its regular end; it got a signal to stop and ends.
RUNNING, STOPPED, INTERRUPTED = "running", "stopped", "interrupted"


@dataclass(frozen=True)
class Beat:
    """One beat of a process: the how-manieth it is, the state and the step of the process, where it runs, what it does.

    What it does is not known between steps, and there are no words for it then.
    """

    number: int
    state: str
    step: int
    place: Place
    activity: Activity = NO_ACTIVITY

    @classmethod
    def parse(cls, text: str) -> Beat:
        """The beat that `str` made a string of."""
        number, state, step, place, processes, words = text.split(" ", 5)
        waits_for = tuple(int(process) for process in processes.split(",") if process)
        return cls(int(number), state, int(step), Place.parse(place), Activity(words, waits_for))

    def __str__(self) -> str:
        """Six entries for `parse`, of which the last one may have spaces."""
        processes = ",".join(map(str, self.activity.waits_for))
        return f"{self.number} {self.state} {self.step} {self.place} {processes} {self.activity.words}"


class Heartbeat:
    """The beats of this process and the last ones of those it watches.

    The main thread sets `state` and `step`, which the next beat carries; -1 stands for before the first step. The beat
    asks `activity` what that thread is at.
    """

    def __init__(self, store: Store, process: int, world_size: int) -> None:
        self.state = RUNNING
        self.step = -1
        self.activity: Callable[[], Activity] = lambda: NO_ACTIVITY
        self.number = 0  # of the last beat; it does not change while a call to the store hangs
        self.place = Place.of_this_process()
        self.watched = range(1, world_size) if process == 0 else range(1)
        self.latest: dict[int, Beat] = {}  # by number, of this process too; none of a process that has not begun
        self._store = store
        self._process = process

    def prepare(self) -> None:
        """Make the keys of the beats: reading waits for keys that are not there.

        Raises:
            RuntimeError: the store is gone.
        """
        for process in {self._process, *self.watched}:
            self._store.compare_set(_key(process), "", "")

    def exchange(self) -> None:
        """Write the next beat of this process and read those of the watched ones.

        Raises:
            RuntimeError: the store is gone.
        """
        self.number += 1
        own = Beat(self.number, self.state, self.step, self.place, self.activity())
        self._store.set(_key(self._process), str(own))
        self._read(self.watched)
        self.latest[self._process] = own

    def read_all(self, world_size: int) -> None:
        """Read the last beats of all processes, for a message about one that others wait for.

        Raises:
            RuntimeError: the store is gone.
        """
        others = [process for process in range(world_size) if process != self._process]
        for process in others:
            self._store.compare_set(_key(process), "", "")
        self._read(others)

    def _read(self, processes: Sequence[int]) -> None:
        beats = self._store.multi_get([_key(process) for process in processes])
        self.latest |= {
            process: Beat.parse(beat.decode()) for process, beat in zip(processes, beats, strict=True) if beat
        }

    def state_of(self, process: int) -> str:
        """The last known state of a process; one that has not begun counts as running."""
        return self.latest[process].state if process in self.latest else RUNNING

    def place_of(self, process: int) -> Place | None:
        """Where a process runs; None where it is not known yet."""
        return self.latest[process].place if process in self.latest else None

    def activities(self) -> dict[int, Activity]:
        """What the processes that are known here were last heard to do, and what this one does, by number."""
        heard = {process: beat.activity for process, beat in self.latest.items()} | {self._process: self.activity()}
        return dict(sorted(heard.items()))

    def step_of(self, process: int) -> int:
        """The step that a process is at. Its beat may be some steps old, and all processes begin a step together."""
        return max(self.latest[process].step if process in self.latest else -1, self.step)


def _key(process: int) -> str:
    return f"beat/{process}"
