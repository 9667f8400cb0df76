"""Token ids and target masks are those of an independent reference, for tokenizers and templates of many habits."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from chunkplan.errors import DataError
from chunkplan.intake import tokenizer as module
from chunkplan.intake.backends import fast, load_tokenizer
from chunkplan.intake.pieces import SHARED
from chunkplan.intake.records import Exchange, PromptRecord, Record, RecordError, TextRecord, TokensRecord
from chunkplan.intake.schemas import detect, parse
from tests.support.intake_checks import encode_all
from tests.support.places import ROOT
from tests.support.tokenizer_cases import (
    CHATML,
    CORPUS,
    STRINGS,
    byte_level,
    conversation,
    reference_mask,
    save_tokenizer,
)

SAMPLES = ROOT / "sample_data"


def test_text_is_what_the_tokenizer_says_and_every_token_but_the_first_counts(tmp_path: Path) -> None:
    tokenizer = byte_level()
    encoded = encode_all(load_tokenizer(save_tokenizer(tmp_path, tokenizer)), *map(TextRecord, STRINGS))
    for text, (input_ids, target) in zip(STRINGS, encoded, strict=True):
        assert input_ids.dtype == np.int32
        assert input_ids.tolist() == tokenizer.encode(text).ids
        assert target.tolist() == [index > 0 for index in range(len(input_ids))]


def test_text_gets_an_end_only_where_the_configuration_says_so_and_none_is_there(tmp_path: Path) -> None:
    tokenizer = byte_level()
    end = tokenizer.token_to_id("<|im_end|>")
    loaded = load_tokenizer(save_tokenizer(tmp_path, tokenizer, add_eos_token=True))
    (first, target), (second, _) = encode_all(loaded, TextRecord("It is"), TextRecord("It is<|im_end|>"))
    assert first.tolist() == second.tolist() == [*tokenizer.encode("It is").ids, end]
    assert target[-1]


@pytest.mark.parametrize("is_byte_level", [True, False])
def test_a_token_that_holds_the_end_of_a_prompt_and_the_begin_of_an_answer_is_trained_and_counted(
    tmp_path: Path, is_byte_level: bool
) -> None:
    """As a label behind a space is, in a prompt or in what a template puts before an answer."""
    tokenizer = byte_level()
    if not is_byte_level:  # as its normalizer is not one of those of which bytes tell
        tokenizer.normalizer = normalizers.Replace("\u2003", " ")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    loaded = load_tokenizer(save_tokenizer(tmp_path, tokenizer, chat_template=template))
    assert " is" in [tokenizer.decode([token]) for token in tokenizer.encode("What is").ids]
    records = [
        *(PromptRecord("What ", "is"), PromptRecord("What", " is")),
        *(conversation(("user", "It"), ("assistant", "is")), conversation(("user", "It"), ("assistant", "\nis"))),
    ]
    noted: dict[int, set[str]] = {}
    encoded = loaded.encode(records, noted)
    learnt = [tokenizer.decode(ids[target].tolist(), skip_special_tokens=False) for ids, target in encoded]
    assert learnt == [" is<|im_end|>", " is<|im_end|>", " is<|im_end|>", "\nis<|im_end|>"]
    assert noted == {0: {SHARED}, 2: {SHARED}}


def test_completions_count_from_the_first_character_after_the_prompt(tmp_path: Path) -> None:
    tokenizer = byte_level()
    end = tokenizer.token_to_id("<|im_end|>")
    pairs = [(prompt, completion) for prompt in ["", *STRINGS] for completion in STRINGS]
    encoded = encode_all(load_tokenizer(save_tokenizer(tmp_path, tokenizer)), *(PromptRecord(*pair) for pair in pairs))
    for (prompt, completion), (input_ids, target) in zip(pairs, encoded, strict=True):
        whole = tokenizer.encode(prompt + completion).ids
        assert input_ids.tolist() == [*whole, end]
        assert target.tolist() == [*reference_mask(tokenizer, whole, prompt + completion, prompt), True]


def test_an_end_that_is_there_already_is_not_repeated_and_counts(tmp_path: Path) -> None:
    tokenizer = byte_level()
    end = tokenizer.token_to_id("<|im_end|>")
    [(input_ids, target)] = encode_all(
        load_tokenizer(save_tokenizer(tmp_path, tokenizer)), PromptRecord("It", " is<|im_end|>")
    )
    assert input_ids.tolist().count(end) == 1
    assert target[-1]


def test_tokens_that_the_tokenizer_adds_count_only_after_the_completion(tmp_path: Path) -> None:
    tokenizer = byte_level()
    begin, end = (tokenizer.token_to_id(token) for token in ("<s>", "<|im_end|>"))
    plain = tokenizer.encode("It is fine.").ids
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> <s> $A <|im_end|>", special_tokens=[("<s>", begin), ("<|im_end|>", end)]
    )
    loaded = load_tokenizer(save_tokenizer(tmp_path, tokenizer, eos_token=None))
    [(input_ids, target)] = encode_all(loaded, PromptRecord("It is", " fine."))
    assert input_ids.tolist() == [begin, begin, *plain, end]
    in_text = reference_mask(tokenizer, plain, "It is fine.", "It is")
    assert target.tolist() == [False, False, *in_text, True]


def test_tokens_of_spaces_count_under_a_post_processor_that_trims_offsets(tmp_path: Path) -> None:
    tokenizer = byte_level()
    trimming = processors.ByteLevel(trim_offsets=True)
    tokenizer.post_processor = processors.Sequence([trimming, processors.TemplateProcessing(single="$A")])
    loaded = load_tokenizer(save_tokenizer(tmp_path, tokenizer, chat_template=CHATML))
    content = "x =     1;  y =   2"
    assert "Ġ" in tokenizer.encode(content).tokens or "ĠĠ" in tokenizer.encode(content).tokens
    [(input_ids, target)] = encode_all(loaded, conversation(("user", "?"), ("assistant", content)))
    assert tokenizer.decode(input_ids[target].tolist(), skip_special_tokens=False) == content + "<|im_end|>"


def test_spaces_written_as_marks_keep_their_place_in_the_text(tmp_path: Path) -> None:
    """Like Llama 2's tokenizer: the normalizer prepends a mark, so normalized and given text differ in length."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.decoder = decoders.Replace("▁", " ")
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<|im_end|>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    [(input_ids, target)] = encode_all(
        load_tokenizer(save_tokenizer(tmp_path, tokenizer)), PromptRecord("What is", " it? 日本")
    )
    assert tokenizer.decode(input_ids[target].tolist(), skip_special_tokens=False) == " it? 日本<|im_end|>"


