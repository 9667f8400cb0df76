"""What notices that a process of the job died, is suspended or failed, and ends the job with its name and step.

Every process has a watchdog, whose threads run also while the main thread is blocked in C++. It is made of a heartbeat
(what the processes know of each other), a verdict (how the job ends) and a listener (signals); here is what decides.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from chunkplan.errors import ChunkplanError
from chunkplan_runtime.exchange import NO_ACTIVITY, Activity
from chunkplan_runtime.failures.fate import RESUME, Fate, last_heard, lost
from chunkplan_runtime.failures.heartbeat import INTERRUPTED, RUNNING, STOPPED, Heartbeat
from chunkplan_runtime.failures.signals import SignalListener
from chunkplan_runtime.failures.stall import StallClock
from chunkplan_runtime.failures.verdict import Verdict
from chunkplan_runtime.layout import RankLayout

#: Seconds without a beat after which nobody waits for a process any more.
DEAD_AFTER = 10.0

#: Beats in that time.
_BEATS = 10

#: Seconds in which a main thread that runs Python has noticed a signal.
_PATIENCE = 3.0

#: Exit code of a process that ends because another one was stopped: as if it had got that SIGTERM too.
_STOPPED_CODE = 143


class Watchdog:
    """Ends the job when one of its processes has not beaten for `dead_after` seconds, which is the same in all.

    Make it right after `init_process_group`, whose store it has a connection of its own to, and keeps alive. A process
    is watched from its first beat on; about 1.4 times `dead_after` after a death every process has ended. One that is
    suspended is woken then, to end too.
    """

    def __init__(self, layout: RankLayout, dead_after: float = DEAD_AFTER) -> None:
        group = dist.group.WORLD
        assert group is not None, "before init_process_group"
        self.layout = layout
        self._dead_after = dead_after
        self._interval = dead_after / _BEATS
        self._job_store = group.get_group_store()  # where this process hosts it, it ends with the last reference
        self._store = PrefixStore("watchdog", self._job_store.clone())  # type: ignore[attr-defined]  # not in torch's stubs
        self._by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        self._hosts_store = layout.process == 0 and layout.world_size > 1 and not self._by_launcher
        self._prints_if_alone = False
        self._exit_code: int | None = None  # of an error that ends the main thread

        self.heartbeat = Heartbeat(self._store, layout.process, layout.world_size)
        self._verdict = Verdict(self._store, layout.process, grace=2 * self._interval)
        self._listener = SignalListener(self._on_signal)
        self._clock = StallClock(2 * self._interval)

        self._looked = time.monotonic()  # when the last round of the thread was done
        self._wake = threading.Event()  # begins a round at once
        self._over = threading.Event()  # ends the threads
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to beat and to look; only the main thread may call it."""
        self._verdict.prepare()
        self.heartbeat.prepare()
        # Without a store nobody can agree on who prints: on each machine it is the first process that came here.
        if not self._hosts_store:
            self._prints_if_alone = self._store.add(f"machine/{socket.gethostname()}", 1) == 1
        self._thread.start()
        threading.Thread(target=self._look_at_store, name="watchdog of the store", daemon=True).start()
        self._listener.start()
        atexit.register(self._leave)

    def at_step(self, step: int) -> None:
        """Beat from now on that this process is at `step`; -1: before the first.

        When the job ends it does not come back: one that was suspended is awake again by then, and all could go on.
        """
        self.heartbeat.step = step
        looked = self._looked
        if time.monotonic() - looked > self._dead_after / 2:  # suspended meanwhile, perhaps: what became of the job?
            self._wake.set()
            while self._thread.is_alive() and self._looked == looked and not self._verdict.settled.is_set():
                self._verdict.settled.wait(self._interval / 10)
        if self._verdict.settled.is_set():
            self.await_end()

    @contextmanager
    def telling(self, activity: Callable[[], Activity]) -> Iterator[None]:
        """Within the block, have the others know what this process is at, for their messages."""
        self.heartbeat.activity = activity
        yield
        self.heartbeat.activity = lambda: NO_ACTIVITY  # after an error it stays: what it waited for says who is missing

    def fail(self, exit_code: int) -> bool:
        """Report to the others that this process ends with an error; their watchdogs end them with that exit code.

        Returns whether this process is the first one to report an end; only then it prints its message.
        """
        self._verdict.main_thread_ends = True
        self._exit_code = exit_code
        self._await_verdict()
        return self._verdict.is_first

    def interrupted(self) -> ChunkplanError | None:
        """Report that this process got a signal to stop, and wait until each other one has reported its end, or died.

        Whoever has not done either a while after `dead_after` is ended by its watchdog. Returns an error to print that
        names the process that died, and its step; None where nobody died or another process prints it.
        """
        self._verdict.main_thread_ends = True
        self.heartbeat.state = INTERRUPTED
        self._await_verdict()
        return self._verdict.error

    def stop(self) -> None:
        """A regular end of this process, when all have come to theirs: a barrier comes before.

        Rank 0, with which the store may go, waits until the others have stopped too.
        """
        self.heartbeat.state = STOPPED
        self._listener.stop()
        self._wake.set()
        self._thread.join(self._dead_after)
        self._over.set()
        if not self._verdict.main_thread_ends:
            atexit.unregister(self._leave)  # with which goes the store

    def await_end(self) -> None:
        """Wait for as long as the watchdog needs to find who died, and to end this process."""
        if self._thread.is_alive():
            time.sleep(1.6 * self._dead_after)

    def _await_verdict(self) -> None:
        self._wake.set()
        if self._thread.is_alive():
            self._verdict.settled.wait(2 * self._dead_after)

    def _run(self) -> None:
        try:
            while not self._over.is_set() and not self._verdict.settled.is_set():
                self._do_round()
                self._looked = time.monotonic()
                hurries = self.heartbeat.state == STOPPED
                self._wake.wait(self._interval / 10 if hurries else self._interval)
                self._wake.clear()
        except RuntimeError:  # all that a store raises
            self._clock.tick()
            self._lose_store(Fate.GONE, "its store closed the connection")
        finally:
            self._over.set()
            self._verdict.settled.set()

    def _do_round(self) -> None:
        """Exchange beats, and act on what they and the verdict say."""
        self.heartbeat.exchange()
        self._verdict.look()
        if self._verdict.settled.is_set():
            return
        if self.heartbeat.latest[self.layout.process].state == STOPPED:
            if self.layout.process > 0 or not any(map(self._is_running, self.heartbeat.watched)):
                self._over.set()
        else:
            self._judge()

    def _judge(self) -> None:
        """End the job if this process fails, another one died, or some were stopped."""
        self._clock.tick()
        if self._exit_code is not None:
            self._end_job(self._exit_code, None)
            return
        for process in self.heartbeat.watched:
            beat = self.heartbeat.latest.get(process)
            stalled = self._clock.seconds(process, beat)
            if beat is not None and stalled >= self._dead_after and self._is_running(process):
                heard = f"nothing heard of it for {self._dead_after:g} s"
                self.heartbeat.read_all(self.layout.world_size)  # who waits for it may be none that is watched
                error = self._lost(beat.place.fate(), process, heard)
                self._end_job(1, error, found=process)
                return
        stopped = [process for process, beat in self.heartbeat.latest.items() if beat.state == INTERRUPTED]
        if self.layout.process == 0 and stopped:
            waits = any(map(self._is_running, range(self.layout.world_size)))
            # longer than a death takes to be found, which is then the reason
            if not waits or self._clock.seconds(INTERRUPTED, True) >= 1.3 * self._dead_after:
                sentence = f"{self.layout.describe(stopped[0])} was stopped {self._when(stopped[0])}"
                prints = not self._verdict.main_thread_ends
                self._end_job(_STOPPED_CODE, ChunkplanError(sentence, hint=RESUME) if prints else None)

    def _end_job(self, code: int, error: ChunkplanError | None, *, found: int | None = None) -> None:
        """End the job, for all who can read the verdict; the process `found` could not, and is woken if suspended."""
        code, is_first = self._verdict.write(code)
        place = None if found is None else self.heartbeat.place_of(found)
        if place is not None and place.fate() is Fate.SUSPENDED:
            place.wake()  # else its launcher would wait for it
        self._verdict.settle(code, error if is_first else None, is_first=is_first)

    def _look_at_store(self) -> None:
        """Look whether the beats come through: a call to a store on a machine that is lost does not come back."""
        clock = StallClock(2 * self._interval)
        while not self._over.wait(self._interval):
            clock.tick()
            if clock.seconds("beats", self.heartbeat.number) >= self._dead_after:
                place = None if self._by_launcher else self.heartbeat.place_of(0)
                fate = place.fate() if place else Fate.UNKNOWN
                self._lose_store(fate, f"nothing heard of its store for {self._dead_after:g} s")
                return

    def _on_signal(self) -> None:
        """Have the job end where the main thread is in C++, and so does not run Python's handler of a signal."""
        if not self._over.wait(_PATIENCE) and not self._verdict.main_thread_ends:
            self.heartbeat.state = INTERRUPTED
            self._wake.set()

    def _lose_store(self, fate: Fate, heard: str) -> None:
        if STOPPED in (self.heartbeat.state, self.heartbeat.state_of(0)):
            return  # it has done its work
        error = self._lost(fate, 0, heard, "torchrun on the machine of " if self._by_launcher else "")
        is_first = self._prints_if_alone or self._exit_code is not None
        self._verdict.settle(1, error if is_first else None, is_first=is_first)

    def _leave(self) -> None:
        """Before the interpreter ends, under which a thread must not come back from C++."""
        self._over.set()
        self._wake.set()
        self._thread.join(2 * self._interval)
        if self._verdict.main_thread_ends and self._hosts_store:
            time.sleep(2 * self._interval)  # the store ends with this process, and others have yet to read the verdict

    def _is_running(self, process: int) -> bool:
        return self.heartbeat.state_of(process) == RUNNING

    def _lost(self, fate: Fate, process: int, heard: str, before_name: str = "") -> ChunkplanError:
        """The error about a process of which nothing is heard any more; `before_name` makes it something of its."""
        if self._clock.has_paused(self._dead_after):
            heard += f", after a pause of {self.layout.describe()} itself"
        heard += last_heard(process, self.heartbeat.activities())
        name = before_name + self.layout.describe(process)
        return lost(fate, name, self._when(process), heard, self.heartbeat.place_of(process))

    def _when(self, process: int) -> str:
        step = self.heartbeat.step_of(process)
        return f"at step {step}" if step >= 0 else "before the first step"
