"""The folder of a training run: what is in it, and whether a run may start or go on there."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from chunkplan.errors import UsageError
from chunkplan.files.folder import MANIFEST, refuse_inside_ours, remove_left_behind
from chunkplan.files.lock import try_lock
from chunkplan.options import in_words

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


@dataclass(frozen=True)
class RunFolder:
    """The paths of all that a run leaves in its folder."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration; written when the first step is done."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """A file with a JSON line a step."""
        return self.path / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        """A file with a JSON line an evaluation."""
        return self.path / "evals.jsonl"

    @property
    def sequences(self) -> Path:
        """A file with a JSON line a sequence and step, with `--log-sequences`."""
        return self.path / "sequences.jsonl"

    @property
    def measured(self) -> Path:
        """When processes did each action of the largest step, of a run on several of them."""
        return self.path / "measured.json"

    @property
    def final(self) -> Path:
        """The folder of the trained model."""
        return self.path / "final"

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


def shorten(value: object) -> str:
    """A value as a message has it: hashes, and all else that is long, by the first 12 characters."""
    text = in_words(value)
    return text if len(text) <= 40 else f"{text[:12]}..."
