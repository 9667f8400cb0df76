"""The result of a piece: counts, and where its sequences are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

#: What a chat template may leave out of a conversation, or change: the names in manifests, and what they mean.
LEFT_OUT = {
    "system": "what the system message says",
    "user": "what the user says",
    "tool": "what a tool answers",
    "assistant": "what the assistant says",
    "other": "what a message of another role says",
    "thinking": "thinking of a message that counts",
    "end": "the token that ends the last turn",
}

#: Beside `LEFT_OUT`, with which it is counted: a token that counts begins in the prompt, or in a turn of somebody else.
SHARED = "shared"


@dataclass
class PieceResult:
    """Counts of a piece that was read to its end.

    `key` names it in the store, `digest` is that of what was read, and `reader` what read it.

    `num_rows` are its lines or rows, `num_records` those that are not blank. With the `num_more` sequences that records
    made beside their first, they are the sequences, those rejected, and those left out of the sample. `rows` are the
    numbers of sequences in the record batches of its token file, if `has_tokens`. With `is_estimated`, lengths were not
    counted by a tokenizer. `unread` has the keys that were not read, with the number of records that have them, or None
    where that number is not known; of `num_unread` keys it has the most frequent. `left_out` has the number of
    sequences of which the chat template leaves something out, by what it is, and `first_left_out` the row of the first.
    """

    key: str
    digest: str
    reader: str
    num_rows: int = 0
    num_records: int = 0
    num_sequences: int = 0
    num_more: int = 0
    num_tokens: int = 0
    num_target_tokens: int = 0
    num_not_sampled: int = 0
    num_truncated: int = 0
    num_truncated_tokens: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    unread: dict[str, int | None] = field(default_factory=dict)
    num_unread: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    first_left_out: dict[str, int] = field(default_factory=dict)
    max_token_id: int | None = None
    has_tokens: bool = False
    is_estimated: bool = False
    rows: list[int] = field(default_factory=list)
    files: dict[str, list[int]] = field(default_factory=dict)  # of the store: size and time of the content

    @property
    def num_rejected(self) -> int:
        """Records that did not become sequences."""
        return sum(self.rejected.values())


def add_left_out(result: PieceResult, kinds: Iterable[str], number: int) -> None:
    """Count a sequence, of the record in row `number`, of which these kinds of `LEFT_OUT` are not there."""
    for kind in kinds:
        result.left_out[kind] = result.left_out.get(kind, 0) + 1
        result.first_left_out[kind] = min(number, result.first_left_out.get(kind, number))
