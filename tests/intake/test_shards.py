"""Shares of an analysis that were made apart and merged are what one machine would have made of all."""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from chunkplan import IntakeOptions, analyze, load_analysis, validate
from chunkplan.errors import ChunkplanError, DataError, UsageError
from chunkplan.intake.reading import IntakeRequest
from chunkplan.intake.shard import merge, write_shard
from tests.support.places import ROOT

TOKENIZER = ROOT / "sample_data" / "tokenizer"
SKIP = IntakeOptions(on_error="skip")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chunkplan.intake.pieces.PIECE_BYTES", 2_000)


def lines(name: str, count: int) -> bytes:
    """Texts, of which some are empty and one is no JSON."""
    records = [json.dumps({"text": f"{name} {number} " * (number % 7)}) for number in range(count)]
    return "\n".join([*records[:5], "{", *records[5:]]).encode() + b"\n"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Several pieces of lines, streams, a JSON array, a table of several row groups, texts, and files with nothing."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(lines("a", 150))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines("b", 120)))
    (folder / "c.json").write_text(json.dumps([{"prompt": f"{n}?", "completion": "c" * n} for n in range(1, 90)]))
    table = pa.table({"text": [f"d {n} " * 20 for n in range(100)]})
    pq.write_table(table, folder / "d.parquet", row_group_size=20)
    (folder / "e.txt").write_text("a text\nof two lines\n")
    (folder / "f.jsonl").write_bytes(b"")
    (folder / "g.jsonl.gz").write_bytes(gzip.compress(lines("g", 120))[:-9])
    (folder / "h.jsonl.bz2").write_bytes(bz2.compress(lines("h", 20)))
    return folder


def request(
    paths: Any, cache: Path, options: IntakeOptions = SKIP, tokenizer: Path | None = TOKENIZER
) -> IntakeRequest:
    return IntakeRequest(paths=paths, options=options, tokenizer=tokenizer, cache=cache)


def shards(data: Any, folder: Path, count: int = 3, **changes: Any) -> list[Path]:
    """All shards, each made with a cache of its own as on a machine of its own."""
    paths = [folder / f"shard-{index}" for index in range(1, count + 1)]
    for index, path in enumerate(paths, 1):
        write_shard(request(data, folder / f"cache-{index}", **changes), path, (index, count))
    return paths


@pytest.mark.parametrize("tokenizer", [TOKENIZER, None])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_merged_shards_are_what_one_run_makes(data: Path, tmp_path: Path, count: int, tokenizer: Path | None) -> None:
    """40 are more than there are pieces."""
    alone = analyze(data, tmp_path / "alone", SKIP, tokenizer=tokenizer)
    made = shards(data, tmp_path, count, tokenizer=tokenizer)
    sizes_of = [len(list(path.glob("pieces/*"))) for path in made]
    assert (0 in sizes_of) == (count == 40)
    assert max(sizes_of) < 12 or count == 1
    merged = merge(made, tmp_path / "merged")
    assert merged.content_hash == alone.content_hash
    assert merged.manifest == alone.manifest
    assert {source["schema"] for source in merged.manifest["sources"]} == {"text", "prompt+completion", None}
    rejected = (tmp_path / "merged" / "rejected.jsonl").read_text()
    assert rejected == (tmp_path / "alone" / "rejected.jsonl").read_text()
    assert {json.loads(line)["reason"] for line in rejected.splitlines()} == {"empty", "not-json", "unreadable"}
    assert validate(tmp_path / "merged").ok


def test_the_order_of_the_shards_changes_nothing(data: Path, tmp_path: Path) -> None:
    made = shards(data, tmp_path)
    manifests = [merge(order, tmp_path / "merged").manifest for order in itertools.permutations(made)]
    assert all(manifest == manifests[0] for manifest in manifests)


def test_a_sample_and_dropped_records_are_the_same_in_shards(data: Path, tmp_path: Path) -> None:
    options = IntakeOptions(on_error="skip", sample=0.5, max_length=20, long="drop")
    alone = analyze(data, tmp_path / "alone", options, tokenizer=TOKENIZER)
    merged = merge(shards(data, tmp_path, options=options), tmp_path / "merged")
    assert merged.manifest == alone.manifest
    assert merged.manifest["rejected"]["too-long"] > 0


