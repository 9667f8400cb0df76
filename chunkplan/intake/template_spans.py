"""Where a message stands in the rendering of its conversation, known from the renderings of its beginnings."""

from __future__ import annotations

from chunkplan.intake.records import Conversation
from chunkplan.intake.rejection import RecordError
from chunkplan.intake.template_beginnings import Beginnings

#: [start, stop) in characters.
Span = tuple[int, int]

_HINT = (
    "use a template with {% generation %} blocks or one that renders a message the same whatever follows it, "
    "or give `prompt` and `completion`"
)


def message_span(conversation: Conversation, beginnings: Beginnings, index: int) -> Span:
    """The characters of message `index`: for the assistant what follows the generation prompt, else the whole.

    Raises:
        RecordError: the template raises, or renders a message otherwise when others follow it.
    """
    is_last = index + 1 == len(conversation.messages)
    stop = len(beginnings.full) if is_last else _length(beginnings, index + 1, prompt=False)
    if conversation.messages[index].role != "assistant":
        start = _length(beginnings, index, prompt=False) if index else 0
    elif index:
        start = _length(beginnings, index, prompt=True)
    else:
        start = _first_start(beginnings, stop)
    return min(start, stop), stop  # the template may leave the message out


def refuse_missing_calls(conversation: Conversation, counted: str) -> None:
    """Raises RecordError where `counted`, the text that counts, lacks a call of a tool: silence would be trained.

    The rest of a rendering may name the tool as well, in a list of tools or in a question.
    """
    for index, message in enumerate(conversation.messages):
        calls = message.fields.get("tool_calls") if message.fields and message.counts_in_loss else None
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function", call) if isinstance(call, dict) else None
            name = function.get("name") if isinstance(function, dict) else None
            if isinstance(name, str) and name not in counted:
                raise RecordError(
                    f"the chat template leaves out the call of `{name}` that `messages[{index}]` makes",
                    reason="template",
                    hint="give a template for calls of tools with --chat-template, or leave this record out",
                )


def _first_start(beginnings: Beginnings, stop: int) -> int:
    """Where the first message begins after its generation prompt.

    Many templates refuse a conversation without messages, or begin one with a default system message. The generation
    prompt that would follow this message is the one it was itself generated from.
    """
    prompt = beginnings.text(1, True).removeprefix(beginnings.text(1, False))
    place = beginnings.full.find(prompt, 0, stop)
    if place < 0:
        raise RecordError(
            f"the chat template does not begin an assistant message with its generation prompt {prompt!r}",
            reason="template",
            hint=_HINT,
        )
    return place + len(prompt)


def _length(beginnings: Beginnings, count: int, *, prompt: bool) -> int:
    """The length of the rendering of the first `count` messages, which has to be how the whole begins."""
    length = beginnings.length(count, prompt)
    if length is None:
        rest = "and the generation prompt " if prompt else ""
        raise RecordError(
            f"the chat template renders the first {count} messages {rest}otherwise when others follow, "
            "so which tokens count in the loss is not known",
            reason="template",
            hint=_HINT,
        )
    return length
