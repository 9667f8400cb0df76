"""Arguments become sources: what is read, in which order, and what is refused with what is known."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import fsspec
import pytest

from chunkplan import IntakeOptions, analyze, load_analysis, validate
from chunkplan.building import build
from chunkplan.config.plan import PlanConfig
from chunkplan.errors import DataError, UsageError
from chunkplan.extras import pip_install
from chunkplan.intake.reading import IntakeRequest
from chunkplan.intake.shard import merge, write_shard
from chunkplan.intake.sources import SourceFile, describe, find_sources
from tests.support.command_line import Run
from tests.support.places import ROOT


def _write(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"{}\n")
    return folder


def _found(*paths: str | Path, folder: Path) -> list[str]:
    return [os.path.relpath(source.path, folder) for source in find_sources(paths)]


@pytest.mark.parametrize(
    ("name", "described"),
    [
        ("a.jsonl", ("jsonl", None)),
        ("a.ndjson.gz", ("jsonl", "gzip")),
        ("A.JSON.ZST", ("json", "zstd")),
        ("a.json", ("json", None)),
        ("a.txt.bz2", ("text", "bz2")),
        ("a.parquet", ("parquet", None)),
        ("a.b.arrow", ("arrow", None)),
        ("a.npy", ("npy", None)),
        ("data", ("jsonl", None)),
        ("data.gz", ("jsonl", "gzip")),
        ("s3://bucket.name/data", ("jsonl", None)),
        ("a.parquet.gz", None),
        ("a.xlsx", None),
        ("a.xlsx.gz", None),
    ],
)
def test_the_name_says_kind_and_compression(name: str, described: tuple[str, str | None] | None) -> None:
    assert describe(name) == described


def test_a_folder_stands_for_all_data_in_it_and_below_sorted(tmp_path: Path) -> None:
    _write(tmp_path, "b.jsonl", "a/z.txt", "a/b/c.json.gz", "a.parquet", "README.md", "no_suffix", ".hidden.jsonl")
    _write(tmp_path, ".git/x.jsonl", "c.xlsx", "state.json")
    assert _found(tmp_path, folder=tmp_path) == ["a.parquet", "a/b/c.json.gz", "a/z.txt", "b.jsonl"]
    with pytest.raises(UsageError, match="no data in it or below") as caught:
        find_sources([_write(tmp_path / "empty", "x.xlsx")])
    assert ".parquet" in caught.value.hint
    assert ".zst" in caught.value.hint


def test_a_pattern_is_expanded_sorted(tmp_path: Path) -> None:
    _write(tmp_path, "b-2.jsonl", "b-10.jsonl", "a.txt", "c.xlsx", "d/e/f.jsonl", "d/g.jsonl", "[x].jsonl")
    assert _found(tmp_path / "b-*.jsonl", folder=tmp_path) == ["b-10.jsonl", "b-2.jsonl"]
    assert _found(tmp_path / "b-?.jsonl", folder=tmp_path) == ["b-2.jsonl"]
    assert _found(tmp_path / "d/**/*.jsonl", folder=tmp_path) == ["d/e/f.jsonl", "d/g.jsonl"]
    assert _found(tmp_path / "[ac].*", folder=tmp_path) == ["a.txt"]
    assert _found(tmp_path / "d*", folder=tmp_path) == ["d/e/f.jsonl", "d/g.jsonl"]
    assert _found(tmp_path / "[x].jsonl", folder=tmp_path) == ["[x].jsonl"]  # there is a file of that name
    for pattern in ("*.parquet", "*.xlsx"):
        with pytest.raises(UsageError, match="no data matches"):
            find_sources([tmp_path / pattern])


def test_what_lies_beside_data_is_left_out_unless_it_is_named(tmp_path: Path) -> None:
    """Files of models and tokenizers by their names, in folders as in patterns; hidden folders."""
    _write(tmp_path, "a.jsonl", "model/config.json", "model/model.safetensors.index.json", "tokenizer/tokenizer.json")
    _write(tmp_path, "tokenizer/merges.txt", "web/package.json", "web/config.jsonl", ".cache/x.jsonl", "d/.x/y.jsonl")
    assert _found(tmp_path, folder=tmp_path) == ["a.jsonl", "web/config.jsonl"]
    assert _found(tmp_path / "**/*.json*", folder=tmp_path) == ["a.jsonl", "web/config.jsonl"]
    assert _found(tmp_path / "w*", folder=tmp_path) == ["web/config.jsonl"]
    named = [tmp_path / "model/config.json", tmp_path / ".cache", tmp_path / ".cache/*.jsonl"]
    assert _found(*named, folder=tmp_path) == ["model/config.json", ".cache/x.jsonl", ".cache/x.jsonl"]
    with pytest.raises(UsageError, match="no data in it or below"):
        find_sources([tmp_path / "model"])


def test_what_spark_hides_is_no_data_unless_it_is_named(tmp_path: Path) -> None:
    """Below a leading underscore, in folders as in patterns; a folder of a partition is read."""
    _write(tmp_path, "_SUCCESS", "part-0.jsonl", ".part-0.jsonl.crc", "_temporary/0/task/part-1.jsonl", "_x.jsonl")
    _write(tmp_path, "_lang=en/part-2.jsonl", "year=2026/_delta_log/00.json", "year=2026/part-3.jsonl")
    data = ["_lang=en/part-2.jsonl", "part-0.jsonl", "year=2026/part-3.jsonl"]
    for argument in (tmp_path, tmp_path / "**/*.json*", f"{tmp_path}/"):
        beside: list[str] = []
        found = find_sources([argument], beside)
        assert sorted(str(Path(source.path).relative_to(tmp_path)) for source in found) == data
        assert {"_temporary", "_delta_log", "_x.jsonl"} <= {Path(path).name for path in beside}
    assert _found(tmp_path / "*", folder=tmp_path) == data
    named = ["_temporary", "_x.jsonl", "_temp*/0", "_*.jsonl", "_temporary/**/*.jsonl"]
    part = "_temporary/0/task/part-1.jsonl"
    assert _found(*(tmp_path / name for name in named), folder=tmp_path) == [part, "_x.jsonl", part, "_x.jsonl", part]
    with pytest.raises(UsageError, match=r"no data in it or below; names that begin with _ are left out: .*_delta_log"):
        (tmp_path / "year=2026/part-3.jsonl").unlink()
        find_sources([tmp_path / "year=2026"])


def test_what_commands_made_of_data_is_none(tmp_path: Path) -> None:
    """Analyses, shards, plans and the cache, wherever they are; a manifest of somebody else hides nothing."""
    lines = "".join(json.dumps({"text": f"number {number}"}) + "\n" for number in range(20))
    (tmp_path / "data.jsonl").write_text(lines)
    tokenizer = ROOT / "sample_data" / "tokenizer"
    request = IntakeRequest(paths=str(tmp_path), tokenizer=tokenizer, cache=tmp_path / "w/cache", workers=1)
    write_shard(request, tmp_path / "w/shard", (1, 1))
    analysis = merge([tmp_path / "w/shard"], tmp_path / "w/analysis")
    build(analysis, tmp_path / "w/plan", PlanConfig(chunk_size=64, k=1, global_batch=8))
    for folder in ("analysis", "shard", "plan", "cache"):
        written = [path for path in (tmp_path / "w" / folder).rglob("*.*") if describe(str(path)) is not None]
        assert written, folder
    _write(tmp_path / "theirs", "b.jsonl", "manifest.json")
    theirs = ["data.jsonl", "theirs/b.jsonl", "theirs/manifest.json"]
    assert _found(tmp_path, folder=tmp_path) == theirs
    assert _found(tmp_path / "**/*.*", folder=tmp_path) == theirs
    part = "w/analysis/tokens/part-00000.arrow"
    assert _found(tmp_path / "w/analysis/tokens/*.arrow", tmp_path / part, folder=tmp_path) == [part, part]


def test_a_link_that_leads_nowhere_stops_the_run_or_is_counted(tmp_path: Path) -> None:
    """In a folder and of a pattern; what would be left out as a file is left out as a link too."""
    lines = "".join(json.dumps({"text": f"number {number}"}) + "\n" for number in range(20))
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "b.jsonl").write_text(lines)
    for name, target in (("a.jsonl", "gone.jsonl"), ("c.json", "c.json"), ("part", "/gone"), ("x.md", "gone")):
        (tmp_path / "d" / name).symlink_to(target)
    (tmp_path / "d" / "config.json").symlink_to("gone")
    tokenizer = ROOT / "sample_data" / "tokenizer"
    skip = IntakeOptions(on_error="skip")
    for argument, names in (
        (tmp_path / "d", ["a.jsonl", "c.json", "part"]),
        (tmp_path / "d/*", ["a.jsonl", "c.json", "part"]),
        (tmp_path / "d/**", ["a.jsonl", "c.json", "part"]),
        (tmp_path / "d/*.j*", ["a.jsonl", "c.json"]),
    ):
        with pytest.raises(DataError, match="a link that leads nowhere") as caught:
            analyze(argument, tmp_path / "out", tokenizer=tokenizer)
        assert [line.partition(": ")[0] for line in caught.value.lines] == [
            str(tmp_path / "d" / name) for name in names
        ]
        assert "--on-error skip" in caught.value.hint
        analysis = analyze(argument, tmp_path / "out", skip, tokenizer=tokenizer)
        assert analysis.num_sequences == 20
        assert analysis.manifest["rejected"] == {"unreadable": len(names)}
        rejected = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
        assert [Path(one["file"]).name for one in rejected] == names
        assert {one["message"] for one in rejected} == {"a link that leads nowhere", "a link that leads to itself"}
        assert validate(tmp_path / "out").ok
    for index in (1, 2):
        request = IntakeRequest(paths=argument, tokenizer=tokenizer, options=skip, cache=tmp_path / f"cache-{index}")
        write_shard(request, tmp_path / f"shard-{index}", (index, 2))
    assert merge([tmp_path / "shard-1", tmp_path / "shard-2"], tmp_path / "merged").manifest == analysis.manifest


def test_what_cannot_be_looked_at_or_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permissions, which hold for everybody but root."""
    _write(tmp_path / "d", "a.jsonl", "b.jsonl")
    monkeypatch.setattr("os.access", lambda path, mode: not str(path).endswith("a.jsonl"))
    damaged, whole = find_sources([tmp_path / "d"])
    assert (damaged.damage, whole.damage) == ("there is no permission to read it", None)
    with pytest.raises(DataError, match=r"a\.jsonl: there is no permission to read it"):
        analyze(tmp_path / "d", tmp_path / "out")