def test_equal_pieces_are_there_once_and_counted_as_often_as_they_are_read(tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.jsonl" for name in "abcd"]
    for file in files:
        file.write_text('{"text": "the same"}\n' * 10)
    made = shards(files, tmp_path, 2)
    assert [len(list(path.glob("pieces/*"))) for path in made] == [1, 1]
    merged = merge(made, tmp_path / "merged")
    assert merged.source.tolist() == [source for source in range(4) for _ in range(10)]
    assert merged.manifest == analyze(files, tmp_path / "alone", SKIP, tokenizer=TOKENIZER).manifest


def test_the_files_may_be_in_other_folders_on_every_machine(data: Path, tmp_path: Path) -> None:
    """What counts is their names, sizes and order; the folder of the first shard is the one that is named."""
    other = shutil.copytree(data, tmp_path / "mnt" / "b")
    made = [tmp_path / "shard-1", tmp_path / "shard-2"]
    write_shard(request(data, tmp_path / "cache-1"), made[0], (1, 2))
    write_shard(request(other, tmp_path / "cache-2"), made[1], (2, 2))
    alone = analyze(data, tmp_path / "alone", SKIP, tokenizer=TOKENIZER)
    for order in (made, made[::-1]):
        assert merge(order, tmp_path / "merged").manifest == alone.manifest


def test_the_tokenizer_may_be_written_otherwise_on_every_machine(data: Path, tmp_path: Path) -> None:
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(tmp_path / "saved")
    made = [tmp_path / "shard-1", tmp_path / "shard-2"]
    for index, tokenizer in enumerate((TOKENIZER, tmp_path / "saved"), 1):
        write_shard(request(data, tmp_path / f"cache-{index}", tokenizer=tokenizer), made[index - 1], (index, 2))
    alone = analyze(data, tmp_path / "alone", SKIP, tokenizer=TOKENIZER)
    assert merge(made, tmp_path / "merged").manifest == alone.manifest


def test_a_shard_is_made_again_from_what_was_done(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [first, _] = shards(data, tmp_path, 2)
    manifest = (first / "manifest.json").read_bytes()
    monkeypatch.setattr("chunkplan.intake.process.read", lambda *arguments, **options: pytest.fail("it was read"))
    write_shard(request(data, tmp_path / "cache-1"), first, (1, 2))
    assert (first / "manifest.json").read_bytes() == manifest


def test_a_bad_record_stops_the_shard_that_it_falls_to(data: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        shards(data / "a.jsonl", tmp_path, 1, options=IntakeOptions())
    assert caught.value.where == f"{data / 'a.jsonl'}:6"  # the first that is more than blank
    assert not (tmp_path / "shard-1").exists()


def test_nothing_in_any_shard_is_an_error_of_the_merging(tmp_path: Path) -> None:
    file = tmp_path / "empty.jsonl"
    file.write_text('{"text": ""}\n')
    made = shards(file, tmp_path, 2)
    with pytest.raises(DataError, match="no sequence"):
        merge(made, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def edit(**changes: Any) -> Callable[[Path], None]:
    """Changes the manifest of a shard."""

    def change(folder: Path) -> None:
        path = folder / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def broken(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "manifest.json").write_text(text) and None


def without_a_piece(folder: Path) -> None:
    shutil.rmtree(next((folder / "pieces").iterdir()))


def with_a_short_file(folder: Path) -> None:
    path = next(path for path in sorted((folder / "pieces").glob("*/lengths.arrow")))
    path.write_bytes(path.read_bytes()[:-1])


def without_results(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    edit(sources=[source | {"results": {}} for source in manifest["sources"]])(folder)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three shards of lines in several pieces, which no test changes."""
    folder = tmp_path_factory.mktemp("three")
    (folder / "a.jsonl").write_bytes(lines("a", 150))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chunkplan.intake.pieces.PIECE_BYTES", 2_000)
        return shards([folder / "a.jsonl"], folder)


@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (broken("{"), DataError, r"shard-2/manifest\.json: damaged"),
        (broken("[]"), DataError, "damaged"),
        (broken('{"kind": "shard"}'), DataError, "damaged"),
        (edit(shard=[2]), DataError, "damaged"),
        (edit(options={"what": 1}), DataError, "damaged"),
        (edit(sources=[{"file": {}}]), DataError, "damaged"),
        (edit(schema_version=3), UsageError, "a shard, schema version 3; expected a shard of version"),
        (edit(kind="analysis"), UsageError, "of kind analysis"),
        (edit(identity="other"), UsageError, "different tokenizers or chat templates"),
        (edit(options=IntakeOptions(max_length=5).to_dict()), UsageError, "different options"),
        (edit(sources=[]), UsageError, r"source 1 is .*a\.jsonl \(.* in one and nothing in the other"),
        (edit(shard=[1, 3]), UsageError, "shard 2 of 3 is missing"),
        (edit(shard=[2, 4]), UsageError, "runs with 3 and 4 of them"),
        (without_a_piece, DataError, "is missing"),
        (with_a_short_file, DataError, "bytes, expected"),
        (without_results, DataError, "pieces of it are missing"),
        (shutil.rmtree, UsageError, r"shard-2 is no shard of an analysis: it has no manifest\.json"),
    ],
)
def test_a_shard_that_is_none_or_of_another_run_is_refused(
    three: list[Path], tmp_path: Path, damage: Callable[[Path], None], kind: type[ChunkplanError], message: str
) -> None:
    made = [shutil.copytree(path, tmp_path / path.name) for path in three]
    damage(made[1])
    with pytest.raises(kind, match=message) as caught:
        merge(made, tmp_path / "merged")
    assert type(caught.value) is kind
    assert not (tmp_path / "merged").exists()


def test_missing_repeated_and_no_shards_are_refused(three: list[Path], data: Path, tmp_path: Path) -> None:
    first, second, third = three
    for given, message in (
        ([first, third], "shard 2 of 3 is missing"),
        ([third], "shard 1 of 3 is missing, and 1 more"),
        ([first, second, second, third], "shard 2 of 3 is there twice"),
        ([], "no shards"),
    ):
        with pytest.raises(UsageError, match=message):
            merge(given, tmp_path / "merged")
    analyze(data / "a.jsonl", tmp_path / "whole", SKIP)
    with pytest.raises(UsageError, match="of kind analysis"):
        merge([tmp_path / "whole"], tmp_path / "merged")
    with pytest.raises(UsageError, match="not just an analysis"):
        merge([first, second, third], data)


def test_shards_of_other_data_are_refused_with_what_differs(data: Path, tmp_path: Path) -> None:
    first, _ = shards(data / "a.jsonl", tmp_path, 2)
    other = tmp_path / "other" / "a.jsonl"
    other.parent.mkdir()
    content = (data / "a.jsonl").read_text()
    for changed, message in (
        (content + "\n", rf"{data}/a\.jsonl \(.* bytes, schema text, .*\) in one and {other} \("),
        (content.replace('"text"', '"body"'), "schema text"),
    ):
        other.write_text(changed)
        options = IntakeOptions(on_error="skip", columns={"text": "body"}) if "body" in changed else SKIP
        write_shard(request(other, tmp_path / "cache", options=options), tmp_path / "second", (2, 2))
        with pytest.raises(UsageError, match=message if options is SKIP else "different options"):
            merge([first, tmp_path / "second"], tmp_path / "merged")


def test_what_can_be_read_once_cannot_be_dealt_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "lines.jsonl").open("w+") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(UsageError, match="the standard input can be read once"):
            write_shard(request("-", tmp_path / "cache"), tmp_path / "shard", (1, 2))


@pytest.mark.parametrize("shard", [(0, 2), (3, 2)])
def test_there_are_shards_1_to_n(data: Path, tmp_path: Path, shard: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match=r"shard \d of 2"):
        write_shard(request(data, tmp_path / "cache"), tmp_path / "shard", shard)


def test_an_old_shard_is_replaced_and_nothing_else_is(data: Path, tmp_path: Path) -> None:
    one = [data / "a.jsonl", data / "b.jsonl.gz"]
    [path] = shards(one, tmp_path, 1)
    write_shard(request(data / "e.txt", tmp_path / "cache-1"), path, (1, 1))
    assert merge([path], tmp_path / "merged").num_sequences == 1
    assert load_analysis(tmp_path / "merged").num_sequences == 1
    (path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not just a shard"):
        write_shard(request(one, tmp_path / "cache-1"), path, (1, 1))


def test_files_of_one_name_and_size_but_other_content_are_told_apart(tmp_path: Path) -> None:
    for index, word in ((1, "aaaa"), (2, "bbbb")):
        folder = tmp_path / f"data-{index}"
        folder.mkdir()
        for name in ("x", "y"):
            (folder / f"{name}.jsonl").write_text(json.dumps({"text": word}) + "\n")
        write_shard(request(folder, tmp_path / f"cache-{index}"), tmp_path / f"shard-{index}", (index, 2))
    with pytest.raises(UsageError, match="different data"):
        merge([tmp_path / "shard-1", tmp_path / "shard-2"], tmp_path / "out")


def test_a_damaged_piece_of_a_shard_is_named(three: list[Path], tmp_path: Path) -> None:
    made = [shutil.copytree(path, tmp_path / path.name) for path in three]
    for name in ("lengths.arrow", "tokens.arrow"):
        file = next(path for path in sorted((made[0] / "pieces").rglob(name)))
        content = file.read_bytes()
        file.write_bytes(bytes(len(content)))
        with pytest.raises(DataError, match="damaged") as caught:
            merge(made, tmp_path / "out")
        assert caught.value.where == str(file.parent)
        file.write_bytes(content)
