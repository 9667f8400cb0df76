"""Finds the characters of each message in a rendered conversation, and those that the assistant wrote.

A message's fragments (see `template_render`) are all output of the template for it. The *header* of an assistant's
fragment is not written by the model: it is the generation prompt, or the part of it that the template puts before a
message that others follow. The rest runs to the token that ends the turn; a line end after it belongs to no message.

The split into fragments is proved for every shape of conversation (roles, keys, numbers of calls, tools or none) before
one of that shape is read: a conversation of that shape is rendered with a unique word as each text. The split holds if
every word is in the fragment of its message; a text whose word is nowhere is left out by the template. In every
rendering, the counted part of a message may contain no text of other messages, unless the template puts the same there
whatever their texts are.

If fragments cannot be separated, the position of a message is known only if the rendering of the messages up to it is
a prefix of the whole rendering.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from chunkplan.intake.records import JsonObject, RecordError
from chunkplan.intake.template_render import Rendered, Span

#: Tools of a conversation.
Tools = list[JsonObject] | None

#: (messages, tools, with the generation prompt) -> their rendering. Raises RecordError where the template raises.
Render = Callable[[list[JsonObject], Tools, bool], Rendered]

#: Keys of a message that templates may read text of the message from: what it says, and what it thinks.
TEXTS = ("content", "reasoning_content", "thinking", "reasoning")

#: So many shapes are remembered; data has some hundreds.
MOST_SHAPES = 1 << 12

#: The fields of a message: its texts and its calls, and its role.
_SAID = {"role", "tool_calls", *TEXTS}

#: Every word of `_word`, also where one overlaps another.
_WORDS = re.compile("(?=(qz[a-p]+zq))")

#: Beginnings of reasoning that a generation prompt may have beyond the header of a message that others follow.
_THOUGHT = re.compile("think|thought|reason", re.IGNORECASE)

#: Texts of neighbours that are shorter may stand anywhere by chance.
_LEAST_TEXT = 6

_BLOCKS_HINT = "use a template with {% generation %} blocks"
_BEGINNINGS_HINT = (
    f"{_BLOCKS_HINT}, with one loop over the messages, or one that renders a message the same whatever follows it"
)


def _with_text(message: JsonObject, said: str, thought: str) -> JsonObject:
    """The message with these words in place of what it says and of what it thinks."""
    changed = dict(message)
    for key in TEXTS:
        value, word = message.get(key), said if key == "content" else thought
        if isinstance(value, str) and value:
            changed[key] = word
        elif isinstance(value, list):
            changed[key] = [
                {**part, "text": word} if isinstance(part, dict) and "text" in part else part for part in value
            ]
    return changed


def _word(index: int) -> str:
    """A word that no template has, of letters alone."""
    return f"qz{f'{index:x}'.translate(str.maketrans('0123456789abcdef', 'abcdefghijklmnop'))}zq"


class FragmentCheck(NamedTuple):
    """Result of checking one shape: whether fragments separate, and the texts in their own fragment or nowhere.

    A text is given by its message, and whether it is the reasoning.
    """

    holds: bool
    own: frozenset[tuple[int, bool]]
    left_out: frozenset[tuple[int, bool]]


class _Frame(NamedTuple):
    """Template text around answers: `headers`, longest first, and how all answers begin and end."""

    headers: list[str]
    beginnings: list[str]
    ends: list[str]


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
        """Text that `after` gives for the messages before message `index`, whose own output begins with `text`."""
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


class TurnFinder:
    """Finds the spans of messages in renderings of one template.

    `ends` are the tokens that end a turn or a text, or begin a turn of somebody else; `has_fixed_prompt` says that the
    generation prompt is the same behind every conversation.
    """

    def __init__(self, render: Render, ends: Collection[str], prompts: Prompts, *, has_fixed_prompt: bool) -> None:
        self._render = render
        self._ends = tuple(sorted(filter(None, ends), key=len, reverse=True))
        self._has_fixed_prompt = has_fixed_prompt
        self._prompts = prompts
        self._frames: dict[bool, _Frame] = {}  # by whether there are tools
        self._proofs: dict[Any, FragmentCheck] = {}  # by shape
        self._last: tuple[object, object, FragmentCheck | None] = None, None, None

    def proof(self, messages: list[JsonObject], tools: Tools) -> FragmentCheck:
        """Return the proof of the shape of `messages`, which is asked for several times in a row."""
        last_messages, last_tools, last = self._last
        if last is None or last_messages is not messages or last_tools is not tools:
            shape = shape_of(messages, tools)
            last = self._proofs.get(shape)
            if last is None:
                if len(self._proofs) >= MOST_SHAPES:
                    self._proofs.clear()
                last = self._proofs[shape] = self._prove(messages, tools)
            self._last = messages, tools, last
        return last

    def _prove(self, messages: list[JsonObject], tools: Tools) -> FragmentCheck:
        words = {(index, thinks): _word(2 * index + thinks) for index in range(len(messages)) for thinks in (0, 1)}
        worded = [_with_text(message, words[index, 0], words[index, 1]) for index, message in enumerate(messages)]
        try:
            rendered = self._render(worded, tools, False)
        except RecordError:
            return FragmentCheck(False, frozenset(), frozenset())
        whole = set(_WORDS.findall(rendered.text.lower()))
        found = {owner: set(_WORDS.findall(text.lower())) for owner, text in rendered.by_message().items()}
        index_of = {word: index for (index, _), word in words.items()}
        stands = {(index_of[word], owner) for owner, some in found.items() for word in some if word in index_of}
        assistants = {index for index, message in enumerate(messages) if message["role"] == "assistant"}
        said = [
            (index, key != "content") for index, message in enumerate(messages) for key in TEXTS if message.get(key)
        ]
        return FragmentCheck(
            holds=all(index == owner for index, owner in stands if index in assistants or owner in assistants),
            own=frozenset(text for text in said if words[text] in found.get(text[0], ())),
            left_out=frozenset(text for text in said if words[text] not in whole),
        )

    def spans(
        self, messages: list[JsonObject], tools: Tools, rendered: Rendered, counting: Sequence[int]
    ) -> list[Span]:
        """Return the characters of the messages `counting`: of the assistant's what it wrote, of others' all.

        They are known from fragments where these are proved, else from renderings of beginnings. Raises RecordError
        where a message or its header is not known, or its text is left out.
        """
        proof = self.proof(messages, tools)
        if not proof.holds:
            return [self._from_beginnings(messages, tools, rendered.text, index) for index in counting]
        for index in counting if proof.left_out else ():
            said = messages[index]
            if said["role"] == "assistant" and not said.get("tool_calls") and (index, False) in proof.left_out:
                raise left_out_error(index, "assistant")
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

    def ends_turn(self, written: str, tools: Tools) -> bool:
        """Return whether an answer ends with what ends a turn, whatever the message says."""
        written = written.rstrip()
        if written.endswith(self._ends):
            return True
        return any(written.endswith(end.rstrip()) for end in self._frame(tools).ends)

    def _from_beginnings(self, messages: list[JsonObject], tools: Tools, full: str, index: int) -> Span:
        """The characters of a message in `full`: for the assistant what follows the generation prompt, else all."""

        def length(count: int, *, prompt: bool) -> int:
            beginning = self._render(messages[:count], tools, prompt).text
            if not full.startswith(beginning):
                rest = "and the generation prompt " if prompt else ""
                first = "first message" if count == 1 else f"first {count} messages"
                raise RecordError(
                    f"the chat template renders the {first} {rest}otherwise when others follow, "
                    "so which tokens count in the loss is not known",
                    reason="template",
                    hint=_BEGINNINGS_HINT,
                )
            return len(beginning)

        stop = len(full) if index + 1 == len(messages) else length(index + 1, prompt=False)
        is_assistant = messages[index]["role"] == "assistant"
        if index or not is_assistant:
            start = length(index, prompt=is_assistant) if index else 0
        else:
            # Many templates refuse a conversation without messages, or begin one with a default system message. The
            # generation prompt that would follow this message is the one it was itself generated from.
            with_prompt, without = (self._render(messages[:1], tools, prompt).text for prompt in (True, False))
            prompt = with_prompt.removeprefix(without)
            start = full.find(prompt, 0, stop) + len(prompt)
            if start < len(prompt):
                raise RecordError(
                    f"the chat template does not begin an assistant message with its generation prompt {prompt!r}",
                    reason="template",
                    hint=_BEGINNINGS_HINT,
                )
        start = min(start, stop)  # the template may leave the message out
        return start, self._stop(full, start, stop, tools) if is_assistant else stop

    def _stop(self, text: str, start: int, stop: int, tools: Tools) -> int:
        """Return where the answer in [start, stop) ends: behind the token that ends the turn, not a line end."""
        written = text[start:stop]
        for end in self._frame(tools).ends:
            if written.endswith(end):
                return stop - len(end) + len(end.rstrip())
        stripped = written.rstrip()
        return start + len(stripped) if stripped.endswith(self._ends) else stop

    def _written(
        self, messages: list[JsonObject], tools: Tools, rendered: Rendered, index: int, fragments: list[Span]
    ) -> list[Span]:
        """Return the spans of a message, given its fragments, that the model writes."""
        spans = []
        for place, (start, stop) in enumerate(fragments):
            text = rendered.text[start:stop]
            header = self._known_header(text, tools) if place else self._header(messages, tools, text, index)
            spans.append((start + header, stop))
        start, stop = spans[-1]
        end = self._stop(rendered.text, start, stop, tools)
        is_last = index + 1 == len(messages)
        if end == stop and not is_last and messages[index + 1]["role"] != "assistant" and not self._frame(tools).ends:
            # The token that begins the turn of somebody else.
            end += len(next((one for one in self._ends if rendered.text.startswith(one, stop)), ""))
        spans[-1] = start, end
        if is_last and stop == rendered.stop_of_messages:  # the token that ends a text may be put out behind
            behind = rendered.text[stop:].strip()
            if behind in self._ends and all(header.strip() != behind for header in self._frame(tools).headers):
                stop = rendered.text.index(behind, stop)
                spans.append((stop, stop + len(behind)))
        return spans

    def _refuse_text_of_others(
        self, messages: list[JsonObject], tools: Tools, rendered: Rendered, index: int, spans: list[Span]
    ) -> None:
        """Raise RecordError where a neighbour's text stands in message `index`, which does not say it itself."""
        written = rendered.joined(spans).lower()
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
                message = f"the chat template puts what `messages[{other}]` says into `messages[{index}]`"
                raise RecordError(message, reason="template", hint=_BLOCKS_HINT)

    def _written_beside_words(self, messages: list[JsonObject], tools: Tools, index: int) -> str:
        """Return the answer `index` rendered with other words around it; "" where that is not known."""
        beside = range(max(index - 1, 0), min(index + 3, len(messages)))
        changed = [
            _with_text(message, _word(other), _word(other)) if other in beside and other != index else message
            for other, message in enumerate(messages)
        ]
        try:
            rendered = self._render(changed, tools, False)
            fragments = rendered.of_message(index)
            return rendered.joined(self._written(changed, tools, rendered, index, fragments)) if fragments else ""
        except RecordError:
            return ""

    def _header(self, messages: list[JsonObject], tools: Tools, text: str, index: int) -> int:
        """Return the length of the header of `text`, which was put out for a message of the assistant first."""
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
        if headers and not any(beginning in text or common_start(beginning, text) for beginning in beginnings):
            return 0  # the template puts out no header for this message, nor anything like one
        raise RecordError(
            f"the chat template begins `messages[{index}]` neither with its generation prompt nor as it begins other "
            "messages of the assistant, so which tokens count in the loss is not known",
            reason="template",
            hint=_BLOCKS_HINT,
        )

    def _header_of_fields(self, messages: list[JsonObject], tools: Tools, text: str, index: int) -> int:
        """Return the length of a header that is due to fields such as `name`; 0 for none."""
        plain = {key: value for key, value in messages[index].items() if key in _SAID}
        if len(plain) == len(messages[index]):
            return 0
        try:
            rendered = self._render([*messages[:index], plain, *messages[index + 1 :]], tools, False)
        except RecordError:
            return 0
        without = rendered.joined(rendered.of_message(index))
        rest = without[self._known_header(without, tools) :]
        is_one = len(rest) < len(without) and rest.strip() and text.endswith(rest)
        return len(text) - len(rest) if is_one else 0

    def _known_header(self, text: str, tools: Tools) -> int:
        """Return the length of the header that `text` begins with; 0 for none."""
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
                    blocks[place].append(rendered.joined(rendered.of_message(index)))
        except RecordError:
            return _Frame([], [], [])
        headers, beginnings = {prompt}, [common_start(*block) for block in blocks]
        for common in beginnings:
            header = common_start(prompt, common) if prompt.strip() else common
            rest = prompt.removeprefix(header)
            if not rest.strip() or _THOUGHT.search(rest):
                headers.add(header)
        ends = {common_start(*(text[::-1] for text in block))[::-1] for block in blocks}

        def longest_first(texts: set[str]) -> list[str]:
            return sorted((text for text in texts if text.strip()), key=len, reverse=True)

        return _Frame(longest_first(headers), beginnings, longest_first(ends))


def left_out_error(index: int, role: str) -> RecordError:
    """The error of a message that counts, and of which the template leaves out what it says."""
    who = role if role in ("user", "system", "tool", "assistant") else "message"
    return RecordError(
        f"the chat template leaves out what the {who} says in `messages[{index}]`",
        reason="template",
        hint="give its content as a list of text parts if the template reads these, or another template",
    )


def _header_before(message: JsonObject, text: str, prompt: str | None) -> int:
    """Return the length of a header that is the generation prompt less the thought it begins; 0 for none."""
    content = message.get("content")
    said = content.strip() if isinstance(content, str) else ""
    if not prompt or not said or said in prompt or said not in text:
        return 0
    header = text.partition(said)[0]
    is_one = header.strip() and prompt.startswith(header) and _THOUGHT.search(prompt[len(header) :])
    return len(header) if is_one else 0
