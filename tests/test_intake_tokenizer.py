"""Token ids and target masks are those of an independent reference, for tokenizers and templates of many habits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from chunkplan.errors import DataError, UsageError
from chunkplan.intake.records import Conversation, Message, PromptRecord, TextRecord
from chunkplan.intake.tokenizer_files import load_tokenizer

CORPUS = ["def f(x):\n    return x  # yes", "日本語のテキスト and naïve café 😀😀", "What is it? It is fine."] * 4
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: Strings whose characters take one to four bytes, some of which only combine into what is seen.
STRINGS = ["plain text", "    indented", "日本語", "😀", "\U0001f469\u200d\U0001f467 family"]
STRINGS += ["e\u0301\u0323 combined", "\n\n", " ", "naïve café", "𝔘nicode"]


def _byte_level() -> Tokenizer:
    """A byte-level BPE like GPT-2's, so small that most characters outside ASCII are several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _save(folder: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", **config}))
    return folder


def _reference_mask(tokenizer: Tokenizer, ids: list[int], text: str, prompt: str) -> list[bool]:
    """Found from the bytes of every token alone: does it begin in a character at or after the end of the prompt?

    The name of a byte-level token has one character a byte.
    """
    character = [index for index, letter in enumerate(text) for _ in letter.encode()]
    starts = np.cumsum([0, *(len(tokenizer.id_to_token(token)) for token in ids)])[:-1]
    return [bool(index) and character[start] >= len(prompt) for index, start in enumerate(starts)]


def _conversation(*messages: tuple[str, str], counts: tuple[bool, ...] | None = None) -> Conversation:
    counts = counts or tuple(role == "assistant" for role, _ in messages)
    return Conversation(
        tuple(Message(role, content, count) for (role, content), count in zip(messages, counts, strict=True)),
        None,
        "x.jsonl:5",
    )


def test_text_is_what_the_tokenizer_says_and_every_token_but_the_first_counts(tmp_path: Path) -> None:
    tokenizer = _byte_level()
    encoded = load_tokenizer(_save(tmp_path, tokenizer)).encode([TextRecord(text) for text in STRINGS])
    for text, (input_ids, target) in zip(STRINGS, encoded, strict=True):
        assert input_ids.dtype == np.int32
        assert input_ids.tolist() == tokenizer.encode(text).ids
        assert target.tolist() == [index > 0 for index in range(len(input_ids))]


def test_text_gets_an_end_only_where_the_configuration_says_so_and_none_is_there(tmp_path: Path) -> None:
    tokenizer = _byte_level()
    end = tokenizer.token_to_id("<|im_end|>")
    loaded = load_tokenizer(_save(tmp_path, tokenizer, add_eos_token=True))
    (first, target), (second, _) = loaded.encode([TextRecord("It is"), TextRecord("It is<|im_end|>")])
    assert first.tolist() == second.tolist() == [*tokenizer.encode("It is").ids, end]
    assert target[-1]


def test_completions_count_from_the_first_character_after_the_prompt(tmp_path: Path) -> None:
    tokenizer = _byte_level()
    end = tokenizer.token_to_id("<|im_end|>")
    pairs = [(prompt, completion) for prompt in ["", *STRINGS] for completion in STRINGS]
    encoded = load_tokenizer(_save(tmp_path, tokenizer)).encode([PromptRecord(*pair) for pair in pairs])
    for (prompt, completion), (input_ids, target) in zip(pairs, encoded, strict=True):
        whole = tokenizer.encode(prompt + completion).ids
        assert input_ids.tolist() == [*whole, end]
        assert target.tolist() == [*_reference_mask(tokenizer, whole, prompt + completion, prompt), True]


def test_an_end_that_is_there_already_is_not_repeated_and_counts(tmp_path: Path) -> None:
    tokenizer = _byte_level()
    end = tokenizer.token_to_id("<|im_end|>")
    [(input_ids, target)] = load_tokenizer(_save(tmp_path, tokenizer)).encode([PromptRecord("It", " is<|im_end|>")])
    assert input_ids.tolist().count(end) == 1
    assert target[-1]


def test_tokens_that_the_tokenizer_adds_count_only_after_the_completion(tmp_path: Path) -> None:
    tokenizer = _byte_level()
    begin, end = (tokenizer.token_to_id(token) for token in ("<s>", "<|im_end|>"))
    plain = tokenizer.encode("It is fine.").ids
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> <s> $A <|im_end|>", special_tokens=[("<s>", begin), ("<|im_end|>", end)]
    )
    loaded = load_tokenizer(_save(tmp_path, tokenizer, eos_token=None))
    [(input_ids, target)] = loaded.encode([PromptRecord("It is", " fine.")])
    assert input_ids.tolist() == [begin, begin, *plain, end]
    in_text = _reference_mask(tokenizer, plain, "It is fine.", "It is")
    assert target.tolist() == [False, False, *in_text, True]


