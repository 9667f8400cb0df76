"""The folder of a training run: what is in it, whether a run may start or go on there, and how things are put there.

Folders in it are written whole or not at all; files of JSON lines are such that a stopped run can go on writing them
as if it had not been stopped.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chunkplan.errors import ChunkplanError, UsageError
from chunkplan.files.folder import MANIFEST, put_in_place, refuse_inside_ours, remove_left_behind, temporary_folder
from chunkplan.files.lock import try_lock

if TYPE_CHECKING:  # it comes with torch, which options are checked without
    from chunkplan_runtime.distributed.job import Job

NO_ROOM = "check that the disk has room and may be written; --resume goes on from the last checkpoint"

_CHECKPOINT = re.compile(r"step-(\d{8,})")


class RunLock:
    """One run at a time in a folder: a second one would write over the first one's lines.

    It is a lock on the folder itself, which may be the only one in which this user can write: nothing is left of it,
    however the process ends.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def take(self) -> None:
        """Hold the folder, if it is there and not held by this run already, and its file system has locks.

        Raises:
            UsageError: another run holds it.
        """
        if self._descriptor is not None or not self._path.is_dir():
            return
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            try_lock(descriptor)
        except BlockingIOError as error:
            os.close(descriptor)
            raise UsageError(
                f"another run is at work in {self._path}", hint="wait for it to end, or give another --output"
            ) from error
        self._descriptor = descriptor

    def release(self) -> None:
        """Let another run have the folder."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class RunFolder:
    """The paths of all that a run leaves in its folder.

    `config`: the resolved configuration, written when the first step is done. `metrics`, `evaluations`, `sequences`: a
    JSON line a step, an evaluation, and with `--log-sequences` a sequence and step. `measured`: when each of several
    processes did each action of the largest step. `final`: the folder of the trained model.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.measured, self.final = path / "config.json", path / "measured.json", path / "final"
        self.metrics, self.evaluations = path / "metrics.jsonl", path / "evals.jsonl"
        self.sequences = path / "sequences.jsonl"

    def checkpoint(self, step: int) -> Path:
        """The folder of the checkpoint from which `step` comes next."""
        return self.path / "checkpoints" / f"step-{step:08d}"

    def checkpoints(self) -> list[Path]:
        """The checkpoints that are whole, oldest first."""
        folder = self.path / "checkpoints"
        found = [path for path in folder.iterdir() if _CHECKPOINT.fullmatch(path.name)] if folder.is_dir() else []
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))

    def remove_left_behind(self) -> None:
        """Remove what runs that were killed left half written, or half removed; this run holds the folder."""
        checkpoints = self.path / "checkpoints"
        for parent, name in ((self.path, self.final.name), (self.path, self.config.name), (checkpoints, None)):
            if parent.is_dir():
                remove_left_behind(parent, name, by_anyone=True)

    def how_to_resume(self) -> str:
        """What a run that was stopped left behind to go on from, in words."""
        checkpoints = self.checkpoints()
        if checkpoints:
            return f"the same command with --resume goes on from {checkpoints[-1]}"
        return "there is no checkpoint yet; the same command with --resume starts from the beginning"

    def finished(self, why: str, hint: str = "") -> UsageError:
        """The error of a run that is finished and cannot go on: `why`, and the `hint` where something helps that."""
        is_adapter = (self.final / "adapter_config.json").exists()
        merged = (
            "start another run, with --merge-adapters one whose weights can be trained on from; "
            "peft merges those that are here into their model (merge_and_unload)"
        )
        weights = f"`--model {self.final}` with another --output trains on from its weights; "
        return UsageError(
            f"the run in {self.path} is finished: {self.final} is there, and {why}",
            hint=hint or (merged if is_adapter else f"{weights}it begins the plan again from its first step"),
        )

    def check(self, resume: bool) -> None:
        """Refuse a folder that holds something else, or that cannot be made, before any work is done.

        Raises:
            UsageError: it holds a run already (with `resume`: a finished one without a checkpoint), is a plan or an
                analysis, or lies in one.
        """
        if resume and self.final.exists() and not self.checkpoints():
            raise self.finished("there is no checkpoint to go on from")
        if self.config.exists() and not self.metrics.exists():
            raise UsageError(f"{self.config} is not of a training run", hint="give another --output")
        for earlier in (self.final, self.metrics, self.path / "checkpoints"):
            if earlier.exists() and not resume:
                raise UsageError(
                    f"{earlier} of an earlier run is there",
                    hint=("" if self.final.exists() else "go on with it with --resume, ")
                    + "give another --output, or remove that run",
                )
        if (self.path / MANIFEST).exists():
            raise UsageError(f"{self.path} is an analysis or a plan", hint="give another --output")
        refuse_inside_ours(self.path)
        absolute = self.path.absolute()
        there = next(folder for folder in (absolute, *absolute.parents) if os.path.lexists(folder))
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise UsageError(f"cannot write to {self.path}", hint="give another --output")


