"""What is replaced is ours and nothing but ours: whatever else is in the way is refused and stays."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import chunkplan
from chunkplan.config.intake import IntakeOptions
from chunkplan.errors import UsageError
from chunkplan.files.folder import MANIFEST, replace_folder
from chunkplan.intake.reading import IntakeRequest
from chunkplan.intake.shard import write_shard
from chunkplan.planfile.analysis_writer import AnalysisWriter
from chunkplan_runtime.training.run_folder import RunFolder

CONFIG = chunkplan.PlanConfig(chunk_size=64, k=1, global_batch=8)
SKIP = IntakeOptions(on_error="skip")
KINDS = ("analysis", "plan", "shard", "export")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each kind under its name."""
    folder = tmp_path_factory.mktemp("ours")
    records = folder / "data.jsonl"
    records.write_text('{"input_ids": [1, 2, 3]}\n{"input_ids": []}\n' * 9)
    chunkplan.analyze(records, folder / "analysis", SKIP, cache=folder / "cache")
    chunkplan.build(folder / "analysis", folder / "plan", CONFIG)
    chunkplan.export(folder / "plan", folder / "export", "hf")
    write_shard(
        IntakeRequest(paths=[records], options=SKIP, cache=folder / "cache", workers=1), folder / "shard", (1, 1)
    )
    return folder


@pytest.fixture
def copied(ours: Path, tmp_path: Path) -> Path:
    return shutil.copytree(ours, tmp_path / "ours")


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def replace(folder: Path, kind: str) -> None:
    with replace_folder(folder, kind) as temporary:
        (temporary / MANIFEST).write_text("new")


@pytest.mark.parametrize("kind", KINDS)
def test_what_we_write_is_replaced_and_what_we_write_of_another_kind_is_not(copied: Path, kind: str) -> None:
    for other in set(KINDS) - {kind}:
        before = files_of(copied / other)
        with pytest.raises(UsageError, match=r"exists and is not just an?"):
            replace(copied / other, kind)
        assert files_of(copied / other) == before
    replace(copied / kind, kind)
    assert files_of(copied / kind) == {MANIFEST: b"new"}


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        ("analysis", {"manifest.json": '{"name": "my PWA"}'}),
        ("analysis", {"manifest.json": '{"kind": "plan"}'}),
        ("analysis", {"sequences.parquet": ""}),
        ("analysis", {"tokens/notes.txt": ""}),
        ("analysis", {"manifest.json": '{"kind": "analysis"}', "tokens/notes.txt": ""}),
        ("analysis", {"manifest.json": '{"kind": "analysis"}', "rejected.jsonl/mine.txt": ""}),
        ("analysis", {"tokens/": ""}),
        ("plan", {"manifest.json": '{"name": "my PWA"}'}),
        ("plan", {"chunks.parquet": ""}),
        ("plan", {"manifest.json": '{"kind": "plan"}', "steps.parquet/": ""}),
        ("shard", {"manifest.json": '{"kind": "shard"}', "pieces/0a/notes.txt": ""}),
        ("export", {"export.json": "{}"}),
        ("export", {"export.json": "{}", "data-my-of-life/diary.txt": ""}),
        ("export", {"state.json": "{}"}),
        ("export", {"manifest.json": '{"kind": "export"}'}),
    ],
)
def test_what_only_has_our_names_is_refused_and_stays(tmp_path: Path, kind: str, files: dict[str, str]) -> None:
    target = tmp_path / "target"
    for name, content in files.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if name.endswith("/") else path.write_text(content)
    before = sorted(target.rglob("*"))
    with pytest.raises(UsageError, match=r"exists and is not just an?") as refused:
        replace(target, kind)
    assert "--output" in refused.value.hint
    assert sorted(target.rglob("*")) == before


@pytest.mark.parametrize("kind", ["analysis", "plan"])
@pytest.mark.parametrize("damage", ["torn", "newer", "a file is missing"])
def test_ours_is_replaced_however_damaged_it_is(copied: Path, kind: str, damage: str) -> None:
    """As its error messages tell to do."""
    manifest = copied / kind / MANIFEST
    if damage == "a file is missing":
        (copied / kind / ("sequences" if kind == "analysis" else "chunks")).with_suffix(".parquet").unlink()
    elif damage == "torn":
        manifest.write_text(manifest.read_text()[:100])
    else:
        manifest.write_text(manifest.read_text().replace('"schema_version": 6', '"schema_version": 99'))
    replace(copied / kind, kind)


@pytest.mark.parametrize("link", ["tokens", "manifest.json", "target"])
def test_of_a_link_in_the_way_nothing_behind_it_is_lost(copied: Path, link: str) -> None:
    """A link to the whole folder is followed, as everywhere; one in it to another folder is not ours."""
    target, elsewhere = copied / "analysis", copied / "elsewhere"
    path = target if link == "target" else target / link
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    if link == "tokens":
        with pytest.raises(UsageError, match="is not just"):
            replace(target, "analysis")
    else:
        replace(target, "analysis")
    assert elsewhere.exists()
    assert target.is_symlink() == (link == "target")


