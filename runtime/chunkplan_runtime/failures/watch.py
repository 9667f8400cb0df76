"""What notices that a process of the job died, is suspended or failed, and ends the job with its name and step.

Every process beats into the job's store, from a thread. Rank 0 looks at all beats, the others at rank 0's. Who finds
that the job has to end writes a verdict into the store, the first one prints it, and all who read it end, also those
whose main thread is blocked in C++, where no signal handler of Python runs.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import threading
import time

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from chunkplan.errors import ChunkplanError
from chunkplan.visible import one_line
from chunkplan_runtime.failures.fate import RESUME, Fate, Place, lost
from chunkplan_runtime.failures.silence import Silence
from chunkplan_runtime.layout import Layout

#: Seconds of silence after which nobody waits for a process any more.
DEAD_AFTER = 10.0

#: Beats in that time.
_BEATS = 10

#: Seconds in which a main thread that runs Python has got to know of a signal.
_PATIENCE = 3.0

#: Exit code of a process that ends because another one was stopped: as if it had got that SIGTERM too.
_STOPPED_CODE = 143

_RUNNING, _STOPPED, _INTERRUPTED = "running", "stopped", "interrupted"

#: The key of the verdict in the store: "<exit code> <rank that found it>", empty while there is none.
_VERDICT = "verdict"


class Watch:
    """A thread in every process that beats into the job's store, and looks for those that stopped.

    Make it right after `init_process_group`, whose store it has a connection of its own to, and keeps alive. The job
    ends after `dead_after` seconds of silence of one, the same in all, from its first beat on; about 1.4 times that
    after a death every process has ended. One that is suspended is woken then, to end too.
    """

    def __init__(self, layout: Layout, dead_after: float = DEAD_AFTER) -> None:
        group = dist.group.WORLD
        assert group is not None, "before init_process_group"
        self.layout = layout
        self._dead_after = dead_after
        self._interval = dead_after / _BEATS
        self._job_store = group.get_group_store()  # where this process hosts it, it ends with the last reference
        self._store = PrefixStore("watch", self._job_store.clone())  # type: ignore[attr-defined]  # not in torch's stubs
        self._others = range(1, layout.world_size) if layout.rank == 0 else range(1)
        self._by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        self._hosts_store = layout.rank == 0 and layout.world_size > 1 and not self._by_launcher
        self._speaks_if_alone = False

        # what the main thread says
        self._word = _RUNNING
        self._step = -1
        self._exit_code: int | None = None
        self._ends_itself = False

        # what the watch has found
        self._rounds = 0
        self._looked = time.monotonic()  # when the last of them was done
        self._beats: dict[int, tuple[str, int]] = {}  # the last word and step of the others, and of this process
        self._place = Place.of_this_process()
        self._places: dict[int, Place] = {}  # of the others
        self._silence = Silence(2 * self._interval)
        self._is_first = True  # nobody else has told of an end
        self._error: ChunkplanError | None = None
        self._settled = threading.Event()  # how the job ends is known, or nothing looks for it any more
        self._settling = threading.Lock()

        self._signals, self._signalled = socket.socketpair()
        self._signalled.setblocking(False)
        self._wake = threading.Event()
        self._over = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="watch", daemon=True)

    def start(self) -> None:
        """Begin to beat and to look."""
        for key in (_VERDICT, *map(_beat_key, range(self.layout.world_size) if self.layout.rank == 0 else (0,))):
            self._store.compare_set(key, "", "")  # reading waits for keys that are not there
        # Without a store nobody can agree on who speaks: on each machine it is the first who came here.
        if not self._hosts_store:
            self._speaks_if_alone = self._store.add(f"machine/{socket.gethostname()}", 1) == 1
        self._beating.start()
        threading.Thread(target=self._look_at_store, name="watch of the store", daemon=True).start()
        signal.set_wakeup_fd(self._signalled.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._look_at_signals, name="watch of signals", daemon=True).start()
        atexit.register(self._leave)

    def at_step(self, step: int) -> None:
        """Say from now on that this process is at `step`; -1: before the first.

        When the job ends it does not come back: one that was suspended is awake again by then, and all could go on.
        """
        self._step = step
        looked = self._looked
        if time.monotonic() - looked > self._dead_after / 2:  # suspended meanwhile, perhaps: what became of the job?
            self._wake.set()
            while self._beating.is_alive() and self._looked == looked and not self._settled.is_set():
                self._settled.wait(self._interval / 10)
        if self._settled.is_set():
            self.await_end()

    def fail(self, exit_code: int) -> bool:
        """This process ends with an error: tell the others, whom the watch ends with that exit code.

        Returns whether this process is the first one to tell of an end; only then it prints its message.
        """
        self._ends_itself = True
        self._exit_code = exit_code
        self._await_verdict()
        return self._is_first

    def interrupted(self) -> ChunkplanError | None:
        """This process was told to stop: tell the others, and wait until each of them has said that it ends, or died.

        Whoever has not done either a while after `dead_after` is ended by the watch. Returns an error to print that
        names the process that died, and its step; None where nobody died or another process prints it.
        """
        self._ends_itself = True
        self._word = _INTERRUPTED
        self._await_verdict()
        return self._error

    def stop(self) -> None:
        """A regular end of this process, when all have come to theirs: a barrier comes before.

        Rank 0, with which the store may go, waits until the others have stopped too.
        """
        self._word = _STOPPED
        signal.set_wakeup_fd(-1)
        self._wake.set()
        self._beating.join(self._dead_after)
        self._over.set()
        if not self._ends_itself:
            atexit.unregister(self._leave)  # with which goes the store

    def await_end(self) -> None:
        """Wait for as long as the watch needs to find who died, and to end this process."""
        if self._beating.is_alive():
            time.sleep(1.6 * self._dead_after)

    def _await_verdict(self) -> None:
        self._wake.set()
        if self._beating.is_alive():
            self._settled.wait(2 * self._dead_after)

    def _beat(self) -> None:
        try:
            while not self._over.is_set():
                self._exchange()
                hurries = self._word == _STOPPED
                self._wake.wait(self._interval / 10 if hurries else self._interval)
                self._wake.clear()
        except RuntimeError:  # all that a store raises
            self._silence.tick()
            self._lose_store(Fate.GONE, "its store closed the connection")
        finally:
            self._over.set()
            self._settled.set()

    def _exchange(self) -> None:
        """Write this process's beat, read the others', and act on what they say."""
        word, step, rank = self._word, self._step, self.layout.rank
        self._rounds += 1
        self._store.set(_beat_key(rank), f"{self._rounds} {word} {step} {self._place}")
        verdict, *beats = self._store.multi_get([_VERDICT, *map(_beat_key, self._others)])
        self._beats[rank] = word, step
        for other, beat in zip(self._others, beats, strict=True):
            if beat:  # it has begun
                _, its_word, its_step, its_place = beat.decode().split()
                self._beats[other] = its_word, int(its_step)
                self._places[other] = Place.parse(its_place)

        if verdict:
            self._settle(_code_of(verdict), None, is_first=False)
        elif word == _STOPPED:
            if rank > 0 or not any(self._has_not_ended(other) for other in self._others):
                self._over.set()
        else:
            self._judge(beats)
        self._looked = time.monotonic()

    def _judge(self, beats: list[bytes]) -> None:
        """End the job if this process fails, another one died, or some were stopped."""
        self._silence.tick()
        if self._exit_code is not None:
            self._claim(self._exit_code, None)
            return
        for other, beat in zip(self._others, beats, strict=True):
            silent = self._silence.of(other, beat)
            if silent >= self._dead_after and beat and self._has_not_ended(other):
                place = self._places[other]
                heard = f"nothing heard of it for {self._dead_after:g} s"
                self._claim(1, self._lost(place.fate(), other, heard), wakes=place)
                return
        stopped = [rank for rank, (word, _) in self._beats.items() if word == _INTERRUPTED]
        if self.layout.rank == 0 and stopped:
            waits = any(self._has_not_ended(rank) for rank in range(self.layout.world_size))
            # longer than a death takes to be found, which is then the reason
            if not waits or self._silence.of(_INTERRUPTED, True) >= 1.3 * self._dead_after:
                tells = not self._ends_itself
                sentence = f"{self.layout.describe(stopped[0])} was stopped {self._when(stopped[0])}"
                self._claim(_STOPPED_CODE, ChunkplanError(sentence, hint=RESUME) if tells else None)

    def _claim(self, code: int, error: ChunkplanError | None, *, wakes: Place | None = None) -> None:
        """End the job, for all who can read it; `wakes`: of a process that could not, if it is suspended."""
        mine = f"{code} {self.layout.rank}"
        verdict = self._store.compare_set(_VERDICT, "", mine)
        is_first = verdict == mine.encode()
        if wakes is not None and wakes.fate() is Fate.SUSPENDED:
            wakes.wake()  # else its launcher would wait for it
        self._settle(_code_of(verdict), error if is_first else None, is_first=is_first)

    def _look_at_store(self) -> None:
        """Look whether the beats come through: a call to a store on a machine that is lost does not come back."""
        silence = Silence(2 * self._interval)
        while not self._over.wait(self._interval):
            silence.tick()
            if silence.of("rounds", self._rounds) >= self._dead_after:
                place = None if self._by_launcher else self._places.get(0)
                fate = place.fate() if place else Fate.UNKNOWN
                self._lose_store(fate, f"nothing heard of its store for {self._dead_after:g} s")
                return

    def _look_at_signals(self) -> None:
        """Have the job end where the main thread is in C++, and so does not run Python's handler of a signal."""
        number = self._signals.recv(1)[0]
        while number not in (signal.SIGTERM, signal.SIGINT):
            number = self._signals.recv(1)[0]
        if not self._over.wait(_PATIENCE) and not self._ends_itself:
            self._word = _INTERRUPTED
            self._wake.set()

    def _lose_store(self, fate: Fate, heard: str) -> None:
        if _STOPPED in (self._word, self._beats.get(0, (_RUNNING, -1))[0]):
            return  # it has done its work
        error = self._lost(fate, 0, heard, "torchrun on the machine of " if self._by_launcher else "")
        is_first = self._speaks_if_alone or self._exit_code is not None
        self._settle(1, error if is_first else None, is_first=is_first)

    def _settle(self, code: int, error: ChunkplanError | None, *, is_first: bool) -> None:
        """The job ends: with it this process, unless its main thread is at it."""
        with self._settling:
            if self._settled.is_set():
                return
            ends_itself = self._ends_itself
            self._is_first = is_first and ends_itself
            self._error = error if ends_itself else None
            self._settled.set()
            self._over.set()
        if ends_itself:
            return
        if error is not None:
            sys.stderr.write(f"error: {one_line(str(error))}\nhint: {error.hint}\n")  # in one piece
        time.sleep(2 * self._interval)  # others read it; who fails too may end by itself
        sys.stderr.flush()
        os._exit(code)

    def _leave(self) -> None:
        """Before the interpreter ends, under which a thread must not come back from C++."""
        self._over.set()
        self._wake.set()
        self._beating.join(2 * self._interval)
        if self._ends_itself and self._hosts_store:
            time.sleep(2 * self._interval)  # the store ends with this process, and others have yet to read the verdict

    def _has_not_ended(self, rank: int) -> bool:
        return self._beats.get(rank, (_RUNNING, -1))[0] == _RUNNING

    def _lost(self, fate: Fate, rank: int, heard: str, what_of_it: str = "") -> ChunkplanError:
        """What is said of a process, or of `what_of_it`, that nothing is heard of any more."""
        if self._silence.has_paused(self._dead_after):
            heard += f", after a pause of {self.layout.describe()} itself"
        who = what_of_it + self.layout.describe(rank)
        return lost(fate, who, self._when(rank), heard, self._places.get(rank))

    def _when(self, rank: int) -> str:
        # A beat may be some steps old, and all processes begin a step together.
        step = max(self._beats.get(rank, (_RUNNING, -1))[1], self._step)
        return f"at step {step}" if step >= 0 else "before the first step"


def _beat_key(rank: int) -> str:
    return f"beat/{rank}"


def _code_of(verdict: bytes) -> int:
    return int(verdict.split()[0])
