"""Token ids and target masks are those of an independent reference, for tokenizers and templates of many habits."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from chunkplan.errors import DataError, UsageError
from chunkplan.intake import tokenizer as module
from chunkplan.intake.backends import fast, load_tokenizer
from chunkplan.intake.records import Conversation, Exchange, Message, PromptRecord, Record, TextRecord, TokensRecord
from chunkplan.intake.rejection import RecordError
from chunkplan.intake.schemas import detect, parse
from tests.support.intake_checks import encode_all
from tests.support.places import ROOT

SAMPLES = ROOT / "sample_data"
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
    said = counts or (None,) * len(messages)
    return Conversation(
        tuple(Message(role, content, count) for (role, content), count in zip(messages, said, strict=True))
    )


def test_text_is_what_the_tokenizer_says_and_every_token_but_the_first_counts(tmp_path: Path) -> None:
    tokenizer = _byte_level()
    encoded = encode_all(load_tokenizer(_save(tmp_path, tokenizer)), *map(TextRecord, STRINGS))
    for text, (input_ids, target) in zip(STRINGS, encoded, strict=True):
        assert input_ids.dtype == np.int32
        assert input_ids.tolist() == tokenizer.encode(text).ids
        assert target.tolist() == [index > 0 for index in range(len(input_ids))]


def test_text_gets_an_end_only_where_the_configuration_says_so_and_none_is_there(tmp_path: Path) -> None:
    tokenizer = _byte_level()
    end = tokenizer.token_to_id("<|im_end|>")
    loaded = load_tokenizer(_save(tmp_path, tokenizer, add_eos_token=True))
    (first, target), (second, _) = encode_all(loaded, TextRecord("It is"), TextRecord("It is<|im_end|>"))
    assert first.tolist() == second.tolist() == [*tokenizer.encode("It is").ids, end]
    assert target[-1]


def test_completions_count_from_the_first_character_after_the_prompt(tmp_path: Path) -> None:
    tokenizer = _byte_level()
    end = tokenizer.token_to_id("<|im_end|>")
    pairs = [(prompt, completion) for prompt in ["", *STRINGS] for completion in STRINGS]
    encoded = encode_all(load_tokenizer(_save(tmp_path, tokenizer)), *(PromptRecord(*pair) for pair in pairs))
    for (prompt, completion), (input_ids, target) in zip(pairs, encoded, strict=True):
        whole = tokenizer.encode(prompt + completion).ids
        assert input_ids.tolist() == [*whole, end]
        assert target.tolist() == [*_reference_mask(tokenizer, whole, prompt + completion, prompt), True]


def test_an_end_that_is_there_already_is_not_repeated_and_counts(tmp_path: Path) -> None:
    tokenizer = _byte_level()
    end = tokenizer.token_to_id("<|im_end|>")
    [(input_ids, target)] = encode_all(load_tokenizer(_save(tmp_path, tokenizer)), PromptRecord("It", " is<|im_end|>"))
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
    [(input_ids, target)] = encode_all(loaded, PromptRecord("It is", " fine."))
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
    [(input_ids, target)] = encode_all(loaded, _conversation(("user", "?"), ("assistant", content)))
    assert tokenizer.decode(input_ids[target].tolist(), skip_special_tokens=False) == content + "<|im_end|>\n"


def test_spaces_written_as_marks_keep_their_place_in_the_text(tmp_path: Path) -> None:
    """Like Llama 2's tokenizer: the normalizer prepends a mark, so normalized and given text differ in length."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.decoder = decoders.Replace("▁", " ")
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<|im_end|>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    [(input_ids, target)] = encode_all(load_tokenizer(_save(tmp_path, tokenizer)), PromptRecord("What is", " it? 日本"))
    assert tokenizer.decode(input_ids[target].tolist(), skip_special_tokens=False) == " it? 日本<|im_end|>"


def test_truncation_and_padding_stored_in_the_file_are_switched_off(tmp_path: Path) -> None:
    tokenizer = _byte_level()
    lengths = [len(tokenizer.encode(text).ids) for text in CORPUS[:3]]
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    encoded = encode_all(load_tokenizer(_save(tmp_path, tokenizer)), *map(TextRecord, CORPUS[:3]))
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
    for (rendered, said), (input_ids, target) in zip(expected, encode_all(loaded, *conversations), strict=True):
        assert input_ids.tolist() == tokenizer.encode(rendered, add_special_tokens=False).ids
        decoded = tokenizer.decode(input_ids[target].tolist(), skip_special_tokens=False)
        assert decoded == said


