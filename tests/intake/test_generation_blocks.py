"""`{% generation %}` blocks of chat templates: what stands in them counts, as transformers says it does."""

from __future__ import annotations

import random
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from chunkplan.intake.backends import load_tokenizer
from chunkplan.intake.records import Conversation, Message, RecordError
from chunkplan.intake.template import ChatTemplate
from tests.support.places import ROOT

TOKENIZER = ROOT / "sample_data" / "tokenizer"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

GENERATION = {
    "whole": "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}",
    "dashes": "{%- for m in messages -%}\n  {{- m.role }}<|im_start|>{% if m.role == 'assistant' -%}\n"
    "    {%- generation -%}\n    {{ m.content }}. \n   {%- endgeneration -%}  \n"
    " {% else %}{{ m.content }}{% endif %}\n{% endfor %}",
}


@pytest.mark.parametrize("name", GENERATION)
def test_generation_blocks_give_the_mask_of_transformers(name: str) -> None:
    source = GENERATION[name]
    reference = AutoTokenizer.from_pretrained(TOKENIZER)
    loaded = load_tokenizer(TOKENIZER)
    template = ChatTemplate(source, SPECIAL, "x")
    rng = random.Random(name)
    for _ in range(60):
        messages = [
            Message(
                rng.choice(["user", "assistant", "system"]),
                rng.choice(["Say hi.", "日本 😀", "\ue000{% %}", "it's 12"]),
            )
            for _ in range(rng.randint(1, 6))
        ]
        found = reference.apply_chat_template(
            [message.for_template() for message in messages],
            chat_template=source,
            return_assistant_tokens_mask=True,
            return_dict=True,
            tokenize=True,
        )
        text, spans = template.render(Conversation(tuple(messages)))
        [(input_ids, mask, _)] = loaded.library.rendered([text], [spans])
        assert input_ids.tolist() == found["input_ids"]
        assert mask.astype(int).tolist() == found["assistant_masks"]


def _counting(source: str, *messages: Message) -> list[str]:
    text, spans = ChatTemplate(source, SPECIAL, "x").render(Conversation(messages))
    return [text[start:end] for start, end in spans]


def test_each_message_counts_as_it_says_where_there_is_one_generation_block_for_it() -> None:
    said = Message("user", "a", True), Message("assistant", "b", False), Message("assistant", "c")
    assert _counting(GENERATION["whole"], *said) == ["<|im_start|>user\na<|im_end|>\n", "c<|im_end|>\n"]


def test_what_messages_say_against_their_role_holds_for_all_their_blocks() -> None:
    twice = GENERATION["whole"].replace(
        "{{ m.content }}<|im_end|>\n{% endg", "{{ m.content }}{% endgeneration %}, {% generation %}<|im_end|>\n{% endg"
    )
    assert _counting(twice, Message("user", "a"), Message("assistant", "b")) == ["b", "<|im_end|>\n"]
    said = Message("user", "a", True), Message("assistant", "b")
    assert _counting(twice, *said) == ["<|im_start|>user\na<|im_end|>\n", "b", "<|im_end|>\n"]
    hidden = (
        "{% macro say(messages) %}" + twice + "{% endmacro %}{{ say(messages) }}"
    )  # whose output nobody tells apart
    with pytest.raises(RecordError, match="2 generation blocks for the 1 messages") as caught:
        _counting(hidden, *said)
    assert caught.value.reason == "template"


@pytest.mark.parametrize(
    "say",
    [
        "{% set text %}{% generation %}{{ m.content }}{% endgeneration %}{% endset %}{{ text | trim }}",
        "{% macro say() %}[{% generation %}{{ m.content }}{% endgeneration %}]{% endmacro %}{{ say() }}",
        "{% filter upper %}{% generation %}{{ m.content }}{% endgeneration %}{% endfilter %}",
    ],
)
def test_generation_blocks_in_variables_macros_and_filters_are_found_or_refused(say: str) -> None:
    source = "{% for m in messages %}" + say + "{% endfor %}"
    plain = source.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    for content in ("b", " b ", "B"):
        message = Message("assistant", content)
        expected = _transformers(plain, [message.for_template()])
        try:
            text, [(start, end)] = ChatTemplate(source, SPECIAL, "x").render(Conversation((message,)))
        except RecordError as error:
            assert (error.reason, content) == ("template", " b " if "trim" in say else content)
        else:
            assert (text, text[start:end]) == (expected, expected.strip("[]"))


def test_what_is_set_in_a_generation_block_stays_in_it() -> None:
    source = (
        "{% for m in messages %}{% generation %}{% set x = m.content %}{{ x }}{% endgeneration %}{{ x }};{% endfor %}"
    )
    message = Message("assistant", "b")
    text, spans = ChatTemplate(source, SPECIAL, "x").render(Conversation((message,)))
    assert (text, spans) == (_transformers(source, [message.for_template()]), [(0, 1)])


def _transformers(source: str, messages: list[dict[str, Any]], **others: Any) -> str:
    [text], _ = render_jinja_template([messages], chat_template=source, **SPECIAL, **others)
    return str(text)
