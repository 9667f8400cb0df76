"""Finds the forms of messages that a chat template takes, and the parts of messages that its rendering leaves out.

Data have the arguments of a tool call as an object, or as JSON, which is OpenAI's form. Most templates write an object
as JSON themselves, and would quote JSON twice; some print JSON as it is, and raise at an object or print its Python
form. A template without support for calls leaves them out. Transformers passes on lists of text parts unchanged, while
many templates support strings alone: they would print the list's Python form, leave it out, or raise. The form that a
template takes is found by rendering an example.

All texts, and most reasoning, are in the rendering unchanged, in the order of the messages: that is checked first, and
is enough for most conversations. Templates may also write a text as JSON or HTML, trim it, change its case or spaces,
and remove the reasoning from it; that is not to leave it out.
"""

from __future__ import annotations

import html
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import msgspec

from chunkplan.intake.records import Conversation, JsonObject, Message, RecordError, as_tools
from chunkplan.intake.template_turns import TEXTS, FragmentCheck, Tools

#: Renders messages with tools. Raises RecordError where the template raises.
RenderText = Callable[[list[JsonObject], Tools], str]

_NAME, _KEY, _VALUE = "qzname", "qzfirst", "qzsecond"

#: Thoughts within a text, with the first of which it may begin; templates split texts at these marks.
_THOUGHT = re.compile(r"(?:<think>|<\|channel>|\A)((?:(?!<think>|<\|channel>).)*?)(?:</think>|<channel\|>)", re.DOTALL)
_MARK = re.compile(r"</?think>|<\|channel>|<channel\|>")

#: Shorter texts may stand anywhere by chance.
_LEAST_TEXT = 6


class LeftOut(NamedTuple):
    """A message that lacks some of its thought or text; with `is_all`, so much that it is another answer."""

    message: int
    thinks: bool
    is_all: bool = False


