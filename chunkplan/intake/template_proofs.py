"""What is known of every shape of conversation before one of it is read: where a template puts what messages say.

A conversation of the same shape (see `template_shapes`) is rendered with words of their own as the texts of each
message. Fragments are told apart rightly if the words stand in those of their messages; a text whose word stands
nowhere is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from chunkplan.intake.records import JsonObject
from chunkplan.intake.rejection import RecordError
from chunkplan.intake.template_fragments import NOBODY, Rendered
from chunkplan.intake.template_shapes import MOST_SHAPES, TEXTS, shape_of, with_text, word_of, words_in

#: What tools a conversation has.
Tools = list[JsonObject] | None

#: (messages, tools, with the generation prompt) -> their rendering. Raises RecordError where the template raises.
Render = Callable[[list[JsonObject], Tools, bool], Rendered]

#: A text of a conversation: the message, and whether it is what was thought.
Text = tuple[int, bool]


class Proof(NamedTuple):
    """What is known of a shape.

    `holds` says whether fragments are told apart. Of its texts, `own` are put out in fragments of their messages, and
    `left_out` nowhere.
    """

    holds: bool
    own: frozenset[Text]
    left_out: frozenset[Text]


class Proofs:
    """The proofs of one template, of which `render` renders messages; each is made once."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._known: dict[Any, Proof] = {}
        self._last: tuple[object, object, Proof | None] = None, None, None

    def of(self, messages: list[JsonObject], tools: Tools) -> Proof:
        """The proof of the shape of `messages`, which is asked for several times in a row."""
        last_messages, last_tools, last = self._last
        if last is None or last_messages is not messages or last_tools is not tools:
            last = self._of_shape(messages, tools)
            self._last = messages, tools, last
        return last

    def _of_shape(self, messages: list[JsonObject], tools: Tools) -> Proof:
        shape = bool(tools), *map(shape_of, messages)
        found = self._known.get(shape)
        if found is None:
            if len(self._known) >= MOST_SHAPES:
                self._known.clear()
            found = self._known[shape] = self._prove(messages, tools)
        return found

    def _prove(self, messages: list[JsonObject], tools: Tools) -> Proof:
        words = {(index, thinks): word_of(2 * index + thinks) for index in range(len(messages)) for thinks in (0, 1)}
        worded = [with_text(message, words[index, 0], words[index, 1]) for index, message in enumerate(messages)]
        try:
            rendered = self._render(worded, tools, False)
        except RecordError:
            return Proof(False, frozenset(), frozenset())
        fragments: dict[int, str] = dict.fromkeys(range(NOBODY, len(messages)), "")
        for message, start, stop in rendered.fragments:
            fragments[message] += rendered.text[start:stop].lower()
        whole = words_in(rendered.text.lower())
        found = {owner: words_in(text) for owner, text in fragments.items()}
        index_of = {word: index for (index, _), word in words.items()}
        stands = {(index_of[word], owner) for owner, some in found.items() for word in some if word in index_of}
        assistants = {index for index, message in enumerate(messages) if message["role"] == "assistant"}
        said = [
            (index, key != "content") for index, message in enumerate(messages) for key in TEXTS if message.get(key)
        ]
        return Proof(
            holds=all(index == owner for index, owner in stands if index in assistants or owner in assistants),
            own=frozenset(text for text in said if words[text] in found[text[0]]),
            left_out=frozenset(text for text in said if words[text] not in whole),
        )