@pytest.mark.parametrize("command", ["analyze", "build", "export"])
@pytest.mark.parametrize("output", [".", "..", ""])
def test_the_current_folder_and_those_around_it_are_never_replaced(
    ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, output: str
) -> None:
    """A shell in them would be left in a folder that is no more."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    do = {
        "analyze": lambda: chunkplan.analyze(ours / "data.jsonl", output, SKIP, cache=tmp_path / "cache"),
        "build": lambda: chunkplan.build(ours / "analysis", output, CONFIG),
        "export": lambda: chunkplan.export(ours / "plan", output, "jsonl"),
    }
    with pytest.raises(UsageError, match="the current folder, or around it") as refused:
        do[command]()
    assert "--output" in refused.value.hint
    assert Path("../work").samefile(".") and not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda plan: (plan / ".DS_Store").touch(), ".DS_Store is in it"),
        (lambda plan: [(plan / name).touch() for name in ("plan.html", "manifest.json~")], "manifest.json~ is in it"),
        (lambda plan: os.truncate(plan / MANIFEST, 0), "no manifest.json says that it is one"),
        (lambda plan: (plan / MANIFEST).unlink(), "no manifest.json says that it is one"),
        (lambda plan: [shutil.rmtree(plan), plan.touch()], "it is no folder"),
    ],
    ids=["a stranger", "strangers", "empty manifest", "no manifest", "a file"],
)
def test_what_is_in_the_way_is_named(copied: Path, spoil: Callable[[Path], object], why: str) -> None:
    spoil(copied / "plan")
    with pytest.raises(UsageError) as refused:
        chunkplan.build(copied / "analysis", copied / "plan", CONFIG)
    assert str(refused.value) == f"{copied / 'plan'} exists and is not just a plan: {why}"
    assert "remove it yourself" in refused.value.hint


@pytest.mark.parametrize("command", ["analyze", "build", "export", "train"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_written_into_a_folder_of_ours(copied: Path, command: str, kind: str) -> None:
    """It would then hold more than we write, and never be replaced again."""
    (copied / "link").symlink_to(copied / kind)
    before = sorted(copied.rglob("*"))
    for output in (copied / kind / "sub", copied / kind / "a" / "b", copied / "link" / "sub"):
        do = {
            "analyze": lambda output=output: chunkplan.analyze(copied / "data.jsonl", output, SKIP),
            "build": lambda output=output: chunkplan.build(copied / "analysis", output, CONFIG),
            "export": lambda output=output: chunkplan.export(copied / "plan", output, "jsonl"),
            "train": lambda output=output: RunFolder(output).check(resume=False),
        }
        with pytest.raises(UsageError, match=f"{output} lies in {copied / kind}, which is an? ") as refused:
            do[command]()
        assert "--output" in refused.value.hint
    assert sorted(copied.rglob("*")) == before


@pytest.mark.parametrize("output", ["one", "one/plan"])
def test_links_that_lead_to_themselves_are_no_output(copied: Path, output: str) -> None:
    for one, other in (("one", "two"), ("two", "one")):
        (copied / one).symlink_to(other)
    before = sorted(copied.rglob("*"))
    for do in (
        lambda: chunkplan.analyze(copied / "data.jsonl", copied / output, SKIP, cache=copied / "cache"),
        lambda: chunkplan.build(copied / "analysis", copied / output, CONFIG),
        lambda: chunkplan.export(copied / "plan", copied / output, "jsonl"),
    ):
        with pytest.raises(UsageError, match="Too many levels of symbolic links") as refused:
            do()
        assert "links on the way" in refused.value.hint
    with pytest.raises(UsageError, match="cannot write to"):
        RunFolder(copied / output).check(resume=False)
    assert sorted(copied.rglob("*")) == before


def test_of_a_name_that_is_too_long_a_shorter_one_is_asked(ours: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="File name too long") as refused:
        chunkplan.build(ours / "analysis", tmp_path / ("x" * 240), CONFIG)
    assert "a shorter name" in refused.value.hint


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"])
def test_a_name_that_no_folder_can_have_is_a_usage_error(ours: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        chunkplan.export(ours / "plan", tmp_path / name, "jsonl")
    with pytest.raises(UsageError):
        chunkplan.build(ours / "analysis", tmp_path / name, CONFIG)


def test_an_analysis_with_tokens_in_many_parts_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chunkplan.planfile.analysis_writer.TOKEN_FILE_TOKENS", 4)
    monkeypatch.setattr("chunkplan.planfile.analysis_writer.WAITING_TOKENS", 4)
    with replace_folder(tmp_path / "analysis", "analysis") as folder:
        writer = AnalysisWriter(folder)
        for record in range(12):
            writer.add(0, record, np.arange(3, dtype=np.int32), np.array([False, True, True]))
        writer.finish(exact=True, sources=[])
    assert len(list((tmp_path / "analysis" / "tokens").iterdir())) > 3
    replace(tmp_path / "analysis", "analysis")
