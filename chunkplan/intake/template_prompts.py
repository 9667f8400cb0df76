"""The generation prompts of a template, and what of messages decides how templates render them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import takewhile
from typing import Any

from chunkplan.intake.records import JsonObject
from chunkplan.intake.template_render import Rendered

#: What tools a conversation has.
Tools = list[JsonObject] | None

#: (messages, tools, with the generation prompt) -> their rendering. Raises RecordError where the template raises.
Render = Callable[[list[JsonObject], Tools, bool], Rendered]

#: Keys of a message that templates may read text of the message from: what it says, and what it thinks.
TEXTS = ("content", "reasoning_content", "thinking", "reasoning")

#: So many shapes are remembered; data has some hundreds.
MOST_SHAPES = 1 << 12


def shape_of(messages: list[JsonObject], tools: Tools) -> Any:
    """Return all that templates decide by how to render a conversation, besides texts."""
    return bool(tools), *map(_shape, messages)


def _shape(message: JsonObject) -> Any:
    content = message.get("content")
    if len(message) == 2 and type(content) is str:  # as most are
        return message["role"] if content else (message["role"],)
    calls = message.get("tool_calls")
    kind = (type(content).__name__, len(content) if isinstance(content, list) else bool(content))
    keys = tuple(sorted((key, bool(value)) for key, value in message.items()))  # some ask for keys, some for values
    return message["role"], kind, keys, len(calls) if isinstance(calls, list) else 0


class Prompts:
    """The generation prompts of a template: what it puts out behind messages where the model is to answer them.

    A prompt takes two renderings of the messages before it. In long conversations messages of the assistant are grouped
    by all that a template may decide the prompt from: the shapes of messages from the last one on that is no tool's,
    and which of the words `asked`, that the template looks for, was said last. Where the first and the last of a group
    have the same prompt, and a message agrees with it as far as they do, it is that message's too. `end_of_text` is a
    token.
    """

    def __init__(self, render: Render, end_of_text: str, asked: Collection[str]) -> None:
        self._render = render
        self._end_of_text = end_of_text
        self._asked = tuple(asked)
        self._messages: list[JsonObject] = []
        self._groups: dict[int, list[int]] | None = None  # message of the assistant -> all of its group
        self._agreed: dict[int, tuple[str | None, int] | None] = {}  # first of a group -> prompt, characters in common
        self._texts: dict[int, str] = {}

    def begin(self, messages: list[JsonObject], rendered: Rendered) -> None:
        """`messages`, whose rendering is `rendered`, are asked about next, one after another."""
        self._messages, self._rendered, self._groups = messages, rendered, None

    def after(self, messages: list[JsonObject], tools: Tools) -> str | None:
        """Return what follows `messages` where the model is to answer; None where they are rendered otherwise then."""
        without, with_prompt = self._render(messages, tools, False), self._render(messages, tools, True)
        stop = without.stop_of_messages
        if with_prompt.text[:stop] != without.text[:stop]:
            return None
        if not stop:  # all of them are put out outside of the loop, as a first question is that has the tools
            prompt = with_prompt.text.removeprefix(without.text)
            return prompt if 0 < len(prompt) < len(with_prompt.text) else None
        tail, prompt = without.text[stop:], with_prompt.text[stop:]
        if tail != prompt:
            return prompt.removesuffix(tail)
        return "" if tail.strip() == self._end_of_text else prompt  # which some put out whether asked for or not

    def before(self, messages: list[JsonObject], tools: Tools, index: int, text: str) -> str | None:
        """As `after` of the messages before message `index`, of which `text` is put out first; of its own if first."""
        if messages is self._messages and index:
            groups = self._group() if self._groups is None else self._groups
            group = groups.get(index, [])
            if len(group) > 2:
                if group[0] not in self._agreed:
                    self._agreed[group[0]] = self._agree(group, tools)
                agreed = self._agreed[group[0]]
                if agreed is not None and len(common_start(agreed[0] or "", text)) == agreed[1]:
                    return agreed[0]
        return self.after(messages[: max(index, 1)], tools)

    def _agree(self, group: list[int], tools: Tools) -> tuple[str | None, int] | None:
        """The prompt of the first and last of a group, with how much of it each begins with; None if they differ."""
        first, last = group[0], group[-1]
        prompt = self.after(self._messages[:first], tools)
        if prompt != self.after(self._messages[:last], tools):
            return None
        length, other = (len(common_start(prompt or "", self._texts[index])) for index in (first, last))
        return (prompt, length) if length == other else None

    def _group(self) -> dict[int, list[int]]:
        """Groups the messages of the assistant behind the first message."""
        self._texts, self._agreed = {}, {}
        for owner, start, stop in self._rendered.fragments:
            self._texts.setdefault(owner, self._rendered.text[start:stop])
        by_key: dict[Any, list[int]] = {}
        before: Any = None
        last_not_of_tools: Any = None
        said: tuple[str, ...] = ()
        for index, message in enumerate(self._messages):
            shape = _shape(message)
            if index and message["role"] == "assistant" and index in self._texts:
                by_key.setdefault((last_not_of_tools, before, shape, said), []).append(index)
            before = shape
            if message["role"] != "tool":
                last_not_of_tools = shape
            texts = [str(message[key]) for key in TEXTS if message.get(key)]
            said = tuple(word for word in self._asked if any(word in text for text in texts)) or said
        self._groups = {index: group for group in by_key.values() for index in group}
        return self._groups


def common_start(first: str, second: str) -> str:
    """Return the beginning that both texts share."""
    return "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
