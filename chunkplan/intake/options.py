"""What a user may ask of the intake besides data and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from chunkplan.errors import UsageError

LONG = ("error", "drop", "truncate")
ON_ERROR = ("stop", "skip")
UNDESIRABLE = ("error", "drop")

#: What is read of one record at most. Encoding takes up to 130 times as much memory.
MAX_RECORD_BYTES = 8_000_000


@dataclass(frozen=True, kw_only=True)
class IntakeOptions:
    """Options of `analyze`; raises UsageError where one makes no sense.

    Attributes:
        schema: the schema of all sources; found out for each of them where None.
        columns: role -> key of the records, for keys that are not named like the roles of a schema.
        max_length: tokens of a sequence at most; all are kept where None.
        long: what becomes of longer ones: "error", "drop" (counted as rejected) or "truncate" (cut, and counted).
        on_error: "stop" at the first record that cannot become a sequence, or "skip" and count it. Blank ones are
            counted in any case.
        undesirable: what becomes of answers labelled as bad ones (`label`: false): "error", or "drop" and count them.
        tokens: whether tokens are stored; without them a plan can be built, not trained.
        sample: the share of records to read, None for all. Nothing of a sample can be trained: no tokens are stored.
        max_record_bytes: larger records are rejected before they are read.
    """

    schema: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    max_length: int | None = None
    long: str = "truncate"
    on_error: str = "stop"
    undesirable: str = "error"
    tokens: bool = True
    sample: float | None = None
    max_record_bytes: int = MAX_RECORD_BYTES

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 1:
            raise UsageError(f"a maximum length of {self.max_length} leaves nothing", hint="give 1 or more tokens")
        for name, value, choices in (
            ("long", self.long, LONG),
            ("on-error", self.on_error, ON_ERROR),
            ("undesirable", self.undesirable, UNDESIRABLE),
        ):
            if value not in choices:
                raise UsageError(f"--{name} {value!r}", hint=f"it is one of {', '.join(choices)}")
        if self.long != "truncate" and self.max_length is None:
            raise UsageError(
                f"--long {self.long} without a maximum length", hint="say with --max-length what is too long"
            )
        if self.sample is not None and not 0 < self.sample < 1:
            raise UsageError(f"a sample of {self.sample} of the records", hint="give a share such as 0.01")
        if self.max_record_bytes < 1:
            raise UsageError(f"records of at most {self.max_record_bytes} bytes", hint="give 1 or more")

    @property
    def stores_tokens(self) -> bool:
        """Whether tokens are stored where there are any."""
        return self.tokens and self.sample is None

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON values."""
        return asdict(self) | {"columns": dict(self.columns)}