@contextmanager
def saving(target: Path) -> Iterator[None]:
    """Turn all that keeps `target` from being written into an error of ours.

    Unlike `chunkplan.files.writing` it ends a run that has worked, with exit code 1, and says how to go on.

    Raises:
        ChunkplanError: it cannot be written, for example because the disk is full.
    """
    from safetensors import SafetensorError  # which comes with torch: options are checked without both

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ChunkplanError(f"cannot be written: {why(error)}", where=str(target), hint=NO_ROOM) from error


def why(error: Exception) -> str:
    """What an error says, without its number and the name of a temporary file."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


@contextmanager
def shared_folder(target: Path, job: Job, *inside: str) -> Iterator[Path]:
    """Yield a hidden folder beside `target`, which is not there yet, that becomes it when the block ends.

    All processes of a job get it, with folders `inside` of it. A killed run leaves nothing under the name of `target`;
    an error leaves nothing at all.

    Raises:
        ChunkplanError: it cannot be written, or a process does not see it.
    """
    if not job.is_main:
        temporary = target.with_name(job.broadcast_object(""))
        _refuse_other_disks(temporary, target, job)
        yield temporary
        job.barrier()
        return
    with saving(target), temporary_folder(target.parent, target.name) as temporary:
        for name in inside:
            (temporary / name).mkdir()
        job.broadcast_object(temporary.name)
        _refuse_other_disks(temporary, target, job)
        yield temporary
        job.barrier()
        put_in_place(temporary, target)


def _refuse_other_disks(temporary: Path, target: Path, job: Job) -> None:
    for process, sees in enumerate(job.all_gather_object(temporary.is_dir())):
        if not sees:
            raise ChunkplanError(
                f"{job.layout.describe(process)} does not see what process 0 writes",
                where=str(target),
                hint="--output has to be the same folder for all, on a disk that all machines see",
            )


def remove_folder(folder: Path) -> None:
    """Remove a folder; a run killed meanwhile leaves nothing under its name."""
    with temporary_folder(folder.parent, folder.name) as temporary:
        folder.rename(temporary / folder.name)


def append_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Append `rows` to a file of JSON lines, in one write.

    Raises:
        ChunkplanError: it cannot be written, for example because the disk is full.
    """
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
    with saving(path), path.open("a", encoding="utf-8") as file:
        file.write(text)


def cut_back(path: Path, step: int) -> None:
    """Leave the lines before the first whose `step` is `step` or later, or that is torn. No file: nothing to do."""
    if not path.exists():
        return
    end = sum(map(len, _before(path, step)))
    with path.open("rb+") as file:
        file.truncate(end)
        os.fsync(file.fileno())


def lines_before(path: Path, step: int) -> list[Any]:
    """The rows that `cut_back` would leave; none where there is no file."""
    return [json.loads(line) for line in _before(path, step)] if path.exists() else []


def _before(path: Path, step: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from takewhile(lambda line: _is_before(line, step), file)


def _is_before(line: bytes, step: int) -> bool:
    try:
        row = json.loads(line)
    except ValueError:
        return False
    return line.endswith(b"\n") and isinstance(row, dict) and row.get("step", step) < step
