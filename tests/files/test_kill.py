"""Runs that are killed at any moment: nothing torn is ever read as whole, and a rerun ends as if nothing had been."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import pytest

from chunkplan import analyze, build, validate
from chunkplan.config.intake import IntakeOptions
from chunkplan.config.plan import PlanConfig
from chunkplan.files.folder import replace_folder
from tests.support.process_checks import (
    PIECE_BYTES,
    ROOT,
    TOKENIZER,
    begin,
    begin_analyze,
    in_group,
    left_behind,
    wait_until,
)

#: A folder is replaced by a process that kills itself before the rename with the number that it is given.
REPLACE = """
import os, signal, sys
from pathlib import Path
from chunkplan.files.folder import replace_folder

rename, renames = Path.rename, []

def rename_or_die(self, target):
    if len(renames) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    renames.append(target)
    return rename(self, target)

Path.rename = rename_or_die
with replace_folder(Path(sys.argv[1]), "plan") as folder:
    for name in ("manifest.json", "steps.parquet"):
        (folder / name).write_text(sys.argv[3])
"""

#: What is done in turn, each with another result than the one before.
MAX_LENGTHS = (None, 300)
CONFIG = PlanConfig(chunk_size=512, k=2, global_batch=64)
PLAN = ["--chunk-size", "512", "--k", "2", "--global-batch", "64"]


def manifest(words: str) -> str:
    """Of a plan, as far as whoever replaces one looks."""
    return f'{{"kind": "plan", "words": "{words}"}}'


def content(folder: Path) -> set[str]:
    return {path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize(("rename", "leaves"), [(0, "old"), (1, None), (2, "new"), (3, "new"), (4, "new")])
def test_a_run_that_is_killed_around_its_renames_leaves_what_the_next_puts_right(
    tmp_path: Path, rename: int, leaves: str | None
) -> None:
    target = tmp_path / "plan"
    with replace_folder(target, "plan") as folder:
        for name in ("manifest.json", "chunks.parquet"):
            (folder / name).write_text(manifest("old"))
    killed = subprocess.run(
        [sys.executable, "-c", REPLACE, str(target), str(rename), manifest("new")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
        check=False,
    )
    assert killed.returncode == (0 if rename == 4 else -signal.SIGKILL)
    assert content(target) == {manifest(leaves)} if leaves else not target.exists()
    with pytest.raises(KeyboardInterrupt), replace_folder(target, "plan"):
        assert content(target) == {manifest(leaves or "old")}
        raise KeyboardInterrupt
    assert content(target) == {manifest(leaves or "old")}
    assert list(tmp_path.iterdir()) == [target]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """3,000 texts in three files, one of them compressed."""
    folder = tmp_path_factory.mktemp("data")
    dice = random.Random(0)
    words = (ROOT / "README.md").read_text().split()
    lines = [json.dumps({"text": " ".join(dice.choices(words, k=dice.randint(1, 200)))}) + "\n" for _ in range(3000)]
    (folder / "a.jsonl").write_text("".join(lines[:1000]))
    (folder / "b.jsonl").write_text("".join(lines[1000:2000]))
    (folder / "c.jsonl.gz").write_bytes(gzip.compress("".join(lines[2000:]).encode()))
    return [folder / name for name in ("a.jsonl", "b.jsonl", "c.jsonl.gz")]


def wait_for_a_moment(running: subprocess.Popen[str], target: Path, dice: random.Random) -> None:
    """Wait until a command that writes `target` is at work, for a random time or until random pieces are in the cache.

    There are about 30 pieces: where more are waited for, until the folder that is to be `target` is filled.
    """
    lock = target.with_name(f".{target.name}.lock")

    def is_at_work() -> bool:
        with suppress(FileNotFoundError):
            return f"process {running.pid} " in lock.read_text()
        return False

    wait_until(lambda: running.poll() is not None or is_at_work())
    if dice.random() < 0.3:
        time.sleep(dice.uniform(0, 1))
        return
    goal = dice.randint(1, 40)
    pieces, filled = target.parent / "cache" / "pieces", f".{target.name}.tmp-*"
    wait_until(
        lambda: (
            running.poll() is not None
            or len(list(pieces.glob("*/piece.json"))) >= goal
            or any(target.parent.glob(filled))
        )
    )
    time.sleep(dice.uniform(0, 0.3))


def kill(running: subprocess.Popen[str], dice: random.Random) -> bool:
    """Kill a command, or all its processes in any order, and wait for their end; whether it was at work."""
    processes = in_group(running.pid) if dice.random() < 0.5 else [running.pid]
    for process in dice.sample(processes, len(processes)):
        with suppress(ProcessLookupError):  # workers end by themselves once the command is gone
            os.kill(process, signal.SIGKILL)
    running.communicate(timeout=60)
    wait_until(lambda: not in_group(running.pid))
    return running.returncode == -signal.SIGKILL


def check_whole(folder: Path, content_hashes: Collection[str]) -> None:
    """What has its final name is whole, and one of these."""
    if folder.exists():
        found = validate(folder)
        assert found.ok, found.violations
        assert found.content_hash in content_hashes


@pytest.mark.soak
def test_reruns_after_fifty_kills_are_as_unbroken_runs(
    data: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five rounds, each of seven killed `analyze` and three killed `build`, and of their reruns."""
    monkeypatch.setattr("chunkplan.intake.pieces.PIECE_BYTES", PIECE_BYTES)
    analyses, plans = {}, {}
    for longest in MAX_LENGTHS:
        unbroken = tmp_path / f"unbroken-{longest}"
        options = IntakeOptions(max_length=longest)
        analyses[longest] = analyze(data, unbroken / "analysis", options, tokenizer=TOKENIZER).content_hash
        plans[longest] = build(unbroken / "analysis", unbroken / "plan", CONFIG).content_hash
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    num_at_work = 0
    for number in range(5):
        space = tmp_path / f"space-{number}"
        analyze(data, space / "analysis", tokenizer=TOKENIZER, cache=tmp_path / "unbroken-None" / "cache")
        for turn in range(7):
            longest = MAX_LENGTHS[turn % 2]
            limit = [] if longest is None else ["--max-length", str(longest)]
            workers = dice.choice(["1", "2"])
            running = begin_analyze(*data, *limit, "--workers", workers, workspace=space)
            wait_for_a_moment(running, space / "analysis", dice)
            num_at_work += kill(running, dice)
            check_whole(space / "analysis", analyses.values())
        again = analyze(data, space / "analysis", IntakeOptions(max_length=longest), tokenizer=TOKENIZER, workers=1)
        assert again.content_hash == analyses[longest]
        assert left_behind(space) == []
        for _ in range(3):
            running = begin("build", *PLAN, workspace=space)
            wait_for_a_moment(running, space / "plan", dice)
            num_at_work += kill(running, dice)
            check_whole(space / "plan", {plans[longest]})
        assert build(space / "analysis", space / "plan", CONFIG).content_hash == plans[longest]
        assert left_behind(space) == []
    print(f"{num_at_work} of 50 killed at work")
    assert num_at_work > 25


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_a_worker_that_is_killed_ends_the_run_with_a_word(data: list[Path], tmp_path: Path, seed: int) -> None:
    """The other one is ended too, and what was finished is there for the rerun."""
    dice = random.Random(seed)
    running = begin_analyze(*data, workspace=tmp_path)
    wait_until(lambda: len(workers_of(running.pid)) == 2)
    done = dice.randint(0, 15)  # of about 30 pieces
    wait_until(lambda: len(list(tmp_path.glob("cache/pieces/*/piece.json"))) >= done)
    os.kill(dice.choice(workers_of(running.pid)), signal.SIGKILL)
    _, screen = running.communicate(timeout=60)
    assert running.returncode == 1
    assert "error: a process that was reading data was killed" in screen
    assert "hint: " in screen
    wait_until(lambda: not in_group(running.pid))
    assert left_behind(tmp_path) == []
    assert not (tmp_path / "analysis").exists()
    assert begin_analyze(*data, workspace=tmp_path).wait(timeout=100) == 0
    assert validate(tmp_path / "analysis").ok


def workers_of(group: int) -> list[int]:
    """The processes of a command that read data for it."""
    return [number for number in in_group(group) if b"spawn_main" in Path(f"/proc/{number}/cmdline").read_bytes()]