@pytest.mark.parametrize("argument", ["d", "d/**/*.jsonl"])
def test_links_to_folders_are_named_and_not_followed(command: Run, argument: str) -> None:
    """Also one to a folder around it, in which everything would be there again and again."""
    _write(Path("d"), "z/b.jsonl")
    Path("d/z/b.jsonl").write_text('{"text": "one two three"}\n')
    Path("elsewhere").mkdir()
    Path("elsewhere/c.jsonl").write_text('{"text": "four five six"}\n')
    Path("d/z/up").symlink_to("..")
    Path("d/there").symlink_to("../elsewhere")
    tokenizer = ROOT / "sample_data" / "tokenizer"
    ran = command("analyze", argument, "--tokenizer", tokenizer)
    assert ran.code == 0, ran.err
    assert "warning: links to folders are not followed: d/there, d/z/up\n" in ran.err
    analysis = load_analysis("chunkplan-out/analysis")
    found = [(one["path"], one["format"], one["records"]) for one in analysis.manifest["sources"]]
    assert found == [("d/z/b.jsonl", "jsonl", 1), ("d/there", "link", 0), ("d/z/up", "link", 0)]
    assert "not followed" in analysis.manifest["sources"][1]["evidence"]
    assert validate("chunkplan-out/analysis").ok
    assert command("analyze", "d/there", "--tokenizer", tokenizer).code == 0  # what is named is read
    Path("only").mkdir()
    Path("only/there").symlink_to("../elsewhere")
    with pytest.raises(UsageError, match="no data in it or below") as caught:
        find_sources(["only"])
    assert "name only/there/" in caught.value.hint


