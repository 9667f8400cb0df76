"""Ctrl-C in commands that compute: they end at once, in one line, whatever they are at, and leave nothing behind."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from chunkplan.validation.validate import validate
from tests.support.process_checks import begin, in_group, left_behind, wait_until

#: What takes long: a search; one round of packing, in compiled code and a linear program; rounds of an integer program.
SLOW_PLANS = (
    ("--schedule", "search", "--pp", "8", "--global-batch", "32"),
    ("--packing", "exact", "--global-batch", "60000"),
    ("--balance", "search", "--dp", "8", "--global-batch", "8192"),
)
TUNE = ("tune", "--pp", "8", "--schedules", "search")

#: A pipeline that is tried in some seconds, the plan of one, and a step of that plan searched.
AT_ANY_MOMENT = {
    "tune": ("--pp", "4", "--chunk-sizes", "8192,16384,65536", "--ks", "1,4,16", "--schedules", "auto,1f1b"),
    "build": ("--chunk-size", "8192", "--k", "2", "--pp", "8", "--global-batch", "64", "--schedule", "auto"),
    "simulate": ("--schedule", "search"),
}


@pytest.fixture
def space(tmp_path: Path) -> Path:
    """A workspace beside files of lengths: of long sequences among short ones, and of many that go in pairs."""
    np.save(tmp_path / "long.npy", np.geomspace(100, 700_000, 1000).astype(np.int32))
    np.save(tmp_path / "pairs.npy", np.random.default_rng(0).integers(2049, 4096, 60_000))
    return tmp_path / "space"


def awaits_signals(running: subprocess.Popen[str]) -> bool:
    """Whether a command blocks Ctrl-C in its main thread, or has ended: Python's own first moments are over."""
    blocked = re.search(r"SigBlk:\s*(\w+)", Path(f"/proc/{running.pid}/status").read_text())
    return running.poll() is not None or (blocked is not None and bool(int(blocked[1], 16) >> signal.SIGINT - 1 & 1))


def interrupt(running: subprocess.Popen[str], *numbers: signal.Signals) -> tuple[int, str]:
    """Send signals to all of a command, as a terminal does; returns its exit code and what it said in the end."""
    for number in numbers:
        os.killpg(running.pid, number)
    _, said = running.communicate(timeout=20)
    assert "Traceback" not in said and said.count("interrupted") == (running.returncode == 130)
    wait_until(lambda: not in_group(running.pid))
    return running.returncode, said.splitlines()[-1] if said else ""


@pytest.mark.parametrize(
    "options", [SLOW_PLANS[1], *(pytest.param(options, marks=pytest.mark.soak) for options in SLOW_PLANS[::2])]
)
def test_a_slow_build_ends_at_once_and_leaves_nothing(space: Path, options: tuple[str, ...]) -> None:
    running = begin("build", space.parent / "pairs.npy", "--chunk-size", "8192", "--k", "1", *options, workspace=space)
    wait_until(lambda: list(space.glob(".plan.tmp-*")))
    time.sleep(2)
    assert running.poll() is None, "this build takes far longer"
    assert interrupt(running, signal.SIGINT) == (130, "interrupted")
    assert list(space.iterdir()) == []


def test_a_tuning_ends_at_once_with_all_that_its_threads_have_begun(space: Path) -> None:
    running = begin(*TUNE, space.parent / "long.npy", workspace=space)
    with pytest.raises(subprocess.TimeoutExpired):
        running.wait(4)
    assert interrupt(running, signal.SIGINT, signal.SIGINT) == (130, "interrupted")
    assert not space.exists()


@pytest.mark.soak
@pytest.mark.parametrize("command", AT_ANY_MOMENT)
def test_at_any_moment_a_command_ends_with_130_and_one_line(space: Path, command: str) -> None:
    """Fourteen signals each, spread over the time of a whole run; every third is SIGTERM, or a double Ctrl-C."""
    data = space.parent / "long.npy"

    def start(name: str) -> subprocess.Popen[str]:
        return begin(name, *([] if name == "simulate" else [data]), *AT_ANY_MOMENT[name], workspace=space)

    for name in ("build", "tune", command, command):  # the second one compiles nothing
        running = start(name)
        wait_until(partial(awaits_signals, running))
        began = time.monotonic()
        _, said = running.communicate(timeout=600)
        seconds = time.monotonic() - began
    plan, tuning = validate(space / "plan").content_hash, (space / "tuning.json").read_bytes()
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    num_at_work = 0
    for turn in range(14):
        running = start(command)
        wait_until(partial(awaits_signals, running))
        time.sleep(seconds * (turn + dice.random()) / 15)
        if running.poll() is None:
            numbers = ((signal.SIGINT,), (signal.SIGINT, signal.SIGINT), (signal.SIGTERM,))[turn % 3]
            code, line = interrupt(running, *numbers)
            if code == 0:  # it ended just before the signal
                assert line == (said.splitlines()[-1] if said else "")
            else:
                assert code == 128 + numbers[0] and (line == "interrupted") == (numbers[0] == signal.SIGINT)
            num_at_work += code != 0
        else:
            seconds *= 0.7  # it runs faster than the one that was timed: a busy machine
        assert left_behind(space) == []
        assert (space / "tuning.json").read_bytes() == tuning
        assert validate(space / "plan").content_hash == plan
    assert num_at_work > 7
