"""What processes do in tests of the watchdog: each case is run by a few of them, one of which dies, stops or fails.

`python -m tests.support.watchdog_cases FOLDER CASE...` runs cases, by forks of one process that has imported torch;
FOLDER gets what each process printed, and `codes.json`. Under torchrun it runs the case whose name is in its place.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from chunkplan.errors import ChunkplanError
from chunkplan_runtime.distributed.job import lost_peers
from chunkplan_runtime.failures.watchdog import Watchdog
from chunkplan_runtime.layout import RankLayout
from tests.support.ports import free_port

DEAD_AFTER = 2.0

#: Cases that run at the same time: most of their processes wait, but all begin with work, and a late beat is a death.
AT_ONCE = 4

#: Seconds after which a process that nothing ended is killed, by SIGALRM.
TOO_LONG = 60


def killed(watchdog: Watchdog, rank: int) -> None:
    """The last process dies: one waits for it, the others for each other."""
    before = (rank - 1) % dist.get_world_size()
    if before == dist.get_world_size() - 2:
        die()
    wait_for(watchdog, before)


def host_killed(watchdog: Watchdog, rank: int) -> None:
    if rank == 0:
        die()
    wait_for(watchdog, 3 - rank)


def suspended(watchdog: Watchdog, rank: int) -> None:
    """One whose beats process 0 looks for."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    wait_for(watchdog, (rank - 1) % dist.get_world_size())


def suspended_in_a_step(watchdog: Watchdog, rank: int) -> None:
    """All could go on when it is woken."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()
    watchdog.at_step(3)
    print("another step", file=sys.stderr, flush=True)
    wait_for(watchdog, (rank - 1) % dist.get_world_size())


def host_suspended(watchdog: Watchdog, rank: int) -> None:
    """Connections to the store stay, answers do not come."""
    if rank == 0:
        after(2 * DEAD_AFTER, "KILL")
        os.kill(os.getpid(), signal.SIGSTOP)
    wait_for(watchdog, 3 - rank)


def suspended_too_long(watchdog: Watchdog, rank: int) -> None:
    """One goes on when the job has ended, and the store with it."""
    if rank == 1:
        pause(3 * DEAD_AFTER)
    wait_for(watchdog, 1 - rank)


def stalled(watchdog: Watchdog, rank: int) -> None:
    """One holds Python's lock, so that its watchdog gets nowhere."""
    if rank == 1:
        after(2 * DEAD_AFTER, "KILL")
        ctypes.PyDLL(None).sleep(TOO_LONG)
    wait_for(watchdog, 1 - rank)


def failed(watchdog: Watchdog, rank: int) -> None:
    """Two processes fail at once, the other one waits."""
    if rank > 0:
        fail(watchdog, 2)
    wait_for(watchdog, 1)


def host_failed(watchdog: Watchdog, rank: int) -> None:
    if rank == 0:
        fail(watchdog, 3)
    wait_for(watchdog, 0)


def ended(watchdog: Watchdog, rank: int) -> None:
    """The process with the store is through first."""
    dist.barrier()
    time.sleep(rank * DEAD_AFTER / 4)
    watchdog.stop()
    os._exit(0)  # the store with it, at once


def paused(watchdog: Watchdog, rank: int) -> None:
    """One process for less than a death takes, then all of them for longer."""
    if rank == 1:
        pause(DEAD_AFTER / 2)
    dist.barrier()
    pause(2 * DEAD_AFTER)
    dist.barrier()
    watchdog.stop()


def all_stopped(watchdog: Watchdog, rank: int) -> None:
    get_sigterm()


def one_stopped(watchdog: Watchdog, rank: int) -> None:
    """The others are in C++, where a signal's handler does not run."""
    if rank < 2:
        wait_for(watchdog, 1 - rank)
    get_sigterm()


def one_dead_others_stopped(watchdog: Watchdog, rank: int) -> None:
    if rank == 1:
        die()
    get_sigterm()


def nobody_answers(watchdog: Watchdog, rank: int) -> None:
    """A wait takes longer than the group allows, and nobody is dead."""
    if rank == 0:
        group = dist.new_group(timeout=timedelta(milliseconds=100))
        try:
            with lost_peers(watchdog):
                dist.recv(torch.zeros(1), 1, group)
        except ChunkplanError as error:
            fail(watchdog, error.exit_code, str(error))
    else:
        dist.new_group(timeout=timedelta(milliseconds=100))
        wait_for(watchdog, 0)