def test_truncation_and_padding_stored_in_the_file_are_switched_off(tmp_path: Path) -> None:
    tokenizer = byte_level()
    lengths = [len(tokenizer.encode(text).ids) for text in CORPUS[:3]]
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    encoded = encode_all(load_tokenizer(save_tokenizer(tmp_path, tokenizer)), *map(TextRecord, CORPUS[:3]))
    assert [len(input_ids) for input_ids, _ in encoded] == lengths


def _with_habits(**habits: Any) -> Tokenizer:
    """The byte-level tokenizer, with what others do besides."""
    tokenizer = byte_level()
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
    """A token counts if one of its characters does, as offsets say, whatever the tokenizer does to a text."""
    tokenizer = _with_habits(**HABITS[habit])
    loaded = load_tokenizer(save_tokenizer(tmp_path, tokenizer))
    reference = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    rng = random.Random(habit)
    texts, spans, borders = [], [], []
    for _ in range(300):
        texts.append("".join(rng.choices(PIECES, k=rng.randint(0, 8))))
        places = sorted(rng.sample(range(len(texts[-1]) + 1), k=2 * rng.randint(0, min(3, (len(texts[-1]) + 1) // 2))))
        spans.append(list(zip(places[::2], places[1::2], strict=True)))
        borders.append(rng.randint(0, len(texts[-1])))
    for text, inside, (input_ids, mask, shares) in zip(
        texts, spans, loaded.library.rendered(texts, spans), strict=True
    ):
        encoding = reference.encode(text, add_special_tokens=False)
        assert input_ids.tolist() == encoding.ids
        expected = [
            end > start and any(start < last and end > first for first, last in inside)
            for start, end in encoding.offsets
        ]
        assert mask.tolist() == expected
        starts = [start for start, _ in itertools.compress(encoding.offsets, expected)]
        assert shares == any(not any(first <= start < last for first, last in inside) for start in starts)
    for text, border, (input_ids, mask, shares) in zip(
        texts, borders, loaded.library.prompts(texts, borders), strict=True
    ):
        encoding = reference.encode(text)
        expected, place = [], 0
        for is_added, (start, end) in zip(encoding.special_tokens_mask, encoding.offsets, strict=True):
            place = place if is_added or start == end else end
            expected.append(place > border and (is_added or start < end))
        assert input_ids.tolist() == encoding.ids
        assert mask.tolist() == expected
        assert shares == any(start < border < end for start, end in encoding.offsets)


def test_offsets_are_not_asked_for_where_bytes_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_tokenizer(save_tokenizer(tmp_path, _with_habits(normalizer=normalizers.NFC()), chat_template=CHATML))
    monkeypatch.setattr(fast, "_mask_by_offsets", None)
    records = [PromptRecord("What", f" {text}") for text in STRINGS if text != STRINGS[5]]
    records += [conversation(("user", "?"), ("assistant", text)) for text in STRINGS if text != STRINGS[5]]
    assert len(encode_all(loaded, *records)) == len(records)


def test_records_of_any_kind_are_encoded_in_order_and_in_calls_of_limited_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_tokenizer(save_tokenizer(tmp_path, byte_level(), chat_template=CHATML))
    kinds: list[Record] = [TextRecord("It is"), PromptRecord("a", "b"), conversation(("user", "a"))]
    records = [kinds[index] for index in (1, 0, 2, 2, 0, 1, 0, 0)]
    alone = [encode_all(loaded, record)[0] for record in records]
    for most in (1, 4, 1 << 20):
        monkeypatch.setattr(module, "CALL_BYTES", most)
        for (input_ids, target), (other_ids, other) in zip(encode_all(loaded, *records), alone, strict=True):
            assert input_ids.tolist() == other_ids.tolist()
            assert target.tolist() == other.tolist()


def test_a_tokenizer_that_fails_on_a_text_is_an_error_and_no_traceback(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]"))
    loaded = load_tokenizer(save_tokenizer(tmp_path, tokenizer, eos_token=None))
    with pytest.raises(DataError, match=r"cannot encode a text: .*UNK"):
        loaded.encode([TextRecord("b")])


def test_text_of_which_the_tokenizer_leaves_nothing_is_empty(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    loaded = load_tokenizer(save_tokenizer(tmp_path, tokenizer, eos_token=None))
    first, nothing = loaded.encode([TextRecord("a b"), TextRecord("\u2003")])
    assert not isinstance(first, RecordError)
    assert isinstance(nothing, RecordError)
    assert nothing.reason == "empty"


@pytest.mark.parametrize("config", [{}, {"add_bos_token": True, "add_eos_token": True}])
@pytest.mark.parametrize("framed", [False, True])
def test_beginning_and_end_are_there_once_whoever_adds_them(
    tmp_path: Path, config: dict[str, Any], framed: bool
) -> None:
    tokenizer = byte_level()
    begin, end = (tokenizer.token_to_id(token) for token in ("<s>", "<|im_end|>"))
    plain = tokenizer.encode("It is").ids
    if framed:
        tokenizer.post_processor = HABITS["framed"]["post_processor"]
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    loaded = load_tokenizer(save_tokenizer(tmp_path, tokenizer, bos_token="<s>", chat_template=template, **config))
    front, behind = ([begin], [end]) if framed or config else ([], [])
    for text in ("It is", "<s>It is", "It is<|im_end|>", "<s>It is<|im_end|>"):
        own_front, own_behind = [begin] * text.startswith("<s>"), [end] * text.endswith("<|im_end|>")
        [(input_ids, _)] = encode_all(loaded, TextRecord(text))
        assert input_ids.tolist() == [*(front or own_front), *plain, *(behind or own_behind)]
        [(input_ids, target)] = encode_all(loaded, PromptRecord(text[:3], text[3:]))
        assert input_ids.tolist() == [*(front or own_front), *plain, end]
        assert target[-1]
    [(input_ids, _)] = encode_all(loaded, conversation(("user", "It is")))
    assert input_ids.tolist() == [begin, *plain, end]


def test_an_exchange_is_a_conversation_where_there_is_a_template_and_else_two_lines(tmp_path: Path) -> None:
    exchange = Exchange("Be brief.", "What is it?", "It is fine.")
    tokenizer = byte_level()
    plain = load_tokenizer(save_tokenizer(tmp_path / "plain", tokenizer))
    templated = load_tokenizer(save_tokenizer(tmp_path / "templated", tokenizer, chat_template=CHATML))
    messages = ("system", "Be brief."), ("user", "What is it?"), ("assistant", "It is fine.")
    for loaded, same in (
        (plain, PromptRecord("Be brief.\nWhat is it?\n", "It is fine.")),
        (templated, conversation(*messages)),
    ):
        [(input_ids, target), (expected, expected_target)] = encode_all(loaded, exchange, same)
        assert input_ids.tolist() == expected.tolist()
        assert target.tolist() == expected_target.tolist()


def _reference(tokenizer: Any, record: dict[str, Any]) -> tuple[list[int], list[bool]]:
    """Ids and mask by transformers alone, one record at a time, from offsets and renderings of every beginning.

    The line end behind a turn is nobody's.
    """
    end = tokenizer.eos_token_id
    if "text" in record:
        ids = tokenizer(record["text"])["input_ids"]
        return ids, [False] + [True] * (len(ids) - 1)
    if "prompt" in record:
        found = tokenizer(record["prompt"] + record["completion"], return_offsets_mapping=True)
        mask = [end > len(record["prompt"]) for _, end in found["offset_mapping"]]
        return [*found["input_ids"], end], [False, *mask[1:], True]
    names = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
    messages = record.get("messages") or [
        {"role": names[turn["from"]], "content": turn["value"]} for turn in record["conversations"]
    ]

    def render(count: int, **options: Any) -> str:
        return str(tokenizer.apply_chat_template(messages[:count], tokenize=False, **options))

    spans = [
        (len(render(index, add_generation_prompt=True)), len(render(index + 1).rstrip("\n")))
        for index, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    found = tokenizer(render(len(messages)), add_special_tokens=False, return_offsets_mapping=True)
    mask = [any(start < last and end > first for first, last in spans) for start, end in found["offset_mapping"]]
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
    chats = [conversation(("user", value["prompt"]), ("assistant", value["completion"])) for value in values]
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
        parsed = [parse(layout, record) for record in records]
        encoded = [one.documents[0] for one in parsed if isinstance(one, TokensRecord)] or encode_all(loaded, *parsed)
        for (input_ids, target), (expected_ids, expected_target) in zip(encoded, expected, strict=True):
            assert input_ids.tolist() == expected_ids.tolist()
            assert target.tolist() == expected_target.tolist()
