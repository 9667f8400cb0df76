"""What the programs that write pages share: paragraphs, tables, and where a page goes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill

WIDTH = 120


def paragraph(text: str) -> str:
    """Wrap `text` into lines of the width of a page."""
    return fill(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table; "|" in its cells is escaped, also in code, as GitHub reads it."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def code(text: str, language: str = "") -> str:
    """Format a block of code."""
    return f"```{language}\n{text}\n```"


def write_page(name: str, parts: Iterable[str]) -> None:
    """Write `parts` to docs/`name`, or where the command line says."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name(name)
    target.write_text("\n\n".join(part.strip("\n") for part in parts) + "\n", encoding="utf-8")
