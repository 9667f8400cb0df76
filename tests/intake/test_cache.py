"""What was done once is not done again, unless anything that it depends on has changed."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from chunkplan import IntakeOptions, analyze, validate
from chunkplan.errors import DataError
from chunkplan.intake import process, store
from tests.support.places import ROOT

TOKENIZER = ROOT / "sample_data" / "tokenizer"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chunkplan.intake.pieces.PIECE_BYTES", 4_000)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files of pieces that were read and encoded, rather than found, as they are."""
    done: list[str] = []
    read = process.read

    def watched(piece, *arguments, **options):
        done.append(f"{Path(piece.path).name}:{piece.index}")
        return read(piece, *arguments, **options)

    monkeypatch.setattr(process, "read", watched)
    return done


def make(path: Path, name: str, count: int = 100) -> Path:
    path.write_text("".join(json.dumps({"text": f"{name} {number} " + "x " * 20}) + "\n" for number in range(count)))
    settle(path)
    return path


def settle(*paths: Path) -> None:
    """Let the file be older than the grain of the clock, as files that people analyze twice are."""
    for path in paths:
        past = time.time() - 10
        os.utime(path, (past, past))


@pytest.fixture(autouse=True)
def grain(monkeypatch: pytest.MonkeyPatch) -> None:
    """os.utime sets the time of the content, never that of the inode, so the clock is moved instead."""
    now = store.time_ns
    monkeypatch.setattr("chunkplan.intake.store.time_ns", lambda: now() + 10_000_000_000)


