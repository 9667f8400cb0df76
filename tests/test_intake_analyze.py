"""From files to an analysis: every record becomes one sequence or is counted, and equal input gives equal output."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from chunkplan.errors import DataError, UsageError
from chunkplan.intake import analyze as module
from chunkplan.intake.analyze import analyze, find_files
from chunkplan.planfile.folder import replace_folder
from chunkplan.planfile.load import load_analysis

TOKENIZER = Path(__file__).parent.parent / "sample_data" / "tokenizer"

TEXTS = [{"text": text} for text in ("one", "", "two two two two", "", "日本語 😀", "three")]
PROMPTS = [{"prompt": "1+1=", "completion": "2"}, {"prompt": "", "completion": ""}, {"prompt": "Say", "completion": ""}]
CHATS = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
    {"messages": []},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "no", "loss": False}]},
]
SHAREGPT = [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]


def _write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name, records in (("a", TEXTS), ("b", PROMPTS), ("c", CHATS), ("d", SHAREGPT)):
        _write(tmp_path / "data" / f"{name}.jsonl", records)
    return tmp_path / "data"


def test_a_folder_of_all_schemas_becomes_sequences_that_point_back_at_their_records(data: Path, tmp_path: Path) -> None:
    analysis = analyze(data, tmp_path / "out", tokenizer=TOKENIZER)
    assert analysis.source.tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 3]
    assert analysis.record.tolist() == [0, 2, 4, 5, 0, 2, 0, 2, 0]
    sources = analysis.manifest["sources"]
    assert [source["schema"] for source in sources] == ["text", "prompt+completion", "messages", "conversations"]
    assert [source["first_sequence_id"] for source in sources] == [0, 4, 6, 8]
    assert [source["rejected"] for source in sources] == [2, 1, 1, 0]
    for source in sources:
        assert source["records"] == source["num_sequences"] + source["rejected"]
        content = Path(source["path"]).read_bytes()
        assert (source["bytes"], source["content_hash"]) == (len(content), hashlib.sha256(content).hexdigest())
    assert analysis.manifest["rejected"] == {"empty": 4}
    assert analysis.manifest["exact"]


def test_tokens_and_masks_are_read_back_as_the_tokenizer_gave_them(data: Path, tmp_path: Path) -> None:
    analysis = analyze(data, tmp_path / "out", tokenizer=TOKENIZER)
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    decoded = []
    most = 0
    for sequence_id in range(analysis.num_sequences):
        input_ids, target = analysis.tokens()(sequence_id)
        most = max(most, int(input_ids.max()))
        assert len(input_ids) == analysis.num_tokens[sequence_id]
        assert target.sum() == analysis.num_target_tokens[sequence_id]
        decoded.append(
            tuple(tokenizer.decode(ids.tolist(), skip_special_tokens=False) for ids in (input_ids, input_ids[target]))
        )
    texts = [record["text"] for record in TEXTS if record["text"]]
    assert [whole for whole, _ in decoded[:4]] == texts
    assert decoded[4:6] == [("1+1=2<|im_end|>", "2<|im_end|>"), ("Say<|im_end|>", "<|im_end|>")]
    assert decoded[6][1] == "hello<|im_end|>\n"
    assert decoded[7][1] == ""
    whole = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    assert decoded[8] == (whole, "b<|im_end|>\n")
    assert analysis.manifest["max_token_id"] == most
    described = analysis.manifest["tokenizer"]
    assert described["content_hash"] == hashlib.sha256((TOKENIZER / "tokenizer.json").read_bytes()).hexdigest()
    assert (described["vocab_size"], described["eos_token"]) == (tokenizer.get_vocab_size(), "<|im_end|>")


def test_the_largest_token_id_is_kept_whatever_comes_last(data: Path, tmp_path: Path) -> None:
    analysis = analyze([data / "d.jsonl", data / "a.jsonl"], tmp_path / "out", tokenizer=TOKENIZER)
    assert analysis.manifest["max_token_id"] == analysis.tokens()(0)[0].max() > analysis.tokens()(4)[0].max()


def test_text_of_which_the_tokenizer_leaves_nothing_is_counted_as_empty(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    file = _write(tmp_path / "x.jsonl", [{"text": "a b"}, {"text": "  \n"}, {"text": "b"}])
    analysis = analyze(file, tmp_path / "out", tokenizer=tmp_path / "tokenizer.json")
    assert analysis.record.tolist() == [0, 2]
    assert analysis.manifest["rejected"] == {"empty": 1}


def test_equal_input_gives_an_equal_hash_however_it_is_cut_into_batches(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = analyze(data, tmp_path / "first", tokenizer=TOKENIZER)
    monkeypatch.setattr(module, "_BATCH_RECORDS", 2)
    second = analyze(data, tmp_path / "second", tokenizer=TOKENIZER)
    assert first.content_hash == second.content_hash
    assert first.manifest == second.manifest
    other = analyze(data / "a.jsonl", tmp_path / "other", tokenizer=TOKENIZER)
    cut = analyze(data / "a.jsonl", tmp_path / "cut", tokenizer=TOKENIZER, max_length=3)
    assert len({first.content_hash, other.content_hash, cut.content_hash}) == 3


def test_the_same_file_twice_is_two_sources(data: Path, tmp_path: Path) -> None:
    file = data / "a.jsonl"
    analysis = analyze([file, file], tmp_path / "out", tokenizer=TOKENIZER)
    assert analysis.source.tolist() == [0] * 4 + [1] * 4
    assert analysis.num_tokens[:4].tolist() == analysis.num_tokens[4:].tolist()


def test_without_a_tokenizer_lengths_are_a_quarter_of_the_bytes_and_at_least_1(data: Path, tmp_path: Path) -> None:
    calls = [{"name": "f"}]
    _write(
        data / "e.jsonl",
        [{"messages": [{"role": "assistant", "content": None, "tool_calls": calls}, {"role": "user", "content": "é"}]}],
    )
    analysis = analyze(data, tmp_path / "out")
    texts = [len(record["text"].encode()) for record in TEXTS if record["text"]]
    others = [5, 3, 7, 4, 2, len('[{"name":"f"}]') + 2]
    assert analysis.num_tokens.tolist() == [max(1, -(-num_bytes // 4)) for num_bytes in texts + others]
    assert np.array_equal(analysis.num_target_tokens, analysis.num_tokens - 1)
    assert not analysis.is_exact
    assert not analysis.has_tokens
    assert analysis.manifest["tokenizer"] is None
    assert analysis.manifest["max_token_id"] is None
    assert analysis.manifest["rejected"] == {"empty": 4}


@pytest.mark.parametrize("tokenizer", [TOKENIZER, None])
def test_longer_sequences_are_cut_to_their_first_tokens_and_counted(
    data: Path, tmp_path: Path, tokenizer: Path | None
) -> None:
    file = data / "a.jsonl"
    whole = analyze(file, tmp_path / "whole", tokenizer=tokenizer)
    cut = analyze(file, tmp_path / "cut", tokenizer=tokenizer, max_length=2)
    assert cut.num_tokens.tolist() == np.minimum(whole.num_tokens, 2).tolist()
    assert cut.manifest["truncated"] == {
        "num_sequences": int((whole.num_tokens > 2).sum()),
        "num_tokens": int(np.maximum(whole.num_tokens - 2, 0).sum()),
    }
    assert cut.manifest["options"] == {"max_length": 2}
    if tokenizer:
        for sequence_id in range(cut.num_sequences):
            for short, long in zip(cut.tokens()(sequence_id), whole.tokens()(sequence_id), strict=True):
                assert short.tolist() == long[:2].tolist()


def test_progress_ends_at_the_bytes_of_all_files(data: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    analyze(data, tmp_path / "out", progress=lambda done, total: calls.append((done, total)))
    size = sum(file.stat().st_size for file in data.iterdir())
    assert calls[-1] == (size, size)
    assert calls == sorted(calls)


def test_a_folder_is_its_jsonl_files_sorted(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "notes.txt", "deep/c.jsonl"):
        _write(tmp_path / name, TEXTS)
    assert find_files([tmp_path]) == [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    assert find_files([tmp_path / "notes.txt"]) == [tmp_path / "notes.txt"]


@pytest.mark.parametrize(
    ("paths", "message"), [(["none.jsonl"], "there is no file"), (["."], "has no"), ([], "no data")]
)
def test_paths_without_data_are_usage_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paths: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        analyze(paths, tmp_path / "out")


def test_a_maximum_length_below_1_is_a_usage_error(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="maximum length of 0"):
        analyze(data, tmp_path / "out", max_length=0)


@pytest.mark.parametrize("tokenizer", [TOKENIZER, None])
def test_a_bad_record_is_named_and_leaves_the_old_analysis(data: Path, tmp_path: Path, tokenizer: Path | None) -> None:
    out = tmp_path / "out"
    old = analyze(data, out)
    with (data / "d.jsonl").open("a") as file:
        file.write('\n{"conversations": [{"from": "gpt"}]}\n')
    with pytest.raises(DataError, match=r"`conversations\[0\]\.value` is missing") as caught:
        analyze(data, out, tokenizer=tokenizer)
    assert caught.value.where == f"{data / 'd.jsonl'}:3"
    assert load_analysis(out).content_hash == old.content_hash


def test_an_interrupted_run_leaves_the_old_analysis_and_nothing_else(data: Path, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    old = analyze(data / "a.jsonl", tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        analyze(data, tmp_path / "out", tokenizer=TOKENIZER, progress=interrupt)
    assert load_analysis(tmp_path / "out").content_hash == old.content_hash
    assert {path.name for path in tmp_path.iterdir()} == {"data", "out"}


def test_nothing_to_train_on_is_an_error(tmp_path: Path) -> None:
    empty = _write(tmp_path / "empty.jsonl", [{"text": ""}, {"text": ""}])
    with pytest.raises(DataError, match=r"no sequence in .*empty\.jsonl \(2 empty\)"):
        analyze(empty, tmp_path / "out")
    nothing = _write(tmp_path / "nothing.jsonl", [])
    with pytest.raises(DataError, match=r"\(no records\)"):
        analyze(nothing, tmp_path / "out")


def test_an_empty_file_beside_others_is_a_source_without_a_schema(data: Path, tmp_path: Path) -> None:
    _write(data / "0.jsonl", [])
    analysis = analyze(data, tmp_path / "out")
    assert analysis.manifest["sources"][0]["schema"] is None
    assert analysis.source.min() == 1


def test_a_source_without_any_target_fails_loudly(tmp_path: Path) -> None:
    record = {"messages": [{"role": "user", "content": "a"}, {"role": "model", "content": "b"}]}
    file = _write(tmp_path / "x.jsonl", [record] * 3)
    with pytest.raises(DataError, match="no token of its 3 sequences counts in the loss") as caught:
        analyze(file, tmp_path / "out", tokenizer=TOKENIZER)
    assert caught.value.where == str(file)
    assert caught.value.hint is not None
    assert "roles" in caught.value.hint
    cut = _write(tmp_path / "y.jsonl", [{"prompt": "a long prompt", "completion": "b"}])
    with pytest.raises(DataError) as caught:
        analyze(cut, tmp_path / "out", tokenizer=TOKENIZER, max_length=1)
    assert caught.value.hint is not None
    assert "--max-length" in caught.value.hint


def test_a_length_beyond_32_bits_is_an_error_and_never_wraps(tmp_path: Path) -> None:
    with replace_folder(tmp_path / "out", "analysis") as folder:
        intake = module._Intake(module.AnalysisWriter(folder), None, None)
        assert intake._cut(2**31 - 1, "x:1") == 2**31 - 1
        with pytest.raises(DataError, match="2147483648 tokens") as caught:
            intake._cut(2**31, "x:1")
        assert caught.value.where == "x:1"
