"""Chat templates: a conversation as the string a model is trained on, and which spans of it count in the loss.

A template is a program somebody else wrote: it runs in Jinja's immutable sandbox, and whatever it raises is reported as
a record that cannot be rendered. What the assistant says is what stands in `{% generation %}` blocks where the template
has them, else what the template puts out for its messages (see `template_turns`). Where that cannot be told apart,
spans are found by rendering the conversation up to each message, and trusted only where each such rendering is how the
whole one begins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import date, datetime
from functools import cached_property
from typing import Any, TypeVar

import jinja2

from chunkplan.errors import DataError
from chunkplan.intake.pieces import LEFT_OUT
from chunkplan.intake.records import Conversation, JsonObject, Message
from chunkplan.intake.rejection import RecordError
from chunkplan.intake.template_blocks import num_direct_marks, num_marks, split_marks, without_marks
from chunkplan.intake.template_calls import calls_put_out, forms_of, takes_calls, with_calls
from chunkplan.intake.template_fragments import NOBODY, Rendered, WatchedTemplate
from chunkplan.intake.template_left_out import find_left_out, refuse_left_out
from chunkplan.intake.template_nulls import MarkedNulls
from chunkplan.intake.template_parts import reads_parts
from chunkplan.intake.template_prompts import Prompts
from chunkplan.intake.template_sandbox import Pieces, TemplateEnvironment, Variables, compile_tree
from chunkplan.intake.template_shapes import MOST_SHAPES, shape_of
from chunkplan.intake.template_spans import Span, beginning_span, refuse_missing_calls
from chunkplan.intake.template_turns import TurnFinder

T = TypeVar("T")

_HINT = "fix the template, give another one with --chat-template, or leave this record out"


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
    ) -> None:
        self._for_tools = (
            None if for_tools is None else ChatTemplate(for_tools, special_tokens, where, today, ends=ends)
        )
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
            self._marks_are_direct = num_marks(tree) == num_direct_marks(tree)
            self._marked = compile_tree(environment, tree) if num_marks(tree) else None
            self._watched = WatchedTemplate(environment, without_marks(environment.parse(source)))
            bos, eos = special_tokens.get("bos_token", ""), special_tokens.get("eos_token", "")
            self._turns = TurnFinder(
                self._render_watched,
                {*ends, eos} - ({bos} - {eos}),
                Prompts(self._render_watched, eos, self._watched.asked),
                has_fixed_prompt=self._watched.has_fixed_prompt,
            )
        except (jinja2.TemplateSyntaxError, RecursionError) as error:
            line = f" (line {error.lineno} of the template)" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            message = f"the chat template is not Jinja: {error}{line}"
            raise DataError(message, where=where, hint="fix the template, or give another one") from error

    @property
    def identity(self) -> list[Any]:
        """Everything that a rendering depends on besides the conversation, as JSON values."""
        return [self.content_hash, self._special_tokens, self.today]

    def render(self, conversation: Conversation, left_out: set[str] | None = None) -> tuple[str, list[Span]]:
        """The conversation as a string, and the spans of characters that count in the loss, in order and disjoint.

        An assistant message counts where it stands in generation blocks; without such blocks from the end of the
        generation prompt to the token that ends it. Any other message counts as a whole. Calls of tools are in the form
        that the template takes; where it raises, in the other one, and tools that are bare functions are written as
        tools. To `left_out` is added what of the conversation is not there: see `LEFT_OUT`.

        Raises:
            RecordError: the template raises, leaves out what counts, or makes the word None of a null that counts; or
                where in the rendering a message begins is not known.
        """
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
        """The conversation as a string, also where what counts in it is not known.

        Raises:
            RecordError: the template raises.
        """
        if self._for_tools is not None and conversation.tools is not None:
            return self._for_tools.text(conversation)
        rendered, _, _ = self._in_some_form(self._with_calls(conversation), self._render_watched)
        return rendered.text

    def _in_some_form(
        self, conversation: Conversation, render: Callable[[list[JsonObject], list[JsonObject] | None], T]
    ) -> tuple[T, list[JsonObject], list[JsonObject] | None]:
        """What `render` makes of the messages and tools as the template gets them, and these.

        They are in the first of their forms at which the template does not raise.
        """
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
        return takes_calls(lambda messages, tools: self._render_watched(messages, tools).text)

    def _with_calls(self, conversation: Conversation) -> Conversation:
        """The conversation with calls that were text as calls; as it is where the template has no place for these."""
        if all(message.calls is None for message in conversation.messages) or self._takes_calls is None:
            return conversation
        return replace(conversation, messages=with_calls(conversation.messages))

    def _calls_put_out(
        self, messages: list[JsonObject], tools: list[JsonObject] | None
    ) -> frozenset[tuple[int, int]] | None:
        """As `calls_put_out`, which is asked once of every shape."""
        if not any("tool_calls" in message for message in messages):
            return None
        shape = bool(tools), *map(shape_of, messages)
        if shape not in self._put_out:
            if len(self._put_out) >= MOST_SHAPES:
                self._put_out.clear()
            self._put_out[shape] = calls_put_out(lambda named: self._render_watched(named, tools).text, messages)
        return self._put_out[shape]

    def _left_out(
        self,
        conversation: Conversation,
        full: str,
        spans: list[Span],
        messages: list[JsonObject],
        tools: list[JsonObject] | None,
    ) -> set[str]:
        """What of `LEFT_OUT` is not in a rendering. Raises RecordError where an answer that counts is not."""
        kinds = set()
        proof = self._turns.proofs.of(messages, tools)
        lacking = find_left_out(messages, full, proof, lambda: self._render_watched(messages, tools))
        for index, thinks, is_all in lacking:
            message = conversation.messages[index]
            has_calls = bool(message.fields and message.fields.get("tool_calls"))
            if is_all and message.counts_in_loss and not thinks and not has_calls:
                raise refuse_left_out(index, message.role)
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
                self._reads_parts[asked] = reads_parts(self._render_plainly, *asked)
            if self._reads_parts[asked]:
                shown["content"] = [{"type": "text", "text": text} for text in message.parts]
        return shown

    def _render_plainly(self, messages: list[JsonObject]) -> str:
        return self._render_watched(messages, None).text

    def _variables(self, tools: list[JsonObject] | None) -> Variables:
        return {"tools": tools, "documents": None, "add_generation_prompt": False, **self._special_tokens}

    def _refuse_printed_nulls(
        self, conversation: Conversation, messages: list[JsonObject], tools: list[JsonObject] | None
    ) -> None:
        """Raises RecordError where a "None" that counts is a null; `messages` and `tools` were rendered."""
        nulls = MarkedNulls()
        messages, tools = nulls.mark(messages, "messages"), nulls.mark(tools, "tools")
        if not nulls.paths:
            return
        full, spans = self._render_all(conversation, messages, tools)
        path = nulls.first_printed(full[start:stop] for start, stop in spans)
        if path is not None:
            raise RecordError(
                f'the chat template makes the word "None" of `{path}`, which is null',
                reason="template",
                hint="leave that key out, fix the template, or leave this record out",
            )

    def _render_all(
        self, conversation: Conversation, messages: list[JsonObject], tools: list[JsonObject] | None
    ) -> tuple[str, list[Span]]:
        """As `render`; `messages` and `tools` are what the template gets of `conversation`."""
        if self._marked is not None:
            marked = _render(self._marked, {**self._variables(tools), "messages": messages}, "this conversation")
            return self._read_marks(conversation, marked, messages, tools)
        rendered = self._render_watched(messages, tools)
        counting = [index for index, message in enumerate(conversation.messages) if message.counts_in_loss]
        return rendered.text, _merged(self._find_spans(messages, tools, rendered, counting))

    def _find_spans(
        self, messages: list[JsonObject], tools: list[JsonObject] | None, rendered: Rendered, counting: list[int]
    ) -> list[Span]:
        """What the messages with these indices are of their rendering.

        It is known from their fragments where these are proved, else from the renderings of beginnings.
        """
        if self._turns.is_proved(messages, tools):
            return self._turns.spans(messages, tools, rendered, counting)

        def render(count: int, prompt: bool) -> str:
            return self._render_watched(messages[:count], tools, prompt).text

        spans = []
        for index in counting:
            start, stop = beginning_span(messages, rendered.text, render, index)
            if messages[index]["role"] == "assistant":
                stop = self._turns.stop(rendered.text, start, stop, tools)
            spans.append((start, stop))
        return spans

    def _render_watched(
        self, messages: list[JsonObject], tools: list[JsonObject] | None, prompt: bool = False
    ) -> Rendered:
        variables = {**self._variables(tools), "add_generation_prompt": prompt}
        try:
            return self._watched.render(messages, variables)
        except Exception as error:
            raise _raised(error, "this conversation") from error

    def _read_marks(
        self, conversation: Conversation, marked: str, messages: list[JsonObject], tools: list[JsonObject] | None
    ) -> tuple[str, list[Span]]:
        """The rendering without its marks and what counts in it; `marked` has marks around generation blocks."""
        full, spans = split_marks(marked)
        by_role = all(message.counts_in_loss == (message.role == "assistant") for message in conversation.messages)
        if self._marks_are_direct and by_role:
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
        if self._turns.is_proved(messages, tools):
            kept = [span for span in spans if conversation.messages[_message_at(rendered, span)].counts_in_loss]
        else:
            assistant = [message for message in conversation.messages if message.role == "assistant"]
            if len(assistant) != len(spans):
                raise RecordError(
                    f"the chat template has {len(spans)} generation blocks for the {len(assistant)} messages of the "
                    "assistant, so which of them are left out of the loss is not known",
                    reason="template",
                    hint="use a template with one generation block a message, or train all of the conversation: leave "
                    "`loss` and weights out, and --turns rendered",
                )
            kept = [span for span, message in zip(spans, assistant, strict=True) if message.counts_in_loss]
        others = [
            index
            for index, message in enumerate(conversation.messages)
            if message.counts_in_loss and message.role != "assistant"
        ]
        return full, _merged(kept + self._find_spans(messages, tools, rendered, others))


def _render(template: Pieces, variables: Variables, several: str) -> str:
    try:
        return "".join(template(variables))
    except Exception as error:
        raise _raised(error, several) from error


def _raised(error: Exception, several: str) -> TemplateRaisedError:
    message = f"the chat template raised on {several}: {error or type(error).__name__}"
    return TemplateRaisedError(message, reason="template", hint=_HINT)


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
