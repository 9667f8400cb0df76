"""Conversations that templates of real models render are kept: with declared tools, and with words of the templates."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from transformers import AutoTokenizer

from chunkplan.intake.backends import load_tokenizer
from chunkplan.intake.records import Conversation, JsonObject, Message, RecordError
from chunkplan.intake.schemas import detect, parse
from chunkplan.intake.template import ChatTemplate
from chunkplan.intake.template_render import WatchedTemplate
from tests.support.places import ROOT
from tests.support.template_cases import (
    ENDS,
    PLAIN,
    SPECIAL,
    conversation,
    counting,
    in_transformers,
    source_of,
    template,
)

TOKENIZER = ROOT / "sample_data" / "tokenizer"
REFERENCE = AutoTokenizer.from_pretrained(TOKENIZER)

LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a place up.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"place": "here"}}}
CALLED = (
    Message("user", "Where is it?"),
    Message("assistant", "", None, {"tool_calls": [CALL]}),
    Message("tool", "It is over there."),
    Message("assistant", "There."),
)
SYSTEM = Message("system", "Be kind.")

#: Conversations with tools -> what counts of them in the templates of Llama 3.1 and 3.2.
WITH_TOOLS = {
    "one turn": (PLAIN.messages[:2], ["Hello."]),
    "turns": (PLAIN.messages, ["Hello.", "Well."]),
    "turns behind a system message": ((SYSTEM, *PLAIN.messages), ["Hello.", "Well."]),
    "a call first": (CALLED, ['{"name": "look_up", "parameters": {"place": "here"}}', "There."]),
    "a call later": (
        (SYSTEM, *PLAIN.messages, *CALLED),
        ["Hello.", "Well.", '{"name": "look_up", "parameters": {"place": "here"}}', "There."],
    ),
}


@pytest.mark.parametrize("name", ["llama3_1", "llama3_2"])
@pytest.mark.parametrize("kind", WITH_TOOLS)
def test_a_template_that_puts_the_first_question_out_before_its_loop_keeps_conversations_with_tools(
    name: str, kind: str
) -> None:
    """With tools these templates put the first message of the user beside the tools; without, into the loop."""
    messages, said = WITH_TOOLS[kind]
    asked = Conversation(tuple(messages), [LOOK_UP])
    expected = [f"{text}<|eot_id|>" for text in said]
    assert counting(name, asked) == expected
    text, spans = template(name).render(asked)
    [(input_ids, counts, _)] = load_tokenizer(TOKENIZER).library.rendered([text], [spans])
    shown = [message.for_template() for message in messages]
    found = REFERENCE.apply_chat_template(shown, tools=[LOOK_UP], chat_template=source_of(name), **SPECIAL)
    assert input_ids.tolist() == found["input_ids"]
    assert REFERENCE.decode(input_ids[counts]) == "".join(expected)


@pytest.mark.parametrize("name", ["llama3_1", "llama3_2"])
def test_an_answer_that_such_a_template_puts_out_as_the_question_is_refused(name: str) -> None:
    asked = Conversation((Message("assistant", "Hello."), *PLAIN.messages), [LOOK_UP])
    text, _ = in_transformers(source_of(name), asked)
    assert text.index("<|start_header_id|>user") < text.index("Hello.") < text.index("<|start_header_id|>assistant")
    with pytest.raises(RecordError, match="does not begin an assistant message with its generation prompt"):
        template(name).render(asked)


@pytest.mark.parametrize("index", ["", "{{ loop.index }}"])
def test_headers_are_known_where_the_prompt_is_always_put_out_and_the_first_question_before_the_loop(
    index: str,
) -> None:
    source = (
        "{% if tools %}<|im_start|>user\n{{ messages[0].content }}<|im_end|>\n{% set messages = messages[1:] %}"
        "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}" + index + "\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}<|im_start|>assistant\n"
    )
    text, spans = ChatTemplate(source, SPECIAL, "x", ends=ENDS).render(Conversation(PLAIN.messages, [LOOK_UP]))
    assert [text[start:stop] for start, stop in spans] == ["Hello.<|im_end|>", "Well.<|im_end|>"]


#: Template -> words of its own, and what it puts out for the answers to two questions.
OWN_WORDS = {
    "gptoss": (
        ("message", "channel", "Return", "<|channel|>", "<|return|>", "<|end|>"),
        ["<|channel|>final<|message|>Hello.<|end|>", "<|channel|>final<|message|>Well.<|return|>"],
    ),
    "qwen3": (("<think>", "</think>", "<|im_end|>"), ["Hello.<|im_end|>", "<think>\n\n</think>\n\nWell.<|im_end|>"]),
    "glm4moe": (
        ("<think>", "</think>", "<think></think>", "<|user|>"),
        ["\n<think></think>\nHello.<|user|>", "\n<think></think>\nWell."],
    ),
    "llama3_1": (("<|eot_id|>",), ["Hello.<|eot_id|>", "Well.<|eot_id|>"]),
}


@pytest.mark.parametrize(("name", "word"), [(name, word) for name in OWN_WORDS for word in OWN_WORDS[name][0]])
def test_a_message_may_say_what_the_template_puts_into_the_answer_itself(name: str, word: str) -> None:
    for first, second in itertools.product((word, "Hi?"), repeat=2):
        assert counting(name, conversation(first, "Hello.", second, "Well.")) == OWN_WORDS[name][1]


def test_a_thought_channel_may_be_named_by_the_user() -> None:
    thought = Message("assistant", "", None, {"tool_calls": [CALL], "thinking": "I look."})
    asked = Conversation((Message("user", "analysis"), thought))
    assert counting("gptoss", asked)[0].startswith("<|channel|>analysis<|message|>I look.<|end|>")


def test_a_word_that_stands_there_once_more_than_the_template_has_it_is_that_of_the_neighbour() -> None:
    """Also where both neighbours say it, and only one of them is put out."""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if 'trap' in m.content %}{{ loop.nextitem.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    read = ChatTemplate(source, SPECIAL, "x", ends=ENDS)
    for first in ("Hi?", "<|im_end|>"):
        with pytest.raises(RecordError, match=r"says into `messages\[1\]`"):
            read.render(conversation(first, "A trap.", "<|im_end|>", "Well."))
    assert len(read.render(conversation("<|im_end|>", "Hello.", "<|im_end|>", "Well."))[1]) == 2


NEMOTRON = ("nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "nemotron_3_5_lightning")


@pytest.mark.parametrize("name", NEMOTRON)
def test_an_answer_with_the_end_of_a_thought_alone_counts_from_behind_the_header(name: str) -> None:
    """These templates put <think></think> before answers without a thought only, and their prompt begins a thought."""
    for said in ("hm\n</think>\n\nHello.", "So: <think>hm</think>Hello."):
        assert counting(name, conversation("Hi?", said)) == [f"{said}<|im_end|>"]
    counted = counting(name, conversation("Hi?", "hm</think>Hello.", "And?", "im</think>Well."))
    assert counted == ["hm</think>Hello.<|im_end|>", "im</think>Well.<|im_end|>"]


#: Keys that say nothing, and the templates that take one of them for something.
NOTHING: list[dict[str, Any]] = [{"tool_calls": []}, {"function_call": None, "tool_calls": None}]


@pytest.mark.parametrize("said", NOTHING)
@pytest.mark.parametrize("name", ["deepseekv3", "gptoss", "llama3_1", "llama3_2", "qwen3", "gemma4"])
def test_no_calls_are_no_calls_however_that_is_written(name: str, said: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo there"}]
    record = {"messages": [messages[0], {**messages[1], **said, "reasoning_content": ""}], "tools": []}
    asked = parse(detect([record]), record)
    assert isinstance(asked, Conversation)
    plain = Conversation((Message("user", "hi"), Message("assistant", "yo there")))
    assert template(name).render(asked) == template(name).render(plain)


@pytest.mark.parametrize("name", ["gemma4", "gemma4_v5", "deepseekv3", "qwen3"])
def test_a_conversation_of_many_turns_takes_a_few_renderings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ChatTemplate(source_of(name), SPECIAL, name, ends=ENDS)
    few, many = (conversation(*(f"text {at} is said" for at in range(2 * turns))) for turns in (2, 50))
    made.render(few)
    rendered = []
    render = WatchedTemplate.render

    def counted(self: WatchedTemplate, messages: Any, variables: Any) -> Any:
        rendered.append(len(messages))
        return render(self, messages, variables)

    monkeypatch.setattr(WatchedTemplate, "render", counted)
    text, spans = made.render(many)
    said = [text[start:stop] for start, stop in spans]
    assert len(said) == 50 and all(f"text {2 * at + 1} is said" in one for at, one in enumerate(said))
    assert len(rendered) <= 6


def test_a_prompt_that_a_word_of_the_user_changes_is_the_header_of_the_answers_behind_that_word() -> None:
    """Also where the first and the last of many answers have the same prompt."""
    source = (
        "{% set ns = namespace(no = false) %}{% for m in messages %}"
        "{% if m.role == 'user' %}{% if '/no' in m.content %}{% set ns.no = true %}{% endif %}"
        "{% if '/yes' in m.content %}{% set ns.no = false %}{% endif %}{% endif %}"
        "<{{ m.role }}>{% if m.role == 'assistant' %}(){% endif %}{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>({% if ns.no %}){% endif %}{% endif %}"
    )
    made = ChatTemplate(source, SPECIAL, "x", ends=ENDS)
    asked = ["ask", "ask", "ask /no", "ask", "ask", "ask /yes", "ask", "ask"]
    said = [text for number, question in enumerate(asked) for text in (question, f"answer {number}")]
    text, spans = made.render(conversation(*said))
    begins = ["" if 2 <= number < 5 else ")" for number in range(8)]
    assert [text[start:stop] for start, stop in spans] == [f"{begin}answer {at}</s>" for at, begin in enumerate(begins)]


def test_what_is_known_of_a_message_with_an_empty_key_is_not_held_against_one_without_it() -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{% if 'name' not in m %}{{ m.content }}{% endif %}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    made = ChatTemplate(source, SPECIAL, "x", ends=ENDS)
    fields: list[JsonObject] = [{"name": "", "id": ""}, {"id": ""}]
    named, other = (Conversation((Message("user", "ask"), Message("assistant", "an answer", None, f))) for f in fields)
    with pytest.raises(RecordError, match="leaves out what the assistant says"):
        made.render(named)
    text, [(start, stop)] = made.render(other)
    assert text[start:stop] == "an answer</s>"
