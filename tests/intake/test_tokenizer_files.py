"""The files of a tokenizer: its template and special tokens, as transformers finds them, and files that are neither."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from chunkplan.errors import DataError, UsageError
from chunkplan.intake.backends import load_tokenizer
from chunkplan.intake.records import Conversation, Message
from tests.support.tokenizer_cases import byte_level, conversation, save_tokenizer


def test_a_special_token_that_is_not_set_renders_as_nothing(tmp_path: Path) -> None:
    loaded = load_tokenizer(save_tokenizer(tmp_path, byte_level(), chat_template="[{{ bos_token }}]", bos_token=None))
    assert loaded.template is not None
    assert loaded.template.render(conversation(("user", "a"))) == ("[]", [])


def test_a_template_is_found_in_its_own_file_first_then_in_the_configuration(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "RAG"}, {"name": "default", "template": "LIST"}]
    folder = save_tokenizer(tmp_path / "t", byte_level(), chat_template=named)
    record = conversation(("user", "a"))

    def rendered() -> str:
        template = load_tokenizer(folder / "tokenizer.json").template
        assert template is not None
        return template.render(record)[0]

    assert rendered() == "LIST"
    (folder / "chat_template.jinja").write_text("FILE")
    assert rendered() == "FILE"


def test_template_and_special_tokens_are_those_that_transformers_takes(tmp_path: Path) -> None:
    """Of several templates the one for tools where there are tools, from the configuration or from files."""

    show = "{{ bos_token }}|{{ pad_token }}|{{ image_token }}|{{ boi_token }}|{{ add_bos_token }}{# %s #}%s{{ tools }}"
    named = [{"name": name, "template": show % (name, name)} for name in ("default", "tool_use", "rag")]
    folder = save_tokenizer(
        tmp_path,
        byte_level(),
        chat_template=named,
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token={"__type": "AddedToken", "content": "<s>"},
        image_token="<image>",
        extra_special_tokens={"boi_token": "<boi>"},
        add_bos_token=False,
    )

    def rendered() -> list[str]:
        reference, template = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder).template
        assert template is not None
        texts = []
        for tools in (None, [{"name": "f"}]):
            messages = [{"role": "user", "content": "a"}]
            texts.append(template.render(Conversation((Message("user", "a"),), tools))[0])
            assert texts[-1] == reference.apply_chat_template(messages, tools=tools, tokenize=False)
        return texts

    assert rendered() == ["<s>||<image>|<boi>|defaultNone", "<s>||<image>|<boi>|tool_use[{'name': 'f'}]"]
    before = load_tokenizer(folder).identity
    (folder / "chat_template.jinja").write_text("FILE")
    assert rendered() == ["FILE", "FILE"]
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("TOOLS")
    alone = load_tokenizer(folder).identity
    assert rendered() == ["FILE", "TOOLS"]
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("OTHER")
    assert rendered() == ["FILE", "OTHER"]
    assert len({before, alone, load_tokenizer(folder).identity}) == 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "not JSON"),
        ("tokenizer.json", "[]", "expected a JSON object"),
        ("tokenizer.json", '{"model": 1}', "not a tokenizer"),
        ("tokenizer_config.json", '{"eos_token": "<no>"}', "'<no>', which"),
        ("tokenizer_config.json", '{"eos_token": 3}', "`eos_token` is 3"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "not Jinja"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "rag", "template": ""}]}', 'named "default"'),
        ("tokenizer_config.json", '{"chat_template": 3}', "neither"),
    ],
)
def test_files_that_are_not_a_tokenizer_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    folder = save_tokenizer(tmp_path, byte_level())
    (folder / name).write_text(content)
    with pytest.raises(DataError) as caught:
        load_tokenizer(folder)
    assert caught.value.where == str(folder / name)
    assert message in caught.value.message


def test_a_tokenizer_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(UsageError, match="there is no tokenizer"):
        load_tokenizer(tmp_path / "none")
