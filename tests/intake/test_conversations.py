"""Conversations through a chat template: which of their tokens count, and what a template that fails is reported as."""

from __future__ import annotations

from pathlib import Path

import pytest

from chunkplan.errors import UsageError
from chunkplan.intake.backends import load_tokenizer
from chunkplan.intake.records import Conversation, Message, RecordError, TextRecord
from tests.support.intake_checks import encode_all
from tests.support.tokenizer_cases import CHATML, STRINGS, byte_level, conversation, reference_mask, save_tokenizer


def test_the_targets_of_a_conversation_decode_to_what_the_assistant_said(tmp_path: Path) -> None:
    tokenizer = byte_level()
    loaded = load_tokenizer(save_tokenizer(tmp_path, tokenizer, chat_template=CHATML))
    conversations, expected = [], []
    contents = [text for text in STRINGS if not text[0].isspace()]
    for index, content in enumerate(contents):
        other = contents[index - 1]
        conversations.append(
            conversation(
                ("system", other), ("user", content), ("assistant", content), ("user", "?"), ("assistant", other)
            )
        )
        rendered = (
            f"<|im_start|>system\n{other}<|im_end|>\n<|im_start|>user\n{content}<|im_end|>\n"
            f"<|im_start|>assistant\n{content}<|im_end|>\n<|im_start|>user\n?<|im_end|>\n"
            f"<|im_start|>assistant\n{other}<|im_end|>\n"
        )
        expected.append((rendered, f"{content}<|im_end|>{other}<|im_end|>"))
    for (rendered, said), (input_ids, target) in zip(expected, encode_all(loaded, *conversations), strict=True):
        assert input_ids.tolist() == tokenizer.encode(rendered, add_special_tokens=False).ids
        decoded = tokenizer.decode(input_ids[target].tolist(), skip_special_tokens=False)
        assert decoded == said


def test_a_token_that_begins_in_the_header_of_a_message_is_no_target(tmp_path: Path) -> None:
    """GPT-2's way to split text joins the line end of the header with the spaces that the content begins with."""
    tokenizer = byte_level()
    loaded = load_tokenizer(save_tokenizer(tmp_path, tokenizer, chat_template=CHATML))
    header = "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"
    for content in STRINGS:
        [(input_ids, target)] = encode_all(loaded, conversation(("user", "?"), ("assistant", content)))
        text = f"{header}{content}<|im_end|>\n"
        expected = reference_mask(tokenizer, input_ids.tolist(), text, header)
        assert target.tolist() == [*expected[:-1], False]  # nobody writes the line end behind the turn


def test_messages_count_as_they_say(tmp_path: Path) -> None:
    tokenizer = byte_level()
    loaded = load_tokenizer(save_tokenizer(tmp_path, tokenizer, chat_template=CHATML))
    record = conversation(("user", "a"), ("assistant", "b"), ("assistant", "c"), counts=(True, False, True))
    [(input_ids, target)] = encode_all(loaded, record)
    decoded = tokenizer.decode(input_ids[target].tolist(), skip_special_tokens=False)
    # The very first token is never a target: nothing predicts it.
    assert decoded == "user\na<|im_end|>\nc<|im_end|>"


@pytest.mark.parametrize(
    "template",
    [
        "{% if not messages %}{{ raise_exception('no messages') }}{% endif %}" + CHATML,
        "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nbe kind<|im_end|>\n{% endif %}" + CHATML,
    ],
)
def test_a_conversation_may_begin_with_the_assistant(tmp_path: Path, template: str) -> None:
    tokenizer = byte_level()
    loaded = load_tokenizer(save_tokenizer(tmp_path, tokenizer, chat_template=template))
    [(input_ids, target)] = encode_all(loaded, conversation(("assistant", "hi"), ("user", "a"), ("assistant", "b")))
    decoded = tokenizer.decode(input_ids[target].tolist(), skip_special_tokens=False)
    assert decoded == "hi<|im_end|>b<|im_end|>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[-1].content }}", "otherwise when others"),
        (CHATML.replace("{{ m", "{{ loop.index }}{{ m"), "begins `messages[1]` neither with its generation prompt"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7]['role'] }}", "raised on this conversation"),
        ("{{ 1 + messages[0]['content'] }}", "raised on this conversation"),
        ("{{ messages.append(1) }}", "raised on this conversation"),
    ],
)
def test_a_template_that_fails_or_looks_ahead_is_an_error_at_the_record(
    tmp_path: Path, template: str, message: str
) -> None:
    loaded = load_tokenizer(save_tokenizer(tmp_path, byte_level(), chat_template=template))
    record = conversation(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    good = TextRecord("It is")
    first, error, last = loaded.encode([good, record, good])
    assert isinstance(error, RecordError)
    assert error.reason == "template"
    assert message in error.message
    for one in (first, last):
        assert not isinstance(one, RecordError)
        assert one[0].tolist() == encode_all(loaded, good)[0][0].tolist()


def test_an_answer_that_the_template_leaves_out_is_named(tmp_path: Path) -> None:
    """Even where the generation prompt looks like the message that follows."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}U{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}U{% endif %}"
    )
    loaded = load_tokenizer(save_tokenizer(tmp_path, byte_level(), chat_template=template))
    messages = ("user", "a"), ("assistant", "x"), ("user", "b")
    [error] = loaded.encode([conversation(*messages)])
    assert isinstance(error, RecordError)
    assert "leaves out what the assistant says in `messages[1]`" in error.message
    [(_, last)] = encode_all(loaded, conversation(*messages, counts=(False, False, True)))
    assert last.tolist() == [False, False, True, True]


def test_templates_see_what_transformers_shows_them(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}|{{ eos_token }}|{{ tools | tojson }}|{% for m in messages %}{% if loop.index0 %}{% break %}"
        "{% endif %}\n    {% if m.tool_calls %}\n{{ m.tool_calls[0] | tojson }}{% endif %}{% endfor %}"
    )
    loaded = load_tokenizer(
        save_tokenizer(tmp_path, byte_level(), chat_template=template, bos_token={"content": "<s>"})
    )
    call = {"name": "<ü>"}
    record = Conversation((Message("assistant", None, False, {"tool_calls": [call]}),), [{"a": 1}])
    assert loaded.template is not None
    assert loaded.template.render(record)[0] == '<s>|<|im_end|>|[{"a": 1}]|{"name": "<ü>"}'


def test_conversations_need_a_template(tmp_path: Path) -> None:
    loaded = load_tokenizer(save_tokenizer(tmp_path, byte_level()))
    with pytest.raises(UsageError, match="has no chat template") as caught:
        encode_all(loaded, conversation(("user", "a")))
    assert caught.value.hint
