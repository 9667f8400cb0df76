"""Reading ahead: as far as asked for and no further, and always stoppable."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from itertools import count

import pytest

from chunkplan_runtime.feed import stream
from chunkplan_runtime.feed.stream import read_ahead
from tests.support.places import ROOT

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "runtime")}


def wait_until(condition):
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.005)
    raise AssertionError("it never came to that")


def test_items_are_made_ahead_up_to_the_depth():
    made = []
    ahead = read_ahead((made.append(number) or number for number in count()), 3)
    assert next(ahead) == 0
    wait_until(lambda: len(made) == 4)
    threading.Event().wait(0.05)
    assert len(made) == 4
    ahead.close()
    assert len(made) == 4
    assert list(ahead) == []


def test_after_an_error_nothing_comes():
    def items():
        yield 1
        raise OSError("gone")

    ahead = read_ahead(items(), 5)
    assert next(ahead) == 1
    with pytest.raises(OSError, match="gone"):
        next(ahead)
    assert list(ahead) == []


def test_control_c_interrupts_the_wait_for_an_item():
    """In a process of its own: what others did to this one's signals does not matter."""
    program = """
import os, signal, threading
from chunkplan_runtime.feed.stream import read_ahead
signal.signal(signal.SIGINT, signal.default_int_handler)
release = threading.Event()
def items():
    release.wait()
    yield 1
ahead = read_ahead(items(), 1)
threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
threading.Timer(0.3, release.set).start()
try:
    next(ahead)
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("interrupted\n", "")


def test_the_interpreter_ends_with_iterations_left_open():
    """Begun or not, without a hang, a message, or a thread killed at its work."""
    program = """
import itertools
from chunkplan_runtime.feed.stream import read_ahead
not_begun, begun = read_ahead(itertools.count(), 2), read_ahead(itertools.count(), 2)
next(begun)
"""
    done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_memory_is_pinned_by_who_asks_for_a_step_and_not_by_the_thread_that_reads_ahead(
    monkeypatch, handmade_plan, random_sequences
):
    """While the next steps are read a step is at work, and pinning may wait for the device."""
    pinned_by = []
    pinned = stream.pinned
    monkeypatch.setattr(
        stream, "pinned", lambda tensor: [pinned_by.append(threading.current_thread()), pinned(tensor)][1]
    )
    steps = [{0: [[(sequence, 0, 4)]]} for sequence in range(5)]
    plan = handmade_plan(random_sequences([4] * 5), steps)
    works = stream.PlanStream(*stream.open_plan(*plan), vocab_size=97, max_positions=10, pin_memory=True, prefetch=2)
    assert len(list(works)) == 5
    assert pinned_by == [threading.current_thread()] * 3 * 5
