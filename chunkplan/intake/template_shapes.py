"""What of messages decides how templates render them, and messages of the same shape that say other words."""

from __future__ import annotations

import re
from typing import Any

from chunkplan.intake.records import JsonObject

#: So many shapes are remembered; data has some hundreds.
MOST_SHAPES = 1 << 12

#: Keys of a message that templates may read text of the message from: what it says, and what it thinks.
TEXTS = ("content", "reasoning_content", "thinking", "reasoning")

#: Every word of `word_of`, also where one overlaps another.
_WORDS = re.compile("(?=(qz[a-p]+zq))")


def shape_of(message: JsonObject) -> Any:
    """What of a message templates look at to decide how conversations are rendered, besides texts."""
    content = message.get("content")
    if len(message) == 2 and type(content) is str:  # as most are
        return message["role"] if content else (message["role"],)
    calls = message.get("tool_calls")
    kind = (type(content).__name__, len(content) if isinstance(content, list) else bool(content))
    keys = tuple(sorted((key, bool(value)) for key, value in message.items()))  # some ask for keys, some for values
    return message["role"], kind, keys, len(calls) if isinstance(calls, list) else 0


def with_text(message: JsonObject, said: str, thought: str) -> JsonObject:
    """The message with these words in place of what it says and of what it thinks."""
    changed = dict(message)
    for key in TEXTS:
        value, word = message.get(key), said if key == "content" else thought
        if isinstance(value, str) and value:
            changed[key] = word
        elif isinstance(value, list):
            is_text = [isinstance(part, dict) and "text" in part for part in value]
            changed[key] = [{**part, "text": word} if text else part for part, text in zip(value, is_text, strict=True)]
    return changed


def word_of(index: int) -> str:
    """A word that no template has, of letters alone."""
    letters = ""
    while True:
        index, letter = divmod(index, 16)
        letters += "abcdefghijklmnop"[letter]
        if not index:
            return f"qz{letters}zq"


def words_in(text: str) -> set[str]:
    """The words of `word_of` that stand in `text`."""
    return set(_WORDS.findall(text))