def test_a_token_that_begins_in_the_header_of_a_message_is_no_target(tmp_path: Path) -> None:
    """GPT-2's way to split text joins the line end of the header with the spaces that the content begins with."""
    tokenizer = _byte_level()
    loaded = load_tokenizer(_save(tmp_path, tokenizer, chat_template=CHATML))
    header = "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"
    for content in STRINGS:
        [(input_ids, target)] = encode_all(loaded, _conversation(("user", "?"), ("assistant", content)))
        text = f"{header}{content}<|im_end|>\n"
        assert target.tolist() == _reference_mask(tokenizer, input_ids.tolist(), text, header)


def test_messages_count_as_they_say(tmp_path: Path) -> None:
    tokenizer = _byte_level()
    loaded = load_tokenizer(_save(tmp_path, tokenizer, chat_template=CHATML))
    record = _conversation(("user", "a"), ("assistant", "b"), ("assistant", "c"), counts=(True, False, True))
    [(input_ids, target)] = encode_all(loaded, record)
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
    [(input_ids, target)] = encode_all(loaded, _conversation(("assistant", "hi"), ("user", "a"), ("assistant", "b")))
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
    good = TextRecord("It is")
    first, error, last = loaded.encode([good, record, good])
    assert isinstance(error, RecordError)
    assert error.reason == "template"
    assert message in error.message
    for one in (first, last):
        assert not isinstance(one, RecordError)
        assert one[0].tolist() == encode_all(loaded, good)[0][0].tolist()


