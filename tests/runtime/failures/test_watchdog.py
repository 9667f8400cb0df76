"""A job of several processes ends as a whole, by itself and with one message, whatever they are at."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.support.places import ROOT

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in (".", "runtime", "cli")),
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch itself warns, with a trace, of a store that is gone
}
RESUME = "--resume continues from the last checkpoint\n"
WHY = f"hint: its own output says why (out of memory, a lost machine); {RESUME}"
IF_GONE = f"hint: if it is gone, its own output says why (out of memory, a lost machine); {RESUME}"
END_IT = r"hint: if it is still there, `kill -CONT (\d+)` has it end as the others do, `kill -KILL \1` at once; "


class Outcomes:
    """What cases came to: exit codes, by rank, and what the processes printed."""

    def __init__(self, folder, *names, cases="tests.support.watchdog_cases"):
        self._folder = folder
        command = [sys.executable, "-m", cases, str(folder), *names]
        subprocess.run(command, check=True, env=ENVIRONMENT, cwd=ROOT, timeout=100)
        self._codes = json.loads((folder / "codes.json").read_text())

    def codes(self, case):
        return self._codes[case]

    def printed(self, case):
        return "".join((self._folder / f"{case}-{rank}").read_text() for rank in range(len(self._codes[case])))


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """Of those that are to be looked at."""
    tests = [each for each in request.session.items if each.path == request.path and hasattr(each, "callspec")]
    return Outcomes(
        tmp_path_factory.mktemp("watch"), "nobody_answers", *(each.callspec.params["case"] for each in tests)
    )


def who(rank, size):
    return rf"process {rank} of {size} \(data parallel\)"


HEARD = "nothing heard of it for 2 s\n"
SILENT = r"is silent at step {} \(suspended, stalled or gone\): nothing heard of"
SUSPENDED = r"is suspended at step {} \(stopped by a signal\): nothing heard of"
AND_RESUME, SAID_WHY, SAID_IF_GONE = map(re.escape, (RESUME, WHY, IF_GONE))

#: By case exit codes by rank, and what is printed in all: one line that names who is lost, and a hint.
EXPECTED = {
    "killed": ([1, 1, 1, -9], rf"error: process 3 of 4 \(stage 1 of pipeline 1\) died at step 12: {HEARD}{SAID_WHY}"),
    "host_killed": (
        [-9, 1, 1],
        rf"error: {who(0, 3)} died before the first step: its store closed the connection\n{SAID_WHY}",
    ),
    "suspended": ([1] * 3, rf"error: {who(1, 3)} {SUSPENDED.format(2)} it for 2 s\n{END_IT}{AND_RESUME}"),
    # No step begins when a suspended process was woken to end.
    "suspended_in_a_step": ([1, 1], rf"error: {who(1, 2)} {SUSPENDED.format(2)} it for 2 s\n[^\n]*\n"),
    "host_suspended": (
        [-9, 1, 1],
        rf"error: {who(0, 3)} {SUSPENDED.format(7)} its store for 2 s\n{END_IT}{AND_RESUME}",
    ),
    # It is on another machine, of which nothing can be told.
    "host_hangs": ([-9, 1, 1], rf"error: {who(0, 3)} {SILENT.format(7)} its store for 2 s\n{SAID_IF_GONE}"),
    # Who goes on when the job has ended says that it was paused.
    "suspended_elsewhere": (
        [1, 1],
        rf"error: {who(1, 2)} {SILENT.format(1)} it for 2 s\n{SAID_IF_GONE}"
        rf"error: {who(0, 2)} died at step 1: its store closed the connection, after a pause of {who(1, 2)} itself\n"
        rf"{SAID_WHY}",
    ),
    "stalled": (
        [1, -9],
        rf"error: {who(1, 2)} is stalled at step 1 \(alive\): {HEARD}"
        rf"hint: if it is still there, `kill -KILL \d+` ends it; {AND_RESUME}",
    ),
    # An error ends all with its exit code and is printed once.
    "failed": ([2] * 3, "no good\n"),
    "host_failed": ([3] * 3, "no good\n"),
    # A regular end and a pause are no death.
    "ended": ([0] * 3, ""),
    "paused": ([0] * 2, ""),
    "all_stopped": ([143] * 3, ""),
    "one_stopped": ([143] * 3, rf"error: {who(2, 3)} was stopped at step 4\nhint: {AND_RESUME}"),
    "one_dead_others_stopped": ([143, -9, 143], rf"{who(1, 3)} died at step 5: {HEARD}"),
}


#: Each is much as another one; `make soak` has them.
ALIKE = (
    "suspended_in_a_step",
    "host_suspended",
    "suspended_elsewhere",
    "host_failed",
    "paused",
    "one_dead_others_stopped",
)


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=[pytest.mark.soak] * (each in ALIKE)) for each in EXPECTED], ids=str
)
def test_all_end_and_who_is_lost_is_named_once(outcomes, case):
    codes, printed = EXPECTED[case]
    assert outcomes.codes(case) == codes
    assert re.fullmatch(printed, outcomes.printed(case)), outcomes.printed(case)


def test_a_connection_that_breaks_without_a_death_is_an_error(outcomes):
    assert outcomes.codes("nobody_answers") == [1, 1]
    printed = outcomes.printed("nobody_answers")
    assert printed.startswith("the connection to another process broke: ") and printed.count("\n") == 1


def under_torchrun(case):
    """Its SIGTERM comes first, and its own store is left."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command += [str(ROOT / "tests" / "support" / "watchdog_cases.py"), case]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    return done


@pytest.mark.soak
def test_under_torchrun_one_process_names_who_died():
    done = under_torchrun("one_killed")
    assert done.stderr.count("process 2 of 3 (data parallel) died at step 12: nothing heard of it for 2 s\n") == 1
    assert " 0 of 3" not in done.stderr and " 1 of 3" not in done.stderr


@pytest.mark.soak
def test_under_torchrun_one_process_names_who_is_suspended_and_does_not_wait_for_it():
    done = under_torchrun("suspended")
    assert done.stderr.count("process 1 of 3 (data parallel) is suspended at step 2 (stopped by a signal): ") == 1
    assert " 0 of 3" not in done.stderr and " 2 of 3" not in done.stderr
    assert "forcefully exiting" not in done.stderr, "half a minute later"
