"""What each process tells the others in the job's store, and what is said of one that tells nothing any more."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from torch.distributed.distributed_c10d import Store

from chunkplan.errors import ChunkplanError
from chunkplan_runtime.sharing import NO_ACTIVITY, Activity, named_processes

RESUME = "--resume continues from the last checkpoint"


class Liveness(Enum):
    """What Linux says of a process that is not heard; `UNKNOWN` of one on another machine."""

    GONE = "gone"
    SUSPENDED = "suspended"
    STALLED = "stalled"
    UNKNOWN = "unknown"


class Beat(NamedTuple):
    """What a process tells, again and again. `step` is -1 before the first one; `stops`: it got a signal to stop."""

    number: int
    step: int
    stops: bool
    machine: str
    pid: int
    activity: Activity = NO_ACTIVITY

    def liveness(self) -> Liveness:
        """What has become of the process, as far as this one can tell."""
        if not self.machine or self.machine != this_machine():
            return Liveness.UNKNOWN
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return Liveness.GONE
        known = {"Z": Liveness.GONE, "X": Liveness.GONE, "T": Liveness.SUSPENDED, "t": Liveness.SUSPENDED}
        return known.get(state, Liveness.STALLED)


def this_machine() -> str:
    """The machine of this process, or its container, which numbers processes anew; "" where that is not Linux."""
    try:
        return f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


class Heartbeat:
    """The beats of this process and the last ones of those it watches: process 0 all, each other one process 0.

    The main thread sets `step` and `stops`, and `activity`, by which it tells what it is at. `silent` has for how many
    exchanges nothing new has come of each process that runs: what passes while this one is suspended does not count.
    """

    def __init__(self, store: Store, process: int, world_size: int) -> None:
        self.number, self.step, self.stops = 0, -1, False
        self.machine = this_machine()
        self.activity: Callable[[], Activity] = lambda: NO_ACTIVITY
        self.latest: dict[int, Beat] = {}  # of this process too; none of a process that has not begun
        self.silent: dict[int, int] = {}
        self._store, self._process = store, process
        self._watched = range(world_size) if process == 0 else range(1)

    def exchange(self) -> None:
        """Write the next beat of this process and read those of the watched ones; RuntimeError: the store is gone."""
        self.number += 1
        own = Beat(self.number, self.step, self.stops, self.machine, os.getpid(), self.activity())
        self._store.set(f"beat/{self._process}", json.dumps(own))
        before = dict(self.latest)
        self.read(self._watched)
        self.latest[self._process] = own
        for process, beat in self.latest.items():
            is_silent = before.get(process) == beat and not beat.stops
            self.silent[process] = self.silent.get(process, 0) + 1 if is_silent else 0

    def read(self, processes: Iterable[int]) -> None:
        """Read the last beats of these processes, of those that have begun."""
        # Reading waits for keys that are not there.
        begun = [each for each in processes if each in self.latest or self._store.check([f"beat/{each}"])]
        for process, text in zip(begun, self._store.multi_get([f"beat/{each}" for each in begun]), strict=True):
            number, step, stops, machine, pid, (words, waits_for) = json.loads(text)
            self.latest[process] = Beat(number, step, stops, machine, pid, Activity(words, tuple(waits_for)))

    @contextmanager
    def telling(self, activity: Callable[[], Activity]) -> Iterator[None]:
        """Within the block, have the others know what this process is at, for their messages."""
        self.activity = activity
        yield
        self.activity = lambda: NO_ACTIVITY  # after an error it stays: what it waited for says who is missing

    def activities(self) -> dict[int, Activity]:
        """What each process that is known here was last heard to do, by number."""
        heard = {process: beat.activity for process, beat in self.latest.items()} | {self._process: self.activity()}
        return dict(sorted(heard.items()))


def lost_process(liveness: Liveness, who: str, when: str, heard: str, pid: int = 0) -> ChunkplanError:
    """The error that says what has become of a process at a step, and by what it is known: `heard`."""
    why, end_it = "its own output says why (out of memory, a lost machine)", f"`kill -KILL {pid}`"
    said, hint = {
        Liveness.GONE: (f"{who} died {when}: {heard}", why),
        Liveness.SUSPENDED: (
            f"{who} is suspended {when} (stopped by a signal): {heard}",
            f"if it is still there, `kill -CONT {pid}` has it end as the others do, {end_it} at once",
        ),
        Liveness.STALLED: (f"{who} is stalled {when} (alive): {heard}", f"if it is still there, {end_it} ends it"),
        Liveness.UNKNOWN: (f"{who} is silent {when} (suspended, stalled or gone): {heard}", f"if it is gone, {why}"),
    }[liveness]
    return ChunkplanError(said, hint=f"{hint}; {RESUME}")


def last_heard(process: int, activities: Mapping[int, Activity]) -> str:
    """What a process was last heard to do, and what those do that wait for it, as the end of a sentence."""
    own = activities.get(process, NO_ACTIVITY).words
    said = f"; last heard of in {own}" if own else ""
    waiting = [other for other, activity in activities.items() if process in activity.waits_for and other != process]
    if waiting:
        said += f"; process {waiting[0]} waits for it in {activities[waiting[0]].words}"
    if waiting[1:]:
        said += f"; so {'do' if waiting[2:] else 'does'} {named_processes(waiting[1:])}"
    return said
