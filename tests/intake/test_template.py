"""Renderings are those of transformers, and what counts in them is what the template put out for each message."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from chunkplan.errors import DataError
from chunkplan.intake.records import Conversation, Message, RecordError
from chunkplan.intake.template import ChatTemplate
from chunkplan.intake.template_render import WatchedTemplate
from tests.support.places import ROOT

TOKENIZER = ROOT / "sample_data" / "tokenizer"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
BODY = "<|{{ m.role }}|>{{ m['content'] }}{{ m.name }}</s>"
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"

#: Walk over the messages once and end with the generation prompt, or look as if they did.
TEMPLATES = {
    "plain": "{{ bos_token }}{% for m in messages %}" + BODY + "{% endfor %}" + PROMPT,
    "tail": "{% for m in messages %}" + BODY + "{% endfor %}" + PROMPT + "</s>",
    "system": "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{{ messages[0].content }}{% else %}"
    "{% set rest = messages %}be kind{% endif %}{% for m in rest %}" + BODY + "{% endfor %}" + PROMPT,
    "last": "{% for m in messages %}" + BODY + "{% if loop.last %}!{% endif %}{% endfor %}" + PROMPT,
    "last first": "{% for m in messages %}{% if loop.last %}{% endif %}" + BODY + "{% endfor %}" + PROMPT,
    "tools": "{% for m in messages %}{% if m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != "
    "'tool' %}<|user|>{% endif %}[{{ m.content }}]{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}</s>"
    "{% endif %}{% else %}" + BODY + "{% endif %}{% endfor %}" + PROMPT,
    "next": "{% for m in messages %}" + BODY + "{% if loop.nextitem is defined %},{% endif %}{% endfor %}" + PROMPT,
    "length": "{% for m in messages %}{% if loop.index == messages | length %}={% endif %}"
    + BODY
    + "{% endfor %}"
    + PROMPT,
    "loop length": "{% for m in messages %}{{ loop.length > 3 }}" + BODY + "{% endfor %}" + PROMPT,
    "end": "{% set final = messages[-1] %}{% for m in messages %}{{ m == final }}" + BODY + "{% endfor %}" + PROMPT,
    "break": "{% for m in messages %}{% if m.role == 'tool' %}{% break %}{% endif %}" + BODY + "{% endfor %}" + PROMPT,
    "continue": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    + BODY
    + "{% endfor %}"
    + PROMPT,
    "count": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}"
    + BODY
    + "{% endfor %}"
    + PROMPT,
    "state": "{% set ns = namespace(r='') %}{% for m in messages %}{% set ns.r = m.role %}"
    + BODY
    + "{% endfor %}{{ ns.r }}"
    + PROMPT,
    "inner": "{% for m in messages %}{% for o in messages %}{{ o.role[0] }}{% endfor %}"
    + BODY
    + "{% endfor %}"
    + PROMPT,
    "list": "{% for m in messages | list %}" + BODY + "{% endfor %}" + PROMPT,
    "list more": "{% for m in (messages[1:] | list) + [messages[0]] %}" + BODY + "{% endfor %}" + PROMPT,
    "batches": "{% for pair in messages | batch(2) %}{% for m in pair %}" + BODY + "{% endfor %};{% endfor %}" + PROMPT,
    "filter": "{% for m in messages if m.role != 'system' %}" + BODY + "{% endfor %}" + PROMPT,
    "else": "{% for m in messages[1:] %}" + BODY + "{% else %}nobody{% endfor %}" + PROMPT,
    "reverse": "{% for m in messages[::-1] %}{% if m.role == 'user' %}{{ loop.index }}{% endif %}{% endfor %}"
    "{% for m in messages %}" + BODY + "{% endfor %}" + PROMPT,
    "twice": "{% for m in messages %}" + BODY + "{% endfor %}{% for m in messages %}" + BODY + "{% endfor %}" + PROMPT,
    "prompt early": "{% for m in messages %}"
    + BODY
    + "{% if loop.last and add_generation_prompt %}?{% endif %}{% endfor %}",
    "prompt set": "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{% for m in messages %}" + BODY + "{% endfor %}" + PROMPT,
    "macro": "{% macro say(m) %}" + BODY + "{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}" + PROMPT,
    "raise": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns') }}{% endif %}" + BODY + "{% endfor %}" + PROMPT,
    "equal": "{% if messages == [] %}none{% endif %}{% if messages[1:] %}more{% endif %}{% for m in messages %}"
    + BODY
    + "{% endfor %}",
    "json": "{{ messages | tojson }}{% for m in messages %}" + BODY + "{% endfor %}" + PROMPT,
    "strings": "{% for m in messages %}{{ m.content.strip().upper() }}{{ m.content.split('a')[-1] }}"
    "{{ m.items() | list | length }}{{ m.get('name', '?') }}{{ 'x{}'.format(m.role) }}"
    "{{ m.keys is defined }}{{ m.nothing is defined }}{% endfor %}" + PROMPT,
}


#: Those that put out every message once, in order, by BODY.
IN_ORDER = ("plain", "last first", "list", "prompt set", "macro", "raise", "equal", "reverse")


def _random_conversation(rng: random.Random) -> Conversation:
    roles = rng.choices(["user", "assistant", "tool", "system"], [4, 4, 2, 1], k=rng.randint(1, 6))
    if rng.random() < 0.4:
        roles = ["user", "assistant", "user", "assistant"][: len(roles)]
    return Conversation(
        tuple(
            Message(
                role,
                rng.choice(["a", " b a ", "", "<|assistant|>", "日本", "c\n"]),
                rng.choice([None] * 5 + [True, False]),
                rng.choice([{}, {}, {"name": "n"}]),
            )
            for role in roles
        )
    )


def _transformers(source: str, messages: list[dict[str, Any]], **others: Any) -> str:
    [text], _ = render_jinja_template([messages], chat_template=source, **SPECIAL, **others)
    return str(text)


#: What the assistant says, and what others do, each between marks that no content has.
_SAID = "{{ m['content'] }}{{ m.name }}</s>"
_MARKED = "{% if m.role == 'assistant' %}<|{{ m.role }}|>\x01" + _SAID + "\x02{% else %}\x01" + BODY + "\x02{% endif %}"


def _by_marks(source: str, conversation: Conversation) -> tuple[str, list[tuple[int, int]]] | None:
    """The whole, and the spans of messages that count, by marks in the template itself; None where it raises.

    The marks of the n-th message are the n-th ones, for templates that put out every message once and in order.
    """
    messages = [message.for_template() for message in conversation.messages]
    try:
        full = _transformers(source, messages)
        marked = _transformers(source.replace(BODY, _MARKED), messages)
    except Exception:
        return None
    assert marked.replace("\x01", "").replace("\x02", "") == full
    spans, position = [], 0
    for piece in re.split("(\x01|\x02)", marked):
        if piece == "\x01":
            spans.append((position, position))
        elif piece == "\x02":
            spans[-1] = spans[-1][0], position
        else:
            position += len(piece)
    kept = [span for span, message in zip(spans, conversation.messages, strict=True) if message.counts_in_loss]
    return full, kept


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same characters, without borders between spans that touch."""
    merged: list[tuple[int, int]] = []
    for start, stop in spans:
        if merged and merged[-1][1] == start:
            merged[-1] = merged[-1][0], stop
        else:
            merged.append((start, stop))
    return merged


