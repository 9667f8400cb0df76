"""The folder of a training run: what is in it, and whether a run may start or go on there."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from chunkplan.errors import UsageError
from chunkplan.files.folder import MANIFEST, refuse_inside_ours

_CHECKPOINT = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class RunFolder:
    """Where everything of a run lies."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration; written when the first step is done."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """A JSON line a step."""
        return self.path / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        """A JSON line an evaluation."""
        return self.path / "evals.jsonl"

    @property
    def sequences(self) -> Path:
        """A JSON line a sequence and step, with `--log-sequences`."""
        return self.path / "sequences.jsonl"

    @property
    def timeline(self) -> Path:
        """A Chrome trace of the largest step, of a run on several processes."""
        return self.path / "timeline.json"

    @property
    def final(self) -> Path:
        """The trained model."""
        return self.path / "final"

    def checkpoint(self, step: int) -> Path:
        """The checkpoint from which `step` comes next."""
        return self.path / "checkpoints" / f"step-{step:08d}"

    def checkpoints(self) -> list[Path]:
        """Those that are whole, oldest first."""
        folder = self.path / "checkpoints"
        found = [path for path in folder.iterdir() if _CHECKPOINT.fullmatch(path.name)] if folder.is_dir() else []
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))

    def how_to_resume(self) -> str:
        """What a run that was stopped left behind to go on from, in words."""
        checkpoints = self.checkpoints()
        if checkpoints:
            return f"the same command with --resume goes on from {checkpoints[-1]}"
        return "there is no checkpoint yet; the same command with --resume starts from the beginning"

    def check(self, resume: bool) -> None:
        """Refuse a folder that holds something else, or that cannot be made, before any work is done.

        Raises:
            UsageError: it holds a run already (with `resume`: a finished one), is a plan or an analysis, or lies in
                one.
        """
        if resume and self.final.exists():
            is_adapter = (self.final / "adapter_config.json").exists()
            raise UsageError(
                f"the run in {self.path} is finished: {self.final} is there",
                hint="start another run; peft merges adapters into their model (merge_and_unload) to train on from"
                if is_adapter
                else f"`--model {self.final}` with another --output trains on from its weights",
            )
        if self.config.exists() and not self.metrics.exists():
            raise UsageError(f"{self.config} is not of a training run", hint="give another --output")
        for earlier in (self.final, self.metrics, self.path / "checkpoints"):
            if earlier.exists() and not resume:
                raise UsageError(
                    f"{earlier} of an earlier run is there",
                    hint="go on with it with --resume, give another --output, or remove that run",
                )
        if (self.path / MANIFEST).exists():
            raise UsageError(f"{self.path} is an analysis or a plan", hint="give another --output")
        refuse_inside_ours(self.path)
        absolute = self.path.absolute()
        there = next(folder for folder in (absolute, *absolute.parents) if os.path.lexists(folder))
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise UsageError(f"cannot write to {self.path}", hint="give another --output")


def shorten(value: object) -> str:
    """A value in few words: hashes by how they begin."""
    text = str(value)
    return text if len(text) <= 40 else f"{text[:12]}..."