def test_tokens_of_spaces_count_under_a_post_processor_that_trims_offsets(tmp_path: Path) -> None:
    tokenizer = _byte_level()
    byte_level = processors.ByteLevel(trim_offsets=True)
    tokenizer.post_processor = processors.Sequence([byte_level, processors.TemplateProcessing(single="$A")])
    loaded = load_tokenizer(_save(tmp_path, tokenizer, chat_template=CHATML))
    content = "x =     1;  y =   2"
    assert "Ġ" in tokenizer.encode(content).tokens or "ĠĠ" in tokenizer.encode(content).tokens
    [(input_ids, target)] = loaded.encode([_conversation(("user", "?"), ("assistant", content))])
    assert tokenizer.decode(input_ids[target].tolist(), skip_special_tokens=False) == content + "<|im_end|>\n"


def test_spaces_written_as_marks_keep_their_place_in_the_text(tmp_path: Path) -> None:
    """Like Llama 2's tokenizer: the normalizer prepends a mark, so normalized and given text differ in length."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.decoder = decoders.Replace("▁", " ")
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<|im_end|>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    [(input_ids, target)] = load_tokenizer(_save(tmp_path, tokenizer)).encode([PromptRecord("What is", " it? 日本")])
    assert tokenizer.decode(input_ids[target].tolist(), skip_special_tokens=False) == " it? 日本<|im_end|>"


def test_truncation_and_padding_stored_in_the_file_are_switched_off(tmp_path: Path) -> None:
    tokenizer = _byte_level()
    lengths = [len(tokenizer.encode(text).ids) for text in CORPUS[:3]]
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    encoded = load_tokenizer(_save(tmp_path, tokenizer)).encode([TextRecord(text) for text in CORPUS[:3]])
    assert [len(input_ids) for input_ids, _ in encoded] == lengths


def test_the_targets_of_a_conversation_decode_to_what_the_assistant_said(tmp_path: Path) -> None:
    tokenizer = _byte_level()
    loaded = load_tokenizer(_save(tmp_path, tokenizer, chat_template=CHATML))
    conversations, expected = [], []
    contents = [text for text in STRINGS if not text[0].isspace()]
    for index, content in enumerate(contents):
        other = contents[index - 1]
        conversations.append(
            _conversation(
                ("system", other), ("user", content), ("assistant", content), ("user", "?"), ("assistant", other)
            )
        )
        rendered = (
            f"<|im_start|>system\n{other}<|im_end|>\n<|im_start|>user\n{content}<|im_end|>\n"
            f"<|im_start|>assistant\n{content}<|im_end|>\n<|im_start|>user\n?<|im_end|>\n"
            f"<|im_start|>assistant\n{other}<|im_end|>\n"
        )
        expected.append((rendered, f"{content}<|im_end|>\n{other}<|im_end|>\n"))
    for (rendered, said), (input_ids, target) in zip(expected, loaded.encode(conversations), strict=True):
        assert input_ids.tolist() == tokenizer.encode(rendered, add_special_tokens=False).ids
        decoded = tokenizer.decode(input_ids[target].tolist(), skip_special_tokens=False)
        assert decoded == said


def test_a_token_that_begins_in_the_header_of_a_message_is_no_target(tmp_path: Path) -> None:
    """GPT-2's way to split text joins the line end of the header with the spaces that the content begins with."""
    tokenizer = _byte_level()
    loaded = load_tokenizer(_save(tmp_path, tokenizer, chat_template=CHATML))
    header = "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"
    for content in STRINGS:
        [(input_ids, target)] = loaded.encode([_conversation(("user", "?"), ("assistant", content))])
        text = f"{header}{content}<|im_end|>\n"
        assert target.tolist() == _reference_mask(tokenizer, input_ids.tolist(), text, header)


def test_messages_count_as_they_say(tmp_path: Path) -> None:
    tokenizer = _byte_level()
    loaded = load_tokenizer(_save(tmp_path, tokenizer, chat_template=CHATML))
    record = _conversation(("user", "a"), ("assistant", "b"), ("assistant", "c"), counts=(True, False, True))
    [(input_ids, target)] = loaded.encode([record])
    decoded = tokenizer.decode(input_ids[target].tolist(), skip_special_tokens=False)
    # The very first token is never a target: nothing predicts it.
    assert decoded == "user\na<|im_end|>\nc<|im_end|>\n"