@pytest.mark.parametrize("name", IN_ORDER)
def test_what_counts_is_what_the_template_puts_out_for_a_message(name: str) -> None:
    """Whatever it puts out for the same message when others follow; and no conversation is refused."""
    source = TEMPLATES[name]
    template = ChatTemplate(source, SPECIAL, "x")
    rng = random.Random(name)
    for _ in range(120):
        conversation = _random_conversation(rng)
        if name == "reverse":  # puts out numbers for users, too
            said = (m if m.role == "assistant" else m._replace(loss=None) for m in conversation.messages)
            conversation = Conversation(tuple(said))
        expected = _by_marks(source, conversation)
        if expected is None:
            with pytest.raises(RecordError):
                template.render(conversation)
        else:
            full, spans = expected
            assert template.render(conversation) == (full, _merged(spans))


@pytest.mark.parametrize("name", sorted(set(TEMPLATES) - set(IN_ORDER)))
def test_a_template_whose_output_cannot_be_told_apart_is_refused_or_read_rightly(name: str) -> None:
    """No header, and nothing of anybody else, is ever part of what counts."""
    source = TEMPLATES[name]
    template = ChatTemplate(source, SPECIAL, "x")
    rng = random.Random(name)
    for _ in range(120):
        conversation = _random_conversation(rng)
        messages = [
            message._replace(content=f"word{index}", loss=None) for index, message in enumerate(conversation.messages)
        ]
        try:
            full, spans = template.render(Conversation(tuple(messages)))
        except RecordError as error:
            assert error.reason == "template"
            continue
        assert full == _transformers(source, [message.for_template() for message in messages])
        counted = "".join(full[start:stop] for start, stop in spans)
        assert "<|" not in counted
        for index, message in enumerate(messages):
            assert message.role == "assistant" or f"word{index}" not in counted.lower()


