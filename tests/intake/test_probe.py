"""All sources are looked at before any is read: what cannot be read is reported at once, or left out and counted."""

from __future__ import annotations

import gzip
import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from chunkplan import IntakeOptions, analyze, validate
from chunkplan.errors import DataError, UsageError
from chunkplan.intake.one_record import find_record, read_place
from chunkplan.intake.reading import IntakeRequest
from chunkplan.intake.shard import merge, write_shard
from tests.support.intake_checks import question_and_answer, write_lines
from tests.support.places import ROOT

TOKENIZER = ROOT / "sample_data" / "tokenizer"
SKIP = IntakeOptions(on_error="skip")

#: Fifty records behind one of more than 8 MB, in every kind of file that has lines or is made to.
GOOD = [{"messages": question_and_answer("Hi!", f"Hello number {number}.")} for number in range(50)]
LATE: dict[str, Callable[[list[str]], bytes]] = {
    "hm.jsonl": lambda rows: "\n".join(rows).encode(),
    "hm.jsonl.gz": lambda rows: gzip.compress("\n".join(rows).encode(), 1),
    "hm.json": lambda rows: f"[{', '.join(rows)}]".encode(),
    "spread.json": lambda rows: "\n".join(row.replace("{", "{\n", 1) for row in rows).encode(),
}

