"""A disk that is full or may not be written is one clear error: the old result stays whole, nothing is left behind."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chunkplan import analyze, build, load_analysis, load_plan, validate
from chunkplan.config.plan import PlanConfig
from chunkplan.errors import UsageError
from chunkplan.exporting.export import FORMATS, export
from chunkplan.files.folder import replace_folder
from chunkplan.files.json_file import write_json
from chunkplan.intake import process, reading, store
from chunkplan.intake.reading import IntakeRequest
from chunkplan.intake.shard import merge, write_shard
from chunkplan.schedule.trace import write_trace
from chunkplan.simulation import simulate_plan
from chunkplan_cli.app import run_command
from tests.support.process_checks import PIECE_BYTES, ROOT, TOKENIZER, left_behind

CONFIG = PlanConfig(chunk_size=64, k=2, global_batch=8)
DISK_BYTES = 8 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A disk of 8 MiB, which is written until it is full: nothing asks before whether there is room."""
    monkeypatch.setattr(store, "RESERVE_BYTES", 0)
    monkeypatch.setattr(reading, "LEAST", 0)
    monkeypatch.setattr(process, "MOST", 0)
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small disk, and not in every container")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.parametrize(
    ("num_bytes", "says"),
    [
        (400_000, None),
        (600_000, "takes about 600.0 KB, 600.0 KB are to stay free, and"),
        (1e12, "268.4 MB are to stay"),
    ],
)
def test_as_much_is_left_free_as_is_written_and_no_more_than_a_reserve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: float, says: str | None
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    if says is None:
        store.check_room(tmp_path, num_bytes, "it")
        return
    with pytest.raises(UsageError, match=says) as refused:
        store.check_room(tmp_path, num_bytes, "it")
    assert str(refused.value).endswith(f"{tmp_path} has 1.0 MB left")


@pytest.mark.parametrize(
    ("record", "tokenizer", "asks"),
    [
        ({"text": "some words"}, None, False),
        ({"text": "some words"}, TOKENIZER, True),
        ({"input_ids": [1, 2]}, None, True),
        ({"length": 9}, None, False),
    ],
    ids=["estimated", "text", "token ids", "lengths"],
)
def test_room_is_asked_for_tokens_that_are_stored_and_for_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: dict[str, Any], tokenizer: Path | None, asks: bool
) -> None:
    (tmp_path / "data.jsonl").write_text((json.dumps(record) + "\n") * 2000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=150_000))
    do = partial(analyze, tmp_path / "data.jsonl", tmp_path / "analysis", tokenizer=tokenizer, workers=1)
    if asks:
        with pytest.raises(UsageError, match="the next piece takes about"):
            do()
    else:
        assert do().num_sequences == 2000


@contextmanager
def only_free(place: Path, num_bytes: int) -> Iterator[None]:
    """A disk that has no more than `num_bytes` left for as long as the block lasts."""
    filler = place / "filler"
    stat = os.statvfs(place)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, stat.f_bavail * stat.f_frsize - num_bytes))
    try:
        yield
    finally:
        filler.unlink()


