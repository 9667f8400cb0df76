"""From files to an analysis: every record becomes one sequence or is counted, and equal input gives equal output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from chunkplan import IntakeOptions, PlanConfig, analyze, build, load_analysis, validate
from chunkplan.errors import DataError, UsageError
from tests.support.intake_checks import TEXTS, write_lines
from tests.support.places import ROOT

TOKENIZER = ROOT / "sample_data" / "tokenizer"

SKIP = IntakeOptions(on_error="skip")


def test_a_folder_of_all_schemas_becomes_sequences_that_point_back_at_their_records(data: Path, tmp_path: Path) -> None:
    analysis = analyze(data, tmp_path / "out", SKIP, tokenizer=TOKENIZER)
    assert analysis.source.tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 3]
    assert analysis.record.tolist() == [0, 2, 4, 5, 0, 2, 0, 2, 0]
    sources = analysis.manifest["sources"]
    assert [source["schema"] for source in sources] == ["text", "prompt+completion", "messages", "conversations"]
    assert [source["first_sequence_id"] for source in sources] == [0, 4, 6, 8]
    assert [source["rejected"] for source in sources] == [2, 1, 1, 0]
    assert [source["bytes"] for source in sources] == [Path(source["path"]).stat().st_size for source in sources]
    for source in sources:
        assert source["records"] == source["num_sequences"] + source["rejected"]
        assert source["evidence"]
    assert analysis.manifest["rejected"] == {"empty": 4}
    assert analysis.manifest["exact"]
    assert analysis.place(1) == f"{data / 'a.jsonl'}:3"
    assert validate(tmp_path / "out").ok


def test_options_are_read_back_as_they_were_given_and_a_file_of_lengths_has_none(tmp_path: Path) -> None:
    options = IntakeOptions(max_length=9, long="drop", columns={"text": "body"}, sample=0.999, on_error="skip")
    file = write_lines(tmp_path / "x.jsonl", [{"body": "one two three"}] * 20)
    assert analyze(file, tmp_path / "out", options).options == options
    assert load_analysis(tmp_path / "out").options == options
    np.save(tmp_path / "lengths.npy", np.array([5, 7]))
    assert load_analysis(tmp_path / "lengths.npy").options is None


def test_tokens_and_masks_are_read_back_as_the_tokenizer_gave_them(data: Path, tmp_path: Path) -> None:
    analysis = analyze(data, tmp_path / "out", SKIP, tokenizer=TOKENIZER)
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
    texts = [record["text"] for record in TEXTS if record["text"].strip()]
    assert [whole for whole, _ in decoded[:4]] == texts
    assert decoded[4:6] == [("1+1=2<|im_end|>", "2<|im_end|>"), ("Say<|im_end|>", "<|im_end|>")]
    assert decoded[6][1] == "hello<|im_end|>"
    assert decoded[7][1] == ""
    whole = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    assert decoded[8] == (whole, "b<|im_end|>")
    assert analysis.manifest["max_token_id"] == most
    described = analysis.manifest["tokenizer"]
    assert (described["vocab_size"], described["eos_token"]) == (tokenizer.get_vocab_size(), "<|im_end|>")


def test_text_of_which_the_tokenizer_leaves_nothing_is_counted_as_empty(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("!", "removed")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    file = write_lines(tmp_path / "x.jsonl", [{"text": "a!b"}, {"text": "!!"}, {"text": "b"}])
    analysis = analyze(file, tmp_path / "out", SKIP, tokenizer=tmp_path / "tokenizer.json")
    assert analysis.record.tolist() == [0, 2]
    assert analysis.manifest["rejected"] == {"empty": 1}


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_same_records_give_the_same_hash_whatever_pieces_and_processes_did_the_work(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    from chunkplan.intake import reading

    monkeypatch.setattr(reading, "ONE_PROCESS_BYTES", 0)
    cut = analyze(many, tmp_path / "cut", tokenizer=TOKENIZER, workers=workers, cache=tmp_path / "cache")
    assert len(list((tmp_path / "cache" / "pieces").iterdir())) > 5
    monkeypatch.setattr("chunkplan.intake.pieces.PIECE_BYTES", 1 << 25)
    whole = analyze(many, tmp_path / "whole", tokenizer=TOKENIZER, workers=1, cache=tmp_path / "other")
    assert whole.content_hash == cut.content_hash
    assert whole.record.tolist() == cut.record.tolist() == list(range(2000))
    assert validate(tmp_path / "cut").ok


def test_the_same_file_twice_is_two_sources(data: Path, tmp_path: Path) -> None:
    file = data / "d.jsonl"
    analysis = analyze([file, file], tmp_path / "out", tokenizer=TOKENIZER)
    assert analysis.source.tolist() == [0, 1]
    assert analysis.num_tokens[0] == analysis.num_tokens[1]


def test_without_a_tokenizer_lengths_are_a_quarter_of_the_bytes_and_at_least_1(data: Path, tmp_path: Path) -> None:
    analysis = analyze(data, tmp_path / "out", SKIP)
    texts = [len(record["text"].encode()) for record in TEXTS if record["text"].strip()]
    others = [5, 3, 7, 4, 2]
    assert analysis.num_tokens.tolist() == [max(1, -(-num_bytes // 4)) for num_bytes in texts + others]
    assert np.array_equal(analysis.num_target_tokens, analysis.num_tokens - 1)
    assert not analysis.is_exact
    assert not analysis.has_tokens
    assert analysis.manifest["tokenizer"] is None
    assert analysis.manifest["max_token_id"] is None
    assert validate(tmp_path / "out").ok


def test_no_tokens_gives_the_same_lengths_and_stores_nothing_else(many: Path, tmp_path: Path) -> None:
    whole = analyze(many, tmp_path / "whole", tokenizer=TOKENIZER)
    lengths = analyze(many, tmp_path / "lengths", IntakeOptions(tokens=False), tokenizer=TOKENIZER)
    assert lengths.num_tokens.tolist() == whole.num_tokens.tolist()
    assert lengths.is_exact
    assert not lengths.has_tokens
    assert not (tmp_path / "lengths" / "tokens").exists()
    with pytest.raises(UsageError, match="lengths only"):
        lengths.tokens()
    assert validate(tmp_path / "lengths").ok


@pytest.mark.parametrize("tokenizer", [TOKENIZER, None])
def test_longer_sequences_are_cut_dropped_or_refused_and_counted(
    many: Path, tmp_path: Path, tokenizer: Path | None
) -> None:
    whole = analyze(many, tmp_path / "whole", tokenizer=tokenizer)
    limit = 30
    is_long = whole.num_tokens > limit
    assert 0 < is_long.sum() < whole.num_sequences
    cut = analyze(many, tmp_path / "cut", IntakeOptions(max_length=limit), tokenizer=tokenizer)
    assert cut.num_tokens.tolist() == np.minimum(whole.num_tokens, limit).tolist()
    assert cut.manifest["truncated"] == {
        "num_sequences": int(is_long.sum()),
        "num_tokens": int(np.maximum(whole.num_tokens - limit, 0).sum()),
    }
    dropped = analyze(many, tmp_path / "dropped", IntakeOptions(max_length=limit, long="drop"), tokenizer=tokenizer)
    assert dropped.record.tolist() == np.flatnonzero(~is_long).tolist()
    assert dropped.manifest["rejected"] == {"too-long": int(is_long.sum())}
    if tokenizer:
        for sequence_id in range(0, cut.num_sequences, 100):
            for short, long in zip(cut.tokens()(sequence_id), whole.tokens()(sequence_id), strict=True):
                assert short.tolist() == long[:limit].tolist()
        assert dropped.tokens()(1)[0].tolist() == whole.tokens()(int(dropped.record[1]))[0].tolist()
    with pytest.raises(DataError, match=f"more than {limit}") as caught:
        analyze(many, tmp_path / "no", IntakeOptions(max_length=limit, long="error"), tokenizer=tokenizer)
    assert caught.value.where == f"{many}:{np.flatnonzero(is_long)[0] + 1}"
    for folder in ("cut", "dropped"):
        assert validate(tmp_path / folder).ok


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: IntakeOptions(max_length=0), "--max-length is 0, expected a number of tokens"),
        (lambda: IntakeOptions(long="cut", max_length=5), "--overlong is 'cut', expected error or drop or truncate"),
        (lambda: IntakeOptions(long="drop"), "--overlong drop without"),
        (lambda: IntakeOptions(on_error="ignore"), "--on-error is 'ignore', expected stop or skip"),
        (lambda: IntakeOptions(sample=1.0), "--sample is 1.0, expected a share"),
        (lambda: IntakeOptions(sample=float("nan")), "--sample is nan, expected a share"),
        (lambda: IntakeOptions(max_record_bytes=0), "--max-record-mb is 0, expected megabytes above 0"),
    ],
)
def test_options_that_make_no_sense_are_usage_errors(make: Callable[[], IntakeOptions], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_progress_ends_at_the_bytes_of_all_files_and_never_goes_back(data: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int | None, int]] = []
    analysis = analyze(data, tmp_path / "out", SKIP, tokenizer=TOKENIZER, progress=lambda *done: calls.append(done))
    size = sum(file.stat().st_size for file in data.iterdir())
    assert calls[-1] == (size, size, int(analysis.num_tokens.sum()))
    assert calls == sorted(calls)


def test_lengths_and_tokens_are_read_without_a_tokenizer(tmp_path: Path) -> None:
    lengths = write_lines(tmp_path / "lengths.jsonl", [{"length": n} for n in (5, 7)])
    tokens = write_lines(tmp_path / "tokens.jsonl", [{"input_ids": [1, 2, 3], "labels": [-100, 2, -100]}])
    only_tokens = analyze(tokens, tmp_path / "a")
    assert only_tokens.has_tokens
    assert only_tokens.is_exact
    assert only_tokens.tokens()(0)[1].tolist() == [False, True, False]
    both = analyze([lengths, tokens], tmp_path / "b")
    assert both.num_tokens.tolist() == [5, 7, 3]
    assert both.num_target_tokens.tolist() == [4, 6, 2]
    assert not both.has_tokens
    assert both.is_exact
    for folder in ("a", "b"):
        assert validate(tmp_path / folder).ok


def test_a_sample_is_the_same_records_whatever_the_pieces_and_is_marked(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = IntakeOptions(sample=0.2)
    cut = analyze(many, tmp_path / "cut", options, tokenizer=TOKENIZER)
    monkeypatch.setattr("chunkplan.intake.pieces.PIECE_BYTES", 1 << 25)
    whole = analyze(many, tmp_path / "whole", options, tokenizer=TOKENIZER, cache=tmp_path / "other")
    assert whole.record.tolist() == cut.record.tolist()
    assert 300 < cut.num_sequences < 500
    assert cut.manifest["sample"] == 0.2
    source = cut.manifest["sources"][0]
    assert (source["records"], source["not_sampled"]) == (2000, 2000 - cut.num_sequences)
    assert not cut.has_tokens
    with pytest.raises(UsageError, match="a sample of 20%"):
        cut.tokens()
    assert validate(tmp_path / "cut").ok


def test_a_line_end_in_the_name_of_a_file_is_stored_as_an_escape(tmp_path: Path) -> None:
    """And a plan of it can be read: a manifest whose names have line ends is refused."""
    path = tmp_path / "a\nb.jsonl"
    path.write_text('{"input_ids": [1, 2, 3]}\n' * 4)
    analysis = analyze(path, tmp_path / "analysis")
    assert analysis.manifest["sources"][0]["path"] == f"{tmp_path}/a\\nb.jsonl"
    assert analysis.place(1) == f"{tmp_path}/a\\nb.jsonl:2"
    plan = build(
        tmp_path / "analysis", tmp_path / "plan", PlanConfig(chunk_size=8, k=1, mix={analysis.place(1)[:-2]: 2})
    )
    assert validate(plan.path).ok
