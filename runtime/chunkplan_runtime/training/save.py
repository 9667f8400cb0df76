"""Writes folders whole or not at all, and a model with its tokenizer as one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from chunkplan.errors import ChunkplanError
from chunkplan.files.folder import let_umask_decide, put_in_place, temporary_folder
from chunkplan_runtime.distributed.job import Job
from chunkplan_runtime.models.model import CausalLM

NO_ROOM = "check that the disk has room and may be written; --resume goes on from the last checkpoint"


@contextmanager
def saving(target: Path) -> Iterator[None]:
    """Turn all that keeps `target` from being written into an error of ours.

    Unlike `chunkplan.files.writing` it ends a run that has worked, with exit code 1, and says how to go on.

    Raises:
        ChunkplanError: it cannot be written, for example because the disk is full.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ChunkplanError(f"cannot be written: {reason}", where=str(target), hint=NO_ROOM) from error


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield a hidden folder beside `target`, which is not there yet, that becomes it when the block ends.

    A killed run leaves nothing under the name of `target`; an error leaves nothing at all.

    Raises:
        ChunkplanError: it cannot be written, for example because the disk is full.
    """
    with saving(target), temporary_folder(target.parent, target.name) as temporary:
        yield temporary
        put_in_place(temporary, target)


@contextmanager
def shared_folder(target: Path, job: Job, *inside: str) -> Iterator[Path]:
    """As `whole_folder`, for all processes of a job, which see the same disk; with folders `inside` of it.

    Raises:
        ChunkplanError: it cannot be written.
    """
    if not job.is_main:
        temporary = target.with_name(job.broadcast_object(""))
        _refuse_other_disks(temporary, target, job)
        yield temporary
        job.barrier()
        return
    with whole_folder(target) as temporary:
        for name in inside:
            (temporary / name).mkdir()
        job.broadcast_object(temporary.name)
        _refuse_other_disks(temporary, target, job)
        yield temporary
        job.barrier()


def _refuse_other_disks(temporary: Path, target: Path, job: Job) -> None:
    blind = [
        job.layout.describe(process)
        for process, sees in enumerate(job.all_gather_object(temporary.is_dir()))
        if not sees
    ]
    if blind:
        raise ChunkplanError(
            f"{blind[0]} does not see what process 0 writes",
            where=str(target),
            hint="--output has to be the same folder for all, on a disk that all machines see",
        )


def remove_folder(folder: Path) -> None:
    """Remove a folder; a run killed meanwhile leaves nothing under its name."""
    with temporary_folder(folder.parent, folder.name) as temporary:
        folder.rename(temporary / folder.name)


def save_files(model: CausalLM, tokenizer: list[Path], folder: Path) -> None:
    """Write weights and config, or adapters, and copies of the files of a tokenizer into `folder`."""
    model.model.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):  # which only their owner may read
        let_umask_decide(path)
    copy_files(tokenizer, folder)


def copy_files(tokenizer: list[Path], folder: Path) -> None:
    """Copy the files of a tokenizer, so that it is to the byte the one whose hash an analysis holds."""
    for file in tokenizer:
        shutil.copyfile(file, folder / file.name)
