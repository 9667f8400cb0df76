"""Tensors by name in a folder of safetensors files, a file a process, by torch.distributed.checkpoint.

Each process writes what it has, whole tensors or shards; any number of processes, also one, reads what it needs. Every
file holds the step that it is of, by its process, so that one which is missing or of another step is noticed.

What torch does it plans, and has read back; bytes go to and from files a tensor at a time, by code of our own. torch's
own would hold a file as a whole, once more than the tensors.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from chunkplan.errors import ChunkplanError, DataError
from chunkplan.files.folder import sync
from chunkplan_runtime.distributed.job import Job
from chunkplan_runtime.tensor_file import Kind, TensorFile, writing_tensors
from chunkplan_runtime.training.save import NO_ROOM

HINT = "remove this checkpoint to go on from the one before"

_STEP = re.compile(r"step:(\d+)")


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], step: int, job: Job, target: Path) -> None:
    """Write what this process has of `tensors` into `folder`, which is there already and will be in `target`.

    Raises:
        ChunkplanError: a process cannot write, for example because its disk is full; all raise it.
    """
    own = {name: tensor.detach() for name, tensor in tensors.items()}
    own[f"step:{job.layout.process}"] = torch.tensor(step)
    writer = _Writer(str(folder), save_distributed=True)
    try:
        with _one_or_many(job) as how:
            save(own, storage_writer=writer, **how)
    except CheckpointException as error:
        raise ChunkplanError(f"cannot be written: {_reason(error)}", where=str(target), hint=NO_ROOM) from error


def stored_tensors(folder: Path, step: int, num_files: int) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Dtype and shape of what is in `folder`, by name, after a check that it is what `num_files` processes wrote.

    Raises:
        DataError: a file is torn, missing, or of another step.
    """
    files = sorted(folder.glob("*.safetensors"))
    written: set[str] = set()
    for path in files:
        file = TensorFile(path, HINT)
        steps = {name: int(file.read(name)) for name in file if _STEP.fullmatch(name)}
        if set(steps.values()) != {step}:
            raise DataError(f"of step {next(iter(steps.values()), None)}", where=str(path), hint=HINT)
        written |= steps.keys()
    missing = [process for process in range(num_files) if f"step:{process}" not in written]
    if missing or len(files) != num_files:
        what = f"no file of process {missing[0]}" if missing else f"{len(files)} files"
        raise DataError(f"{what}, written by {num_files} processes", where=str(folder), hint=HINT)
    found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {
        name: (entry.properties.dtype, entry.size)  # type: ignore[union-attr]  # there are only tensors
        for name, entry in found.items()
        if not _STEP.fullmatch(name)
    }


