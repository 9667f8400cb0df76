"""Tables without boxes, and bars in them: readable at 80 columns and without colour."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text


def titled_table(title: str) -> Table:
    """Make a table with its title above it."""
    return Table(
        title=Text(title, style="bold"), title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim"
    )


def bar(console: Console, value: float, most: float, width: int) -> str:
    """Draw a bar, of which `width` characters stand for `most`; a little is never nothing."""
    block = "#" if console.options.ascii_only else "█"
    return block * (max(1, round(width * value / most)) if value else 0)