def test_a_template_is_rendered_once_for_a_conversation_whatever_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of finding spans does not grow with the square of the messages."""
    rendered = []
    render = WatchedTemplate.render
    monkeypatch.setattr(
        WatchedTemplate,
        "render",
        lambda self, messages, *rest: rendered.append(len(messages)) or render(self, messages, *rest),
    )
    template = ChatTemplate(TEMPLATES["plain"], SPECIAL, "x")
    messages = tuple(Message(role, "a") for _ in range(50) for role in ("user", "assistant"))
    for _ in range(3):
        assert len(template.render(Conversation(messages))[1]) == 50
    assert rendered.count(100) == 4  # once more to prove that fragments of conversations like it are told apart


def test_keys_that_are_null_are_left_out() -> None:
    source = "{% for m in messages %}{{ m.content | trim }}{{ 'content' in m }}{{ m.content is defined }}{% endfor %}"
    message = Message("assistant", None, None, {"name": "f"})
    text, _ = ChatTemplate(source, SPECIAL, "x").render(Conversation((message,)))
    reference = AutoTokenizer.from_pretrained(TOKENIZER)
    given = [{"role": "assistant", "content": None, "name": "f"}]
    assert text == reference.apply_chat_template(given, chat_template=source, tokenize=False) == "FalseFalse"


NULL_ASKED = (
    "{% set v = m.tool_calls[0].function.arguments.x %}{{ v is none }}{{ v is not none }}{{ v == none }}{{ none == v }}"
    "{{ v in [1, none] }}{{ v or 'or' }}{{ v | default('d', true) }}{{ v is string }}{{ v is mapping }}"
    "{{ v is iterable }}{{ v is number }}{{ v is boolean }}{{ v is defined }}{{ v.x is defined }}{{ v | tojson }}"
    "{{ m.tool_calls | tojson(indent=1) }}{{ v | int(3) }}{% if not v %}not{% endif %}"
)


def test_a_null_that_is_printed_is_told_from_the_same_word() -> None:
    """However it is printed, wherever it is; and a null of which a template only asks is one to all it can ask."""
    call = {"function": {"name": "f", "arguments": {"x": None}}}
    message = Message("assistant", "None", None, {"tool_calls": [call]})
    asked = "{% for m in messages %}f{{ m.content }}" + NULL_ASKED + "%s{% endfor %}"
    text, spans = ChatTemplate(asked.replace("%s", ""), SPECIAL, "x").render(Conversation((message,)))
    assert (text, spans) == (_transformers(asked.replace("%s", ""), [message.for_template()]), [(0, len(text))])
    for printed in ("v", "v | trim", "v ~ ''", "v | string | upper", "[v]", "m.tool_calls", "'%s' | format(v)"):
        source = asked.replace("%s", "{{ " + printed + " }}")
        with pytest.raises(RecordError, match=r'the word "None" of `messages\[0\].*\.x`, which is null') as caught:
            ChatTemplate(source, SPECIAL, "x").render(Conversation((message,)))
        assert caught.value.reason == "template"


def test_reasoning_is_there_under_the_names_that_templates_read() -> None:
    source = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }}|{{ m.content }}"
    source += "{% endfor %}"
    for key in ("reasoning_content", "thinking", "reasoning"):
        message = Message("assistant", "b", None, {key: "hm"})
        text, _ = ChatTemplate(source, SPECIAL, "x").render(Conversation((message,)))
        assert text == _transformers(source, [{"role": "assistant", "content": "b", key: "hm"}])


def test_a_template_that_prints_the_day_prints_the_one_it_was_given() -> None:
    source = "{{ strftime_now('%d %b %Y') }}"
    template = ChatTemplate(source, SPECIAL, "x", today="2026-02-03")
    assert template.today == "2026-02-03"
    assert template.render(Conversation((Message("user", "a"),)))[0] == "03 Feb 2026"
    assert template.identity != ChatTemplate(source, SPECIAL, "x", today="2026-02-04").identity
    other = ChatTemplate(TEMPLATES["plain"], SPECIAL, "x", today="2026-02-03")
    assert other.today is None
    assert other.identity == ChatTemplate(TEMPLATES["plain"], SPECIAL, "x", today="2026-02-04").identity


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].__class__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages[0].content.format(1) }}",
        "{{ messages[0].content.format.__globals__ }}",
        "{% set f = messages[0].content.format_map %}{{ f({'0': 1}) }}{{ ''['__class__'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages[0].pop('role') }}",
        "{{ dict.pop(messages[0], 'role') }}",
        "{{ dict.update(messages[0], role='x') }}",
        "{{ dict(a=1, b=2).items() | list }}{{ dict.fromkeys('ab', 1) | tojson }}{{ dict({'a': 1}).a }}",
        "{% set ns = namespace(_x=1) %}{{ ns._x }}",
        "{% set ns = namespace({'_x': 1}) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{% set ns = namespace({'a': 1}, self=2) %}{% set ns.a = ns.a + ns.self %}{{ ns.a }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages[0] | at }}",
    ],
)
def test_a_template_reaches_no_more_than_in_the_sandbox_of_transformers(source: str) -> None:
    source += TEMPLATES["plain"]
    messages = Message("user", "{0.__class__}"), Message("assistant", "b")
    try:
        expected = _transformers(source, [message.for_template() for message in messages])
    except Exception:
        expected = None
    if expected is None:
        with pytest.raises((RecordError, DataError)):
            ChatTemplate(source, SPECIAL, "x").render(Conversation(messages))
    else:
        assert ChatTemplate(source, SPECIAL, "x").render(Conversation(messages))[0] == expected


@pytest.mark.parametrize("source", ["{% if %}", "{{ x | nothing }}", "{% generation %}", "{{ " + "(" * 5000 + " }}"])
def test_what_is_no_template_is_an_error_of_its_file(source: str) -> None:
    with pytest.raises(DataError, match="not Jinja") as caught:
        ChatTemplate(source, SPECIAL, "some/file")
    assert caught.value.where == "some/file"
