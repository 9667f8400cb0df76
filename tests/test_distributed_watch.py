"""A job of several processes ends as a whole, by itself and with one message, whatever they are at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in (".", "runtime", "cli")),
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch itself warns, with a trace, of a store that is gone
}
RESUME = "--resume goes on from the last checkpoint\n"
WHY = f"hint: its own output says why (out of memory, a lost machine); {RESUME}"


class Outcomes:
    """What all cases came to: exit codes, by rank, and what the processes printed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        command = [sys.executable, "-m", "tests.watch_cases", str(folder)]
        subprocess.run(command, check=True, env=ENVIRONMENT, cwd=ROOT, timeout=100)
        self._codes = json.loads((folder / "codes.json").read_text())

    def codes(self, case: str) -> list[int]:
        return self._codes[case]

    def printed(self, case: str) -> str:
        return "".join((self._folder / f"{case}-{rank}").read_text() for rank in range(len(self._codes[case])))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes(tmp_path_factory.mktemp("watch"))


def test_all_end_when_one_was_killed_and_one_line_names_it(outcomes: Outcomes) -> None:
    assert outcomes.codes("killed") == [1, 1, 1, -9]
    who = "process 3 of 4 (stage 1 of pipeline 1)"
    assert outcomes.printed("killed") == f"error: {who} died at step 12: nothing heard of it for 2 s\n{WHY}"


def test_all_end_when_the_process_with_the_store_was_killed(outcomes: Outcomes) -> None:
    assert outcomes.codes("host_killed") == [-9, 1, 1]
    assert outcomes.printed("host_killed") == (
        f"error: process 0 of 3 (data parallel) died before the first step: its store closed the connection\n{WHY}"
    )


def test_all_end_when_the_store_does_not_answer_any_more(outcomes: Outcomes) -> None:
    assert outcomes.codes("host_hangs") == [-9, 1, 1]
    assert outcomes.printed("host_hangs") == (
        f"error: process 0 of 3 (data parallel) died at step 7: nothing heard of its store for 2 s\n{WHY}"
    )


@pytest.mark.parametrize("case, code", [("failed", 2), ("host_failed", 3)])
def test_an_error_ends_all_with_its_exit_code_and_is_printed_once(outcomes: Outcomes, case: str, code: int) -> None:
    assert outcomes.codes(case) == [code] * 3
    assert outcomes.printed(case) == "no good\n"


@pytest.mark.parametrize("case", ["ended", "paused"])
def test_a_regular_end_and_a_pause_are_no_death(outcomes: Outcomes, case: str) -> None:
    assert set(outcomes.codes(case)) == {0}
    assert outcomes.printed(case) == ""


def test_nobody_died_where_all_were_stopped(outcomes: Outcomes) -> None:
    assert outcomes.codes("all_stopped") == [143] * 3
    assert outcomes.printed("all_stopped") == ""


def test_who_is_stopped_does_not_leave_the_others_waiting(outcomes: Outcomes) -> None:
    assert outcomes.codes("one_stopped") == [143] * 3
    assert outcomes.printed("one_stopped") == (
        f"error: process 2 of 3 (data parallel) was stopped at step 4\nhint: {RESUME}"
    )


def test_who_is_stopped_tells_who_died_before(outcomes: Outcomes) -> None:
    assert outcomes.codes("one_dead_others_stopped") == [143, -9, 143]
    assert outcomes.printed("one_dead_others_stopped") == (
        "process 1 of 3 (data parallel) died at step 5: nothing heard of it for 2 s\n"
    )


def test_a_connection_that_breaks_without_a_death_is_an_error(outcomes: Outcomes) -> None:
    assert outcomes.codes("nobody_answers") == [1, 1]
    printed = outcomes.printed("nobody_answers")
    assert printed.startswith("the connection to another process broke: ") and printed.count("\n") == 1


def test_torchrun_tells_who_died() -> None:
    """Its SIGTERM comes first, and its own store is left."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command.append(str(ROOT / "tests" / "watch_cases.py"))
    done = subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert done.stderr.count("process 2 of 3 (data parallel) died at step 12: nothing heard of it for 2 s\n") == 1
    assert " 0 of 3" not in done.stderr and " 1 of 3" not in done.stderr
