"""Ends a job of several processes, with one message, when one of them died, is suspended, stalls or fails."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from chunkplan.errors import ChunkplanError
from chunkplan.visible import one_line
from chunkplan_runtime.failures.liveness import RESUME, Beat, Heartbeat, Liveness, last_heard, lost_process
from chunkplan_runtime.layout import RankLayout

#: Seconds without a beat after which nobody waits for a process any more, and the beats that it has in them.
DEAD_AFTER, _BEATS = 10.0, 10


class Watchdog:
    """Ends the job when one of its processes has not beaten for `dead_after` seconds, which is the same in all.

    Its two threads run also while the main thread is in C++: one exchanges beats and decides, the other one looks
    whether the store still answers, and listens for signals. Make it right after `init_process_group`, whose store it
    keeps alive. About 1.4 times `dead_after` after a death every process has ended. A suspended one is woken, to end.
    """

    def __init__(self, layout: RankLayout, dead_after: float = DEAD_AFTER) -> None:
        group = dist.group.WORLD
        assert group is not None, "before init_process_group"
        self.layout = layout
        self._dead_after, self._interval = dead_after, dead_after / _BEATS
        self._job_store = group.get_group_store()  # where this process hosts it, it ends with the last reference
        self._store = PrefixStore("watchdog", self._job_store.clone())  # type: ignore[attr-defined]  # not in torch's stubs
        self._by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        self._hosts_store = layout.process == 0 and layout.world_size > 1 and not self._by_launcher
        # Without a store nobody can agree on who prints: on each machine it is the first process that came here.
        key = f"machine/{socket.gethostname()}"
        self._prints_without_store = not self._hosts_store and self._store.add(key, 1) == 1
        self.heartbeat = Heartbeat(self._store, layout.process, layout.world_size)
        self._looked = time.monotonic()  # when the last round was done
        self._stopping = 0  # rounds since a process got a signal to stop
        self._is_done = False  # this process has come to its regular end
        self._wake, self._over = threading.Event(), threading.Event()  # begin a round at once; end the threads
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._signals, self._wakeup = socket.socketpair()  # numbers of signals, which Python writes also in C++
        self._signals.settimeout(self._interval)
        self._wakeup.setblocking(False)
        self._fails_with: int | None = None  # the exit status of an error that ends the main thread
        self._main_thread_ends = False  # it prints and exits, else the watchdog does
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
        """Report an error of this process, which ends the others with the same exit status.

        Returns whether this process is the first one to report an end; only then it prints its message.
        """
        self._main_thread_ends, self._fails_with = True, exit_status
        self._await_status()
        return self._is_first

    def interrupted(self) -> ChunkplanError | None:
        """Report that this process got a signal to stop, and wait until each other one has reported its end, or died.

        Returns an error to print about one that died; None where nobody did, or another process prints it.
        """
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
        self._is_done = True
        self._over.set()
        self._wake.set()
        self._thread.join(self._dead_after)
        atexit.unregister(self._leave)

    def _leave(self) -> None:
        """End the threads before the interpreter ends, under which none must come back from C++."""
        self._over.set()
        self._wake.set()
        self._thread.join(2 * self._interval)
        if self._main_thread_ends and self._hosts_store:
            time.sleep(2 * self._interval)  # the store ends with this process, and others have yet to read the status

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._do_round()
                self._looked = time.monotonic()
                self._wake.wait(self._interval)
                self._wake.clear()
            if self._is_done:
                self._store.add("stopped", 1)
                while self._hosts_store and self._store.add("stopped", 0) < self.layout.world_size:
                    time.sleep(self._interval / 50)
        except RuntimeError:  # all that a store raises
            has_paused = time.monotonic() - self._looked >= self._dead_after
            pause = f", after a pause of {self.layout.describe()} itself" if has_paused else ""
            self._lose_store(Liveness.GONE, f"its store closed the connection{pause}")
        finally:
            self._over.set()
            self._ended.set()

    def _do_round(self) -> None:
        """Exchange beats; end the job if another process ends it, this one fails, one died, or some were stopped."""
        self.heartbeat.exchange()
        if self._store.check(["exit_status"]):
            self._end(self._store.get("exit_status"), None, is_first=False)
        elif self._fails_with is not None:
            self._end_job(self._fails_with, None)
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
                self._end_job(128 + signal.SIGTERM, ChunkplanError(error, hint=RESUME) if prints else None)

    def _listen(self) -> None:
        """Look whether beats come through, as a call to a store on a lost machine does not come back; take signals."""
        number, silent = 0, 0
        while not self._over.is_set() and silent <= _BEATS:
            with suppress(TimeoutError):
                is_stop = self._signals.recv(1)[0] in (signal.SIGTERM, signal.SIGINT)
                if is_stop and not self._over.wait(3.0) and not self._main_thread_ends:  # in C++, without handlers
                    self.heartbeat.stops = True
                    self._wake.set()
            silent = silent + 1 if number == self.heartbeat.number else 0
            number = self.heartbeat.number
        host = None if self._by_launcher else self.heartbeat.latest.get(0)
        liveness = host.liveness() if host else Liveness.UNKNOWN
        self._lose_store(liveness, f"nothing heard of its store for {self._dead_after:g} s")

    def _lose_store(self, liveness: Liveness, heard: str) -> None:
        if not self._over.is_set():
            error = self._lost(0, liveness, heard, "torchrun on the machine of " if self._by_launcher else "")
            self._end(b"1", error, is_first=self._prints_without_store or self._fails_with is not None)

    def _end_job(self, status: int, error: ChunkplanError | None, lost: Beat | None = None) -> None:
        """Write how the job ends, unless another process has; wake the process of `lost` if it is suspended."""
        own = f"{status} {self.layout.process}"
        written = self._store.compare_set("exit_status", "", own)
        if lost is not None and lost.liveness() is Liveness.SUSPENDED:
            with suppress(OSError):
                os.kill(lost.pid, signal.SIGCONT)  # else its launcher would wait for it
        self._end(written, error, is_first=written == own.encode())

    def _end(self, written: bytes, error: ChunkplanError | None, *, is_first: bool) -> None:
        """End this process with the exit status that was written, unless its main thread does; print an error once.

        The first call counts, later ones do nothing.
        """
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
        os._exit(int(written.split()[0]))

    def _lost(self, process: int, liveness: Liveness, heard: str, what: str = "") -> ChunkplanError:
        """The error about a process, or `what` of it, that is not heard any more."""
        who, heard = what + self.layout.describe(process), heard + last_heard(process, self.heartbeat.activities())
        beat = self.heartbeat.latest.get(process)
        return lost_process(liveness, who, self._when(process), heard, beat.pid if beat else 0)

    def _when(self, process: int) -> str:
        """The step of a process, whose beat may be some steps old: all processes begin a step together."""
        beat = self.heartbeat.latest.get(process)
        step = max(self.heartbeat.step, beat.step if beat else -1)
        return f"at step {step}" if step >= 0 else "before the first step"
