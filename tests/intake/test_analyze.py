"""From files to an analysis: every record becomes one sequence or is counted, and equal input gives equal output."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from chunkplan import IntakeOptions, PlanConfig, analyze, build, load_analysis, validate
from chunkplan.errors import ChunkplanError, DataError, UsageError
from chunkplan.intake.readers import sizes
from tests.support.places import ROOT

TOKENIZER = ROOT / "sample_data" / "tokenizer"

TEXTS = [{"text": text} for text in ("one", "", "two two two two", " \n", "日本語 😀", "three")]
PROMPTS = [{"prompt": "1+1=", "completion": "2"}, {"prompt": "", "completion": ""}, {"prompt": "Say", "completion": ""}]
CHATS = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
    {"messages": []},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "no", "loss": False}]},
]
SHAREGPT = [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]
SKIP = IntakeOptions(on_error="skip")


def _write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name, records in (("a", TEXTS), ("b", PROMPTS), ("c", CHATS), ("d", SHAREGPT)):
        _write(tmp_path / "data" / f"{name}.jsonl", records)
    return tmp_path / "data"


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One file of some thousand texts that is cut into about ten pieces."""
    random = np.random.default_rng(0)
    records = [{"text": f"text {i} " + "word " * int(random.integers(0, 40))} for i in range(2000)]
    file = _write(tmp_path / "many.jsonl", records)
    monkeypatch.setattr(sizes, "PIECE_BYTES", 20_000)
    return file


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
    assert decoded[6][1] == "hello<|im_end|>\n"
    assert decoded[7][1] == ""
    whole = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    assert decoded[8] == (whole, "b<|im_end|>\n")
    assert analysis.manifest["max_token_id"] == most
    described = analysis.manifest["tokenizer"]
    assert (described["vocab_size"], described["eos_token"]) == (tokenizer.get_vocab_size(), "<|im_end|>")