def takes_calls(render: RenderText) -> str | None:
    """Return the form in which a template takes arguments of calls, "object" or "json"; None if it has no calls."""
    tool = {"type": "function", "function": {"name": _NAME, "description": "d", "parameters": {"type": "object"}}}
    as_json = json.dumps({_KEY: _VALUE})
    forms = (("object", {_KEY: _VALUE}, (_KEY, _VALUE)), ("json", as_json, (as_json,)))
    for form, arguments, words in forms:
        for content, tools in itertools.product(("", "a"), (None, [tool])):
            call = {"id": "call00001", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
            called = {"role": "assistant", "content": content, "tool_calls": [call]}
            rendered = _rendered(render, [{"role": "user", "content": "a"}, called], tools)
            if all(word in rendered for word in (_NAME, *words)) and f"'{words[0]}'" not in rendered:
                return form
    return None


def reads_parts(render: RenderText, role: str, num_parts: int) -> bool:
    """Return whether a template puts out the text of one or two parts, and does not print them as Python does."""
    words = (_KEY, _VALUE)[:num_parts]
    message: JsonObject = {"role": role, "content": [{"type": "text", "text": word} for word in words]}
    user: JsonObject = {"role": "user", "content": "a"}
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    called: JsonObject = {"role": "assistant", "content": "a", "tool_calls": [call]}
    around = {"user": ([], []), "system": ([], [user]), "developer": ([], [user]), "tool": ([user, called], [])}
    before, behind = around.get(role, ([user], []))
    text = _rendered(render, [*before, message, *behind], None)
    return all(word in text and f"'{word}'" not in text and f'"{word}"' not in text for word in words)


def _rendered(render: RenderText, messages: list[JsonObject], tools: Tools) -> str:
    """The rendering, "" where the template raises."""
    try:
        return render(messages, tools)
    except RecordError:
        return ""


def with_calls(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Move calls that were text in the data to `tool_calls`, as chat templates take them.

    Those without text or thought go on in the assistant's message before them, if both count or neither.
    """
    found: list[Message] = []
    for message in messages:
        if message.calls is not None:
            said, calls = message.calls
            begins = said or any(message.fields.get(key) for key in TEXTS)
            before = found[-1] if found and not begins else None
            if before is None or before.role != "assistant" or before.counts_in_loss != message.counts_in_loss:
                before = message._replace(content=said, parts=(), calls=None)
            else:
                found.pop()
            called = [*(before.fields.get("tool_calls") or ()), *calls]
            message = before._replace(fields={**message.fields, **before.fields, "tool_calls": called})
        found.append(message)
    return tuple(found)


def forms_of(messages: list[JsonObject], tools: Tools, takes: str | None) -> Iterator[tuple[list[JsonObject], Tools]]:
    """Yield messages and tools in the forms that templates take, beginning with the form `takes`.

    Arguments of calls are objects, or JSON; a text that is no JSON stays one. Some templates take the `function` of a
    tool.
    """
    changes = [_as_json, _as_object] if takes == "json" else [_as_object, _as_json]
    has_calls = any("tool_calls" in message for message in messages)
    whole = as_tools(tools or [])
    for others in (tools, whole) if whole != (tools or []) else (tools,):
        for change in changes if has_calls else ():
            yield [_with_arguments(message, change) for message in messages], others
        if not has_calls:
            yield messages, others
    if any("content" not in message for message in messages):  # null beside calls, which few templates ask about
        yield from forms_of([{"content": "", **message} for message in messages], tools, takes)


def _with_arguments(message: JsonObject, change: Callable[[Any], Any]) -> JsonObject:
    """The message with the arguments of its calls as `change` makes them."""
    changed = []
    for call in _calls_of(message):
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict) and "arguments" in function:
            function = {**function, "arguments": change(function["arguments"])}
            call = {**call, "function": function} if "function" in call else function
        changed.append(call)
    return {**message, "tool_calls": changed} if isinstance(message.get("tool_calls"), list) else message


def _as_object(arguments: Any) -> Any:
    """Decode JSON, which may be quoted more than once; nothing but spaces is no arguments."""
    value = arguments
    while isinstance(value, str):
        if not value.strip():
            return {}
        try:
            value = msgspec.json.decode(value)
        except (ValueError, RecursionError):
            return arguments
    return value


def _as_json(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, (dict, list)) else arguments


def calls_put_out(render: RenderText, messages: list[JsonObject], tools: Tools) -> frozenset[tuple[int, int]] | None:
    """Return message and place of the calls that are put out, each seen by a name of its own; None if unknown."""
    words: dict[str, tuple[int, int]] = {}
    others = []
    for index, message in enumerate(messages):
        named = []
        for place, call in enumerate(_calls_of(message)):
            word = f"qz{index}in{place}zq"
            if isinstance(call, dict):
                function = call.get("function")
                name = {"function": {**function, "name": word}} if isinstance(function, dict) else {"name": word}
                call = {**call, **name}
            words[word] = index, place
            named.append(call)
        others.append({**message, "tool_calls": named} if named else message)
    if not words:
        return None
    try:
        text = render(others, tools)
    except RecordError:
        return None
    return frozenset(place for word, place in words.items() if word in text)


def refuse_missing_calls(conversation: Conversation, counted: str, put_out: Collection[tuple[int, int]] | None) -> None:
    """Raise RecordError where a call of a tool is left out of what counts: silence would be trained.

    `counted` is the text that counts. `put_out`, where known, has message and place of the calls that are put out: what
    else is said may name the tool.
    """
    for index, message in enumerate(conversation.messages):
        for place, call in enumerate(_calls_of(message.fields) if message.counts_in_loss else ()):
            function = call.get("function", call) if isinstance(call, dict) else None
            name = function.get("name") if isinstance(function, dict) else None
            is_missing = put_out is not None and (index, place) not in put_out
            if isinstance(name, str) and (is_missing or name not in counted):
                raise RecordError(
                    f"the chat template leaves out the call of `{name}` that `messages[{index}]` makes",
                    reason="template",
                    hint="give a template for calls of tools with --chat-template, or leave this record out",
                )


def _calls_of(message: JsonObject) -> list[Any]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def find_left_out(
    messages: list[JsonObject], text: str, proof: FragmentCheck, fragments: Callable[[], dict[int, str]]
) -> Iterator[LeftOut]:
    """Yield what the rendering `text` leaves out; `fragments` gives what was put out for each message."""
    if not proof.left_out and _stands_in_order(messages, text):
        return
    own = fragments()
    for index, message in enumerate(messages):
        said = [(False, one) for one in _texts(message.get("content"))]
        said += [(True, one) for one in _texts(_thought(message))]
        for thinks, one in said:
            is_nowhere = (index, thinks) in proof.left_out
            place = own.get(index, "") if is_nowhere or (index, thinks) in proof.own else text
            if is_nowhere and len(one) < _LEAST_TEXT:
                place = ""
            yield from _missing(index, one, place, thinks=thinks)


def _stands_in_order(messages: list[JsonObject], text: str) -> bool:
    """Return whether all that was thought and said stands in `text` as it is, one message behind the other."""
    position = 0
    find = text.find
    for message in messages:
        content = message.get("content")
        if len(message) == 2 and type(content) is str:  # as most are
            said = [content.strip()]
        else:
            said = [*_texts(_thought(message)), *_texts(content)]
        for one in said:
            position = find(one, position)
            if position < 0:
                return False
            position += len(one)
    return True


def _thought(message: JsonObject) -> object:
    return next((message[key] for key in TEXTS[1:] if message.get(key)), None)


def _texts(content: object) -> list[str]:
    """The texts of a content that is one or a list of parts, without those that are blank."""
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return [stripped for text in texts if isinstance(text, str) and (stripped := text.strip())]


def _missing(index: int, said: str, place: str, *, thinks: bool) -> Iterator[LeftOut]:
    """Yield what is missing of one text in `place`, where it would stand."""
    if _stands(said, place):
        return
    thoughts = [] if thinks else [thought for thought in _THOUGHT.findall(said) if thought.strip()]
    if any(not _stands(thought, place) for thought in thoughts):
        yield LeftOut(index, thinks=True)
    rest = [said] if thinks else [part for part in _MARK.split(_THOUGHT.sub("<think>", said)) if part.strip()]
    if any(not _stands(part, place) for part in rest):
        words = {word for part in rest for word in re.findall(r"\w+", part.lower())}
        found = words.intersection(re.findall(r"\w+", place.lower()))
        yield LeftOut(index, thinks, is_all=2 * len(found) < max(len(words), 1))


def _stands(said: str, place: str) -> bool:
    """Return whether a text stands in `place`, as it is, as JSON or as HTML, whatever its case and spaces."""
    said = said.strip()
    if said in place:
        return True
    escaped = html.escape(said).replace("&quot;", "&#34;").replace("&#x27;", "&#39;")
    forms = (said, json.dumps(said, ensure_ascii=False)[1:-1], json.dumps(said)[1:-1], escaped)
    squeezed = _squeezed(place)
    return any(_squeezed(form) in squeezed for form in forms)


def _squeezed(text: str) -> str:
    return "".join(text.split()).casefold()
