"""`text`: plain text."""

from __future__ import annotations

from typing import Any

from chunkplan.intake.records import TextRecord
from chunkplan.intake.schemas.fields import field


def parse(record: dict[str, Any], where: str) -> TextRecord:
    """Raises DataError where `text` is not a string."""
    return TextRecord(field(record, "text", str, where))
