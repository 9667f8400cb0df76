"""The JSON files beside a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from chunkplan.errors import DataError
from chunkplan.intake.records import JsonObject

HINT = "fix this file, or give another tokenizer"


def read_object(content: bytes, file: Path) -> JsonObject:
    """Raises DataError where `content` is not a JSON object."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {error}", where=str(file), hint=HINT) from error
    if not isinstance(value, dict):
        raise DataError("expected a JSON object", where=str(file), hint=HINT)
    return value
