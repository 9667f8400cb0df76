"""Which characters of a rendered conversation the assistant wrote: header, content and end of every message.

A message's fragments (see `template_fragments`) are all that the template put out for it. Of those of the assistant the
*header* is not what the model writes: it is the generation prompt, or as much of it as the template puts before a
message that others follow. What is left runs to the token that ends the turn; a line end behind it is nobody's.

That fragments are told apart rightly is proved for every shape of conversation (roles, keys, numbers of calls, tools or
none) before one of that shape is read (see `template_proofs`). In every rendering, no text of the messages beside it
may stand in what counts of a message, unless the template puts the same there whatever these say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from chunkplan.intake.records import JsonObject
from chunkplan.intake.rejection import RecordError
from chunkplan.intake.template_fragments import Rendered
from chunkplan.intake.template_left_out import refuse_left_out
from chunkplan.intake.template_prompts import Prompts, num_common
from chunkplan.intake.template_proofs import Proofs, Render, Tools
from chunkplan.intake.template_shapes import TEXTS, with_text, word_of
from chunkplan.intake.template_spans import Span

#: What a message says: its texts and its calls, and who says it.
_SAID = {"role", "tool_calls", *TEXTS}

#: What a generation prompt may have beyond the header of a message that others follow: the beginning of a thought.
_THOUGHT = re.compile("think|thought|reason", re.IGNORECASE)

#: Texts of neighbours that are shorter may stand anywhere by chance.
_LEAST_TEXT = 6


class _Frame(NamedTuple):
    """What a template puts around messages of the assistant.

    `headers`, the longest first, are what the model does not write; `beginnings` and `ends` are what messages begin and
    end with, whatever they say.
    """

    headers: list[str]
    beginnings: list[str]
    ends: list[str]


class TurnFinder:
    """Finds the spans of messages in renderings of one template.

    Args:
        render: renders messages.
        ends: the tokens that end a turn or a text, among them those that begin a turn of somebody else.
        prompts: the template's generation prompts.
        has_fixed_prompt: whether the generation prompt is the same behind every conversation.
    """

    def __init__(self, render: Render, ends: Collection[str], prompts: Prompts, *, has_fixed_prompt: bool) -> None:
        self._render = render
        self._ends = tuple(sorted(filter(None, ends), key=len, reverse=True))
        self._has_fixed_prompt = has_fixed_prompt
        self._frames: dict[bool, _Frame] = {}  # by whether there are tools
        self._prompts = prompts
        self.proofs = Proofs(render)

    def is_proved(self, messages: list[JsonObject], tools: Tools) -> bool:
        """Whether fragments of conversations of the shape of `messages` are those of their messages."""
        return self.proofs.of(messages, tools).holds

    def spans(
        self, messages: list[JsonObject], tools: Tools, rendered: Rendered, counting: Sequence[int]
    ) -> list[Span]:
        """The characters of messages that count, by their indices: of the assistant's what it wrote, of others' all.

        Raises:
            RecordError: where the header of a message ends is not known, or the text of one is left out.
        """
        left_out = self.proofs.of(messages, tools).left_out
        for index in counting if left_out else ():
            said = messages[index]
            if said["role"] == "assistant" and not said.get("tool_calls") and (index, False) in left_out:
                raise refuse_left_out(index, "assistant")
        fragments: dict[int, list[Span]] = {index: [] for index in counting}
        for message, start, stop in rendered.fragments:
            if message in fragments:
                fragments[message].append((start, stop))
        self._prompts.begin(messages, rendered)
        found: list[Span] = []
        for index in counting:
            spans = fragments[index]
            if spans and messages[index]["role"] == "assistant":
                spans = self._written(messages, tools, rendered, index, spans)
                self._refuse_text_of_others(messages, tools, rendered, index, spans)
            found += spans
        return found

    def stop(self, text: str, start: int, stop: int, tools: Tools) -> int:
        """Where what the model writes of [start, stop) ends: behind the token that ends the turn, not a line end."""
        written = text[start:stop]
        for end in self._frame(tools).ends:
            if written.endswith(end):
                return stop - len(end) + len(end.rstrip())
        stripped = written.rstrip()
        return start + len(stripped) if stripped.endswith(self._ends) else stop

    def ends_turn(self, written: str, tools: Tools) -> bool:
        """Whether what the model writes of a message ends with what ends a turn, whatever the message says."""
        written = written.rstrip()
        if written.endswith(self._ends):
            return True
        return any(written.endswith(end.rstrip()) for end in self._frame(tools).ends)

    def _written(
        self, messages: list[JsonObject], tools: Tools, rendered: Rendered, index: int, fragments: list[Span]
    ) -> list[Span]:
        """What the model writes of a message whose fragments these are."""
        spans = []
        for place, (start, stop) in enumerate(fragments):
            text = rendered.text[start:stop]
            header = self._known_header(text, tools) if place else self._header(messages, tools, text, index)
            spans.append((start + header, stop))
        start, stop = spans[-1]
        end = self.stop(rendered.text, start, stop, tools)
        is_last = index + 1 == len(messages)
        if end == stop and not is_last and messages[index + 1]["role"] != "assistant" and not self._frame(tools).ends:
            end += len(self._end_at(rendered.text, stop))  # the token that begins the turn of somebody else
        spans[-1] = start, end
        if is_last and stop == rendered.stop_of_messages:
            spans += self._end_of_text(rendered.text, stop, tools)
        return spans

    def _refuse_text_of_others(
        self, messages: list[JsonObject], tools: Tools, rendered: Rendered, index: int, spans: list[Span]
    ) -> None:
        """Raises RecordError where what a message beside message `index` says stands in what it wrote, its `spans`.

        Not where the message says it, too, nor where it stands there as often if those beside it say something else.
        """
        written = _joined(rendered, spans).lower()
        own = otherwise = None
        for other in range(max(index - 1, 0), min(index + 3, len(messages))):
            text = messages[other].get("content")
            if other == index or not isinstance(text, str):
                continue
            text = text.strip().lower()
            if len(text) < _LEAST_TEXT or text not in written:
                continue
            if own is None:
                own = json.dumps(messages[index], ensure_ascii=False, default=str).lower()
            if json.dumps(text, ensure_ascii=False)[1:-1] in own or text in own:
                continue
            if otherwise is None:
                otherwise = self._written_beside_words(messages, tools, index).lower()
            if written.count(text) > otherwise.count(text):
                raise RecordError(
                    f"the chat template puts what `messages[{other}]` says into `messages[{index}]`",
                    reason="template",
                    hint="use a template with {% generation %} blocks",
                )

    def _written_beside_words(self, messages: list[JsonObject], tools: Tools, index: int) -> str:
        """What the model writes of message `index` if those beside it say other words; "" where that is not known."""
        beside = range(max(index - 1, 0), min(index + 3, len(messages)))
        changed = [
            with_text(message, word_of(other), word_of(other)) if other in beside and other != index else message
            for other, message in enumerate(messages)
        ]
        try:
            rendered = self._render(changed, tools, False)
            fragments = [(start, stop) for _, start, stop in rendered.of_message(index)]
            return _joined(rendered, self._written(changed, tools, rendered, index, fragments)) if fragments else ""
        except RecordError:
            return ""

    def _end_of_text(self, text: str, stop: int, tools: Tools) -> list[Span]:
        """The one token that a template puts out behind the last message, from `stop` on, where that is all."""
        end = text[stop:].strip()
        if end not in self._ends or any(header.strip() == end for header in self._frame(tools).headers):
            return []
        stop = text.index(end, stop)
        return [(stop, stop + len(end))]

    def _end_at(self, text: str, place: int) -> str:
        return next((end for end in self._ends if text.startswith(end, place)), "")

    def _header(self, messages: list[JsonObject], tools: Tools, text: str, index: int) -> int:
        """How many characters of `text`, what was put out for a message of the assistant first, are its header."""
        prompt = None
        if not self._has_fixed_prompt:
            prompt = self._prompts.before(messages, tools, index, text)
            if prompt and prompt.strip() and text.startswith(prompt):
                return len(prompt)
        known = self._known_header(text, tools)
        if known:
            return known
        if self._has_fixed_prompt:
            prompt = self._prompts.before(messages, tools, index, text)
        if prompt is not None and text.startswith(prompt):
            return len(prompt)
        own = self._header_of_fields(messages, tools, text, index) or _header_before(messages[index], text, prompt)
        if own:
            return own
        frame = self._frame(tools)
        headers = [header for header in (prompt, *frame.headers) if header]
        if not index:
            for header in headers:
                if header in text:  # behind what the template begins every conversation with
                    return text.index(header) + len(header)
        beginnings = [beginning for beginning in (*headers, *frame.beginnings) if beginning]
        if headers and not any(beginning in text or _common(beginning, text) for beginning in beginnings):
            return 0  # the template puts out no header for this message, nor anything like one
        raise RecordError(
            f"the chat template begins `messages[{index}]` neither with its generation prompt nor as it begins other "
            "messages of the assistant, so which tokens count in the loss is not known",
            reason="template",
            hint="use a template with {% generation %} blocks",
        )

    def _header_of_fields(self, messages: list[JsonObject], tools: Tools, text: str, index: int) -> int:
        """How many characters of `text` are a header that is due to what a message has beside its texts and calls.

        Such as its `name`. It is one if the message begins with a known header without these, and goes on as it does
        with them. 0 if that is not so.
        """
        plain = {key: value for key, value in messages[index].items() if key in _SAID}
        if len(plain) == len(messages[index]):
            return 0
        try:
            rendered = self._render([*messages[:index], plain, *messages[index + 1 :]], tools, False)
        except RecordError:
            return 0
        without = "".join(rendered.text[start:stop] for _, start, stop in rendered.of_message(index))
        rest = without[self._known_header(without, tools) :]
        is_one = len(rest) < len(without) and rest.strip() and text.endswith(rest)
        return len(text) - len(rest) if is_one else 0

    def _known_header(self, text: str, tools: Tools) -> int:
        """How many characters of `text` are a header of the template; 0 if it begins with none."""
        return next((len(header) for header in self._frame(tools).headers if text.startswith(header)), 0)

    def _frame(self, tools: Tools) -> _Frame:
        found = self._frames.get(bool(tools))
        if found is None:
            found = self._frames[bool(tools)] = self._find_frame(tools)
        return found

    def _find_frame(self, tools: Tools) -> _Frame:
        """The frame of messages, found from two conversations that differ in the answers."""
        ask: JsonObject = {"role": "user", "content": "ask"}
        blocks: list[list[str]] = [[], []]
        try:
            prompt = self._prompts.after([ask], tools) or ""
            for first, last in (("one", "two"), ("this", "any")):
                answers: list[JsonObject] = [{"role": "assistant", "content": text} for text in (first, last)]
                rendered = self._render([ask, answers[0], ask | {}, answers[1]], tools, False)
                for place, index in enumerate((1, 3)):
                    blocks[place].append("".join(rendered.text[f.start : f.stop] for f in rendered.of_message(index)))
        except RecordError:
            return _Frame([], [], [])
        headers, beginnings = {prompt}, []
        for block in blocks:
            common = _common(*block)
            beginnings.append(common)
            header = _common(prompt, common) if prompt.strip() else common
            rest = prompt.removeprefix(header)
            if not rest.strip() or _THOUGHT.search(rest):
                headers.add(header)
        ends = {_common(*(text[::-1] for text in block))[::-1] for block in blocks}

        def longest_first(texts: set[str]) -> list[str]:
            return sorted((text for text in texts if text.strip()), key=len, reverse=True)

        return _Frame(longest_first(headers), beginnings, longest_first(ends))


def _header_before(message: JsonObject, text: str, prompt: str | None) -> int:
    """How many characters of `text` are the generation prompt but for the thought that it begins.

    0 if that is not so. A message that is no thought, but has the end of one in its text, may be put out like that:
    the header, and then what it says as it is.
    """
    content = message.get("content")
    said = content.strip() if isinstance(content, str) else ""
    if not prompt or not said or said in prompt or said not in text:
        return 0
    header = text.partition(said)[0]
    is_one = header.strip() and prompt.startswith(header) and _THOUGHT.search(prompt[len(header) :])
    return len(header) if is_one else 0


def _joined(rendered: Rendered, spans: list[Span]) -> str:
    return "".join(rendered.text[start:stop] for start, stop in spans)


def _common(first: str, second: str) -> str:
    """What both begin with."""
    return first[: num_common(first, second)]
