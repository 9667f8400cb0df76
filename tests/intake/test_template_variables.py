"""Variables of chat templates: for all records by option, and of single records, with masks proved for each of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from chunkplan import IntakeOptions, analyze
from chunkplan.errors import DataError, UsageError
from chunkplan.intake.records import Conversation, Message, RecordError
from chunkplan.intake.template import ChatTemplate
from tests.support.intake_checks import marked_texts, write_lines
from tests.support.places import ROOT

TOKENIZER = ROOT / "sample_data" / "tokenizer"

#: As Qwen3 has it: an empty thought goes before an answer that is not to be thought about, as a part of the prompt.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}]
CONVERSATION = Conversation((Message("user", "Two and two?"), Message("assistant", "Four.")))


def _template(**variables: Any) -> ChatTemplate:
    return ChatTemplate(TEMPLATE, {}, "here", ends=["<|im_end|>"], variables=variables)


@pytest.mark.parametrize("value", [True, False])
def test_what_counts_with_a_variable_is_what_a_template_that_says_it_itself_has(value: bool) -> None:
    itself = ChatTemplate(
        f"{{% set enable_thinking = {str(value).lower()} %}}{TEMPLATE}", {}, "here", ends=["<|im_end|>"]
    )
    text, spans = itself.render(CONVERSATION)
    found = Conversation(CONVERSATION.messages, variables={"enable_thinking": value})
    assert _template(enable_thinking=value).render(CONVERSATION) == (text, spans)
    assert _template(enable_thinking=not value).render(found) == (text, spans)  # that of the record goes before
    rendered, _ = render_jinja_template([MESSAGES], chat_template=TEMPLATE, enable_thinking=value)
    assert [text] == rendered
    assert [text[start:stop] for start, stop in spans] == ["Four.<|im_end|>"]


def test_records_without_variables_are_rendered_as_before() -> None:
    text, _ = _template().render(CONVERSATION)
    _template().render(Conversation(CONVERSATION.messages, variables={"enable_thinking": False}))
    assert "<think>" not in text and _template().identity == ChatTemplate(TEMPLATE, {}, "here").identity
    assert _template(enable_thinking=False).identity != _template().identity


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "eos_token"])
def test_a_record_changes_neither_the_conversation_nor_a_special_token(name: str) -> None:
    template = ChatTemplate(TEMPLATE, {"eos_token": "<|im_end|>"}, "here")
    with pytest.raises(RecordError, match=f"`{name}` is no variable"):
        template.render(Conversation(CONVERSATION.messages, variables={name: []}))


def test_the_variables_of_a_template_are_known() -> None:
    source = "{% set x = 1 %}{{ raise_exception }}{{ bos_token }}{{ x }}{{ tools }}{{ range(2) }}{{ a }}"
    template = ChatTemplate(source, {"bos_token": "<s>"}, "here", for_tools="{{ b }}")
    assert template.asks_for == {"a", "b"}


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    return path


def test_a_variable_is_of_all_records_and_that_of_a_record_goes_before(tmp_path: Path, template: Path) -> None:
    own = {"chat_template_kwargs": {"enable_thinking": True}}
    records = [{"messages": MESSAGES}, {"messages": MESSAGES, **own}, {"question": "Hi?", "answer": "Yes.", **own}]
    found = []
    for number, record in enumerate(records):
        path = write_lines(tmp_path / f"{number}.jsonl", [record])
        options = IntakeOptions(chat_template_kwargs={"enable_thinking": False})
        analysis = analyze(path, tmp_path / f"of-{number}", options, tokenizer=TOKENIZER, chat_template=template)
        found += marked_texts(analysis)
        assert analysis.manifest["sources"][0]["unread_keys"] == {}
        assert analysis.options == options
    assert ["<think>" in text for text in found] == [True, False, False]
    assert all(text.endswith("⟦Four.<|im_end|>⟧⏎") for text in found[:2])


def test_variables_of_records_in_a_table_and_as_json_are_the_same(tmp_path: Path, template: Path) -> None:
    record = {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}}
    as_json = {**record, "chat_template_kwargs": json.dumps(record["chat_template_kwargs"])}
    paths = [write_lines(tmp_path / f"{number}.jsonl", [one]) for number, one in enumerate((record, as_json))]
    hashes = {
        analyze(path, tmp_path / "out", tokenizer=TOKENIZER, chat_template=template).manifest["content_hash"]
        for path in paths
    }
    assert len(hashes) == 1


def test_another_value_is_not_taken_from_the_cache(tmp_path: Path, template: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"messages": MESSAGES}])
    hashes = [
        analyze(
            path,
            tmp_path / "out",
            IntakeOptions(chat_template_kwargs=variables),
            tokenizer=TOKENIZER,
            chat_template=template,
        ).manifest["content_hash"]
        for variables in ({}, {"enable_thinking": True}, {"enable_thinking": False})
    ]
    assert hashes[0] == hashes[1] != hashes[2]  # rendered alike, and named nowhere in what is trained


@pytest.mark.parametrize(
    ("variables", "message", "hint"),
    [
        ({"enable_thinkng": False}, "does not read the variable enable_thinkng", "enable_thinking"),
        ({"messages": []}, "does not read the variable messages", "enable_thinking"),
    ],
)
def test_a_variable_that_the_template_does_not_read_is_refused(
    tmp_path: Path, template: Path, variables: dict[str, Any], message: str, hint: str
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"messages": MESSAGES}])
    with pytest.raises(UsageError, match=message) as caught:
        options = IntakeOptions(chat_template_kwargs=variables)
        analyze(path, tmp_path / "out", options, tokenizer=TOKENIZER, chat_template=template)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": MESSAGES, "enable_thinking": False}, "`enable_thinking` is not read"),
        ({"messages": MESSAGES, "chat_template_kwargs": [1]}, "`chat_template_kwargs` is a list, expected an object"),
        ({"prompt": "a", "completion": "b", "chat_template_kwargs": {"a": 1}}, "beside a prompt that is a string"),
    ],
)
def test_variables_elsewhere_are_refused(tmp_path: Path, record: dict[str, Any], message: str, template: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [record])
    with pytest.raises(DataError, match=message):
        analyze(path, tmp_path / "out", tokenizer=TOKENIZER, chat_template=template)
