"""Chat templates: a conversation as the string a model is trained on, and which spans of it count in the loss.

A template is a program somebody else wrote: it runs in Jinja's immutable sandbox, and whatever it raises is reported
with the record it was given. Spans are found by rendering the conversation up to each message and are trusted only
where each such rendering is how the whole one begins.
"""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from chunkplan.errors import DataError
from chunkplan.intake.records import Conversation, Message

_HINT = "use a template whose rendering of a message does not depend on later ones, or give `prompt` and `completion`"


class ChatTemplate:
    """A chat template, called as transformers calls it: `messages`, `tools`, `add_generation_prompt`, special tokens.

    Args:
        source: the Jinja template.
        special_tokens: `bos_token` and `eos_token`, where the tokenizer has them.
        where: names the file the template is from, for errors.

    Raises:
        DataError: the template is not Jinja.
    """

    def __init__(self, source: str, special_tokens: dict[str, str], where: str) -> None:
        self.content_hash = hashlib.sha256(source.encode()).hexdigest()
        self._special_tokens = special_tokens
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        # One moment for the whole run, or the renderings of one conversation could differ.
        environment.globals["strftime_now"] = datetime.now().strftime
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            message = f"the chat template is not Jinja: {error.message} (line {error.lineno} of the template)"
            raise DataError(message, where=where, hint="mend the template, or give another tokenizer") from error

    def render(self, conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """The conversation as a string, and the spans of characters that count in the loss, in order.

        An assistant message counts from the end of the generation prompt to its own end, any other as a whole.

        Raises:
            DataError: the template raises, or renders a message otherwise when others follow it.
        """
        full = self._render(conversation, len(conversation.messages))
        spans: list[tuple[int, int]] = []
        for index, message in enumerate(conversation.messages):
            if message.counts_in_loss:
                end = self._prefix(conversation, index + 1, full)
                start = self._start(conversation, index, message, full, end)
                spans.append((min(start, end), end))  # the template may leave the message out
        return full, spans

    def _start(self, conversation: Conversation, index: int, message: Message, full: str, end: int) -> int:
        if message.role != "assistant":
            return self._prefix(conversation, index, full) if index else 0
        if index:
            return self._prefix(conversation, index, full, generation=True)
        # Many templates refuse a conversation without messages, or begin one with a default system message. The
        # generation prompt that would follow this message is the one it was itself generated from.
        prompt = self._render(conversation, 1, generation=True).removeprefix(self._render(conversation, 1))
        place = full.find(prompt, 0, end)
        if place < 0:
            raise DataError(
                f"the chat template does not begin an assistant message with its generation prompt {prompt!r}",
                where=conversation.where,
                hint=_HINT,
            )
        return place + len(prompt)

    def _prefix(self, conversation: Conversation, count: int, full: str, *, generation: bool = False) -> int:
        """The length of the rendering of the first `count` messages, which has to be how `full` begins."""
        part = self._render(conversation, count, generation=generation)
        if not full.startswith(part):
            rest = "and the generation prompt " if generation else ""
            raise DataError(
                f"the chat template renders the first {count} messages {rest}otherwise when others follow, "
                "so which tokens count in the loss is not known",
                where=conversation.where,
                hint=_HINT,
            )
        return len(part)

    def _render(self, conversation: Conversation, count: int, *, generation: bool = False) -> str:
        try:
            return self._template.render(
                messages=[message.for_template() for message in conversation.messages[:count]],
                tools=conversation.tools,
                documents=None,
                add_generation_prompt=generation,
                **self._special_tokens,
            )
        except Exception as error:
            several = f"the first {count} messages" if count < len(conversation.messages) else "this conversation"
            message = f"the chat template raised on {several}: {error or type(error).__name__}"
            raise DataError(message, where=conversation.where, hint=_HINT) from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own `tojson` escapes HTML, which no model has seen in training."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
