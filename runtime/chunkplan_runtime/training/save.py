"""Writes folders whole or not at all, and a model with its tokenizer as one."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from chunkplan.errors import ChunkplanError
from chunkplan.files.folder import sync
from chunkplan_runtime.distributed.job import Job
from chunkplan_runtime.models.model import CausalLM

NO_ROOM = "check that the disk has room and may be written; --resume goes on from the last checkpoint"


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield a hidden folder beside `target`, which is not there yet, that becomes it when the block ends.

    A killed run leaves nothing under the name of `target`; an error leaves nothing at all.

    Raises:
        ChunkplanError: it cannot be written, for example because the disk is full.
    """
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in [*temporary.rglob("*"), temporary]:
            sync(path)
        temporary.rename(target)
        sync(target.parent)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ChunkplanError(f"cannot be written: {reason}", where=str(target), hint=NO_ROOM) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def shared_folder(target: Path, job: Job, *inside: str) -> Iterator[Path]:
    """As `whole_folder`, for all processes of a job, which see the same disk; with folders `inside` of it.

    Raises:
        ChunkplanError: it cannot be written.
    """
    if not job.is_main:
        temporary = target.with_name(job.ask_main(""))
        _refuse_other_disks(temporary, target, job)
        yield temporary
        job.wait_for_all()
        return
    with whole_folder(target) as temporary:
        for name in inside:
            (temporary / name).mkdir()
        job.ask_main(temporary.name)
        _refuse_other_disks(temporary, target, job)
        yield temporary
        job.wait_for_all()


def _refuse_other_disks(temporary: Path, target: Path, job: Job) -> None:
    blind = [job.layout.describe(rank) for rank, sees in enumerate(job.tell_all(temporary.is_dir())) if not sees]
    if blind:
        raise ChunkplanError(
            f"{blind[0]} does not see what process 0 writes",
            where=str(target),
            hint="--output has to be the same folder for all, on a disk that all machines see",
        )


def remove_folder(folder: Path) -> None:
    """Remove a folder; a run killed meanwhile leaves nothing under its name."""
    hidden = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def remove_left_behind(folder: Path) -> None:
    """Remove what runs that were killed left half written, or half removed, in `folder`."""
    for path in folder.glob(".*.tmp-*"):
        if re.fullmatch(r"\.(final|step-\d+)\.tmp-\d+", path.name):
            shutil.rmtree(path, ignore_errors=True)
        elif re.fullmatch(r"\.config\.json\.tmp-\d+", path.name):
            path.unlink(missing_ok=True)


def save_files(model: CausalLM, tokenizer: list[Path], folder: Path) -> None:
    """Write weights and config, or adapters, and copies of the files of a tokenizer into `folder`.

    Copied, so that the tokenizer is to the byte the one whose hash an analysis holds.
    """
    model.model.save_pretrained(folder)
    for file in tokenizer:
        shutil.copy(file, folder / file.name)
