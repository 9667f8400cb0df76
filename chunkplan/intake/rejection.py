"""A record that cannot become a sequence: an error that knows its reason, so that rejected records can be counted."""

from __future__ import annotations

from typing import NamedTuple

from chunkplan.errors import DataError

#: Why a record is rejected: the names in reports and in rejected.jsonl, and what they mean.
REASONS = {
    "not-utf8": "bytes that are not UTF-8",
    "not-json": "not JSON: cut short, a lone surrogate, NaN, text behind the value, ...",
    "not-an-object": "JSON, but not an object",
    "too-deep": "nested deeper than the parser allows",
    "duplicate-keys": "the same key twice in one object",
    "schema": "keys or types that are not those of the source's schema",
    "unsupported": "what is not planned: preference pairs, images, weights other than 0 and 1",
    "undesirable": "an answer labelled as a bad one (`label`: false)",
    "empty": "nothing to train on: no text, nothing but whitespace, or a flag of 0",
    "too-large": "more bytes than a record may have",
    "template": "the chat template cannot render it",
    "too-long": "more tokens than --max-length",
    "unreadable": "a whole source, or the rest of one, that cannot be read",
}


#: What to do where all records are left out for one reason.
HINTS_OF_ALL = {
    "empty": "give files with at least one record that is not blank",
    "undesirable": "give records with good answers too, or remove `label` if it means another thing",
    "too-long": "raise --max-length, or say --long truncate",
}


class RecordError(DataError):
    """A record that cannot become a sequence; the reader adds `where`, `number` is its row within its piece."""

    def __init__(
        self, message: str, *, reason: str, hint: str, where: str | None = None, number: int | None = None
    ) -> None:
        assert reason in REASONS
        super().__init__(message, where=where, hint=hint)
        self.reason = reason
        self.number = number

    def of_row(self, number: int) -> Rejected:
        """The entry of a line or row that is left out for this."""
        return Rejected(number, self.reason, self.message, self.hint)


class Rejected(NamedTuple):
    """A record that was left out. `number` is its line or row within its piece of the source, or -1: all the rest."""

    number: int
    reason: str
    message: str
    hint: str = "fix this record, or leave it out"
