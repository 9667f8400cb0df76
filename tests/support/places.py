"""Where the tests find what is not theirs."""

from __future__ import annotations

from pathlib import Path

#: The folder of the project.
ROOT = Path(__file__).parents[2]

#: What earlier releases wrote.
GOLDEN = ROOT / "tests" / "golden"
