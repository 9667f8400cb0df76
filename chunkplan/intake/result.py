"""What became of a piece: counts, and where its sequences are."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class PieceResult:
    """Counts of a piece that was read to its end.

    `key` names it in the store, `digest` is that of what was read, and `reader` what read it.

    `num_rows` are its lines or rows, `num_records` those that are not blank: sequences, rejected and left out of the
    sample. `rows` are the sequences of the record batches of its file of tokens, if `has_tokens`. `is_estimated` says
    that lengths were not counted by a tokenizer.
    """

    key: str
    digest: str
    reader: str
    num_rows: int = 0
    num_records: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    num_target_tokens: int = 0
    num_not_sampled: int = 0
    num_truncated: int = 0
    num_truncated_tokens: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    max_token_id: int | None = None
    has_tokens: bool = False
    is_estimated: bool = False
    rows: list[int] = field(default_factory=list)
    files: dict[str, list[int]] = field(default_factory=dict)  # of the store: size and time of the content

    @property
    def num_rejected(self) -> int:
        """Records that did not become sequences."""
        return sum(self.rejected.values())

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        return asdict(self)
