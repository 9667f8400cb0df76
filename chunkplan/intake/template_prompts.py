"""The generation prompts of a template: what it puts out behind messages where the model is to answer them.

A prompt is found from two renderings of the messages before it. In a long conversation that would be renderings without
end, so messages of the assistant are grouped by all that a template may decide the prompt before them from: the
messages from the last one on that is no tool's, by their shapes, and which of the words that the template looks for was
said last. The first and the last message of a group are asked for their prompts. Where these are the same, and a
message agrees with it as far as those two do, it is the prompt of that message too; else the message is asked itself.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import takewhile
from typing import Any

from chunkplan.intake.records import JsonObject
from chunkplan.intake.template_fragments import Rendered
from chunkplan.intake.template_proofs import Render, Tools
from chunkplan.intake.template_shapes import TEXTS, shape_of

#: The prompt that two messages agree on, or that there is none, and how many characters of it each of them begins with.
_Agreed = tuple[str | None, int]


class Prompts:
    """The prompts of one template.

    Args:
        render: renders messages.
        end_of_text: the token that ends a text.
        asked: the words that the template looks for in texts.
    """

    def __init__(self, render: Render, end_of_text: str, asked: Collection[str]) -> None:
        self._render = render
        self._end_of_text = end_of_text
        self._asked = tuple(asked)
        self._messages: list[JsonObject] = []
        self._groups: dict[int, list[int]] | None = None  # message of the assistant -> all of its group
        self._agreed: dict[int, _Agreed | None] = {}  # by the first of a group
        self._texts: dict[int, str] = {}

    def begin(self, messages: list[JsonObject], rendered: Rendered) -> None:
        """`messages`, whose rendering is `rendered`, are asked about next, one after another."""
        self._messages, self._rendered, self._groups = messages, rendered, None

    def after(self, messages: list[JsonObject], tools: Tools) -> str | None:
        """What follows `messages` where the model is to answer them; None where they are rendered otherwise then."""
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
            if self._groups is None:
                self._group()
            group = (self._groups or {}).get(index, ())
            if len(group) > 2:
                if group[0] not in self._agreed:
                    self._agreed[group[0]] = self._agree(group, tools)
                agreed = self._agreed[group[0]]
                if agreed is not None and num_common(agreed[0] or "", text) == agreed[1]:
                    return agreed[0]
        return self.after(messages[: max(index, 1)], tools)

    def _agree(self, group: list[int], tools: Tools) -> _Agreed | None:
        """What the first and the last of a group agree on, or None."""
        first, last = group[0], group[-1]
        prompt = self.after(self._messages[:first], tools)
        if prompt != self.after(self._messages[:last], tools):
            return None
        length, other = (num_common(prompt or "", self._texts[index]) for index in (first, last))
        return (prompt, length) if length == other else None

    def _group(self) -> None:
        """Groups the messages of the assistant behind the first message."""
        self._texts, self._agreed = {}, {}
        for owner, start, stop in self._rendered.fragments:
            self._texts.setdefault(owner, self._rendered.text[start:stop])
        by_key: dict[Any, list[int]] = {}
        before: Any = None
        last_not_of_tools: Any = None
        said: tuple[str, ...] = ()
        for index, message in enumerate(self._messages):
            shape = shape_of(message)
            if index and message["role"] == "assistant" and index in self._texts:
                by_key.setdefault((last_not_of_tools, before, shape, said), []).append(index)
            before = shape
            if message["role"] != "tool":
                last_not_of_tools = shape
            said = self._said(message) or said
        self._groups = {index: group for group in by_key.values() for index in group}

    def _said(self, message: JsonObject) -> tuple[str, ...]:
        """Those of the words that the template looks for that stand in a message."""
        texts = [str(message[key]) for key in TEXTS if message.get(key)]
        return tuple(word for word in self._asked if any(word in text for text in texts))


def num_common(first: str, second: str) -> int:
    """How many characters both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
