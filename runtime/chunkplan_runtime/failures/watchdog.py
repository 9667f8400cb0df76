"""Ends a job of several processes, with one message, when one of them died, is suspended, stalls or fails."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from chunkplan.errors import ChunkplanError, one_line
from chunkplan.quantities import seconds
from chunkplan_runtime.layout import NO_ACTIVITY, Activity, RankLayout, named_processes

RESUME = "--resume continues from the last checkpoint"
STOPS = (signal.SIGTERM, signal.SIGINT)  # end a job

_numbers = itertools.count()  # of watchdogs

#: Seconds without a beat after which nobody waits for a process any more, and the beats that it has in them.
DEAD_AFTER, _BEATS = 10.0, 10

#: Seconds at the same point after which a process prints where it is. Nobody ends it: it may wait for another for long.
STALLED_AFTER = 300.0

_STALL_HINT = """if no process moves, they wait for each other: look at what each of them says, and whether a GPU's \
memory is full (then --checkpointing full or --kv-offload, or a smaller ChunkSize); after an hour the run ends"""


class Beat(NamedTuple):
    """A heartbeat of a process. `step` is -1 before the first one; `stops`: it got a signal to stop."""

    number: int
    step: int
    stops: bool
    machine: str
    pid: int
    activity: Activity = NO_ACTIVITY

    def liveness(self) -> str:
        """The state of the process: "gone", "suspended" or "stalled"; "unknown" of one on another machine."""
        if not self.machine or self.machine != this_machine():
            return "unknown"
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "gone"
        return {"Z": "gone", "X": "gone", "T": "suspended", "t": "suspended"}.get(state, "stalled")


def this_machine() -> str:
    """The machine of this process, or its container, which numbers processes anew; "" where that is not Linux."""
    try:
        return f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


class Heartbeat:
    """The beats of this process and the last ones of those it watches: process 0 all, each other one process 0.

    `silent` has for how many exchanges nothing new has come of each process that runs: what passes while this one is
    suspended does not count.
    """

    def __init__(self, store: Store, process: int, world_size: int) -> None:
        self.number, self.step, self.stops, self.machine = 0, -1, False, this_machine()
        self.activity: Callable[[], Activity] = lambda: NO_ACTIVITY
        self._on_device: Callable[[], str | None] = lambda: None
        self._point, self._looks = "", 0  # where this process was at the last look for a stall, and for how many
        self.latest: dict[int, Beat] = {}  # of this process too; none of a process that has not begun
        self.silent: dict[int, int] = {}
        self._store, self._process = store, process
        self._watched = range(world_size) if process == 0 else (0, process)

    def exchange(self) -> None:
        """Write the next beat of this process and read those of the watched ones; RuntimeError: the store is gone."""
        self.number += 1
        own = Beat(self.number, self.step, self.stops, self.machine, os.getpid(), self.activity())
        self._store.set(f"beat/{self._process}", json.dumps(own))
        before = dict(self.latest)
        self.read(self._watched)
        for process, beat in self.latest.items():
            is_silent = before.get(process) == beat and not beat.stops
            self.silent[process] = self.silent.get(process, 0) + 1 if is_silent else 0

    def read(self, processes: Iterable[int]) -> None:
        """Read the last beats of these processes, of those that have begun: reading waits for keys not there yet."""
        begun = [each for each in processes if each in self.latest or self._store.check([f"beat/{each}"])]
        for process, text in zip(begun, self._store.multi_get([f"beat/{each}" for each in begun]), strict=True):
            number, step, stops, machine, pid, (words, waits_for) = json.loads(text)
            self.latest[process] = Beat(number, step, stops, machine, pid, Activity(words, tuple(waits_for)))

    @contextmanager
    def reporting(self, activity: Callable[[], Activity], on_device: Callable[[], str | None]) -> Iterator[None]:
        """Within the block, report `activity` of this process to the others and in warnings of a stall.

        `on_device` describes the work of a GPU, which the host runs ahead of, and may wait for it; None without one.
        """
        self.activity, self._on_device = activity, on_device
        yield
        self.activity = lambda: NO_ACTIVITY  # after an error it stays: what it waited for says who is missing

    def look_for_stall(self, who: str, interval: float) -> None:
        """Warn on stderr when `who`, this process, has been at the same point for `STALLED_AFTER` seconds.

        It is called every `interval` seconds. Looks are counted, as a suspended process does not look.
        """
        before, self._point = self._point, self.activity().words
        self._looks = self._looks + 1 if before == self._point != "" else 0
        if self._looks == max(1, int(STALLED_AFTER / interval)):
            stalled = f"warning: {who} has not moved for {seconds(1e6 * STALLED_AFTER)}: {self._point}"
            sys.stderr.write(f"{one_line(stalled)}\nhint: {_STALL_HINT}\n")  # in one piece
            threading.Thread(target=self._warn_of_device, args=[who], daemon=True).start()

    def _warn_of_device(self, who: str) -> None:
        if device := self._on_device():
            sys.stderr.write(one_line(f"warning: {who}: {device}") + "\n")

    def activities(self) -> dict[int, Activity]:
        """The last activity of each process that is known here, by number."""
        heard = {process: beat.activity for process, beat in self.latest.items()} | {self._process: self.activity()}
        return dict(sorted(heard.items()))


