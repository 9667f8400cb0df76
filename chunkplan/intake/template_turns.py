"""Which characters of a rendered conversation the assistant wrote: header, content and end of every message.

A message's fragments (see `template_fragments`) are all that the template put out for it. Of those of the assistant the
*header* is not what the model writes: it is the generation prompt, or as much of it as the template puts before a
message that others follow. What is left runs to the token that ends the turn; a line end behind it is nobody's.

That fragments are told apart rightly is proved for every shape of conversation (roles, keys, numbers of calls) before
one of that shape is read: the same shape is rendered with a word of its own as the text of each message, and the words
have to be in the fragments of their messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from typing import Any

from chunkplan.intake.records import JsonObject
from chunkplan.intake.rejection import RecordError
from chunkplan.intake.template_fragments import NOBODY, Rendered
from chunkplan.intake.template_spans import Span

#: (messages, with the generation prompt) -> their rendering. Raises RecordError where the template raises.
Render = Callable[[list[JsonObject], bool], Rendered]

#: Keys of a message that templates may read text of the message from.
_TEXTS = ("content", "reasoning_content", "thinking", "reasoning")

#: What a generation prompt may have beyond the header of a message that others follow: the beginning of a thought.
_THOUGHT = re.compile("think|thought|reason", re.IGNORECASE)

#: So many shapes are remembered; data has some hundreds.
_MOST_SHAPES = 1 << 12


class TurnFinder:
    """Finds the spans of messages in renderings of one template.

    Args:
        render: renders messages, without tools where `shape` is asked for.
        ends: the tokens that end a turn or a text, among them those that begin a turn of somebody else.
    """

    def __init__(self, render: Render, ends: Collection[str]) -> None:
        self._render = render
        self._ends = tuple(sorted(filter(None, ends), key=len, reverse=True))
        self._headers: list[str] | None = None
        self._beginnings: list[str] = []  # what messages of the assistant begin with, whatever they say
        self._is_proved: dict[Any, bool] = {}

    def is_proved(self, messages: list[JsonObject]) -> bool:
        """Whether fragments of conversations of the shape of `messages` are those of their messages."""
        shape = tuple(map(_shape, messages))
        found = self._is_proved.get(shape)
        if found is None:
            if len(self._is_proved) >= _MOST_SHAPES:
                self._is_proved.clear()
            found = self._is_proved[shape] = self._prove(messages)
        return found

    def spans(self, messages: list[JsonObject], rendered: Rendered, counting: Sequence[int]) -> list[Span]:
        """The characters of messages that count, by their indices: of the assistant's what it wrote, of others' all.

        Raises:
            RecordError: where the header of a message ends is not known.
        """
        fragments: dict[int, list[Span]] = {index: [] for index in counting}
        for message, start, stop in rendered.fragments:
            if message in fragments:
                fragments[message].append((start, stop))
        return [span for index in counting for span in self._spans(messages, rendered, index, fragments[index])]

    def _spans(self, messages: list[JsonObject], rendered: Rendered, index: int, spans: list[Span]) -> list[Span]:
        """Of one message, whose fragments `spans` are."""
        if not spans or messages[index]["role"] != "assistant":
            return spans
        for place, (start, stop) in enumerate(spans):
            text = rendered.text[start:stop]
            header = self._header(messages, text, index) if not place else self._known_header(text)
            spans[place] = start + header, stop
        start, stop = spans[-1]
        spans[-1] = start, self._stop(rendered.text, start, stop)
        if index + 1 == len(messages) and stop == rendered.stop_of_messages:
            spans += self._end_of_text(rendered.text, stop)
        return spans

    def _stop(self, text: str, start: int, stop: int) -> int:
        """Where what the model writes of [start, stop) ends: behind the token that ends the turn.

        Where the message has none of its own, the token that begins the turn of somebody else ends this one.
        """
        written = text[start:stop].rstrip()
        if written.endswith(self._ends):
            return start + len(written)
        return stop + len(self._end_at(text, stop))

    def _end_of_text(self, text: str, stop: int) -> list[Span]:
        """The token that a template puts out behind the last message, from `stop` on, where it does."""
        stop += len(text[stop:]) - len(text[stop:].lstrip())
        end = self._end_at(text, stop)
        return [(stop, stop + len(end))] if end else []

    def _end_at(self, text: str, place: int) -> str:
        return next((end for end in self._ends if text.startswith(end, place)), "")

    def _header(self, messages: list[JsonObject], text: str, index: int) -> int:
        """How many characters of `text`, what was put out for a message of the assistant first, are its header."""
        known = self._known_header(text)
        if known:
            return known
        prompt = self._prompt(messages[: max(index, 1)])
        if prompt is not None and text.startswith(prompt):
            return len(prompt)
        headers = [header for header in (prompt, *(self._headers or ())) if header]
        if not index:
            for header in headers:
                if header in text:  # behind what the template begins every conversation with
                    return text.index(header) + len(header)
        beginnings = [beginning for beginning in (*headers, *self._beginnings) if beginning]
        if headers and not any(beginning in text or _common(beginning, text) for beginning in beginnings):
            return 0  # the template puts out no header for this message, nor anything like one
        raise RecordError(
            f"the chat template begins `messages[{index}]` neither with its generation prompt nor as it begins other "
            "messages of the assistant, so which tokens count in the loss is not known",
            reason="template",
            hint="use a template with {% generation %} blocks",
        )

    def _known_header(self, text: str) -> int:
        """How many characters of `text` are a header of the template; 0 if it begins with none."""
        if self._headers is None:
            self._headers = self._find_headers()
        return next((len(header) for header in self._headers if text.startswith(header)), 0)

    def _prompt(self, messages: list[JsonObject]) -> str | None:
        """What follows `messages` where the model is to answer them; None where they are rendered otherwise then."""
        without, with_prompt = self._render(messages, False), self._render(messages, True)
        stop = without.stop_of_messages
        return with_prompt.text[stop:] if with_prompt.text[:stop] == without.text[:stop] else None

    def _find_headers(self) -> list[str]:
        """The headers of the template, the longest first: found from two conversations that differ in the answers."""
        ask = {"role": "user", "content": "ask"}
        headers = set()
        try:
            prompt = self._prompt([ask]) or ""
            blocks: list[list[str]] = [[], []]
            for first, last in (("one", "two"), ("this", "any")):
                answers = [{"role": "assistant", "content": text} for text in (first, last)]
                rendered = self._render([ask, answers[0], ask | {}, answers[1]], False)
                for place, index in enumerate((1, 3)):
                    fragments = rendered.of_message(index)
                    blocks[place].append(rendered.text[fragments[0].start : fragments[0].stop] if fragments else "")
            for block in blocks:
                common = _common(*block)
                self._beginnings.append(common)
                header = _common(prompt, common) if prompt.strip() else common
                rest = prompt.removeprefix(header)
                if not rest.strip() or _THOUGHT.search(rest):
                    headers.add(header)
            headers.add(prompt)
        except RecordError:
            return []
        return sorted((header for header in headers if header.strip()), key=len, reverse=True)

    def _prove(self, messages: list[JsonObject]) -> bool:
        words = [_word(index) for index in range(len(messages))]
        worded = [_with_text(message, word) for message, word in zip(messages, words, strict=True)]
        try:
            rendered = self._render(worded, False)
        except RecordError:
            return False
        texts: dict[int, str] = dict.fromkeys(range(NOBODY, len(messages)), "")
        for message, start, stop in rendered.fragments:
            texts[message] += rendered.text[start:stop]
        assistants = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        return all(
            (words[other] in texts[index]) <= (other == index) for index in assistants for other in range(len(messages))
        ) and all(words[index] not in texts[other] for index in assistants for other in texts if other != index)


def _shape(message: JsonObject) -> Any:
    """What of a message templates look at to decide how conversations are rendered, besides texts."""
    content = message.get("content")
    if len(message) == 2 and type(content) is str:  # as most are
        return message["role"] if content else (message["role"],)
    calls = message.get("tool_calls")
    kind = (type(content).__name__, len(content) if isinstance(content, list) else bool(content))
    keys = tuple(sorted(key for key, value in message.items() if value))
    return message["role"], kind, keys, len(calls) if isinstance(calls, list) else 0


def _with_text(message: JsonObject, word: str) -> JsonObject:
    """The message with `word` in place of each of its texts."""
    changed = dict(message)
    for key in _TEXTS:
        value = message.get(key)
        if isinstance(value, str) and value:
            changed[key] = word
        elif isinstance(value, list):
            is_text = [isinstance(part, dict) and "text" in part for part in value]
            changed[key] = [{**part, "text": word} if text else part for part, text in zip(value, is_text, strict=True)]
    return changed


def _word(index: int) -> str:
    """A word that no template has, of letters alone."""
    letters = ""
    while True:
        index, letter = divmod(index, 16)
        letters += "abcdefghijklmnop"[letter]
        if not index:
            return f"qz{letters}zq"


def _common(first: str, second: str) -> str:
    """What both begin with."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return "".join(letter for letter, _ in pairs)
