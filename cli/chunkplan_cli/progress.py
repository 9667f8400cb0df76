"""How far long work is: a bar with rate and time left on a terminal, else a line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from chunkplan_cli.terminal import note, stderr

#: Seconds between two lines of progress where there is no terminal.
_LINE_EVERY = 10.0

#: Called with what is done and what there is to do.
Report = Callable[[int, int], None]


@contextmanager
def progress(doing: str, unit: str, scale: int = 1) -> Iterator[Report]:
    """Yield a function to call with (done, total); `unit` names `scale` of them: ("MB", 1_000_000), ("steps", 1)."""
    console = stderr()
    if not console.is_terminal:
        yield _lines(doing, unit, scale)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[rate]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(doing, total=None, rate="")
        started = time.monotonic()

        def report(done: int, total: int) -> None:
            rate = done / scale / max(time.monotonic() - started, 1e-9)
            bar.update(task, completed=done, total=total, rate=f"{rate:,.0f} {unit}/s")

        yield report


def _lines(doing: str, unit: str, scale: int) -> Report:
    started = last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < _LINE_EVERY or not done:
            return
        last = now
        rate = done / (now - started)
        note(
            f"{doing}: {done / scale:,.0f} of {total / scale:,.0f} {unit} ({100 * done // total} %), "
            f"{rate / scale:,.1f} {unit}/s, {max(0, total - done) / rate:,.0f} s left"
        )

    return report