class Watchdog:
    """Ends the job when one of its processes has not beaten for `dead_after` seconds, which is the same in all.

    Its two threads run also while the main thread is in C++: one exchanges beats and decides, the other one looks
    whether the store still answers, and listens for signals. Make it right after `init_process_group`, whose store it
    keeps alive. About 1.4 times `dead_after` after a death every process has ended. A suspended one is woken, to end.
    """

    def __init__(
        self, layout: RankLayout, dead_after: float = DEAD_AFTER, *, resume: str = RESUME, stops: Iterable[int] = STOPS
    ) -> None:
        """`resume`: how the job goes on, for hints. `stops`: the signals that end it."""
        group = dist.group.WORLD
        assert group is not None, "before init_process_group"
        self.layout, self.resume, self._stops = layout, resume, stops
        self._dead_after, self._interval = dead_after, dead_after / _BEATS
        self._job_store = group.get_group_store()  # where this process hosts it, it ends with the last reference
        name = f"watchdog {next(_numbers)}"  # of a job that begins again, all processes count alike
        self._store = PrefixStore(name, self._job_store.clone())  # type: ignore[attr-defined]  # not in torch's stubs
        self._by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        self._hosts_store = layout.process == 0 and layout.world_size > 1 and not self._by_launcher
        # Without a store nobody can agree on who prints: on each machine it is the first process that came here.
        key = f"machine/{socket.gethostname()}"
        self._prints_without_store = not self._hosts_store and self._store.add(key, 1) == 1
        self.heartbeat = Heartbeat(self._store, layout.process, layout.world_size)
        self._looked, self._stopping = time.monotonic(), 0  # the last round; rounds since a process was told to stop
        self._wake, self._over = threading.Event(), threading.Event()  # begin a round at once; end the threads
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._signals, self._wakeup = socket.socketpair()  # numbers of signals, which Python writes also in C++
        self._signals.settimeout(self._interval)
        self._wakeup.setblocking(False)
        self.defers_interrupt = False  # the main thread takes the next Ctrl-C when its step is done
        self._is_done = False  # this process has come to its regular end
        self._main_thread_ends = False  # it prints and exits, else the watchdog does
        self._fails_with: int | None = None  # with this exit status
        self._is_first = True  # no other process has reported an end
        self._error: ChunkplanError | None = None  # for the main thread to print
        self._ended, self._ending = threading.Event(), threading.Lock()  # how the job ends is known

    def start(self) -> None:
        """Begin to beat and to look; only the main thread may call it."""
        self._thread.start()
        threading.Thread(target=self._listen, name="watchdog of store and signals", daemon=True).start()
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        atexit.register(self._leave)

    def at_step(self, step: int) -> None:
        """Beat from now on that this process is at `step`; -1: before the first.

        When the job ends it does not come back: one that was suspended is awake again by then, and all could go on.
        """
        self.heartbeat.step = step
        if time.monotonic() - self._looked > self._dead_after / 2:  # suspended meanwhile, perhaps
            self._wake.set()
            self._ended.wait(self._dead_after / 2)
        if self._ended.is_set():
            self.await_end()

    def fail(self, exit_status: int) -> bool:
        """Report an error, which ends the other processes with the same exit status; whether this one prints it."""
        self._main_thread_ends, self._fails_with = True, exit_status
        self._await_status()
        return self._is_first

    def interrupted(self) -> ChunkplanError | None:
        """Report a signal to stop, and wait until all have reported their end; an error to print where one died."""
        self._main_thread_ends = self.heartbeat.stops = True
        self._await_status()
        return self._error

    def _await_status(self) -> None:
        self._wake.set()
        if self._thread.is_alive():
            self._ended.wait(2 * self._dead_after)

    def await_end(self) -> None:
        """Wait for as long as the watchdog needs to find who died, and to end this process."""
        if self._thread.is_alive():
            time.sleep(1.6 * self._dead_after)

    def stop(self) -> None:
        """End regularly, after a barrier; who hosts the store waits until all have come here."""
        signal.set_wakeup_fd(-1)
        atexit.unregister(self._leave)
        self._is_done = True
        self._leave(self._dead_after)

    def _leave(self, timeout: float | None = None) -> None:
        """End the threads before the interpreter ends, under which none must come back from C++."""
        self._over.set()
        self._wake.set()
        self._thread.join(timeout or 2 * self._interval)
        if self._main_thread_ends and self._hosts_store:
            time.sleep(2 * self._interval)  # the store ends with this process, and others have yet to read the status

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._do_round()
                self._looked = time.monotonic()
                self.heartbeat.look_for_stall(self.layout.describe(), self._interval)
                self._wake.wait(self._interval)
                self._wake.clear()
            if self._is_done:
                if self._store.check(["exit_status"]):  # another process was lost, and came back
                    self._end_job(0, None)
                self._store.add("stopped", 1)
                while self._hosts_store and self._store.add("stopped", 0) < self.layout.world_size:
                    time.sleep(self._interval / 50)
        except RuntimeError:  # all that a store raises
            has_paused = time.monotonic() - self._looked >= self._dead_after
            pause = f", after a pause of {self.layout.describe()} itself" if has_paused else ""
            self._lose_store("gone", f"its store closed the connection{pause}")
        finally:
            self._over.set()
            self._ended.set()

    def _do_round(self) -> None:
        """Exchange beats; end the job if another process ends it, this one fails, one died, or some were stopped."""
        self.heartbeat.exchange()
        if self._fails_with is not None or self._store.check(["exit_status"]):
            self._end_job(self._fails_with or 0, None)
        elif lost := [each for each, silent in self.heartbeat.silent.items() if silent >= _BEATS]:
            self.heartbeat.read(range(self.layout.world_size))  # who waits for it may be none that is watched
            beat = self.heartbeat.latest[lost[0]]
            heard = f"nothing heard of it for {self._dead_after:g} s"
            self._end_job(1, self._lost(lost[0], beat.liveness(), heard), beat)
        elif self.layout.process == 0:
            stopped = [process for process, beat in self.heartbeat.latest.items() if beat.stops]
            self._stopping += bool(stopped)
            # until a death, which is then the reason, would have been found
            if len(stopped) == self.layout.world_size or self._stopping > 1.3 * _BEATS:
                error = f"{self.layout.describe(stopped[0])} was stopped {self._when(stopped[0])}"
                prints = not self._main_thread_ends
                self._end_job(128 + signal.SIGTERM, ChunkplanError(error, hint=self.resume) if prints else None)

    def _listen(self) -> None:
        """Look whether beats come through, as a call to a store on a lost machine does not come back; take signals."""
        number, silent = 0, 0
        while not self._over.is_set() and silent <= _BEATS:
            with suppress(TimeoutError):
                sent = self._signals.recv(1)[0]
                is_deferred = sent == signal.SIGINT and self.defers_interrupt
                self.defers_interrupt &= not is_deferred
                is_stop = sent in self._stops and not is_deferred
                if is_stop and not self._over.wait(3.0) and not self._main_thread_ends:  # in C++, without handlers
                    self.heartbeat.stops = True
                    self._wake.set()
            silent = silent + 1 if number == self.heartbeat.number else 0
            number = self.heartbeat.number
        host = None if self._by_launcher else self.heartbeat.latest.get(0)
        liveness = host.liveness() if host else "unknown"
        self._lose_store(liveness, f"nothing heard of its store for {self._dead_after:g} s")

    def _lose_store(self, liveness: str, heard: str) -> None:
        if not self._over.is_set():
            error = self._lost(0, liveness, heard, "torchrun on the machine of " if self._by_launcher else "")
            self._end(1, error, is_first=self._prints_without_store or self._fails_with is not None)

    def _end_job(self, status: int, error: ChunkplanError | None, lost: Beat | None = None) -> None:
        """Write how the job ends, unless another process has; wake the process of `lost` if it is suspended."""
        own = f"{status} {self.layout.process}"
        written = self._store.compare_set("exit_status", "", own)
        if lost is not None and lost.liveness() == "suspended":
            with suppress(OSError):
                os.kill(lost.pid, signal.SIGCONT)  # else its launcher would wait for it
        self._end(int(written.split()[0]), error, is_first=written == own.encode())

    def _end(self, status: int, error: ChunkplanError | None, *, is_first: bool) -> None:
        """End this process with this status, unless its main thread does; the first call counts."""
        if not self._ending.acquire(blocking=False):
            return
        self._is_first = is_first and self._main_thread_ends
        self._error = error if self._is_first else None
        self._ended.set()
        if self._main_thread_ends:
            return
        if error is not None and is_first:
            sys.stderr.write(f"error: {one_line(str(error))}\nhint: {error.hint}\n")  # in one piece
        time.sleep(2 * self._interval)  # others read the status; a process that fails too may end by itself
        sys.stderr.flush()
        os._exit(status)

    def _lost(self, process: int, liveness: str, heard: str, what: str = "") -> ChunkplanError:
        """The error about a process, or `what` of it, that is not heard any more."""
        heard += last_activity(process, self.heartbeat.activities())
        pid = self.heartbeat.latest[process].pid if process in self.heartbeat.latest else 0
        who = what + self.layout.describe(process)
        return lost_process(liveness, who, self._when(process), heard, pid, self.resume)

    def _when(self, process: int) -> str:
        """The step of a process, whose beat may be some steps old: all processes begin a step together."""
        beat = self.heartbeat.latest.get(process)
        step = max(self.heartbeat.step, beat.step if beat else -1)
        return f"at step {step}" if step >= 0 else "before the first step"


