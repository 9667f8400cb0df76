"""What a rendering leaves out of the messages of its conversation, as a template may do for reasons of its own.

Whatever is said, and most of what is thought, stands in the rendering as it is, in the order of the messages: that is
looked up first, and is all there is to do for most conversations. Templates may also write a text as JSON or HTML, trim
it, change its case or its spaces, and take the thoughts out of it; that is not to leave it out.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from chunkplan.intake.records import JsonObject
from chunkplan.intake.rejection import RecordError
from chunkplan.intake.template_fragments import NOBODY, Rendered
from chunkplan.intake.template_proofs import Proof
from chunkplan.intake.template_shapes import TEXTS

#: Thoughts within a text, with the first of which it may begin; templates split texts at these marks.
_THOUGHT = re.compile(r"(?:<think>|<\|channel>|\A)((?:(?!<think>|<\|channel>).)*?)(?:</think>|<channel\|>)", re.DOTALL)
_MARK = re.compile(r"</?think>|<\|channel>|<channel\|>")

#: Shorter texts may stand anywhere by chance.
_LEAST_TEXT = 6


class LeftOut(NamedTuple):
    """A message of which something is left out or changed: of what it thinks, or else of what it says.

    With `is_all`, so little of what it says is left that the rendering has another answer.
    """

    message: int
    thinks: bool
    is_all: bool = False


def find_left_out(
    messages: list[JsonObject], text: str, proof: Proof, render: Callable[[], Rendered]
) -> Iterable[LeftOut]:
    """What is left out of `messages` in `text`, their rendering; `render` gives it with its fragments, if asked to."""
    if not proof.left_out and _stands_in_order(messages, text):
        return ()
    return _search(messages, text, proof, render)


def _search(messages: list[JsonObject], text: str, proof: Proof, render: Callable[[], Rendered]) -> Iterator[LeftOut]:
    """As `find_left_out`, text by text."""
    fragments = [""] * len(messages)
    for owner, start, stop in render().fragments:
        if owner != NOBODY:
            fragments[owner] += text[start:stop]
    for index, message in enumerate(messages):
        said = [(False, one) for one in _texts(message.get("content"))]
        said += [(True, one) for one in _texts(_thought(message))]
        for thinks, one in said:
            is_nowhere, is_own = (index, thinks) in proof.left_out, (index, thinks) in proof.own
            place = fragments[index] if is_nowhere or is_own else text
            if is_nowhere and len(one) < _LEAST_TEXT:
                place = ""
            yield from _missing(index, one, place, thinks=thinks)


def refuse_left_out(index: int, role: str) -> RecordError:
    """The error of a message that counts, and of which the template leaves out what it says."""
    who = role if role in ("user", "system", "tool", "assistant") else "message"
    return RecordError(
        f"the chat template leaves out what the {who} says in `messages[{index}]`",
        reason="template",
        hint="give its content as a list of text parts if the template reads these, or another template",
    )


def _stands_in_order(messages: list[JsonObject], text: str) -> bool:
    """Whether all that was thought and said stands in `text` as it is, one message behind the other."""
    position = 0
    find = text.find
    for message in messages:
        content = message.get("content")
        if len(message) == 2 and type(content) is str:  # as most are
            content = content.strip()
            position = find(content, position)
            if position < 0:
                return False
            position += len(content)
            continue
        for said in (*_texts(_thought(message)), *_texts(content)):
            position = find(said, position)
            if position < 0:
                return False
            position += len(said)
    return True


def _thought(message: JsonObject) -> object:
    return next((message[key] for key in TEXTS[1:] if message.get(key)), None)


def _texts(content: object) -> list[str]:
    """The texts of a content that is one or a list of parts, without those that are blank."""
    if isinstance(content, list):
        content = [part.get("text") for part in content if isinstance(part, dict)]
    else:
        content = [content]
    return [stripped for text in content if isinstance(text, str) and (stripped := text.strip())]


def _missing(index: int, said: str, place: str, *, thinks: bool) -> Iterator[LeftOut]:
    """What is missing of one text in `place`, where it would stand."""
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
    """Whether a text stands in `place`, as it is or in another form."""
    said = said.strip()
    if said in place:
        return True
    forms = (said, json.dumps(said, ensure_ascii=False)[1:-1], json.dumps(said)[1:-1], _as_html(said))
    squeezed = _squeezed(place)
    return any(_squeezed(form) in squeezed for form in forms)


def _as_html(text: str) -> str:
    """The text as Jinja escapes it."""
    return html.escape(text).replace("&quot;", "&#34;").replace("&#x27;", "&#39;")


def _squeezed(text: str) -> str:
    return "".join(text.split()).casefold()
