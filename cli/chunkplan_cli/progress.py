"""How far long work is: a bar on a terminal, else a line every few seconds; rate and time left once they can be told.

And why nothing seems to happen where the planner's loops are compiled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from chunkplan.files.writing import undone
from chunkplan.quantities import Pace, left_words
from chunkplan_cli.terminal import note, stderr

#: Seconds between two lines of progress where there is no terminal.
LINE_EVERY = 10.0

#: Seconds of silence that need no explanation.
PATIENCE = 2.0

#: Called with what is done and what there is to do.
Report = Callable[[int, int], None]

#: Called with what is done now, how much of it is done and how much there is.
PhaseReport = Callable[[str, int, int], None]

#: Called with the bytes read, the bytes of all sources or None, and the tokens so far.
ReadingReport = Callable[[int, int | None, int], None]


@contextmanager
def progress(doing: str, unit: str, scale: int = 1) -> Iterator[Report]:
    """Yield a function to call with (done, total); `unit` names `scale` of them: ("MB", 1_000_000), ("steps", 1)."""
    with progress_of_phases(unit, scale) as report:
        yield lambda done, total: report(doing, done, total)


@contextmanager
def planning_progress() -> Iterator[Report]:
    """Yield a function to call with (steps, all steps), which are alike: time left is told from the fifth second on."""
    from chunkplan.compiled import has_compiled

    began = time.monotonic()

    def new_pace() -> Pace:
        return Pace(time.monotonic() if has_compiled() else began)  # compiling says nothing of what is left

    with _progress("steps", 1, new_pace, Pace.ALIKE_SECONDS) as report:
        yield lambda done, total: report("planning", done, total)


@contextmanager
def progress_of_phases(unit: str, scale: int = 1) -> Iterator[PhaseReport]:
    """Yield a function to call with (what is done now, done, total), each of which counts for itself; as `progress`."""
    with _progress(unit, scale, Pace, LINE_EVERY) as report:
        yield report


@contextmanager
def tuning_progress() -> Iterator[PhaseReport]:
    """Yield a function to call with (the best so far, parts done, all parts): lines come from the fifth second on."""
    pace = Pace()
    with _progress("parts", 1, lambda: pace, Pace.ALIKE_SECONDS) as report:
        yield report


@contextmanager
def _progress(unit: str, scale: int, new_pace: Callable[[], Pace], first_after: float) -> Iterator[PhaseReport]:
    """Yield a function as `progress_of_phases` does; without a terminal the first line comes after so many seconds."""
    console = stderr()
    if not console.is_terminal:
        yield _lines(unit, scale, new_pace, first_after)
        return
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[count]}"),
        TextColumn("{task.fields[speed]}"),
    )
    with Progress(*columns, console=console, transient=True) as bar, undone(bar.stop):
        task = bar.add_task("", total=None, count="", speed="")
        paces: dict[str, Pace] = {}

        def report(doing: str, done: int, total: int) -> None:
            speed = _speed(paces.setdefault(doing, new_pace()), done, total, unit, scale)
            count = _count(done, total, unit, scale)
            bar.update(task, description=doing, completed=done, total=total, count=count, speed=speed)

        yield report


@contextmanager
def reading_progress() -> Iterator[ReadingReport]:
    """Yield a function to call with (bytes done, bytes in all or None where nobody knows, tokens so far)."""
    console = stderr()
    if not console.is_terminal:
        yield _reading_lines()
        return
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("reading"), BarColumn(bar_width=None), TextColumn("{task.fields[rate]}"))
    with Progress(*columns, console=console, transient=True) as bar, undone(bar.stop):
        task = bar.add_task("", total=None, rate="")
        started = time.monotonic()
        pace = Pace()

        def report(num_bytes: int, total: int | None, num_tokens: int) -> None:
            seconds = max(time.monotonic() - started, 1e-9)
            rate = f"{num_bytes / 1e6:,.0f} MB, {_short(num_tokens / seconds)} tokens/s"
            rate += _time_left(pace, num_bytes, total)
            bar.update(task, completed=num_bytes, total=total, rate=rate)

        yield report


@contextmanager
def note_compilation() -> Iterator[None]:
    """Say after some seconds of the block that loops are compiled, if they are."""
    from chunkplan.compiled import has_compiled

    def explain() -> None:
        if has_compiled():
            note("compiling the planner's loops: half a minute, in the first run of each kind after an installation")

    timer = threading.Timer(PATIENCE, explain)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _reading_lines() -> ReadingReport:
    is_due = _Every(LINE_EVERY)
    started = time.monotonic()
    pace = Pace()

    def report(num_bytes: int, total: int | None, num_tokens: int) -> None:
        if not num_bytes:
            return
        left = _time_left(pace, num_bytes, total)
        if not is_due():
            return
        seconds = max(time.monotonic() - started, 1e-9)
        whole = "" if total is None else f" of {total / 1e6:,.0f} MB ({100 * num_bytes // max(1, total)}%)"
        done = f"{num_bytes / 1e6:,.0f}" + (whole or " MB")
        note(f"reading: {done}, {_short(num_tokens / seconds)} tokens/s{left}")

    return report


def _lines(unit: str, scale: int, new_pace: Callable[[], Pace], first_after: float) -> PhaseReport:
    is_due = _Every(LINE_EVERY, first_after)
    paces: dict[str, Pace] = {}
    printed: set[tuple[str, int]] = set()

    def report(doing: str, done: int, total: int) -> None:
        if not done:
            return
        speed = _speed(paces.setdefault(doing, new_pace()), done, total, unit, scale)
        if (doing, done) in printed or not is_due():
            return
        printed.add((doing, done))
        note(f"{doing}: {_count(done, total, unit, scale)} ({100 * done // total}%)" + (f", {speed}" if speed else ""))

    return report


class _Every:
    """Returns True once in so many seconds, the first time after as many, or after `first` of them."""

    def __init__(self, seconds: float, first: float | None = None) -> None:
        self._seconds = seconds
        self._last = time.monotonic() - (0.0 if first is None else seconds - min(first, seconds))

    def __call__(self) -> bool:
        now = time.monotonic()
        if now - self._last < self._seconds:
            return False
        self._last = now
        return True


def _count(done: int, total: int, unit: str, scale: int) -> str:
    """Say how much is done of how much."""
    return f"{done / scale:,.0f} of {total / scale:,.0f} {unit}"


def _speed(pace: Pace, done: int, total: int, unit: str, scale: int) -> str:
    """Say rate and time left; nothing as long as too little was done to tell."""
    rate = pace.rate(done, total, time.monotonic())
    return "" if rate is None else f"{rate / scale:,.1f} {unit}/s, {left_words(max(0, total - done) / rate)}"


def _time_left(pace: Pace, done: int, total: int | None) -> str:
    """Say the time left behind a comma; nothing where nobody knows how much there is, or too little was done."""
    rate = None if total is None else pace.rate(done, total, time.monotonic())
    return "" if rate is None or total is None else f", {left_words(max(0, total - done) / rate)}"


def _short(number: float) -> str:
    """Shorten a number: 1,234,567 becomes 1.2M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:,.1f}{unit}"
    return f"{number:,.0f}"
