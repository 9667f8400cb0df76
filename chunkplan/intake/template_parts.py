"""Whether a chat template reads content that is a list of text parts, found out by what it makes of one.

transformers hands such lists on as they are. Many templates know strings alone: they would print the list as Python
writes it, leave it out, or raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chunkplan.intake.rejection import RecordError

_WORDS = ("qzfirst", "qzsecond")
_USER: dict[str, Any] = {"role": "user", "content": "a"}
_CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "a",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
}


def reads_parts(render: Callable[[list[dict[str, Any]]], str], role: str, num_parts: int) -> bool:
    """Whether what `render` makes of messages has the text of `num_parts` parts, one or two, of a message of `role`.

    Parts that are printed as Python or JSON writes them are not read.
    """
    words = _WORDS[:num_parts]
    message: dict[str, Any] = {"role": role, "content": [{"type": "text", "text": word} for word in words]}
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
