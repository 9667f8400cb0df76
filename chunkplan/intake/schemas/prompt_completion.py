"""`prompt` and `completion`: two strings that are trained as one, with loss on the second."""

from __future__ import annotations

from typing import Any

from chunkplan.intake.records import PromptRecord
from chunkplan.intake.schemas.fields import field


def parse(record: dict[str, Any], where: str) -> PromptRecord:
    """Raises DataError where one of the two is not a string."""
    return PromptRecord(field(record, "prompt", str, where), field(record, "completion", str, where))
