"""Schemas: how a source's records are laid out, and what a record of one becomes."""

from __future__ import annotations

from chunkplan.intake.records import Conversation, Exchange, JsonObject, Labelled, PromptRecord, Record, RecordError
from chunkplan.intake.schemas.detection import detect
from chunkplan.intake.schemas.messages import SUSPECT, refuse
from chunkplan.intake.schemas.rollouts import refuse_other_numbers
from chunkplan.intake.schemas.table import SCHEMAS, RecordLayout, label_of, refuse_label
from chunkplan.intake.schemas.tokens import refuse_mixed
from chunkplan.intake.schemas.unread import check_unread, count_unread

__all__ = ["SCHEMAS", "RecordLayout", "count_unread", "detect", "parse"]


def parse(layout: RecordLayout, record: JsonObject) -> Record:
    """Convert one source record to its neutral form; raises RecordError where it does not fit or is empty."""
    record = layout.as_read(record)
    if not SUSPECT.isdisjoint(record):
        refuse(record, is_pair=layout.schema == "preference")
    if "label" in layout.columns and not layout.labels:
        refuse_label(record, layout.columns)
    if layout.marks is not None:
        refuse_mixed(record, layout.columns, layout.marks)
        refuse_other_numbers(record, layout.columns, layout.numbers)
    try:
        parsed = SCHEMAS[layout.schema].parse(record, layout.columns)
        parsed = parsed if layout.keys.issuperset(record) else check_unread(layout, record, parsed)
        if layout.labels and isinstance(parsed, (PromptRecord, Exchange, Conversation)):
            return Labelled(parsed, label_of(record, layout.columns))
        return parsed
    except RecursionError as error:  # raised where a nested value is written as text
        raise RecordError("nested too deeply", reason="too-deep", hint="leave this record out") from error
