"""`chunkplan inspect --html`: one page in place of the screen."""

from __future__ import annotations

from pathlib import Path

from chunkplan_cli.compilation import note_compilation
from chunkplan_cli.terminal import note, warn


def write_page(output: Path, shown: Path, *, tuning: Path | None, analysis: Path | None, step: int | None) -> None:
    """Write the page of what is at `shown` to `output`, and say so."""
    from chunkplan.reporting.page.write import write_report

    with note_compilation():
        warnings = write_report(output, shown, tuning=tuning, analysis=analysis, step=step)
    for warning in warnings:
        warn(warning)
    note(f"page in {output}")