@dataclass(frozen=True)
class Case:
    work: Callable[[Watchdog, int], None]
    layout: RankLayout
    step: int = 1
    dead_after: float = DEAD_AFTER
    apart: bool = False  # as if each process were on a machine of its own
    lasts: float = 2 * DEAD_AFTER  # about so many seconds: what lasts longest begins first


CASES = {
    "killed": Case(killed, RankLayout(dp=2, pp=2), step=12),
    "one_killed": Case(killed, RankLayout(dp=3), step=12),
    "host_killed": Case(host_killed, RankLayout(dp=3), step=-1, lasts=1),
    "suspended": Case(suspended, RankLayout(dp=3), step=2),
    "suspended_in_a_step": Case(suspended_in_a_step, RankLayout(dp=2), step=2),
    "suspended_elsewhere": Case(suspended_too_long, RankLayout(dp=2), apart=True, lasts=3.5 * DEAD_AFTER),
    "host_suspended": Case(host_suspended, RankLayout(dp=3), step=7),
    "host_hangs": Case(host_suspended, RankLayout(dp=3), step=7, apart=True),
    "stalled": Case(stalled, RankLayout(dp=2)),
    "failed": Case(failed, RankLayout(dp=3), lasts=1),
    "host_failed": Case(host_failed, RankLayout(dp=3), dead_after=10.0),  # beats that are slower than a process ends
    "ended": Case(ended, RankLayout(dp=3), lasts=1),
    "paused": Case(paused, RankLayout(dp=2), lasts=3 * DEAD_AFTER),
    "all_stopped": Case(all_stopped, RankLayout(dp=3), lasts=1),
    "one_stopped": Case(one_stopped, RankLayout(dp=3), step=4),
    "one_dead_others_stopped": Case(one_dead_others_stopped, RankLayout(dp=3), step=5),
    "nobody_answers": Case(nobody_answers, RankLayout(dp=2)),
}


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def wait_for(watchdog: Watchdog, source: int) -> NoReturn:
    with lost_peers(watchdog):
        dist.recv(torch.zeros(1), source)
    raise AssertionError


def fail(watchdog: Watchdog, code: int, message: str = "no good") -> NoReturn:
    if watchdog.fail(code):
        print(message, file=sys.stderr)
    sys.exit(code)


def after(seconds: float, name: str) -> None:
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -{name} {os.getpid()}"])


def pause(seconds: float) -> None:
    after(seconds, "CONT")
    os.kill(os.getpid(), signal.SIGSTOP)


def get_sigterm() -> NoReturn:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(TOO_LONG)
    raise AssertionError


def run(case: Case, rank: int) -> None:
    """Do as the command does."""
    layout = replace(case.layout, process=rank)
    signal.alarm(TOO_LONG)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    dist.init_process_group("gloo", world_size=layout.world_size, rank=rank)
    watchdog = Watchdog(layout, case.dead_after)
    if case.apart:
        watchdog.heartbeat.machine = f"another-{rank}"
    watchdog.at_step(case.step)
    watchdog.start()
    try:
        dist.barrier()
        time.sleep(case.dead_after / 4)  # all have heard of all; and it is between two beats
        case.work(watchdog, rank)
    except KeyboardInterrupt:
        lost = watchdog.interrupted()
        if lost is not None:
            print(lost, file=sys.stderr)
        sys.exit(143)


def fork(name: str, case: Case, rank: int, port: int, folder: Path) -> int:
    process = os.fork()
    if process == 0:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with (folder / f"{name}-{rank}").open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        run(case, rank)
        sys.exit(0)  # as any process ends
    return process


def run_all(cases: dict[str, Case], folder: Path) -> None:
    """What the processes print goes into files of FOLDER, and their exit codes by case and rank into another one."""
    torch.set_num_threads(1)
    to_run = sorted(cases, key=lambda name: cases[name].lasts, reverse=True)
    codes: dict[str, list[int]] = {}
    running: dict[int, tuple[str, int]] = {}  # by process id
    while to_run or running:
        while to_run and len({name for name, _ in running.values()}) < AT_ONCE:
            name, port = to_run.pop(0), free_port()
            size = cases[name].layout.world_size
            codes[name] = [0] * size
            running |= {fork(name, cases[name], rank, port, folder): (name, rank) for rank in range(size)}
        process, status = os.wait()
        name, rank = running.pop(process)
        codes[name][rank] = os.waitstatus_to_exitcode(status)
    (folder / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    if "RANK" in os.environ:
        run(CASES[sys.argv[1]], int(os.environ["RANK"]))
    else:
        run_all({name: CASES[name] for name in sys.argv[2:]}, Path(sys.argv[1]))
