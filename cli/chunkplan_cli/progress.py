"""Progress of long work: a bar on a terminal, else a line every few seconds, with rate and remaining time.

A note explains the wait while the planner's loops are compiled.
"""

from __future__ import annotations

import sys
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
    """Yield a function to call with (the best so far, percent done, 100): lines come from the fifth second on.

    It tells no time left: parts take as long as what they find makes them.
    """
    with _shown(Pace.ALIKE_SECONDS) as show:
        yield lambda doing, done, total: show(doing, done, total, f"{done}%", "")


@contextmanager
def _progress(unit: str, scale: int, new_pace: Callable[[], Pace], first_after: float) -> Iterator[PhaseReport]:
    """Yield a function as `progress_of_phases` does; without a terminal the first line comes after so many seconds."""
    paces: dict[str, Pace] = {}
    with _shown(first_after) as show:

        def report(doing: str, done: int, total: int) -> None:
            rate = paces.setdefault(doing, new_pace()).rate(done, total, time.monotonic()) if done else None
            speed = "" if rate is None else f"{rate / scale:,.1f} {unit}/s, {left_words(max(0, total - done) / rate)}"
            show(doing, done, total, f"{done / scale:,.0f} of {total / scale:,.0f} {unit}", speed)

        yield report


@contextmanager
def reading_progress() -> Iterator[ReadingReport]:
    """Yield a function to call with (bytes done, bytes in all or None where nobody knows, tokens so far)."""
    started, pace = time.monotonic(), Pace()
    with _shown(LINE_EVERY) as show:

        def report(num_bytes: int, total: int | None, num_tokens: int) -> None:
            rate = None if total is None or not num_bytes else pace.rate(num_bytes, total, time.monotonic())
            speed = f"{_short(num_tokens / max(time.monotonic() - started, 1e-9))} tokens/s"
            speed += "" if rate is None or total is None else f", {left_words(max(0, total - num_bytes) / rate)}"
            of_all = "" if total is None else f" of {total / 1e6:,.0f}"
            show("reading", num_bytes, total, f"{num_bytes / 1e6:,.0f}{of_all} MB", speed)

        yield report


#: Shows what is done now, done, total or None, and both in words: how much of it, and how fast.
_Show = Callable[[str, int, int | None, str, str], None]


@contextmanager
def _shown(first_after: float) -> Iterator[_Show]:
    """Yield what shows progress: as a bar on a terminal, else as lines, the first of them after so many seconds."""
    console = stderr()
    if not console.is_terminal:
        yield _lines(first_after)
        return
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.text import Text

    class Doing(ProgressColumn):
        """The current activity; before anything is reported, the progress of compiling."""

        def render(self, task: Task) -> Text:
            loops = None if task.description else sys.modules.get("chunkplan.compiled")
            number = loops.num_compiled() if loops else 0
            return Text(f"compiling: {number} loops so far" if number else task.description)

    words = (TextColumn("{task.fields[count]}"), TextColumn("{task.fields[speed]}"))
    columns = (Doing(), BarColumn(bar_width=None), *words)
    with Progress(*columns, console=console, transient=True) as bar, undone(bar.stop):
        task = bar.add_task("", total=None, count="", speed="")

        def show(doing: str, done: int, total: int | None, count: str, speed: str) -> None:
            bar.update(task, description=doing, completed=done, total=total, count=count, speed=speed)

        yield show


def _lines(first_after: float) -> _Show:
    """Return what prints a line every `LINE_EVERY` seconds, and none twice."""
    last_printed = time.monotonic() - LINE_EVERY + min(first_after, LINE_EVERY)
    printed: set[tuple[str, int]] = set()

    def show(doing: str, done: int, total: int | None, count: str, speed: str) -> None:
        nonlocal last_printed
        now = time.monotonic()
        if not done or (doing, done) in printed or now - last_printed < LINE_EVERY:
            return
        last_printed = now
        printed.add((doing, done))
        share = "" if total is None or count.endswith("%") else f" ({100 * done // max(1, total)}%)"
        note(f"{doing}: {count}{share}" + (f", {speed}" if speed else ""))

    return show


@contextmanager
def note_compilation() -> Iterator[None]:
    """Print a note if the block compiles loops and takes more than some seconds."""
    from chunkplan.compiled import has_compiled

    def explain() -> None:
        if has_compiled():
            note("compiling the planner's loops, once for each kind of plan: half a minute")

    timer = threading.Timer(PATIENCE, explain)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _short(number: float) -> str:
    """Shorten a number: 1,234,567 becomes 1.2M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:,.1f}{unit}"
    return f"{number:,.0f}"
