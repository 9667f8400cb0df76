"""What has become of a process that nothing is heard of, as Linux knows it (no other system does), and in words."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from chunkplan.errors import ChunkplanError
from chunkplan_runtime.exchange import NO_ACTIVITY, Activity, named_processes

RESUME = "--resume goes on from the last checkpoint"

_PROCESSES = Path("/proc")


class Fate(Enum):
    """What is known of a process that nothing is heard of; `UNKNOWN`: nothing, as of one on another machine."""

    GONE = "gone"
    SUSPENDED = "suspended"
    STALLED = "stalled"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Place:
    """A process, by its number on a machine.

    `machine` tells boots and containers apart, each of which numbers processes anew, and `started` processes that had
    the same number; both are "" where the system does not say.
    """

    machine: str
    pid: int
    started: str

    @classmethod
    def of_this_process(cls) -> Place:
        """The place of the process that calls this."""
        pid = os.getpid()
        try:
            boot = (_PROCESSES / "sys/kernel/random/boot_id").read_text().strip()
            container = (_PROCESSES / "self/ns/pid").readlink()
            return cls(f"{boot}:{container}", pid, _state_and_start(pid)[1])
        except OSError:
            return cls("", pid, "")

    @classmethod
    def parse(cls, text: str) -> Place:
        """The place that `str` made a string of."""
        machine, pid, started = text.split("/")
        return cls(machine, int(pid), started)

    def __str__(self) -> str:
        """One word, without spaces, for `parse`."""
        return f"{self.machine}/{self.pid}/{self.started}"

    def fate(self) -> Fate:
        """What has become of the process, as far as this one can tell."""
        if not self.machine or self.machine != Place.of_this_process().machine:
            return Fate.UNKNOWN
        try:
            state, started = _state_and_start(self.pid)
        except OSError:
            return Fate.GONE
        if started != self.started or state in "ZXx":  # another process by now, or one that waits to be reaped
            return Fate.GONE
        return Fate.SUSPENDED if state in "Tt" else Fate.STALLED

    def wake(self) -> None:
        """Let a process go on that is suspended; without effect where this one may not."""
        with suppress(OSError):
            os.kill(self.pid, signal.SIGCONT)


def lost(fate: Fate, who: str, when: str, heard: str, place: Place | None = None) -> ChunkplanError:
    """The error that says of `who` what has become of it at a step, and by what it is known: `heard`."""
    pid = place.pid if place else 0
    why = "(out of memory, a lost machine)"
    match fate:
        case Fate.GONE:
            said, hint = f"{who} died {when}: {heard}", f"its own output says why {why}"
        case Fate.SUSPENDED:
            said = f"{who} is suspended {when} (stopped by a signal): {heard}"
            hint = f"if it is still there, `kill -CONT {pid}` has it end as the others do, `kill -KILL {pid}` at once"
        case Fate.STALLED:
            said = f"{who} is stalled {when} (alive): {heard}"
            hint = f"if it is still there, `kill -KILL {pid}` ends it"
        case Fate.UNKNOWN:
            said = f"{who} is silent {when} (suspended, stalled or gone): {heard}"
            hint = f"if it is gone, its own output says why {why}"
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


def _state_and_start(pid: int) -> tuple[str, str]:
    """The letter of its state, and when it began, in ticks since boot: entries 3 and 22 of proc_pid_stat(5)."""
    entries = (_PROCESSES / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return entries[0], entries[19]