@pytest.mark.parametrize(
    "template",
    [
        "{% if not messages %}{{ raise_exception('no messages') }}{% endif %}" + CHATML,
        "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nbe kind<|im_end|>\n{% endif %}" + CHATML,
    ],
)
def test_a_conversation_may_begin_with_the_assistant(tmp_path: Path, template: str) -> None:
    tokenizer = _byte_level()
    loaded = load_tokenizer(_save(tmp_path, tokenizer, chat_template=template))
    [(input_ids, target)] = loaded.encode([_conversation(("assistant", "hi"), ("user", "a"), ("assistant", "b"))])
    decoded = tokenizer.decode(input_ids[target].tolist(), skip_special_tokens=False)
    assert decoded == "hi<|im_end|>\nb<|im_end|>\n"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.content }}{% if loop.last %}<s>{% endif %}{% endfor %}", "otherwise when others"),
        ("{{ messages[-1].content }}", "otherwise when others"),
        (CHATML.replace("assistant\n", "assistant\n<think>"), "and the generation prompt otherwise"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7]['role'] }}", "raised on this conversation"),
        ("{{ 1 + messages[0]['content'] }}", "raised on this conversation"),
        ("{{ messages.append(1) }}", "raised on this conversation"),
    ],
)
def test_a_template_that_fails_or_looks_ahead_is_an_error_at_the_record(
    tmp_path: Path, template: str, message: str
) -> None:
    loaded = load_tokenizer(_save(tmp_path, _byte_level(), chat_template=template))
    record = _conversation(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    with pytest.raises(DataError) as caught:
        loaded.encode([record])
    assert caught.value.where == "x.jsonl:5"
    assert message in caught.value.message


def test_a_message_that_the_template_leaves_out_has_no_target(tmp_path: Path) -> None:
    """Even where the generation prompt looks like the message that follows."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}U{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}U{% endif %}"
    )
    loaded = load_tokenizer(_save(tmp_path, _byte_level(), chat_template=template))
    messages = ("user", "a"), ("assistant", "x"), ("user", "b")
    [(_, target), (_, last)] = loaded.encode(
        [_conversation(*messages), _conversation(*messages, counts=(False, True, True))]
    )
    assert target.tolist() == [False] * 4
    assert last.tolist() == [False, False, True, True]


def test_templates_see_what_transformers_shows_them(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}|{{ eos_token }}|{{ tools | tojson }}|{% for m in messages %}{% if loop.index0 %}{% break %}"
        "{% endif %}\n    {% if m.tool_calls %}\n{{ m.tool_calls[0] | tojson }}{% endif %}{% endfor %}"
    )
    loaded = load_tokenizer(_save(tmp_path, _byte_level(), chat_template=template, bos_token={"content": "<s>"}))
    call = {"name": "<ü>"}
    record = Conversation((Message("assistant", None, False, {"tool_calls": [call]}),), [{"a": 1}], "x:1")
    assert loaded.template is not None
    assert loaded.template.render(record)[0] == '<s>|<|im_end|>|[{"a": 1}]|{"name": "<ü>"}'


def test_a_special_token_that_is_not_set_renders_as_nothing(tmp_path: Path) -> None:
    loaded = load_tokenizer(_save(tmp_path, _byte_level(), chat_template="[{{ bos_token }}]", bos_token=None))
    assert loaded.template is not None
    assert loaded.template.render(_conversation(("user", "a"))) == ("[]", [])


def test_a_template_is_found_in_its_own_file_first_then_in_the_configuration(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "RAG"}, {"name": "default", "template": "LIST"}]
    folder = _save(tmp_path / "t", _byte_level(), chat_template=named)
    record = _conversation(("user", "a"))

    def rendered() -> str:
        template = load_tokenizer(folder / "tokenizer.json").template
        assert template is not None
        return template.render(record)[0]

    assert rendered() == "LIST"
    (folder / "chat_template.jinja").write_text("FILE")
    assert rendered() == "FILE"


def test_conversations_need_a_template(tmp_path: Path) -> None:
    loaded = load_tokenizer(_save(tmp_path, _byte_level()))
    with pytest.raises(UsageError, match="has no chat template") as caught:
        loaded.encode([_conversation(("user", "a"))])
    assert caught.value.hint


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
    folder = _save(tmp_path, _byte_level())
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
