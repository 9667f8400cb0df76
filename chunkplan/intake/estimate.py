"""Lengths without a tokenizer: one token for every four bytes of UTF-8, about right for English and for code."""

from __future__ import annotations

import msgspec

from chunkplan.intake.records import (
    Conversation,
    Exchange,
    LengthRecord,
    PromptRecord,
    Record,
    TextRecord,
    TokensRecord,
)

BYTES_PER_TOKEN = 4


def estimate_tokens(record: Record) -> int:
    """About how many tokens `record` has, at least 1; those of a conversation include tool calls and reasoning.

    Records that are tokens or a length say it exactly.
    """
    match record:
        case TextRecord(text):
            num_bytes = len(text.encode())
        case PromptRecord(prompt, completion):
            num_bytes = len(prompt.encode()) + len(completion.encode())
        case Exchange(system, prompt, completion):
            num_bytes = len((system or "").encode()) + len(prompt.encode()) + len(completion.encode())
        case Conversation(messages):
            num_bytes = 0
            for message in messages:
                num_bytes += len((message.content or "").encode())
                for key in ("tool_calls", "reasoning_content"):
                    if value := message.fields.get(key):
                        num_bytes += len(value.encode() if isinstance(value, str) else msgspec.json.encode(value))
        case TokensRecord(input_ids):
            return len(input_ids)
        case LengthRecord(num_tokens):
            return num_tokens
    return max(1, -(-num_bytes // BYTES_PER_TOKEN))
