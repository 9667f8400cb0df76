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
    """What all cases came to: exit codes, by rank, and what the processes printed."""

    def __init__(self, folder, cases="tests.support.watchdog_cases"):
        self._folder = folder
        command = [sys.executable, "-m", cases, str(folder)]
        subprocess.run(command, check=True, env=ENVIRONMENT, cwd=ROOT, timeout=100)
        self._codes = json.loads((folder / "codes.json").read_text())

    def codes(self, case):
        return self._codes[case]

    def printed(self, case):
        return "".join((self._folder / f"{case}-{rank}").read_text() for rank in range(len(self._codes[case])))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return Outcomes(tmp_path_factory.mktemp("watch"))


def test_all_end_when_one_was_killed_and_one_line_names_it(outcomes):
    assert outcomes.codes("killed") == [1, 1, 1, -9]
    who = "process 3 of 4 (stage 1 of pipeline 1)"
    assert outcomes.printed("killed") == f"error: {who} died at step 12: nothing heard of it for 2 s\n{WHY}"


def test_all_end_when_the_process_with_the_store_was_killed(outcomes):
    assert outcomes.codes("host_killed") == [-9, 1, 1]
    assert outcomes.printed("host_killed") == (
        f"error: process 0 of 3 (data parallel) died before the first step: its store closed the connection\n{WHY}"
    )


def test_a_suspended_process_is_said_to_be_so_and_ends_with_the_others(outcomes):
    assert outcomes.codes("suspended") == [1, 1, 1]
    error, hint = outcomes.printed("suspended").splitlines()
    who = "process 1 of 3 (data parallel)"
    assert error == f"error: {who} is suspended at step 2 (stopped by a signal): nothing heard of it for 2 s"
    assert re.fullmatch(END_IT + re.escape(RESUME), f"{hint}\n")


def test_no_step_begins_when_a_suspended_process_was_woken_to_end(outcomes):
    assert outcomes.codes("suspended_in_a_step") == [1, 1]
    error, _ = outcomes.printed("suspended_in_a_step").splitlines()
    assert error.startswith("error: process 1 of 2 (data parallel) is suspended at step 2 (stopped by a signal): ")


def test_all_end_when_the_process_with_the_store_is_suspended(outcomes):
    assert outcomes.codes("host_suspended") == [-9, 1, 1]
    error, hint = outcomes.printed("host_suspended").splitlines()
    who = "process 0 of 3 (data parallel)"
    assert error == f"error: {who} is suspended at step 7 (stopped by a signal): nothing heard of its store for 2 s"
    assert re.fullmatch(END_IT + re.escape(RESUME), f"{hint}\n")


def test_all_end_when_the_store_does_not_answer_any_more(outcomes):
    """It is on another machine, of which nothing can be told."""
    assert outcomes.codes("host_hangs") == [-9, 1, 1]
    assert outcomes.printed("host_hangs") == (
        "error: process 0 of 3 (data parallel) is silent at step 7 (suspended, stalled or gone): "
        f"nothing heard of its store for 2 s\n{IF_GONE}"
    )


def test_who_goes_on_when_the_job_has_ended_says_that_it_was_paused(outcomes):
    assert outcomes.codes("suspended_elsewhere") == [1, 1]
    one, other = (f"process {rank} of 2 (data parallel)" for rank in range(2))
    assert outcomes.printed("suspended_elsewhere") == (
        f"error: {other} is silent at step 1 (suspended, stalled or gone): nothing heard of it for 2 s\n{IF_GONE}"
        f"error: {one} died at step 1: its store closed the connection, after a pause of {other} itself\n{WHY}"
    )


def test_a_process_that_lives_and_gets_nowhere_is_said_to_be_stalled(outcomes):
    assert outcomes.codes("stalled") == [1, -9]
    error, hint = outcomes.printed("stalled").splitlines()
    who = "process 1 of 2 (data parallel)"
    assert error == f"error: {who} is stalled at step 1 (alive): nothing heard of it for 2 s"
    assert re.fullmatch(rf"hint: if it is still there, `kill -KILL \d+` ends it; {re.escape(RESUME)}", f"{hint}\n")


@pytest.mark.parametrize("case, code", [("failed", 2), ("host_failed", 3)])
def test_an_error_ends_all_with_its_exit_code_and_is_printed_once(outcomes, case, code):
    assert outcomes.codes(case) == [code] * 3
    assert outcomes.printed(case) == "no good\n"


@pytest.mark.parametrize("case", ["ended", "paused"])
def test_a_regular_end_and_a_pause_are_no_death(outcomes, case):
    assert set(outcomes.codes(case)) == {0}
    assert outcomes.printed(case) == ""


def test_nobody_died_where_all_were_stopped(outcomes):
    assert outcomes.codes("all_stopped") == [143] * 3
    assert outcomes.printed("all_stopped") == ""


def test_who_is_stopped_does_not_leave_the_others_waiting(outcomes):
    assert outcomes.codes("one_stopped") == [143] * 3
    assert outcomes.printed("one_stopped") == (
        f"error: process 2 of 3 (data parallel) was stopped at step 4\nhint: {RESUME}"
    )


def test_who_is_stopped_names_who_died_before(outcomes):
    assert outcomes.codes("one_dead_others_stopped") == [143, -9, 143]
    assert outcomes.printed("one_dead_others_stopped") == (
        "process 1 of 3 (data parallel) died at step 5: nothing heard of it for 2 s\n"
    )


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