def test_arguments_are_taken_in_their_order_and_as_often_as_they_are_given(tmp_path: Path) -> None:
    _write(tmp_path, "a.jsonl", "b.jsonl", "no_suffix")
    arguments = [tmp_path / "b.jsonl", tmp_path / "no_suffix", tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    assert _found(*arguments, folder=tmp_path) == ["b.jsonl", "no_suffix", "a.jsonl", "b.jsonl"]


def test_a_source_has_its_size_and_what_can_be_read_once_has_none(tmp_path: Path) -> None:
    size = (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"{}\n"))
    os.mkfifo(tmp_path / "pipe")
    assert find_sources([tmp_path / "a.jsonl.gz", "-", tmp_path / "pipe"]) == [
        SourceFile(str(tmp_path / "a.jsonl.gz"), "jsonl", "gzip", size),
        SourceFile("-", "jsonl", None, None),
        SourceFile(str(tmp_path / "pipe"), "jsonl", None, None),
    ]
    with pytest.raises(UsageError, match="read once"):
        find_sources(["-", "-"])


@pytest.mark.parametrize(
    ("argument", "message"), [("a.xlsx", "suffix that is not known"), ("missing.jsonl", "there is no file")]
)
def test_a_path_that_makes_no_sense_is_refused(tmp_path: Path, argument: str, message: str) -> None:
    _write(tmp_path, "a.xlsx")
    with pytest.raises(UsageError, match=message) as caught:
        find_sources([tmp_path / argument])
    assert caught.value.hint
    with pytest.raises(UsageError, match="no data"):
        find_sources([])