#: Files that cannot be read, and what is said of each.
BAD = {
    "b.jsonl": (b"", "the file is empty (0 bytes)"),
    "c.json": (b'{"records": 7}', "no schema fits the keys of the records: `records`"),
    "d.parquet": (b"PAR1 and no more", "not a parquet file, or it is torn"),
    "e.arrow": (b"ARROW1 and no more", "not a arrow file, or it is torn"),
    "f.npy": (b"\x93NUMPY and no more", "not a file of numpy, or it is torn"),
    "g.jsonl": (b'{"prompt": "p", "preferred_output": "c", "non_preferred_output": "r"}\n', "a preference pair"),
    "h.jsonl.gz": (b"\x1f\x8b", "cut short after 0 bytes"),
    "i.txt.gz": (b"\x07\0 no gzip", "damaged, or not gzip"),
}
#: Those of which every record is a bad one.
BAD_RECORDS = {
    "j.jsonl": (b"<html>\n<body>\n", "not JSON"),
    "k.json": (b"[1, 2, 3]", "found a number, expected a JSON object as the element of the array"),
    "l.jsonl": (b'{"text": 5}\n{"text": 6}\n', "`text` is a number"),
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with `a.jsonl` and `z.jsonl`, which can be read, and all that is `BAD` between them."""
    (tmp_path / "data").mkdir()
    for name in ("a.jsonl", "z.jsonl"):
        write_lines(tmp_path / "data" / name, [{"text": f"number {number} of {name}"} for number in range(20)])
    for name, (content, _) in BAD.items():
        (tmp_path / "data" / name).write_bytes(content)
    return tmp_path / "data"


def test_all_that_cannot_be_read_is_reported_at_once_and_nothing_is_done(data: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{len(BAD)} of {len(BAD) + 2} sources cannot be read") as caught:
        analyze(data, tmp_path / "out", tokenizer=TOKENIZER, workers=1)
    assert [line.partition(": ")[0] for line in caught.value.lines] == [str(data / name) for name in BAD]
    for line, (_, message) in zip(caught.value.lines, BAD.values(), strict=True):
        assert message in line
        assert line in str(caught.value)
        assert len(line) < 121 + len(str(data)) + len("/h.jsonl.gz: ")
    assert "--on-error skip" in caught.value.hint
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and "pieces" in path.parts]
    assert not (tmp_path / "out").exists()


def test_a_source_whose_first_records_are_all_bad_is_one_of_them(data: Path, tmp_path: Path) -> None:
    """With the place of the first; where bad records are counted, they are counted each."""
    for name in BAD:
        (data / name).unlink()
    for name, (content, _) in BAD_RECORDS.items():
        (data / name).write_bytes(content)
    with pytest.raises(DataError, match="3 of 5 sources") as caught:
        analyze(data, tmp_path / "out", tokenizer=TOKENIZER)
    for line, (_, message) in zip(caught.value.lines, BAD_RECORDS.values(), strict=True):
        assert message in line
    places = [line.partition(": ")[0].removeprefix(f"{data}/") for line in caught.value.lines]
    assert places == ["j.jsonl:1", "k.json, record 0", "l.jsonl:1"]
    analysis = analyze(data, tmp_path / "out", SKIP, tokenizer=TOKENIZER)
    assert [source["rejected"] for source in analysis.manifest["sources"]] == [0, 2, 3, 2, 0]
    (data / "j.jsonl").write_text('<html>\n{"text": "this one is good"}\n')
    with pytest.raises(DataError) as caught:
        analyze(data / "j.jsonl", tmp_path / "out", tokenizer=TOKENIZER)  # of a record, found when it is read
    assert caught.value.where == f"{data / 'j.jsonl'}:1"


def test_one_is_reported_as_it_is_with_a_way_on_if_there_is_another(data: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no schema fits") as caught:
        analyze([data / "a.jsonl", data / "c.json"], tmp_path / "out", tokenizer=TOKENIZER)
    assert caught.value.where == str(data / "c.json")
    assert "--format c.json=NAME" in caught.value.hint and "--on-error skip" in caught.value.hint
    with pytest.raises(DataError, match="no schema fits") as caught:
        analyze(data / "c.json", tmp_path / "out", SKIP, tokenizer=TOKENIZER)
    assert "--on-error skip" not in caught.value.hint
    with pytest.raises(UsageError, match="--format is 'chat', expected one of text, messages"):
        analyze(data, tmp_path / "out", IntakeOptions(schema="chat"), tokenizer=TOKENIZER)


def test_sources_that_cannot_be_read_are_left_out_and_counted_where_errors_are_skipped(
    data: Path, tmp_path: Path
) -> None:
    analysis = analyze(data, tmp_path / "out", SKIP, tokenizer=TOKENIZER)
    assert analysis.num_sequences == 40
    assert analysis.manifest["rejected"] == {"unreadable": len(BAD)}
    rejected = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    for one, (name, (_, message)) in zip(rejected, BAD.items(), strict=True):
        assert one["file"] == str(data / name)
        assert message in one["message"]
        assert (one["reason"], one.get("line"), one.get("record")) == ("unreadable", None, None)
    sources = analysis.manifest["sources"]
    assert [source["schema"] for source in sources] == ["text", *[None] * len(BAD), "text"]
    assert all(source["records"] == source["num_sequences"] + source["rejected"] for source in sources)
    assert validate(tmp_path / "out").ok
    assert analyze(data, tmp_path / "out", SKIP, tokenizer=TOKENIZER).manifest == analysis.manifest  # from the cache
    for index in (1, 2):
        request = IntakeRequest(paths=data, tokenizer=TOKENIZER, options=SKIP, cache=tmp_path / f"cache-{index}")
        write_shard(request, tmp_path / f"shard-{index}", (index, 2))
    assert merge([tmp_path / "shard-1", tmp_path / "shard-2"], tmp_path / "merged").manifest == analysis.manifest


def test_what_is_damaged_behind_its_first_records_keeps_these(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": f"number {number}"}) + "\n" for number in range(2000)).encode()
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(lines)[:-20])
    good = write_lines(tmp_path / "good.jsonl", [{"text": "good"}])
    analysis = analyze([tmp_path / "x.jsonl.gz", good], tmp_path / "out", SKIP, tokenizer=TOKENIZER)
    first = analysis.manifest["sources"][0]
    assert first["schema"] == "text"
    assert (first["rejected"], first["num_sequences"] > 1000) == (1, True)


def test_no_large_file_is_read_whole_to_look_at_it_and_no_stream_at_all(tmp_path: Path) -> None:
    """What is in the pipe stays in it."""
    records = [{"text": f"{number} " * 100} for number in range(30_000)]
    write_lines(tmp_path / "a.jsonl", records)
    (tmp_path / "c.json").write_text(json.dumps(records))
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes(), 0))
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDWR)
    os.write(pipe, b'{"text": "a"}\n')
    names = [tmp_path / name for name in ("a.jsonl", "c.json", "d.jsonl.gz")]
    assert min(path.stat().st_size for path in names) > 10_000_000
    empty = tmp_path / "empty.jsonl"
    empty.touch()

    def read_bytes() -> int:
        [line] = [line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar")]
        return int(line.split()[1])

    with pytest.raises(DataError):
        analyze([names[-1], empty], tmp_path / "out", workers=1)  # what it needs is loaded now
    before = read_bytes()
    with pytest.raises(DataError, match="the file is empty"):
        analyze([*names, empty, tmp_path / "pipe"], tmp_path / "out", workers=1)
    assert read_bytes() - before < 8_000_000
    assert os.read(pipe, 100) == b'{"text": "a"}\n'
    os.close(pipe)


def test_the_keys_to_give_for_several_sources_are_one_line_that_works_as_it_is_printed(tmp_path: Path) -> None:
    """Each for its own source: what is said of one is nothing for the others. Those of the same keys are a pattern."""
    write_lines(
        tmp_path / "data" / "a.jsonl", [{"the_prompt": "Add.", "my_solution": f"{number}"} for number in range(9)]
    )
    write_lines(tmp_path / "data" / "b.jsonl", [{"body_text": f"number {number}"} for number in range(9)])
    write_lines(tmp_path / "data" / "c.jsonl", [{"text": "as it should be"}])
    with pytest.raises(DataError) as caught:
        analyze([tmp_path / "data"], tmp_path / "out")
    words = shlex.split(caught.value.hint.partition("; try this: ")[2])
    assert words[::2] == ["--column"] * 3
    columns = dict(word.split("=") for word in words[1::2])
    assert list(columns) == ["a.jsonl:prompt", "a.jsonl:completion", "b.jsonl:text"]
    assert analyze([tmp_path / "data"], tmp_path / "out", IntakeOptions(columns=columns)).num_sequences == 19
    for name in ("1", "2", "3"):
        write_lines(tmp_path / "data" / "parts" / f"{name}.json", [{"Body": "some words"}])
    (tmp_path / "data" / "b.jsonl").unlink()
    with pytest.raises(DataError) as caught:
        analyze([tmp_path / "data"], tmp_path / "out", IntakeOptions(columns={"a.jsonl:text": "my_solution"}))
    assert caught.value.hint.endswith("; try this: --column '*.json:text=Body'")
    with pytest.raises(DataError) as caught:
        analyze([tmp_path / "data" / "parts"], tmp_path / "out")
    assert caught.value.hint == "try this: --column text=Body"


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.json"])
@pytest.mark.parametrize("bad", ["\n", "no record\n"])
def test_the_first_record_is_looked_for_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, bad: str
) -> None:
    """However many pieces without one are before it: nothing is guessed of how it is laid out."""
    monkeypatch.setattr("chunkplan.intake.pieces.PIECE_BYTES", 200)
    text = bad * 10_000 + "".join(json.dumps(row) + "\n" for row in GOOD)
    (tmp_path / name).write_bytes(gzip.compress(text.encode(), 1) if name.endswith("gz") else text.encode())
    analysis = analyze(tmp_path / name, tmp_path / "out", SKIP, tokenizer=TOKENIZER, workers=1)
    [source] = analysis.manifest["sources"]
    assert (source["schema"], source["num_sequences"]) == ("messages", 50)
    assert source["reasons"] == ({} if bad == "\n" else {"not-json": 10_000})
    assert find_record(read_place(f"{tmp_path / name}:10001"), IntakeOptions()).layout.schema == "messages"
    if bad == "\n":
        assert analyze(tmp_path / name, tmp_path / "out", tokenizer=TOKENIZER, workers=1).num_sequences == 50
        return
    with pytest.raises(DataError, match="not JSON") as caught:
        analyze(tmp_path / name, tmp_path / "out", tokenizer=TOKENIZER, workers=1)
    assert caught.value.where == f"{tmp_path / name}:1"


@pytest.mark.parametrize("name", LATE)
def test_a_first_record_that_is_too_large_is_all_that_is_lost(tmp_path: Path, name: str) -> None:
    """How the others are laid out is found behind it, among all and by each of them alone."""
    large = {"messages": question_and_answer("Hi!", "So much. " * 1_400_000)}
    path = tmp_path / name
    path.write_bytes(LATE[name]([json.dumps(row) for row in (large, *GOOD)]))
    other = write_lines(tmp_path / "other.jsonl", [{"text": "good"}])
    analysis = analyze([path, other], tmp_path / "out", SKIP, tokenizer=TOKENIZER, workers=1)
    source = analysis.manifest["sources"][0]
    assert (source["schema"], source["num_sequences"], source["reasons"]) == ("messages", 50, {"too-large": 1})
    [rejected] = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert (rejected.get("line"), rejected.get("record")) == ((1, None) if ".jsonl" in name else (None, 0))
    place = f"{path}:2" if ".jsonl" in name else f"{path}, record 1"
    assert find_record(read_place(place), IntakeOptions()).keys == GOOD[0]
    with pytest.raises(DataError, match="more than the 8,000,000 that are read") as caught:
        analyze([path, other], tmp_path / "out", tokenizer=TOKENIZER, workers=1)
    assert caught.value.where == (f"{path}:1" if ".jsonl" in name else f"{path}, record 0")
    assert "raise --max-record-mb" in (caught.value.hint or "")


def test_damage_behind_a_first_record_that_is_too_large_keeps_what_is_before_it(tmp_path: Path) -> None:
    """Also where it is met while the first record that can be read is looked for."""
    large = json.dumps({"text": "So much. " * 1_400_000})
    (tmp_path / "a.json").write_text(f"[{large}, 5, {large}")
    other = write_lines(tmp_path / "other.jsonl", [{"text": "good"}])
    analysis = analyze([tmp_path / "a.json", other], tmp_path / "out", SKIP, tokenizer=TOKENIZER, workers=1)
    assert analysis.manifest["rejected"] == {"not-an-object": 1, "too-large": 1, "unreadable": 1}


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.json"])
@pytest.mark.parametrize("piece_bytes", [200, 1 << 20])
def test_records_that_are_null_say_nothing_of_how_the_others_are_laid_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, piece_bytes: int
) -> None:
    """They are looked behind as blank ones are, and are each a record that cannot be read."""
    monkeypatch.setattr("chunkplan.intake.pieces.PIECE_BYTES", piece_bytes)
    rows = [{"text": None, "n": 1}] * 150 + [{"text": f"some words {number}", "n": 1} for number in range(5)]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (tmp_path / name).write_bytes(gzip.compress(text, 1) if name.endswith("gz") else text)
    [source] = analyze(tmp_path / name, tmp_path / "out", SKIP, tokenizer=TOKENIZER, workers=1).manifest["sources"]
    assert (source["schema"], source["num_sequences"], source["reasons"]) == ("text", 5, {"schema": 150})
    with pytest.raises(DataError, match="`text` is null, expected a string"):
        analyze(tmp_path / name, tmp_path / "out", tokenizer=TOKENIZER, workers=1)


def test_records_that_are_all_null_are_said_to_be(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{"text": None, "n": 1}] * 50)
    with pytest.raises(DataError, match="`text` in 50 of 50, always null, `n` in 50 of 50"):
        analyze(path, tmp_path / "out", tokenizer=TOKENIZER)
