"""Schemas: how a source's records are laid out, one schema a file; a record of one becomes its neutral form."""

from __future__ import annotations

from chunkplan.intake.records import JsonObject, Record
from chunkplan.intake.rejection import RecordError
from chunkplan.intake.schemas.beside import refuse_answer
from chunkplan.intake.schemas.detection import detect
from chunkplan.intake.schemas.input_ids import refuse_mixed
from chunkplan.intake.schemas.layout import RecordLayout
from chunkplan.intake.schemas.left_over import with_left_over
from chunkplan.intake.schemas.marks import without_ignored
from chunkplan.intake.schemas.refused import SUSPECT, refuse
from chunkplan.intake.schemas.registry import SCHEMAS
from chunkplan.intake.schemas.unread import count_unread

__all__ = ["SCHEMAS", "RecordLayout", "count_unread", "detect", "parse"]


def parse(layout: RecordLayout, record: JsonObject) -> Record:
    """The neutral form of a record of a source that is laid out so.

    Raises:
        RecordError: the record does not fit, or has nothing to train on.
    """
    record = without_ignored(record, layout.ignored)
    if not SUSPECT.isdisjoint(record):
        refuse(record)
    if "label" in layout.columns:
        refuse_answer(record, layout.columns)
    if layout.marks is not None:
        refuse_mixed(record, layout.columns, layout.marks)
    try:
        parsed = SCHEMAS[layout.schema].parse(record, layout.columns)
        return parsed if layout.keys.issuperset(record) else with_left_over(layout, record, parsed)
    except RecursionError as error:  # raised where a nested value is written as text
        raise RecordError("nested too deeply", reason="too-deep", hint="leave this record out") from error
