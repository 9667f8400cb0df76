"""Chat templates: a conversation as the string a model is trained on, and which spans of it count in the loss.

The assistant's text is that in `{% generation %}` blocks if the template has them, else the template's output for its
messages (see `template_turns`). Any error of a template is reported as a record that cannot be rendered.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import date, datetime
from functools import cached_property, partial
from typing import Any, TypeVar

import jinja2
from jinja2.meta import find_undeclared_variables

from chunkplan.errors import DataError, UsageError
from chunkplan.intake.pieces import LEFT_OUT
from chunkplan.intake.records import Conversation, JsonObject, Message, RecordError
from chunkplan.intake.template_messages import (
    calls_put_out,
    find_left_out,
    forms_of,
    reads_parts,
    refuse_missing_calls,
    takes_calls,
    with_calls,
)
from chunkplan.intake.template_render import (
    NOBODY,
    Rendered,
    Span,
    TemplateEnvironment,
    Variables,
    WatchedTemplate,
    mark_nulls,
    num_direct_blocks,
    num_generation_blocks,
    printed_null,
    split_blocks,
)
from chunkplan.intake.template_turns import MOST_SHAPES, Prompts, Tools, TurnFinder, left_out_error, shape_of

T = TypeVar("T")

#: Variables of a template that are a conversation itself, or that say to stop in the middle of it.
RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message")

#: Sets of variables of which the templates are kept; data has a few.
_MOST_VARIANTS = 64


class TemplateRaisedError(RecordError):
    """The template itself refuses a conversation."""


class ChatTemplate:
    """A chat template, called as transformers calls it: `messages`, `tools`, `add_generation_prompt`, special tokens.

    Args:
        source: the Jinja template.
        special_tokens: `bos_token`, `eos_token` and the like, where the tokenizer has them.
        where: names the file the template is from, for errors.
        today: the day on which the template is rendered, as YYYY-MM-DD, for those that print one; else the real one.
        for_tools: the Jinja template of conversations with tools, where they have one of their own.
        ends: tokens of the tokenizer that no text contains, such as the one that ends a turn.
        variables: further variables, such as `enable_thinking`: none of `RESERVED`, and no special token.

    Raises:
        DataError: the template is not Jinja.
    """

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        where: str,
        today: str | None = None,
        *,
        for_tools: str | None = None,
        ends: Collection[str] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        make = partial(ChatTemplate, special_tokens=special_tokens, where=where, today=today, ends=ends)
        self._make = partial(make, source, for_tools=for_tools)
        self._for_tools = None if for_tools is None else make(for_tools, variables=variables)
        self._own_variables = dict(variables or {})
        self._variants: dict[str, ChatTemplate] = {}  # by variables
        self.content_hash = hashlib.sha256("\0".join(filter(None, (source, for_tools))).encode()).hexdigest()
        today = today or date.today().isoformat()
        #: The day that renderings depend on, if they depend on it.
        self.today = today if "strftime_now" in source + (for_tools or "") else None
        self._special_tokens = special_tokens
        self._reads_parts: dict[tuple[str, int], bool] = {}
        self._put_out: dict[Any, frozenset[tuple[int, int]] | None] = {}  # by shape
        environment = TemplateEnvironment(datetime.fromisoformat(today))
        try:
            tree = environment.parse(source)
            num_blocks = num_generation_blocks(tree)
            self._blocks_are_direct = num_blocks == num_direct_blocks(tree)
            self._marked = environment.compile_tree(tree) if num_blocks else None
            self._watched = WatchedTemplate(environment, environment.parse(source))
            asked = find_undeclared_variables(environment.parse(source))
        except (jinja2.TemplateSyntaxError, RecursionError) as error:
            line = f" (line {error.lineno} of the template)" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            message = f"the chat template is not Jinja: {error}{line}"
            raise DataError(message, where=where, hint="fix the template, or give another one") from error
        #: The names of the variables that it may be given beside the conversation.
        self.asks_for = asked.difference(RESERVED, special_tokens, environment.globals)
        self.asks_for |= self._for_tools.asks_for if self._for_tools else set()
        bos, eos = special_tokens.get("bos_token", ""), special_tokens.get("eos_token", "")
        self._turns = TurnFinder(
            self._render_watched,
            {*ends, eos} - ({bos} - {eos}),
            Prompts(self._render_watched, eos, self._watched.asked),
            has_fixed_prompt=self._watched.has_fixed_prompt,
        )

    @property
    def identity(self) -> list[Any]:
        """Everything that a rendering depends on besides the conversation, as JSON values."""
        own = [self._own_variables] if self._own_variables else []
        return [self.content_hash, self._special_tokens, self.today, *own]

    def with_variables(self, variables: Mapping[str, Any] | None) -> ChatTemplate:
        """The template that is given `variables` too; all that is proved of a template is proved of each by itself.

        Raises RecordError where one of them is not for the data to say.
        """
        if not variables:
            return self
        if taken := [name for name in variables if name in RESERVED or name in self._special_tokens]:
            raise RecordError(
                f"`{taken[0]}` is no variable that a chat template can be given beside a conversation",
                reason="template",
                hint="leave it out",
            )
        key = json.dumps(variables, sort_keys=True)
        if key not in self._variants:
            if len(self._variants) >= _MOST_VARIANTS:
                self._variants.clear()
            self._variants[key] = self._make(variables={**self._own_variables, **variables})
        return self._variants[key]

    def check_variables(self, variables: Mapping[str, Any]) -> None:
        """Raise UsageError for one of `variables` that the template does not read."""
        if unread := next((name for name in variables if name not in self.asks_for), None):
            names = ", ".join(sorted(self.asks_for)) or "none"
            raise UsageError(
                f"the chat template does not read the variable {unread}", hint=f"variables that it reads: {names}"
            )

    def render(self, conversation: Conversation, left_out: set[str] | None = None) -> tuple[str, list[Span]]:
        """Render a conversation, and find the spans of characters that count in the loss, in order and disjoint.

        An assistant message counts where it stands in generation blocks, else from the end of the generation prompt to
        the token that ends it; any other message as a whole. Calls and tools are given in the first form at which the
        template does not raise. What of the conversation is missing, see `LEFT_OUT`, is added to `left_out`. Raises
        RecordError: the template raises, leaves out what counts, or prints a null that counts as the word None; or the
        place of a message is not known.
        """
        if conversation.variables:
            own = self.with_variables(conversation.variables)
            return own.render(replace(conversation, variables=None), left_out)
        if self._for_tools is not None and conversation.tools is not None:
            return self._for_tools.render(conversation, left_out)
        conversation = self._with_calls(conversation)
        (full, spans), messages, tools = self._in_some_form(
            conversation, lambda messages, tools: self._render_all(conversation, messages, tools)
        )
        if "None" in full and any("None" in full[start:stop] for start, stop in spans):
            self._refuse_printed_nulls(conversation, messages, tools)
        counted = "".join(full[start:stop] for start, stop in spans)
        refuse_missing_calls(conversation, counted, self._calls_put_out(messages, tools))
        found = self._left_out(conversation, full, spans, messages, tools)
        if left_out is not None:
            left_out |= found
        return full, spans

    def text(self, conversation: Conversation) -> str:
        """Render a conversation, also where the counting spans are unknown; raises RecordError as the template does."""
        if conversation.variables:
            return self.with_variables(conversation.variables).text(replace(conversation, variables=None))
        if self._for_tools is not None and conversation.tools is not None:
            return self._for_tools.text(conversation)
        text, _, _ = self._in_some_form(self._with_calls(conversation), self._render_text)
        return text

    def _in_some_form(
        self, conversation: Conversation, render: Callable[[list[JsonObject], Tools], T]
    ) -> tuple[T, list[JsonObject], Tools]:
        """Call `render` with messages and tools in the first form at which the template does not raise."""
        shown, tools = [self._shown(message) for message in conversation.messages], conversation.tools
        takes = self._takes_calls if any("tool_calls" in message for message in shown) else None
        raised: TemplateRaisedError | None = None
        for messages, others in forms_of(shown, tools, takes):
            try:
                return render(messages, others), messages, others
            except TemplateRaisedError as error:
                raised = raised if raised and others is tools else error  # of tools that it can read
        assert raised is not None
        raise raised from None

    @cached_property
    def _takes_calls(self) -> str | None:
        return takes_calls(self._render_text)

    def _with_calls(self, conversation: Conversation) -> Conversation:
        """The conversation with calls that were text as calls; as it is where the template has no place for these."""
        if all(message.calls is None for message in conversation.messages) or self._takes_calls is None:
            return conversation
        return replace(conversation, messages=with_calls(conversation.messages))

    def _calls_put_out(self, messages: list[JsonObject], tools: Tools) -> frozenset[tuple[int, int]] | None:
        """Cached `calls_put_out`, by shape."""
        if not any("tool_calls" in message for message in messages):
            return None
        shape = shape_of(messages, tools)
        if shape not in self._put_out:
            if len(self._put_out) >= MOST_SHAPES:
                self._put_out.clear()
            self._put_out[shape] = calls_put_out(self._render_text, messages, tools)
        return self._put_out[shape]

    def _left_out(
        self, conversation: Conversation, full: str, spans: list[Span], messages: list[JsonObject], tools: Tools
    ) -> set[str]:
        """Return the kinds of `LEFT_OUT` that a rendering lacks; raises RecordError for an answer that counts."""
        kinds = set()
        proof = self._turns.proof(messages, tools)
        for index, thinks, is_all in find_left_out(
            messages, full, proof, lambda: self._render_watched(messages, tools).by_message()
        ):
            message = conversation.messages[index]
            if is_all and message.counts_in_loss and not thinks and not message.fields.get("tool_calls"):
                raise left_out_error(index, message.role)
            if not thinks:
                kinds.add(message.role if message.role in LEFT_OUT else "other")
            elif message.counts_in_loss:  # of other turns the model does not see it either when it answers
                kinds.add("thinking")
        last = conversation.messages[-1]
        if last.counts_in_loss and last.role == "assistant":
            start, stop = spans[-1] if spans else (0, 0)
            if not self._turns.ends_turn(full[start:stop], tools):
                kinds.add("end")
        return kinds

    def _shown(self, message: Message) -> JsonObject:
        """The message as the template gets it: content as a list of parts where it can read one."""
        shown = message.for_template()
        if message.parts:
            asked = message.role, min(len(message.parts), 2)
            if asked not in self._reads_parts:
                self._reads_parts[asked] = reads_parts(self._render_text, *asked)
            if self._reads_parts[asked]:
                shown["content"] = [{"type": "text", "text": text} for text in message.parts]
        return shown

    def _variables(self, tools: Tools) -> Variables:
        given = {"tools": tools, "documents": None, "add_generation_prompt": False}
        return {**given, **self._special_tokens, **self._own_variables}

    def _refuse_printed_nulls(self, conversation: Conversation, messages: list[JsonObject], tools: Tools) -> None:
        """Raise RecordError where a "None" that counts is a null; `messages` and `tools` were rendered."""
        paths: list[str] = []
        messages, tools = mark_nulls(messages, "messages", paths), mark_nulls(tools, "tools", paths)
        if not paths:
            return
        full, spans = self._render_all(conversation, messages, tools)
        number = printed_null(full[start:stop] for start, stop in spans)
        if number is not None:
            raise RecordError(
                f'the chat template makes the word "None" of `{paths[number]}`, which is null',
                reason="template",
                hint="leave that key out, fix the template, or leave this record out",
            )

    def _render_all(
        self, conversation: Conversation, messages: list[JsonObject], tools: Tools
    ) -> tuple[str, list[Span]]:
        """Implement `render`; `messages` and `tools` are what the template gets of `conversation`."""
        if self._marked is not None:
            try:
                marked = "".join(self._marked({**self._variables(tools), "messages": messages}))
            except Exception as error:
                raise _raised(error) from error
            return self._read_blocks(conversation, marked, messages, tools)
        rendered = self._render_watched(messages, tools)
        counting = [index for index, message in enumerate(conversation.messages) if message.counts_in_loss]
        return rendered.text, _merged(self._turns.spans(messages, tools, rendered, counting))

    def _render_watched(self, messages: list[JsonObject], tools: Tools, prompt: bool = False) -> Rendered:
        try:
            return self._watched.render(messages, {**self._variables(tools), "add_generation_prompt": prompt})
        except Exception as error:
            raise _raised(error) from error

    def _render_text(self, messages: list[JsonObject], tools: Tools) -> str:
        return self._render_watched(messages, tools).text

    def _read_blocks(
        self, conversation: Conversation, marked: str, messages: list[JsonObject], tools: Tools
    ) -> tuple[str, list[Span]]:
        """The rendering without its marks and what counts in it; `marked` has marks around generation blocks."""
        full, spans = split_blocks(marked)
        by_role = all(message.counts_in_loss == (message.role == "assistant") for message in conversation.messages)
        if self._blocks_are_direct and by_role:
            return full, _merged(spans)
        rendered = self._render_watched(messages, tools)
        if rendered.text != full:
            raise RecordError(
                "the chat template changes what stands in its generation blocks, so where that is is not known",
                reason="template",
                hint="fix the template: what is in {% generation %} must be put out as it is",
            )
        if by_role:
            return full, _merged(spans)
        if self._turns.proof(messages, tools).holds:
            kept = [span for span in spans if conversation.messages[_message_at(rendered, span)].counts_in_loss]
        else:
            assistant = [message for message in conversation.messages if message.role == "assistant"]
            if len(assistant) != len(spans):
                raise RecordError(
                    f"the chat template has {len(spans)} generation blocks for the {len(assistant)} messages of the "
                    "assistant, so which of them are left out of the loss is not known",
                    reason="template",
                    hint="use a template with one generation block a message, or train all of the conversation: leave "
                    "`loss` and weights out, and --train-turns rendered",
                )
            kept = [span for span, message in zip(spans, assistant, strict=True) if message.counts_in_loss]
        others = [
            index
            for index, message in enumerate(conversation.messages)
            if message.counts_in_loss and message.role != "assistant"
        ]
        return full, _merged(kept + self._turns.spans(messages, tools, rendered, others))


def _raised(error: Exception) -> TemplateRaisedError:
    return TemplateRaisedError(
        f"the chat template raised on this conversation: {error or type(error).__name__}",
        reason="template",
        hint="fix the template, give another one with --chat-template, or leave this record out",
    )


def _message_at(rendered: Rendered, span: Span) -> int:
    """The message in whose fragments a span begins."""
    return next((each.message for each in rendered.fragments if each.start <= span[0] < each.stop), NOBODY)


def _merged(spans: list[Span]) -> list[Span]:
    """Spans of the same characters, in order and disjoint."""
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged
