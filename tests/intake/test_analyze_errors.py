"""What ends an analysis, or leaves records out of it: reported with its place, and the old analysis stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chunkplan import IntakeOptions, analyze, load_analysis, validate
from chunkplan.errors import ChunkplanError, DataError
from tests.support.intake_checks import write_lines
from tests.support.places import ROOT

TOKENIZER = ROOT / "sample_data" / "tokenizer"


SKIP = IntakeOptions(on_error="skip")


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_bad_record_of_the_input_is_named_and_the_old_analysis_stays(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    from chunkplan.intake import reading

    monkeypatch.setattr(reading, "ONE_PROCESS_BYTES", 0)
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
    empty = write_lines(tmp_path / "empty.jsonl", [{"text": ""}, {"text": ""}])
    for options in (SKIP, IntakeOptions()):
        with pytest.raises(DataError, match=r"no sequence in .*empty\.jsonl \(all 2 records are blank\)") as caught:
            analyze(empty, tmp_path / "out", options)
        assert "not blank" in caught.value.hint
    nothing = write_lines(tmp_path / "nothing.jsonl", [])
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
    ("content", "reason"), [(b"", "0 bytes"), (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS")]
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
    record = {"messages": [{"role": "user", "content": "a"}, {"role": "critic", "content": "b", "loss": 0}]}
    file = write_lines(tmp_path / "x.jsonl", [record] * 3)
    with pytest.raises(DataError, match="no token of its 3 sequences counts in the loss") as caught:
        analyze(file, tmp_path / "out", tokenizer=TOKENIZER)
    assert caught.value.where == str(file)
    assert "roles" in caught.value.hint
    words = write_lines(tmp_path / "z.jsonl", [{"text": "a"}] * 2)
    with pytest.raises(DataError, match="no token of its 2 sequences") as caught:
        analyze(words, tmp_path / "out", tokenizer=TOKENIZER)
    assert "one token each" in caught.value.hint
    cut = write_lines(tmp_path / "y.jsonl", [{"prompt": "a long prompt", "completion": "b"}])
    with pytest.raises(DataError) as caught:
        analyze(cut, tmp_path / "out", IntakeOptions(max_length=1), tokenizer=TOKENIZER)
    assert "--max-length" in caught.value.hint


def test_a_worker_that_is_killed_is_an_error_that_says_so(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import multiprocessing
    import os
    import signal
    import threading

    from chunkplan.intake import reading

    monkeypatch.setattr(reading, "ONE_PROCESS_BYTES", 0)
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
