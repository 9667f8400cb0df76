"""What a run prints on stderr: a line a step, and on a terminal one progress bar below them."""

from __future__ import annotations

import shutil
import sys
import time
from types import TracebackType
from typing import Any

from chunkplan.quantities import Pace, left_words
from chunkplan.visible import one_line
from chunkplan_runtime.training.metrics import StepRow

#: Of a line that is not shown on a terminal.
_COLUMNS = 120


class Screen:
    """Prints lines; within a `with` block on a terminal, and where rich is installed, above a progress bar."""

    def __init__(self, start: int, num_steps: int, *, silent: bool = False) -> None:
        """Step `start` of `num_steps` comes next. `silent`: another process prints."""
        self._start = start
        self._num_steps = num_steps
        self._silent = silent
        self._bar: Any = None
        self._pace = Pace()

    def __enter__(self) -> Screen:
        if sys.stderr.isatty() and not self._silent:
            self._bar = _make_bar(self._start, self._num_steps)
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def say(self, line: str) -> None:
        """Print a line; control characters in names from elsewhere are made visible."""
        if self._silent:
            return
        line = one_line(line)
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def show_step(self, row: StepRow) -> None:
        """Print the line of a step from its metrics, and move the bar.

        It has the step's number in the plan, from 0, and how many steps are done now: "step 4 (5/5)" is the last of 5.
        """
        step = row["step"]
        parts = [
            f"step {step} ({step + 1}/{self._num_steps})  loss {row['loss']:.4f}  grad {row['grad_norm']:.3g}",
            f"{row['tokens_per_second']:,.0f} tok/s",
            f"{row['peak_memory_bytes'] / 2**30:.1f} GiB",
            f"{row['seconds']:.2f} s",
        ]
        parts += [f"plan {row['predicted_seconds']:.2f} s"] if row["predicted_seconds"] is not None else []
        parts += [f"MFU {row['mfu']:.1%}"] if row["mfu"] is not None else []
        columns = shutil.get_terminal_size().columns if self._bar is not None else _COLUMNS
        while len("  ".join(parts)) > columns and len(parts) > 1:
            parts.pop()  # metrics.jsonl has it all
        self.say("  ".join(parts))
        if self._bar is not None:
            rate = self._pace.rate(step + 1 - self._start, self._num_steps - self._start, time.monotonic())
            left = "" if rate is None else f"  {left_words((self._num_steps - step - 1) / rate)}"
            speed = f"{row['tokens_per_second']:,.0f} tokens/s{left}"
            self._bar.update(0, completed=step + 1, loss=f"{row['loss']:.4f}", speed=speed)


def _make_bar(start: int, num_steps: int) -> Any:
    """None without rich, which a machine that only trains need not have."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
    except ImportError:
        return None
    bar = Progress(
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} steps"),
        BarColumn(bar_width=20),
        TextColumn("loss {task.fields[loss]}  {task.fields[speed]}"),
        console=Console(stderr=True),
        redirect_stdout=False,
    )
    bar.add_task("", total=num_steps, completed=start, loss="-", speed="-")
    return bar
