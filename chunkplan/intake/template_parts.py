"""The forms of content that a chat template takes.

transformers hands lists of text parts on as they are. Many templates know strings alone: they would print the list as
Python writes it, leave it out, or raise. Whether one reads them is found out by rendering one.
"""

from __future__ import annotations

from collections.abc import Callable

from chunkplan.intake.records import JsonObject
from chunkplan.intake.rejection import RecordError

_WORDS = ("qzfirst", "qzsecond")
_USER: JsonObject = {"role": "user", "content": "a"}
_CALL: JsonObject = {
    "role": "assistant",
    "content": "a",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
}


def reads_parts(render: Callable[[list[JsonObject]], str], role: str, num_parts: int) -> bool:
    """Whether what `render` makes of messages has the text of `num_parts` parts, one or two, of a message of `role`.

    Parts that are printed as Python or JSON writes them are not read.
    """
    words = _WORDS[:num_parts]
    message: JsonObject = {"role": role, "content": [{"type": "text", "text": word} for word in words]}
    match role:
        case "user":
            messages = [message]
        case "system" | "developer":  # as they begin a conversation
            messages = [message, _USER]
        case "tool":
            messages = [_USER, _CALL, message]
        case _:
            messages = [_USER, message]
    try:
        text = render(messages)
    except RecordError:
        return False
    return all(word in text and f"'{word}'" not in text and f'"{word}"' not in text for word in words)