def test_a_message_that_the_template_leaves_out_has_no_target(tmp_path: Path) -> None:
    """Even where the generation prompt looks like the message that follows."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}U{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}U{% endif %}"
    )
    loaded = load_tokenizer(_save(tmp_path, _byte_level(), chat_template=template))
    messages = ("user", "a"), ("assistant", "x"), ("user", "b")
    [(_, target), (_, last)] = encode_all(
        loaded, _conversation(*messages), _conversation(*messages, counts=(False, True, True))
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
    record = Conversation((Message("assistant", None, False, {"tool_calls": [call]}),), [{"a": 1}])
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


def test_template_and_special_tokens_are_those_that_transformers_takes(tmp_path: Path) -> None:
    """Of several templates the one for tools where there are tools, from the configuration or from files."""
    from transformers import AutoTokenizer

    show = "{{ bos_token }}|{{ pad_token }}|{{ image_token }}|{{ boi_token }}|{{ add_bos_token }}{# %s #}%s{{ tools }}"
    named = [{"name": name, "template": show % (name, name)} for name in ("default", "tool_use", "rag")]
    folder = _save(
        tmp_path,
        _byte_level(),
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


def test_conversations_need_a_template(tmp_path: Path) -> None:
    loaded = load_tokenizer(_save(tmp_path, _byte_level()))
    with pytest.raises(UsageError, match="has no chat template") as caught:
        encode_all(loaded, _conversation(("user", "a")))
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


def _with_habits(**habits: Any) -> Tokenizer:
    """The byte-level tokenizer, with what others do besides."""
    tokenizer = _byte_level()
    tokenizer.add_tokens([AddedToken("<pad>", lstrip=True, rstrip=True), "naïve"])
    for name, value in habits.items():
        setattr(tokenizer, name, value)
    return tokenizer


LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
HABITS = {
    "byte level": {},
    "NFC": {"normalizer": normalizers.NFC()},
    "NFKD": {"normalizer": normalizers.NFKD()},
    "lower": {"normalizer": normalizers.Lowercase()},
    "prefix space": {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
    "split": {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "merged_with_next"), LEVEL])},
    "removed": {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), LEVEL])},
    "digits": {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), LEVEL])},
    "framed": {
        "post_processor": processors.TemplateProcessing(
            single="<s> $A <|im_end|>", special_tokens=[("<s>", 0), ("<|im_end|>", 2)]
        )
    },
}
PIECES = [*STRINGS, "<|im_start|>", "<|im_end|>", "<pad>", "e\u0301", "\u0958", "ﬁ", "A B", "12 34", "\u200d", "a" * 30]


@pytest.mark.parametrize("habit", HABITS)
def test_masks_told_from_bytes_are_those_told_from_offsets(tmp_path: Path, habit: str) -> None:
    """A token counts if the first of its characters does, as offsets say, whatever the tokenizer does to a text."""
    tokenizer = _with_habits(**HABITS[habit])
    loaded = load_tokenizer(_save(tmp_path, tokenizer))
    reference = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    rng = random.Random(habit)
    texts, spans, borders = [], [], []
    for _ in range(300):
        texts.append("".join(rng.choices(PIECES, k=rng.randint(0, 8))))
        places = sorted(rng.choices(range(len(texts[-1]) + 1), k=2 * rng.randint(0, 3)))
        spans.append(list(zip(places[::2], places[1::2], strict=True)))
        borders.append(rng.randint(0, len(texts[-1])))
    for text, inside, (input_ids, mask) in zip(texts, spans, loaded.backend.rendered(texts, spans), strict=True):
        encoding = reference.encode(text, add_special_tokens=False)
        assert input_ids.tolist() == encoding.ids
        assert mask.tolist() == [
            end > start and any(first <= start < last for first, last in inside) for start, end in encoding.offsets
        ]
    for text, border, (input_ids, mask) in zip(texts, borders, loaded.backend.prompts(texts, borders), strict=True):
        encoding = reference.encode(text)
        expected, place = [], -1
        for is_added, (start, _) in zip(encoding.special_tokens_mask, encoding.offsets, strict=True):
            place = place if is_added else max(place, start)
            expected.append(place >= border)
        assert input_ids.tolist() == encoding.ids
        assert mask.tolist() == expected


def test_offsets_are_not_asked_for_where_bytes_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_tokenizer(_save(tmp_path, _with_habits(normalizer=normalizers.NFC()), chat_template=CHATML))
    monkeypatch.setattr(fast, "_offsets", None)
    records = [PromptRecord("What", f" {text}") for text in STRINGS if text != STRINGS[5]]
    records += [_conversation(("user", "?"), ("assistant", text)) for text in STRINGS if text != STRINGS[5]]
    assert len(encode_all(loaded, *records)) == len(records)


def test_records_of_any_kind_are_encoded_in_order_and_in_calls_of_limited_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_tokenizer(_save(tmp_path, _byte_level(), chat_template=CHATML))
    tokens = TokensRecord(np.array([5, 6], np.int32), np.array([False, True]))
    kinds: list[Record] = [TextRecord("It is"), PromptRecord("a", "b"), _conversation(("user", "a")), tokens]
    records = [kinds[index % 4] for index in (3, 1, 0, 2, 2, 0, 1, 3, 0, 0)]
    alone = [encode_all(loaded, record)[0] for record in records]
    for most in (1, 4, 1 << 20):
        monkeypatch.setattr(module, "_CALL", most)
        for (input_ids, target), (other_ids, other) in zip(encode_all(loaded, *records), alone, strict=True):
            assert input_ids.tolist() == other_ids.tolist()
            assert target.tolist() == other.tolist()


def test_a_tokenizer_that_fails_on_a_text_is_an_error_and_no_traceback(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]"))
    loaded = load_tokenizer(_save(tmp_path, tokenizer, eos_token=None))
    with pytest.raises(DataError, match=r"cannot encode a text: .*UNK"):
        loaded.encode([TextRecord("b")])


def test_text_of_which_the_tokenizer_leaves_nothing_is_empty(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    loaded = load_tokenizer(_save(tmp_path, tokenizer, eos_token=None))
    first, nothing = loaded.encode([TextRecord("a b"), TextRecord("\u2003")])
    assert not isinstance(first, RecordError)
    assert isinstance(nothing, RecordError)
    assert nothing.reason == "empty"


@pytest.mark.parametrize("config", [{}, {"add_bos_token": True, "add_eos_token": True}])
@pytest.mark.parametrize("framed", [False, True])
def test_beginning_and_end_are_there_once_whoever_adds_them(
    tmp_path: Path, config: dict[str, Any], framed: bool
) -> None:
    tokenizer = _byte_level()
    begin, end = (tokenizer.token_to_id(token) for token in ("<s>", "<|im_end|>"))
    plain = tokenizer.encode("It is").ids
    if framed:
        tokenizer.post_processor = HABITS["framed"]["post_processor"]
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    loaded = load_tokenizer(_save(tmp_path, tokenizer, bos_token="<s>", chat_template=template, **config))
    front, behind = ([begin], [end]) if framed or config else ([], [])
    for text in ("It is", "<s>It is", "It is<|im_end|>", "<s>It is<|im_end|>"):
        own_front, own_behind = [begin] * text.startswith("<s>"), [end] * text.endswith("<|im_end|>")
        [(input_ids, _)] = encode_all(loaded, TextRecord(text))
        assert input_ids.tolist() == [*(front or own_front), *plain, *(behind or own_behind)]
        [(input_ids, target)] = encode_all(loaded, PromptRecord(text[:3], text[3:]))
        assert input_ids.tolist() == [*(front or own_front), *plain, end]
        assert target[-1]
    [(input_ids, _)] = encode_all(loaded, _conversation(("user", "It is")))
    assert input_ids.tolist() == [begin, *plain, end]


def test_an_exchange_is_a_conversation_where_there_is_a_template_and_else_two_lines(tmp_path: Path) -> None:
    exchange = Exchange("Be brief.", "What is it?", "It is fine.")
    tokenizer = _byte_level()
    plain = load_tokenizer(_save(tmp_path / "plain", tokenizer))
    templated = load_tokenizer(_save(tmp_path / "templated", tokenizer, chat_template=CHATML))
    messages = ("system", "Be brief."), ("user", "What is it?"), ("assistant", "It is fine.")
    for loaded, same in (
        (plain, PromptRecord("Be brief.\nWhat is it?\n", "It is fine.")),
        (templated, _conversation(*messages)),
    ):
        [(input_ids, target), (expected, expected_target)] = encode_all(loaded, exchange, same)
        assert input_ids.tolist() == expected.tolist()
        assert target.tolist() == expected_target.tolist()


def _reference(tokenizer: Any, record: dict[str, Any]) -> tuple[list[int], list[bool]]:
    """Ids and mask by transformers alone, one record at a time, from offsets and renderings of every beginning."""
    end = tokenizer.eos_token_id
    if "text" in record:
        ids = tokenizer(record["text"])["input_ids"]
        return ids, [False] + [True] * (len(ids) - 1)
    if "prompt" in record:
        found = tokenizer(record["prompt"] + record["completion"], return_offsets_mapping=True)
        mask = [start >= len(record["prompt"]) for start, _ in found["offset_mapping"]]
        return [*found["input_ids"], end], [False, *mask[1:], True]
    names = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
    messages = record.get("messages") or [
        {"role": names[turn["from"]], "content": turn["value"]} for turn in record["conversations"]
    ]

    def render(count: int, **options: Any) -> str:
        return str(tokenizer.apply_chat_template(messages[:count], tokenize=False, **options))

    spans = [
        (len(render(index, add_generation_prompt=True)), len(render(index + 1)))
        for index, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    found = tokenizer(render(len(messages)), add_special_tokens=False, return_offsets_mapping=True)
    mask = [any(first <= start < last for first, last in spans) for start, _ in found["offset_mapping"]]
    return found["input_ids"], [False, *mask[1:]]


def test_tokens_and_masks_of_the_sample_data_are_those_of_a_plain_reference() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SAMPLES / "tokenizer")
    loaded = load_tokenizer(SAMPLES / "tokenizer")
    schemas = set()
    for file in sorted(SAMPLES.glob("*.jsonl")):
        values = [json.loads(line) for line in file.read_bytes().splitlines()]
        values = [value | {"text": value["text"][:20_000]} if "text" in value else value for value in values[::3]]
        layout = detect(values[:100])
        schemas.add(layout.schema)
        encoded = encode_all(loaded, *(parse(layout, value) for value in values))
        for value, (input_ids, target) in zip(values, encoded, strict=True):
            expected_ids, expected = _reference(tokenizer, value)
            assert input_ids.tolist() == expected_ids
            assert target.tolist() == expected
    assert schemas == {"text", "prompt+completion", "messages", "conversations"}


def test_the_other_schemas_give_the_tokens_of_those_they_stand_for() -> None:
    loaded = load_tokenizer(SAMPLES / "tokenizer")
    values = [json.loads(line) for line in (SAMPLES / "math.jsonl").read_bytes().splitlines()][:100]
    chats = [_conversation(("user", value["prompt"]), ("assistant", value["completion"])) for value in values]
    expected = encode_all(loaded, *chats)
    layouts: list[list[dict[str, Any]]] = [
        [{"question": value["prompt"], "answer": value["completion"]} for value in values],
        [{"instruction": value["prompt"], "response": value["completion"], "input": ""} for value in values],
        [
            {"input_ids": ids.tolist(), "labels": [int(i) if t else -100 for i, t in zip(ids, mask, strict=True)]}
            for ids, mask in expected
        ],
    ]
    for records in layouts:
        layout = detect(records)
        encoded = encode_all(loaded, *(parse(layout, record) for record in records))
        for (input_ids, target), (expected_ids, expected_target) in zip(encoded, expected, strict=True):
            assert input_ids.tolist() == expected_ids.tolist()
            assert target.tolist() == expected_target.tolist()