def _dataset(folder: Path, *files: str) -> Path:
    _write(folder, *files, "dataset_info.json", "cache-123.arrow")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in files]}))
    return folder


def test_a_dataset_saved_to_disk_stands_for_the_files_it_lists(tmp_path: Path) -> None:
    _dataset(tmp_path / "one", "data-1.arrow", "data-0.arrow")
    for split in ("train", "test"):
        _dataset(tmp_path / "all" / split, "data-0.arrow")
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    _write(tmp_path, "b.jsonl")
    one = ["one/data-1.arrow", "one/data-0.arrow"]
    both = ["all/train/data-0.arrow", "all/test/data-0.arrow"]
    assert _found(tmp_path / "one", folder=tmp_path) == one
    assert _found(tmp_path / "all", folder=tmp_path) == both
    assert _found(tmp_path, folder=tmp_path) == [both[0], "b.jsonl", *one, both[1]]  # what is evaluated on is behind
    (tmp_path / "one" / "data-0.arrow").unlink()
    with pytest.raises(DataError, match=r"data-0.arrow is missing"):
        find_sources([tmp_path / "one"])
    (tmp_path / "one" / "state.json").write_text("[]")
    with pytest.raises(DataError, match="does not list the data_files"):
        find_sources([tmp_path / "one"])


def test_urls_are_files_folders_and_patterns_as_paths_are() -> None:
    system = fsspec.filesystem("memory")
    root = "/sources-test"
    names = ["b.jsonl", "a/c.parquet", "x.xlsx", ".x/d.jsonl", "config.json"]
    for name in (*names, "ds/data-1.arrow", "ds/data-0.arrow", "ds/dataset_info.json"):
        system.pipe(f"{root}/{name}", b"{}\n")
    listed = {"_data_files": [{"filename": "data-1.arrow"}, {"filename": "data-0.arrow"}]}
    system.pipe(f"{root}/ds/state.json", json.dumps(listed).encode())
    try:
        url = f"memory://{root}"
        assert find_sources([f"{url}/b.jsonl"]) == [SourceFile(f"{url}/b.jsonl", "jsonl", None, 3)]
        names = [source.path.removeprefix(f"{url}/") for source in find_sources([url])]
        assert names == ["a/c.parquet", "b.jsonl", "ds/data-1.arrow", "ds/data-0.arrow"]
        for pattern in ("*.json*", "**/*.json*"):
            assert [source.path for source in find_sources([f"{url}/{pattern}"])] == [f"{url}/b.jsonl"]
        assert [source.path for source in find_sources([f"{url}/.x/*"])] == [f"{url}/.x/d.jsonl"]
        with pytest.raises(UsageError, match="there is no file"):
            find_sources([f"{url}/missing.jsonl"])
    finally:
        system.rm(root, recursive=True)


def test_a_url_without_access_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="is no address"):
        find_sources(["nonsense://bucket/a.jsonl"])
    with pytest.raises(UsageError, match="no access to dropbox://") as caught:
        find_sources(["dropbox://bucket/a.jsonl"])  # its package is no dependency of anything here
    assert caught.value.hint == "pip install dropboxdrivefs"
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.raises(UsageError, match="needs fsspec") as caught:
        find_sources(["s3://bucket/a.jsonl"])
    assert pip_install("remote") in caught.value.hint
