"""Which turns of a conversation are trained, and in how many sequences.

A *turn* of the assistant is what it writes between two messages of others, tools aside: its messages, the calls in
them, and the answers of tools that it went on from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from chunkplan.config.intake import Turns
from chunkplan.intake.records import Conversation, Message


def by_turns(conversation: Conversation, turns: Turns) -> list[Conversation]:
    """The conversations that become sequences, at least one; messages that are not trained have `loss` False.

    - "rendered": the conversation as it is, in which all counts that the assistant said.
    - "last": the same, in which only its last turn counts.
    - "each": of every turn the conversation up to its end, in which only that turn counts. That is how a model meets it
      when it answers: a template shows the thinking of this turn, and of earlier ones what it leaves of it.

    Of a conversation that no message counts in, there is one sequence, without targets.
    """
    if turns == "rendered":
        return [conversation]
    messages = conversation.messages
    spans = [(start, stop) for start, stop in turns_of(messages) if _counts(messages[start:stop])]
    if not spans:
        return [conversation]
    if turns == "last":
        start, stop = spans[-1]
        rest = tuple(map(_silent, messages[stop:]))
        return [replace(conversation, messages=(*map(_silent, messages[:start]), *messages[start:stop], *rest))]
    return [
        replace(conversation, messages=(*map(_silent, messages[:start]), *messages[start:stop]))
        for start, stop in spans
    ]


def turns_of(messages: tuple[Message, ...]) -> Iterator[tuple[int, int]]:
    """The messages [start, stop) of every turn, with those of others that it answers.

    Together they cover all but the rest behind the last turn.
    """
    start = stop = 0
    for index, message in enumerate(messages):
        if message.role == "assistant":
            stop = index + 1
        elif stop > start and message.role != "tool":
            yield start, stop
            start = stop
    if stop > start:
        yield start, stop


def _counts(messages: tuple[Message, ...]) -> bool:
    return any(message.counts_in_loss for message in messages)


def _silent(message: Message) -> Message:
    return message._replace(loss=False)