@contextmanager
def read_only(place: Path) -> Iterator[None]:
    """A disk that may not be written for as long as the block lasts."""
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    yield
    subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Text in a file and in a compressed one, which is unpacked into the cache piece by piece."""
    monkeypatch.setattr("chunkplan.intake.pieces.PIECE_BYTES", PIECE_BYTES)
    random = np.random.default_rng(0)
    words = (ROOT / "README.md").read_text().split()
    lines = [json.dumps({"text": " ".join(random.choice(words, 200))}) + "\n" for _ in range(160)]
    (tmp_path / "data.jsonl").write_text("".join(lines[:80]))
    (tmp_path / "data.jsonl.gz").write_bytes(gzip.compress("".join(lines[80:]).encode()))
    return [tmp_path / "data.jsonl", tmp_path / "data.jsonl.gz"]


@pytest.fixture
def space(small_disk: Path) -> Path:
    """A workspace on the small disk with an analysis and a plan of something else."""
    (small_disk.parent / "old.jsonl").write_text('{"input_ids": [1, 2, 3]}\n' * 16)
    analyze(small_disk.parent / "old.jsonl", small_disk / "space" / "analysis")
    build(small_disk / "space" / "analysis", small_disk / "space" / "plan", CONFIG)
    return small_disk / "space"


def check_fails(space: Path, do: Callable[[], object], *, says: str = "no room is left to write") -> None:
    """`do` fails for want of room, and the workspace is as it was."""
    before = {name: validate(space / name).content_hash for name in ("analysis", "plan")}
    with pytest.raises(UsageError) as caught:
        do()
    assert says in str(caught.value) or "takes about" in str(caught.value)  # found out before, or by writing
    assert str(space.parent) in str(caught.value)
    assert ".tmp-" not in str(caught.value)
    assert caught.value.hint
    for name, content_hash in before.items():
        found = validate(space / name)
        assert found.ok
        assert found.content_hash == content_hash
    assert left_behind(space.parent) == []


def fail_at_every_fill(space: Path, do: Callable[[], object], *, rounds: int = 12) -> None:
    """`do` fails as `check_fails` has it with ever more room, and then succeeds; what has failed costs no room."""
    free = 0
    for number in range(rounds):
        with only_free(space.parent, free):
            try:
                check_fails(space, do)
            except pytest.fail.Exception:  # it did not fail: there was room enough
                assert number > 3
                return
        free = free * 3 // 2 + PAGE
    raise AssertionError(f"{do} fails with {free:,} bytes free")


def test_analyze_on_a_full_disk(space: Path, data: list[Path]) -> None:
    fail_at_every_fill(space, partial(analyze, data, space / "analysis", tokenizer=TOKENIZER, workers=1), rounds=20)
    assert load_analysis(space / "analysis").num_sequences == 160


def test_build_on_a_full_disk(space: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.random.default_rng(0).integers(1, 500, 2000))
    fail_at_every_fill(space, partial(build, tmp_path / "lengths.npy", space / "plan", CONFIG, workers=1))
    assert load_plan(space / "plan").manifest["totals"]["num_sequences"] == 2000


@pytest.mark.soak
def test_two_plans_at_once_on_a_full_disk(space: Path, tmp_path: Path) -> None:
    """Neither takes its place where there is no room for both."""
    np.save(tmp_path / "lengths.npy", np.random.default_rng(0).integers(1, 500, 2000))
    config = PlanConfig(chunk_size=64, k=2, global_batch=8, holdout=0.5)
    fail_at_every_fill(space, partial(build, tmp_path / "lengths.npy", space / "plan", config, workers=1))
    assert validate(space / "plan-eval").ok


@pytest.mark.soak
def test_shards_and_their_merging_on_a_full_disk(space: Path, data: list[Path], tmp_path: Path) -> None:
    request = IntakeRequest(paths=data, cache=space / "cache", tokenizer=TOKENIZER, workers=1)
    fail_at_every_fill(space, partial(write_shard, request, space / "shard-1", (1, 2)), rounds=20)
    write_shard(request, space / "shard-2", (2, 2))
    shards = [space / "shard-1", space / "shard-2"]
    fail_at_every_fill(space, partial(merge, shards, space / "analysis"), rounds=20)
    assert load_analysis(space / "analysis").num_sequences == 160


def test_a_file_in_a_folder_that_is_being_filled_has_its_final_name_in_errors(space: Path) -> None:
    def write() -> None:
        with replace_folder(space / "shard", "shard") as folder, only_free(space.parent, 0):
            write_json(folder / "manifest.json", ["word"] * 9999)

    check_fails(space, write, says=f"{space / 'shard' / 'manifest.json'}: No space left on device")


@pytest.mark.parametrize(
    "to", ["jsonl", *(pytest.param(to, marks=pytest.mark.soak) for to in FORMATS if to != "jsonl")]
)
def test_export_on_a_full_disk(space: Path, tmp_path: Path, to: str) -> None:
    random = np.random.default_rng(0)
    records = ({"input_ids": random.integers(0, 99, 500).tolist()} for _ in range(64))
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    analyze(tmp_path / "data.jsonl", tmp_path / "analysis")
    do = partial(export, tmp_path / "analysis", space.parent / "export", to, chunk_size=1024)
    fail_at_every_fill(space, do, rounds=20)
    assert (space.parent / "export").is_dir()


def test_files_beside_a_workspace_on_a_full_disk(space: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.random.default_rng(0).integers(1, 5000, 200))
    build(tmp_path / "lengths.npy", tmp_path / "plan", PlanConfig(chunk_size=1024, k=1, global_batch=200))
    played = simulate_plan(load_plan(tmp_path / "plan"), 0)
    file = space.parent / "file.json"
    for write in (partial(write_trace, file, [played]), partial(write_json, file, ["word"] * 9999)):
        file.write_text("old")
        with only_free(space.parent, PAGE):
            check_fails(space, write)
            assert file.read_text() == "old"
        write()
        assert json.loads(file.read_text())


def test_a_disk_that_may_not_be_written(space: Path, data: list[Path], tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.arange(1, 99))
    request = IntakeRequest(paths=data, cache=tmp_path / "cache")
    with read_only(space.parent):
        for do in (
            partial(analyze, data, space / "analysis", workers=1),
            partial(analyze, data, space / "analysis", cache=tmp_path / "cache"),
            partial(analyze, data, tmp_path / "analysis", cache=space / "cache"),
            partial(analyze, data, space / "new" / "analysis"),
            partial(write_shard, request, space / "shard", (1, 1)),
            partial(build, tmp_path / "lengths.npy", space / "plan", CONFIG),
            partial(build, tmp_path / "lengths.npy", space / "new" / "plan", CONFIG),
            partial(write_json, space / "file.json", []),
        ):
            check_fails(space, do, says="Read-only file system")
    assert not (tmp_path / "analysis").exists()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may enter; those of pytest are closed to others."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def as_nobody(*arguments: str | Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What a user without any rights sees of a command that fails."""
    monkeypatch.setattr(sys, "argv", ["chunkplan", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "200")
    if is_root := os.geteuid() == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(SystemExit) as caught:
            run_command()
    finally:
        if is_root:
            os.seteuid(0)
    printed = capsys.readouterr()
    assert caught.value.code == 2, printed.err
    assert printed.out == ""
    *_, error, hint = printed.err.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    return error


@pytest.mark.parametrize(
    ("closed", "mode", "command"),
    [
        ("data.jsonl", 0o000, "analyze data.jsonl"),
        ("more", 0o000, "analyze more"),
        ("more/data.jsonl", 0o000, "analyze more"),
        ("space", 0o555, "analyze data.jsonl"),
        ("space", 0o000, "analyze data.jsonl"),
        ("space/cache", 0o555, "analyze data.jsonl"),
        ("space/cache/pieces", 0o555, "analyze data.jsonl --no-cache"),
        ("space/cache/lock", 0o444, "analyze data.jsonl"),
        ("space/analysis", 0o000, "analyze data.jsonl"),
        ("space", 0o555, "build --chunk-size 8 --k 1"),
        ("space", 0o000, "build --chunk-size 8 --k 1"),
        ("space/analysis", 0o000, "build --chunk-size 8 --k 1"),
        ("space/analysis/manifest.json", 0o000, "build --chunk-size 8 --k 1"),
        ("space/analysis/sequences.parquet", 0o000, "build --chunk-size 8 --k 1"),
        ("space/analysis/tokens", 0o000, "build --chunk-size 8 --k 1"),
        ("space/plan", 0o000, "inspect"),
        ("space/plan/chunks.parquet", 0o000, "inspect"),
        ("more", 0o555, "simulate --trace more/trace.json"),
    ],
)
def test_what_is_closed_to_a_user_is_named(
    closed: str,
    mode: int,
    command: str,
    open_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(open_folder)
    Path("more").mkdir()
    for file in ("data.jsonl", "more/data.jsonl"):
        Path(file).write_text('{"input_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9]}\n' * 16)
    analyze("data.jsonl", "space/analysis")
    build("space/analysis", "space/plan", CONFIG)
    monkeypatch.setenv("CHUNKPLAN_WORKSPACE", "space")
    for path in Path("space").rglob("*"):
        path.chmod(0o777)
    Path("space").chmod(0o777)
    Path(closed).chmod(mode)
    error = as_nobody(*command.split(), monkeypatch=monkeypatch, capsys=capsys)
    assert "Permission denied" in error
    assert (closed.rpartition("/")[0] or closed) in error  # it, or the folder that it is in


@pytest.mark.parametrize(("words", "buffering"), [("", ""), pytest.param("--json", "1", marks=pytest.mark.soak)])
def test_a_report_that_cannot_be_printed_is_an_error(space: Path, words: str, buffering: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "chunkplan_cli.main", "inspect", *words.split(), "--workspace", str(space)],
            stdout=full,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}", "PYTHONUNBUFFERED": buffering},
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: standard output: No space left on device\nhint: ")
    assert len(done.stderr.splitlines()) == 2
