"""Where a message stands in the rendering of its conversation, known from the renderings of its beginnings.

This is for templates without a loop over messages whose output can be told apart (see `template_fragments`): a
message's place is known where the rendering of the messages up to it is how the whole rendering begins.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from chunkplan.intake.records import Conversation, JsonObject
from chunkplan.intake.rejection import RecordError

#: [start, stop) in characters.
Span = tuple[int, int]

#: (number of messages, with the generation prompt) -> the rendering of that beginning.
Render = Callable[[int, bool], str]

_HINT = (
    "use a template with {% generation %} blocks, with one loop over the messages, or one that renders a message the "
    "same whatever follows it"
)


def beginning_span(messages: list[JsonObject], full: str, render: Render, index: int) -> Span:
    """The characters of message `index` in `full`: for the assistant what follows the generation prompt, else all.

    Raises:
        RecordError: the template raises, or renders a message otherwise when others follow it.
    """
    stop = len(full) if index + 1 == len(messages) else _length(full, render, index + 1, prompt=False)
    if messages[index]["role"] != "assistant":
        start = _length(full, render, index, prompt=False) if index else 0
    elif index:
        start = _length(full, render, index, prompt=True)
    else:
        start = _first_start(full, render, stop)
    return min(start, stop), stop  # the template may leave the message out


def refuse_missing_calls(conversation: Conversation, counted: str, put_out: Collection[tuple[int, int]] | None) -> None:
    """Raises RecordError where a call of a tool is left out of what counts: silence would be trained.

    `counted` is the text that counts; the rest of a rendering may name the tool as well, in a list of tools or in a
    question. `put_out` has the calls that the template puts out, by message and place in it, where that is known: some
    put out the first call of a message alone, and what else is said may name the tool.
    """
    for index, message in enumerate(conversation.messages):
        calls = message.fields.get("tool_calls") if message.fields and message.counts_in_loss else None
        for place, call in enumerate(calls if isinstance(calls, list) else ()):
            name = name_called(call)
            if name is not None and (name not in counted or (put_out is not None and (index, place) not in put_out)):
                raise RecordError(
                    f"the chat template leaves out the call of `{name}` that `messages[{index}]` makes",
                    reason="template",
                    hint="give a template for calls of tools with --chat-template, or leave this record out",
                )


def name_called(call: Any) -> str | None:
    """The name of the tool that an entry of `tool_calls` calls."""
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _first_start(full: str, render: Render, stop: int) -> int:
    """Where the first message begins after its generation prompt.

    Many templates refuse a conversation without messages, or begin one with a default system message. The generation
    prompt that would follow this message is the one it was itself generated from.
    """
    prompt = render(1, True).removeprefix(render(1, False))
    place = full.find(prompt, 0, stop)
    if place < 0:
        raise RecordError(
            f"the chat template does not begin an assistant message with its generation prompt {prompt!r}",
            reason="template",
            hint=_HINT,
        )
    return place + len(prompt)


def _length(full: str, render: Render, count: int, *, prompt: bool) -> int:
    """The length of the rendering of the first `count` messages, which has to be how the whole begins."""
    beginning = render(count, prompt)
    if not full.startswith(beginning):
        rest = "and the generation prompt " if prompt else ""
        first = "first message" if count == 1 else f"first {count} messages"
        raise RecordError(
            f"the chat template renders the {first} {rest}otherwise when others follow, "
            "so which tokens count in the loss is not known",
            reason="template",
            hint=_HINT,
        )
    return len(beginning)