def read_tensors(folder: Path, tensors: dict[str, Tensor], job: Job, hint: str = HINT) -> None:
    """Fill `tensors`, whole ones or shards, with what `stored_tensors` has found in `folder`.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with _one_or_many(job) as how:
            load(tensors, storage_reader=_Reader(str(folder)), **how)
    except CheckpointException as error:
        raise DataError(f"cannot be read: {_reason(error)}", where=str(folder), hint=hint) from error


class StoredRows:
    """Any rows of the tensors in `folder`, which `stored_tensors` has found whole, from the files of all processes.

    Of all that there is it holds where that is, and room for what is stored in another dtype than is asked for: memory
    that came and went would leave gaps.
    """

    def __init__(self, folder: Path, hint: str) -> None:
        stored = HuggingFaceStorageReader(str(folder)).read_metadata()
        files: dict[str, TensorFile] = {}
        self._room = torch.empty(0, dtype=torch.uint8)
        #: Of each tensor its parts, with the places where they begin.
        self._parts: dict[str, list[tuple[TensorFile, tuple[int, ...]]]] = {}
        for index, where in stored.storage_data.items():
            path = where.relative_path
            if path not in files:
                files[path] = TensorFile(Path(path), hint)
            self._parts.setdefault(index.fqn, []).append((files[path], tuple(index.offset or ())))

    def read(self, tensors: Mapping[str, Tensor], first: int = 0) -> None:
        """Fill each of `tensors`, by name, with the rows of it from `first` on.

        Raises:
            DataError: it cannot be read.
        """
        for name, target in tensors.items():
            filled = sum(self._fill(target, first, name, *part) for part in self._parts[name])
            assert filled == target.numel(), f"{filled} numbers of {name}"

    def _fill(self, target: Tensor, first: int, name: str, file: TensorFile, begins: tuple[int, ...]) -> int:
        """Fill rows of a tensor, from `first` on, as far as they are in a part of it; how many numbers that was."""
        kind = file.kind(name)
        if not kind.shape:
            target.copy_(file.read(name))
            return 1
        begin = begins[0] if begins else 0
        low, high = max(first, begin), min(first + len(target), begin + kind.shape[0])
        if low >= high:
            return 0
        columns = [slice(start, start + size) for start, size in zip(begins[1:], kind.shape[1:], strict=False)]
        part = target[(slice(low - first, high - first), *columns)]
        if part.is_contiguous() and part.device.type == "cpu" and part.dtype == kind.dtype:
            file.read_rows(name, low - begin, part)
        else:
            rows = Kind(kind.dtype, (high - low, *kind.shape[1:]))
            if len(self._room) < rows.num_bytes:
                self._room = torch.empty(rows.num_bytes, dtype=torch.uint8)
            stored = self._room[: rows.num_bytes].view(kind.dtype).view(rows.shape)
            file.read_rows(name, low - begin, stored)
            part.copy_(stored)
        return part.numel()


class _Writer(HuggingFaceStorageWriter):
    """Writes the file of a process tensor by tensor."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(plan, planner) if plan.items else [])
        return done

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        name = f"shard-{plan.storage_data['shard_index']:05d}-model-00001-of-00001.safetensors"
        kinds, offsets = {}, {}
        for item in plan.items:
            assert item.tensor_data is not None, "there are only tensors"
            chunk = item.tensor_data.chunk
            kinds[item.index.fqn] = Kind(item.tensor_data.properties.dtype, tuple(chunk.sizes))
            offsets[item.index.fqn] = {"saved_offsets": [*chunk.offsets]}
        metadata = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
        path = Path(self.path) / name
        results = []
        with writing_tensors(path, kinds, metadata) as file:
            for item in plan.items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor), "there are only tensors"
                file.write(item.index.fqn, tensor)
                num_bytes = kinds[item.index.fqn].num_bytes
                results.append(WriteResult(item.index, num_bytes, storage_data=None))
        sync(path)
        return results


class _Reader(HuggingFaceStorageReader):
    """Reads from files what is asked for, tensor by tensor."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        files: dict[str, TensorFile] = {}
        for item in plan.items:
            path = self.storage_data[item.storage_index].relative_path
            if path not in files:
                files[path] = TensorFile(Path(path), HINT)
            ends = zip(item.storage_offsets, item.lengths, strict=True)
            where = [slice(begin, begin + length) for begin, length in ends]
            target = planner.resolve_tensor(item).detach()
            for part, rows in _row_blocks(target, where):
                part.copy_(files[path].read(item.storage_index.fqn, rows))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _row_blocks(target: Tensor, where: list[slice]) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
    """Rows of a tensor that are read at once, each with the place of them in a file, of which the whole has `where`."""
    if not where:
        yield target, ()
        return
    rows = Kind(target.dtype, tuple(target.shape)).rows_at_once
    for begin in range(0, len(target), rows):
        part = target[begin : begin + rows]
        first = where[0].start + begin
        yield part, (slice(first, first + len(part)), *where[1:])


@contextmanager
def _one_or_many(job: Job) -> Iterator[dict[str, object]]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # that is meant
        yield {"no_dist": True} if job.groups is None else {"process_group": job.groups.control}


def _reason(error: CheckpointException) -> str:
    process, (first, _) = min(error.failures.items())
    text = first.strerror if isinstance(first, OSError) and first.strerror else str(first).splitlines()[0]
    return text if len(error.failures) == 1 and process == 0 else f"{text} (process {process})"
