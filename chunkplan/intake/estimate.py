"""Lengths without a tokenizer: one token for every four bytes of UTF-8, about right for English and for code."""

from __future__ import annotations

import msgspec

from chunkplan.intake.records import PromptRecord, Record, TextRecord

BYTES_PER_TOKEN = 4


def estimate_tokens(record: Record) -> int:
    """About how many tokens the text of `record` has, at least 1; the text of a conversation includes tool calls."""
    match record:
        case TextRecord(text):
            num_bytes = len(text.encode())
        case PromptRecord(prompt, completion):
            num_bytes = len(prompt.encode()) + len(completion.encode())
        case _:
            num_bytes = 0
            for message in record.messages:
                num_bytes += len((message.content or "").encode())
                if calls := message.fields.get("tool_calls"):
                    num_bytes += len(msgspec.json.encode(calls))
    return max(1, -(-num_bytes // BYTES_PER_TOKEN))
