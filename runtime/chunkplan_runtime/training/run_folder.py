"""The folder of a training run: what is in it, whether a run may start or go on there, and how files are put there."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chunkplan.errors import ChunkplanError, UsageError
from chunkplan.files.folder import (
    MANIFEST,
    put_in_place,
    refuse_inside_ours,
    remove_left_behind,
    sync,
    temporary_folder,
)
from chunkplan.files.writing import try_lock

if TYPE_CHECKING:  # it comes with torch, which options are checked without
    from chunkplan_runtime.distributed.job import Job

NO_ROOM = "check that the disk has room and may be written; --resume goes on from the last checkpoint"

_CHECKPOINT = re.compile(r"step-(\d{8,})")


class RunFolder:
    """The paths of all that a run leaves in its folder; docs/training.md has what they are."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.measured, self.final = path / "config.json", path / "measured.json", path / "final"
        self.metrics, self.evaluations = path / "metrics.jsonl", path / "evals.jsonl"
        self.sequences, self.samples = path / "sequences.jsonl", path / "samples.jsonl"
        self.lines = (self.metrics, self.evaluations, self.sequences, self.samples)  # of which a step has some
        self._lock: int | None = None

    def lock(self) -> None:
        """Hold the folder, if it is there, as long as the process lives. Raises UsageError: another run holds it."""
        if self._lock is not None or not self.path.is_dir():
            return
        self._lock = os.open(self.path, os.O_RDONLY)
        try:
            try_lock(self._lock)
        except BlockingIOError as error:
            self.unlock()
            hint = "wait for it to end, or give another --output"
            raise UsageError(f"another run is at work in {self.path}", hint=hint) from error

    def unlock(self) -> None:
        """Release the folder to other runs."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

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
        """Words on how to resume a stopped run from what it left behind."""
        checkpoints = self.checkpoints()
        if checkpoints:
            return f"the same command with --resume goes on from {checkpoints[-1]}"
        return "there is no checkpoint yet; the same command with --resume starts from the beginning"

    def finished(self, why: str, hint: str = "") -> UsageError:
        """The error of a run that is finished and cannot go on: `why`, and the `hint` where something helps that."""
        if not hint and (self.final / "adapter_config.json").exists():
            hint = "start another run, with --merge-adapters one whose weights can be trained on from; "
            hint += "peft merges those that are here into their model (merge_and_unload)"
        elif not hint:
            hint = f"`--model {self.final}` with another --output trains on from its weights; "
            hint += "it begins the plan again from its first step"
        return UsageError(f"the run in {self.path} is finished: {self.final} is there, and {why}", hint=hint)

    def check(self, resume: bool) -> None:
        """Raise UsageError if it holds a run (with `resume`: one that cannot go on) or something else, or cannot be."""
        if resume and self.final.exists() and not self.checkpoints():
            raise self.finished("there is no checkpoint to go on from")
        if self.config.exists() and not self.metrics.exists():
            raise UsageError(f"{self.config} is not of a training run", hint="give another --output")
        for earlier in (self.final, self.metrics, self.path / "checkpoints"):
            if earlier.exists() and not resume:
                hint = "give another --output, or remove that run"
                hint = hint if self.final.exists() else f"go on with it with --resume, {hint}"
                raise UsageError(f"{earlier} of an earlier run is there", hint=hint)
        if (self.path / MANIFEST).exists():
            raise UsageError(f"{self.path} is an analysis or a plan", hint="give another --output")
        refuse_inside_ours(self.path)
        absolute = self.path.absolute()
        there = next(folder for folder in (absolute, *absolute.parents) if os.path.lexists(folder))
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise UsageError(f"cannot write to {self.path}", hint="give another --output")


@contextmanager
def saving(target: Path) -> Iterator[None]:
    """Raise ChunkplanError, which says how to go on, where `target` cannot be written, such as of a full disk."""
    from safetensors import SafetensorError  # which comes with torch: options are checked without both
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (OSError, SafetensorError, CheckpointException) as error:
        raise ChunkplanError(f"cannot be written: {why(error)}", where=str(target), hint=NO_ROOM) from error


def why(error: BaseException) -> str:
    """The text of an error, without its number and a temporary file's name; of several processes, the first one's."""
    process, (first, _) = min(getattr(error, "failures", {0: (error, None)}).items())
    text: str = first.strerror if isinstance(first, OSError) and first.strerror else str(first).splitlines()[0]
    return text + (f" (process {process})" if process else "")


@contextmanager
def shared_folder(target: Path, job: Job) -> Iterator[Path]:
    """Yield to all processes of a job a hidden folder beside `target`, which it becomes when the block ends.

    An error leaves nothing. Raises ChunkplanError: it cannot be written, or a process does not see it.
    """
    with ExitStack() as stack:
        temporary = target
        stack.enter_context(saving(target))
        if job.is_main:
            temporary = stack.enter_context(temporary_folder(target.parent, target.name))
        temporary = target.with_name(job.broadcast_object(temporary.name))
        for process, sees in enumerate(job.all_gather_object(temporary.is_dir())):
            if not sees:
                raise ChunkplanError(
                    f"{job.layout.describe(process)} does not see what process 0 writes",
                    where=str(target),
                    hint="--output has to be the same folder for all, on a disk that all machines see",
                )
        yield temporary
        job.barrier()
        if job.is_main:
            put_in_place(temporary, target)


def remove_folder(folder: Path) -> None:
    """Remove a folder; a run killed meanwhile leaves nothing under its name."""
    with temporary_folder(folder.parent, folder.name) as temporary:
        folder.rename(temporary / folder.name)


def append_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Append `rows` to a file of JSON lines, in one write. Raises ChunkplanError: it cannot be written."""
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
    with saving(path), path.open("a", encoding="utf-8") as file:
        file.write(text)


def cut_back(path: Path, step: int) -> None:
    """Leave the lines before the first whose `step` is `step` or later, or that is torn. No file: nothing to do."""
    if path.exists():
        os.truncate(path, sum(length for length, _ in _lines_before(path, step)))
        sync(path)


def lines_before(path: Path, step: int) -> list[Any]:
    """The rows that `cut_back` would leave; none where there is no file."""
    return [row for _, row in _lines_before(path, step)] if path.exists() else []


def _lines_before(path: Path, step: int) -> Iterator[tuple[int, Any]]:
    """The bytes of each of these lines, and its row."""
    with path.open("rb") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                return
            if not line.endswith(b"\n") or not isinstance(row, dict) or row.get("step", step) >= step:
                return
            yield len(line), row