def test_text_of_which_the_tokenizer_leaves_nothing_is_counted_as_empty(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("!", "removed")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    file = _write(tmp_path / "x.jsonl", [{"text": "a!b"}, {"text": "!!"}, {"text": "b"}])
    analysis = analyze(file, tmp_path / "out", SKIP, tokenizer=tmp_path / "tokenizer.json")
    assert analysis.record.tolist() == [0, 2]
    assert analysis.manifest["rejected"] == {"empty": 1}


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_same_records_give_the_same_hash_whatever_pieces_and_processes_did_the_work(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    from chunkplan.intake import reading

    monkeypatch.setattr(reading, "_LITTLE", 0)
    cut = analyze(many, tmp_path / "cut", tokenizer=TOKENIZER, workers=workers, cache=tmp_path / "cache")
    assert len(list((tmp_path / "cache" / "pieces").iterdir())) > 5
    monkeypatch.setattr(sizes, "PIECE_BYTES", 1 << 25)
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
        (lambda: IntakeOptions(long="cut", max_length=5), "--long is 'cut', expected error or drop or truncate"),
        (lambda: IntakeOptions(long="drop"), "--long drop without"),
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


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_bad_record_of_the_input_is_named_and_the_old_analysis_stays(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    from chunkplan.intake import reading

    monkeypatch.setattr(reading, "_LITTLE", 0)
    out = tmp_path / "out"
    old = analyze(many, out)
    lines = many.read_text().splitlines()
    lines[700], lines[1800] = '{"text": 5}', "nothing"
    many.write_text("\n".join(lines))
    with pytest.raises(DataError, match="`text`") as caught:
        analyze(many, out, tokenizer=TOKENIZER, workers=workers)
    assert caught.value.where == f"{many}:701"
    assert "--on-error skip" in caught.value.hint
    assert load_analysis(out).content_hash == old.content_hash
    assert {path.name for path in tmp_path.iterdir()} == {"many.jsonl", "out", "cache"}
    assert not [path for path in (tmp_path / "cache").rglob("*") if ".tmp-" in path.name]


def test_skip_lists_every_rejected_record_with_its_line_and_reason(many: Path, tmp_path: Path) -> None:
    lines = many.read_text().splitlines()
    lines[700], lines[1800], lines[5] = '{"text": 5}', "nothing", '{"text": "  "}'
    many.write_text("\n".join(lines) + "\n")
    analysis = analyze(many, tmp_path / "out", SKIP, tokenizer=TOKENIZER)
    rejected = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert [(one["file"], one["line"], one["reason"]) for one in rejected] == [
        (str(many), 6, "empty"),
        (str(many), 701, "schema"),
        (str(many), 1801, "not-json"),
    ]
    assert analysis.manifest["rejected"] == {"empty": 1, "not-json": 1, "schema": 1}
    assert analysis.num_sequences == 1997
    assert analysis.record.tolist() == [i for i in range(2000) if i not in (5, 700, 1800)]
    assert validate(tmp_path / "out").ok
    with pytest.raises(DataError) as caught:
        analyze(many, tmp_path / "out", tokenizer=TOKENIZER)  # what was skipped before is in the cache, and still wrong
    assert caught.value.where == f"{many}:701"  # a blank one stops nothing


def test_an_interrupted_run_leaves_the_old_analysis_and_nothing_else(data: Path, tmp_path: Path) -> None:
    def interrupt(*done: int | None) -> None:
        raise KeyboardInterrupt

    old = analyze(data / "d.jsonl", tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        analyze(data, tmp_path / "out", SKIP, tokenizer=TOKENIZER, progress=interrupt)
    assert load_analysis(tmp_path / "out").content_hash == old.content_hash
    assert {path.name for path in tmp_path.iterdir()} == {"data", "out", "cache"}


def test_nothing_to_train_on_is_an_error(tmp_path: Path) -> None:
    empty = _write(tmp_path / "empty.jsonl", [{"text": ""}, {"text": ""}])
    for options in (SKIP, IntakeOptions()):
        with pytest.raises(DataError, match=r"no sequence in .*empty\.jsonl \(all 2 records are blank\)") as caught:
            analyze(empty, tmp_path / "out", options)
        assert "not blank" in caught.value.hint
    nothing = _write(tmp_path / "nothing.jsonl", [])
    with pytest.raises(DataError, match="0 bytes"):
        analyze(nothing, tmp_path / "out")
    blank = tmp_path / "blank.jsonl"
    blank.write_text("\n \n")
    with pytest.raises(DataError, match=r"\(no records\)"):
        analyze(blank, tmp_path / "out")


def test_a_file_that_cannot_be_read_is_counted_as_one_rejected_record(data: Path, tmp_path: Path) -> None:
    (data / "0.jsonl").write_text("")
    (data / "e.jsonl").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    analysis = analyze(data, tmp_path / "out", SKIP)
    assert analysis.manifest["sources"][0]["schema"] is None
    assert analysis.manifest["rejected"]["unreadable"] == 2
    assert analysis.source.min() == 1
    entry = json.loads((tmp_path / "out" / "rejected.jsonl").read_text().splitlines()[0])
    assert (entry["file"], entry["line"], entry["reason"]) == (str(data / "0.jsonl"), None, "unreadable")
    assert validate(tmp_path / "out").ok


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "0 bytes"), (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS")],
)
def test_where_nothing_is_left_the_reason_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=f"no sequence in .*1 unreadable: .*{reason}"):
        analyze(tmp_path / "x.jsonl", tmp_path / "out", SKIP)


def test_lines_under_a_json_name_have_their_line_and_elements_their_index(tmp_path: Path) -> None:
    lines, array = tmp_path / "lines.json", tmp_path / "array.json"
    lines.write_text('{"text": "a"}\n\n\nxx\n{"text": "b"}\n')
    array.write_text('[{"text": "a"}, {"text": 5}]')
    for path, place in ((lines, f"{lines}:4"), (array, f"{array}, record 1")):
        with pytest.raises(DataError) as caught:
            analyze(path, tmp_path / "out")
        assert caught.value.where == place
    analysis = analyze([lines, array], tmp_path / "out", SKIP)
    assert [source["format"] for source in analysis.manifest["sources"]] == ["jsonl", "json"]
    entries = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert [(entry.get("line"), entry.get("record")) for entry in entries] == [(4, None), (None, 1)]
    assert analysis.place(1) == f"{lines}:5"


def test_a_source_without_any_target_fails_loudly(tmp_path: Path) -> None:
    record = {"messages": [{"role": "user", "content": "a"}, {"role": "model", "content": "b"}]}
    file = _write(tmp_path / "x.jsonl", [record] * 3)
    with pytest.raises(DataError, match="no token of its 3 sequences counts in the loss") as caught:
        analyze(file, tmp_path / "out", tokenizer=TOKENIZER)
    assert caught.value.where == str(file)
    assert "roles" in caught.value.hint
    words = _write(tmp_path / "z.jsonl", [{"text": "a"}] * 2)
    with pytest.raises(DataError, match="no token of its 2 sequences") as caught:
        analyze(words, tmp_path / "out", tokenizer=TOKENIZER)
    assert "one token each" in caught.value.hint
    cut = _write(tmp_path / "y.jsonl", [{"prompt": "a long prompt", "completion": "b"}])
    with pytest.raises(DataError) as caught:
        analyze(cut, tmp_path / "out", IntakeOptions(max_length=1), tokenizer=TOKENIZER)
    assert "--max-length" in caught.value.hint


def test_lengths_and_tokens_are_read_without_a_tokenizer(tmp_path: Path) -> None:
    lengths = _write(tmp_path / "lengths.jsonl", [{"length": n} for n in (5, 7)])
    tokens = _write(tmp_path / "tokens.jsonl", [{"input_ids": [1, 2, 3], "labels": [-100, 2, -100]}])
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
    monkeypatch.setattr(sizes, "PIECE_BYTES", 1 << 25)
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


def test_a_worker_that_is_killed_is_an_error_that_says_so(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import multiprocessing
    import os
    import signal
    import threading

    from chunkplan.intake import reading

    monkeypatch.setattr(reading, "_LITTLE", 0)
    others = set(multiprocessing.active_children())

    def kill() -> None:
        while not (children := set(multiprocessing.active_children()) - others):
            pass
        os.kill(next(iter(children)).pid or 0, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(ChunkplanError, match="was killed or not started"):
        analyze(many, tmp_path / "out", tokenizer=TOKENIZER, workers=2)
    thread.join()
    assert not (tmp_path / "out").exists()


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