def lost_process(liveness: str, who: str, when: str, heard: str, pid: int = 0, resume: str = RESUME) -> ChunkplanError:
    """The error that says what has become of a process at a step, and by what it is known: `heard`."""
    end_it = f"`kill -KILL {pid}`"
    here = f"if it is still there, `kill -CONT {pid}` has it end as the others do, {end_it} at once"
    why = "its own output says why (out of memory, a lost machine)"
    said, hint = {
        "gone": (f"died {when}", why),
        "suspended": (f"is suspended {when} (stopped by a signal)", here),
        "stalled": (f"is stalled {when} (alive)", f"if it is still there, {end_it} ends it"),
        "unknown": (f"is silent {when} (suspended, stalled or gone)", f"if it is gone, {why}"),
    }[liveness]
    return ChunkplanError(f"{who} {said}: {heard}", hint=f"{hint}; {resume}")


def last_activity(process: int, activities: Mapping[int, Activity]) -> str:
    """The last activity of a process, and of those that wait for it, as the end of a sentence."""
    own = activities.get(process, NO_ACTIVITY).words
    said = f"; last heard of in {own}" if own else ""
    waiting = [other for other, activity in activities.items() if process in activity.waits_for and other != process]
    if waiting:
        said += f"; process {waiting[0]} waits for it in {activities[waiting[0]].words}"
    if waiting[1:]:
        said += f"; so {'do' if waiting[2:] else 'does'} {named_processes(waiting[1:])}"
    return said
