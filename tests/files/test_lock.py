"""Two runs that write the same folder never disturb one another, nor those that read it; all others run at once."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from chunkplan import analyze, build, load_analysis, load_plan
from chunkplan.config.plan import PlanConfig
from chunkplan.errors import ChunkplanError, DataError, UsageError
from chunkplan.files.folder import replace_folder
from chunkplan.files.writing import hold
from chunkplan.intake.reading import IntakeRequest
from chunkplan.intake.shard import merge, write_shard
from chunkplan.planfile import manifest
from tests.support.process_checks import begin, in_group, left_behind, wait_until

CONFIG = PlanConfig(chunk_size=64, k=1, global_batch=8)


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.npy"
    np.save(path, np.arange(1, 200))
    return path


def write_records(path: Path, count: int) -> Path:
    random = np.random.default_rng(count)
    records = ({"input_ids": random.integers(0, 9, size).tolist()} for size in random.integers(2, 200, count))
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def refusal(target: Path, *, writes: Path | None = None) -> str:
    """What a run hears that is to write `target`, or what it stands for, too."""
    with (
        pytest.raises(UsageError, match=f"another run is writing {writes or target} ") as caught,
        replace_folder(target, "plan"),
    ):
        pass
    return str(caught.value)


def test_a_second_run_is_told_who_writes_and_a_killed_one_holds_nothing(tmp_path: Path) -> None:
    """The old analysis can be planned all the while."""
    records = write_records(tmp_path / "old.jsonl", 20)
    space = tmp_path / "space"
    old = analyze(records, space / "analysis")
    os.mkfifo(tmp_path / "pipe.jsonl")
    running = begin("analyze", tmp_path / "pipe.jsonl", workspace=space)
    with (tmp_path / "pipe.jsonl").open("w") as pipe:  # opens when the command reads
        pipe.write('{"text": "a"}\n')
        pipe.flush()
        with pytest.raises(UsageError) as caught:
            analyze(records, space / "analysis")
        assert f"another run is writing {space}/analysis (process {running.pid} on " in str(caught.value)
        assert f"analyze {tmp_path}/pipe.jsonl" in str(caught.value)
        assert "--workspace" in caught.value.hint
        assert build(space / "analysis", space / "plan", CONFIG).manifest["analysis"]["content_hash"] == (
            old.content_hash
        )
        running.kill()
        running.communicate(timeout=30)
        wait_until(lambda: not in_group(running.pid))
    assert (space / ".analysis.lock").exists()
    assert analyze(records, space / "analysis").content_hash == old.content_hash
    assert left_behind(space) == []


def test_a_build_is_refused_before_it_plans_and_leaves_the_other_alone(tmp_path: Path, lengths: Path) -> None:
    def refuse(*done: int) -> None:
        raise AssertionError("it plans")

    with replace_folder(tmp_path / "plan-eval", "plan"):
        with pytest.raises(UsageError, match=r"another run is writing .*/plan-eval "):
            build(lengths, tmp_path / "plan", PlanConfig(chunk_size=64, k=1, global_batch=8, holdout=9))
        with pytest.raises(UsageError, match=r"another run is writing .*/plan-eval "):
            build(lengths, tmp_path / "plan-eval", CONFIG, progress=refuse)
        build(lengths, tmp_path / "plan", CONFIG)
        refusal(tmp_path / "plan-eval")
    assert {path.name for path in tmp_path.iterdir()} == {"plan", "plan-eval", "lengths.npy"}


def test_a_folder_behind_a_symbolic_link_is_the_same_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "plan")
    with replace_folder(tmp_path / "plan", "plan"):
        refusal(tmp_path / "link", writes=tmp_path / "plan")


def test_a_lock_is_free_again_however_its_block_ends(tmp_path: Path) -> None:
    for error in (RuntimeError, KeyboardInterrupt, SystemExit):
        with pytest.raises(error), replace_folder(tmp_path / "plan", "plan"):
            assert "process " + str(os.getpid()) in refusal(tmp_path / "plan")
            raise error
        assert list(tmp_path.iterdir()) == []


def test_of_many_that_take_a_lock_at_once_one_has_it(tmp_path: Path) -> None:
    """Each removes the file as it ends, while others have opened it."""
    holders: list[int] = []
    most: list[int] = []

    def compete(number: int) -> int:
        taken = 0
        while taken < 20:
            try:
                with hold(tmp_path / "plan"):
                    holders.append(number)
                    most.append(len(holders))
                    time.sleep(0.001)
                    taken += 1
                    holders.pop()
            except UsageError:
                continue
        return taken

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(compete, range(6))) == [20] * 6
    assert set(most) == {1}
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    analyze(write_records(tmp_path / "data.jsonl", 5), tmp_path / "space" / "analysis")
    assert load_analysis(tmp_path / "space" / "analysis").num_sequences == 5
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("kind", ["link", "link to nothing", "link to a folder", "pipe", "folder", "socket"])
def test_a_lock_that_is_no_file_is_refused_and_stays_and_nothing_behind_it_is_written(
    tmp_path: Path, kind: str, lengths: Path
) -> None:
    lock, secret = tmp_path / "space" / ".plan.lock", tmp_path / "secret.txt"
    lock.parent.mkdir()
    secret.write_text("precious")
    if kind == "pipe":
        os.mkfifo(lock)
    elif kind == "folder":
        lock.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(lock))
    else:
        targets = {"link": secret, "link to nothing": tmp_path / "nothing", "link to a folder": tmp_path}
        lock.symlink_to(targets[kind])
    before = lock.lstat()
    with pytest.raises(UsageError, match=r"/space/\.plan\.lock is to be a file") as refused:
        build(lengths, tmp_path / "space" / "plan", CONFIG)
    assert "--workspace" in refused.value.hint
    assert os.path.samestat(lock.lstat(), before)
    assert secret.read_text() == "precious"
    assert {path.name for path in tmp_path.iterdir()} == {"space", "secret.txt", "lengths.npy"}


def test_all_shards_of_one_workspace_run_at_once(tmp_path: Path) -> None:
    files = [write_records(tmp_path / f"{count}.jsonl", count) for count in range(10, 18)]
    together = threading.Barrier(4, timeout=60)

    def do(index: int) -> Path:
        def wait(*done: int | None) -> None:
            if not has_waited:
                has_waited.append(True)
                together.wait()  # none goes on before all are at work

        has_waited: list[bool] = []
        request = IntakeRequest(paths=files, cache=tmp_path / "cache", workers=1, progress=wait)
        write_shard(request, tmp_path / f"shard-{index}", (index, 4))
        return tmp_path / f"shard-{index}"

    with ThreadPoolExecutor(4) as pool:
        shards = list(pool.map(do, range(1, 5)))
    whole = analyze(files, tmp_path / "whole", cache=tmp_path / "other")
    assert merge(shards, tmp_path / "merged").content_hash == whole.content_hash
    assert left_behind(tmp_path) == []


def test_an_analysis_that_is_replaced_under_a_build_is_an_error_and_leaves_the_old_plan(tmp_path: Path) -> None:
    first, second = (write_records(tmp_path / f"{count}.jsonl", count) for count in (40, 30))
    space = tmp_path / "space"
    old = analyze(first, space / "analysis")
    build(space / "analysis", space / "plan", CONFIG)

    def replace_it(done: int, total: int) -> None:
        analyze(second, space / "analysis")

    with pytest.raises(DataError, match="was replaced while it was planned") as caught:
        build(space / "analysis", space / "plan", CONFIG, progress=replace_it)
    assert "again" in caught.value.hint
    assert load_plan(space / "plan").manifest["analysis"]["content_hash"] == old.content_hash
    assert left_behind(space) == []


def test_who_reads_an_analysis_that_is_replaced_gets_the_old_the_new_or_an_error(tmp_path: Path) -> None:
    files = [write_records(tmp_path / f"{count}.jsonl", count) for count in (40, 30)]
    target, cache = tmp_path / "analysis", tmp_path / "cache"
    whole = {analyze(file, target, cache=cache).content_hash for file in files}
    found: Counter[str] = Counter()
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            try:
                found[load_analysis(target).content_hash] += 1
            except ChunkplanError as error:
                assert error.hint
                found["error"] += 1

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read)
        try:
            for number in range(40):
                analyze(files[number % 2], target, cache=cache)
        finally:
            stop.set()
        reader.result()
    assert whole <= set(found) <= whole | {"error"}


def test_a_manifest_that_vanishes_between_two_looks_at_it_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    analyze(write_records(tmp_path / "data.jsonl", 5), tmp_path / "analysis")
    monkeypatch.setattr(manifest, "refuse_outside", lambda path, folder: path.unlink())
    with pytest.raises(DataError, match="was replaced while it was read"):
        load_analysis(tmp_path / "analysis")