def test_unchanged_input_is_not_even_read(tmp_path: Path, work: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    file = make(tmp_path / "a.jsonl", "a")
    first = analyze(file, tmp_path / "out", tokenizer=TOKENIZER)
    assert len(work) == 2
    work.clear()
    monkeypatch.setattr("chunkplan.intake.probe.cut", lambda *arguments: pytest.fail("the file was read"))
    second = analyze(file, tmp_path / "out", tokenizer=TOKENIZER)
    assert work == []
    assert second.content_hash == first.content_hash
    assert second.manifest == first.manifest
    assert second.tokens()(5)[0].tolist() == first.tokens()(5)[0].tolist()


def test_an_added_or_changed_file_costs_itself_alone(tmp_path: Path, work: list[str]) -> None:
    a, b = make(tmp_path / "a.jsonl", "a"), make(tmp_path / "b.jsonl", "b")
    analyze([b], tmp_path / "out", tokenizer=TOKENIZER)
    work.clear()
    analyze([a, b], tmp_path / "out", tokenizer=TOKENIZER)
    assert work == ["a.jsonl:0", "a.jsonl:1"]
    work.clear()
    make(tmp_path / "b.jsonl", "c", count=90)
    changed = analyze([a, b], tmp_path / "out", tokenizer=TOKENIZER)
    assert work == ["b.jsonl:0", "b.jsonl:1"]
    fresh = analyze([a, b], tmp_path / "fresh", tokenizer=TOKENIZER, cache=tmp_path / "other")
    assert changed.content_hash == fresh.content_hash


def test_lines_that_are_appended_cost_the_pieces_they_are_in(tmp_path: Path, work: list[str]) -> None:
    file = make(tmp_path / "a.jsonl", "a")
    analyze(file, tmp_path / "out", tokenizer=TOKENIZER)
    work.clear()
    with file.open("a") as opened:
        opened.write('{"text": "more"}\n')
    analyze(file, tmp_path / "out", tokenizer=TOKENIZER)
    assert work == ["a.jsonl:1"]


def test_a_change_that_keeps_size_and_time_is_seen(tmp_path: Path) -> None:
    file = make(tmp_path / "a.jsonl", "a")
    before = file.stat()
    first = analyze(file, tmp_path / "out", tokenizer=TOKENIZER)
    file.write_text(file.read_text().replace("a 5 ", "b 5 "))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    assert analyze(file, tmp_path / "out", tokenizer=TOKENIZER).content_hash != first.content_hash


@pytest.mark.parametrize("changed", ["tokenizer.json", "tokenizer_config.json", "options", "columns"])
def test_what_tokens_depend_on_is_in_the_key(tmp_path: Path, work: list[str], changed: str) -> None:
    """Content, not names or times: a tokenizer or a template that was edited in place is another."""
    tokenizer = shutil.copytree(TOKENIZER, tmp_path / "tokenizer")
    file = make(tmp_path / "a.jsonl", "a")
    options = IntakeOptions()
    analyze(file, tmp_path / "out", options, tokenizer=tokenizer)
    work.clear()
    if changed == "options":
        options = IntakeOptions(max_length=5)
    elif changed == "columns":
        file.write_text(file.read_text().replace('"text"', '"body"'))
        options = IntakeOptions(columns={"text": "body"})
    elif changed == "tokenizer.json":
        content = json.loads((tokenizer / changed).read_text())
        content["model"]["merges"] = content["model"]["merges"][:-1]
        (tokenizer / changed).write_text(json.dumps(content))
    else:
        content = json.loads((tokenizer / changed).read_text())
        (tokenizer / changed).write_text(json.dumps(content | {"add_eos_token": True}))
    analyze(file, tmp_path / "out", options, tokenizer=tokenizer)
    assert len(work) == 2


def test_a_tokenizer_in_another_place_is_the_same(tmp_path: Path, work: list[str]) -> None:
    file = make(tmp_path / "a.jsonl", "a")
    analyze(file, tmp_path / "out", tokenizer=TOKENIZER)
    work.clear()
    analyze(file, tmp_path / "out", tokenizer=shutil.copytree(TOKENIZER, tmp_path / "tokenizer"))
    assert work == []


def test_the_same_bytes_are_other_records_under_another_name(tmp_path: Path) -> None:
    lines = make(tmp_path / "a.jsonl", "a", count=3)
    text = tmp_path / "a.txt"
    shutil.copy(lines, text)
    analysis = analyze([lines, text], tmp_path / "out")
    assert [source["records"] for source in analysis.manifest["sources"]] == [3, 1]
    text.rename(tmp_path / "b.jsonl")
    assert analyze(tmp_path / "b.jsonl", tmp_path / "out").num_sequences == 3


def test_no_cache_does_everything_anew(tmp_path: Path, work: list[str]) -> None:
    file = make(tmp_path / "a.jsonl", "a")
    first = analyze(file, tmp_path / "out", tokenizer=TOKENIZER)
    work.clear()
    again = analyze(file, tmp_path / "out", tokenizer=TOKENIZER, use_cache=False)
    assert len(work) == 2
    assert again.content_hash == first.content_hash


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path, work: list[str]) -> None:
    file = make(tmp_path / "a.jsonl", "a", count=400)

    def interrupt(*done: int | None) -> None:
        if len(work) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        analyze(file, tmp_path / "out", tokenizer=TOKENIZER, workers=1, progress=interrupt)
    finished = work[:2]
    work.clear()
    analyze(make(tmp_path / "b.jsonl", "b"), tmp_path / "other", tokenizer=TOKENIZER)  # another run takes nothing away
    work.clear()
    analyze(file, tmp_path / "out", tokenizer=TOKENIZER)
    assert not set(finished) & set(work)
    assert len(work) == -(-file.stat().st_size // 4_000) - 2


def test_the_cache_holds_what_an_analysis_holds_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chunkplan.planfile.analysis_writer.OWN_FILE_TOKENS", 10)
    file = make(tmp_path / "a.jsonl", "a")
    analyze(file, tmp_path / "kept", tokenizer=TOKENIZER, cache=tmp_path / "cache")
    analyze(file, tmp_path / "out", IntakeOptions(max_length=7), tokenizer=TOKENIZER, cache=tmp_path / "cache")
    assert len(list((tmp_path / "cache" / "pieces").iterdir())) == 4
    for part in (tmp_path / "out" / "tokens").iterdir():
        assert part.stat().st_nlink == 2  # no byte of it is on the disk twice
    make(file, "b")
    analyze(file, tmp_path / "out", IntakeOptions(max_length=7), tokenizer=TOKENIZER, cache=tmp_path / "cache")
    keys = list((tmp_path / "cache" / "pieces").iterdir())
    assert len(keys) == 4  # those of `kept`, and the new ones in place of what `out` had before


def test_a_damaged_entry_is_made_again(tmp_path: Path, work: list[str]) -> None:
    file = make(tmp_path / "a.jsonl", "a")
    first = analyze(file, tmp_path / "out", tokenizer=TOKENIZER)
    pieces = sorted((tmp_path / "cache" / "pieces").iterdir())
    (pieces[0] / "lengths.arrow").write_bytes(b"")
    (pieces[1] / "piece.json").write_text("{")
    work.clear()
    assert analyze(file, tmp_path / "out", tokenizer=TOKENIZER).content_hash == first.content_hash
    assert len(work) == 2


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    file = make(tmp_path / "a.jsonl", "a")

    def change(*done: int | None) -> None:
        with file.open("a") as opened:
            opened.write('{"text": "late"}\n')

    with pytest.raises(DataError, match="changed while it was read"):
        analyze(file, tmp_path / "out", progress=change)


@pytest.mark.parametrize("name", ["lengths.arrow", "digests.bin", "tokens.arrow", "piece.json"])
def test_a_file_that_was_damaged_in_place_is_made_again(tmp_path: Path, work: list[str], name: str) -> None:
    file = make(tmp_path / "a.jsonl", "a")
    first = analyze(file, tmp_path / "out", tokenizer=TOKENIZER)
    for path in (tmp_path / "cache" / "pieces").rglob(name):
        with path.open("r+b") as opened:
            opened.write(b'{"key": 1, "digest": 2}' if name == "piece.json" else bytes(path.stat().st_size))
            opened.truncate()
    for note in (tmp_path / "cache" / "files").iterdir():
        entry = json.loads(note.read_text())
        note.write_text(json.dumps(entry | {"known": {}}))
    work.clear()
    again = analyze(file, tmp_path / "out", tokenizer=TOKENIZER)
    assert len(work) == 2
    assert again.content_hash == first.content_hash
    assert validate(tmp_path / "out").ok


def test_tokens_that_were_damaged_in_the_analysis_are_not_taken_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the same files."""
    monkeypatch.setattr("chunkplan.planfile.analysis_writer.OWN_FILE_TOKENS", 10)
    file = make(tmp_path / "a.jsonl", "a")
    analyze(file, tmp_path / "out", tokenizer=TOKENIZER)
    with (tmp_path / "out" / "tokens" / "part-00000.arrow").open("r+b") as opened:
        opened.seek(1000)
        opened.write(b"\xff" * 8)
    assert not validate(tmp_path / "out").ok
    analyze(file, tmp_path / "out", tokenizer=TOKENIZER)
    assert validate(tmp_path / "out").ok


def test_what_was_skipped_before_is_reported_all_at_once_again(tmp_path: Path) -> None:
    """Though pieces of it are in the cache, from a run that went on."""
    good = make(tmp_path / "good.jsonl", "a")
    bad = [tmp_path / name for name in ("cut.jsonl", "empty.jsonl", "log.jsonl")]
    for path, content in zip(bad, ('{"text', "", "12:00 started"), strict=True):
        path.write_text(content)
        settle(path)

    def errors() -> str:
        with pytest.raises(DataError, match="3 of 4 sources cannot be read") as caught:
            analyze([good, *bad], tmp_path / "out", tokenizer=TOKENIZER)
        return str(caught.value)

    first = errors()
    skip = IntakeOptions(on_error="skip")
    analysis = analyze([good, *bad], tmp_path / "out", skip, tokenizer=TOKENIZER)
    assert errors() == first
    assert analyze([good, *bad], tmp_path / "out", skip, tokenizer=TOKENIZER).manifest == analysis.manifest
