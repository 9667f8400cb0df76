"""The places of what tests read and have not written."""

from __future__ import annotations

from pathlib import Path

#: The folder of the project.
ROOT = Path(__file__).parents[2]

#: What earlier releases wrote.
GOLDEN = ROOT / "tests" / "golden"


def section(page: str, title: str) -> str:
    """The text below a title of the second level of a page in docs/."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]
