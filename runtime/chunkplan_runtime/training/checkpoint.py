"""Checkpoints: everything that a run needs to go on as if it had not been stopped, on disk whole or not at all.

`weights` holds the trained weights (as fp32 master weights where there are such), `optimizer` what it remembers of
them, both written by torch.distributed.checkpoint: each process what it has, which any number of processes can read.
`state.json` has the rest: the position in the plan, random states, what the run must not change, and of each file what
tells it from one that is torn or of another step.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict, cast

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from chunkplan.errors import ChunkplanError, DataError
from chunkplan.files.folder import sync
from chunkplan.files.json_file import read_json
from chunkplan_runtime.distributed.job import Job
from chunkplan_runtime.feed.stream import StreamPosition
from chunkplan_runtime.training.optimizer import empty_state
from chunkplan_runtime.training.run_folder import NO_ROOM, RunFolder, remove_folder, shared_folder

_WEIGHTS, _OPTIMIZER, _STATE = "weights", "optimizer", "state.json"

_HINT = "remove this checkpoint to go on from the one before"

#: How much a process writes into a file at most, but for one tensor: torch makes each file in memory.
_FILE_BYTES = 1 << 28

#: How many pieces of a file, of how many bytes, tell it from others.
_PIECES, _PIECE_BYTES = 16, 1 << 12

#: Entries of the state, and whether a value is one.
_ENTRIES: dict[str, Callable[[Any], bool]] = {
    "step": lambda value: type(value) is int and value >= 0,
    "random": lambda value: isinstance(value, list) and all(_is_hex(text) for text in value) and len(value) > 0,
    "files": lambda value: isinstance(value, dict),
    "stream": lambda value: isinstance(value, dict),
    "losses": lambda value: isinstance(value, list) and all(type(loss) in (int, float) for loss in value),
    "fixed": lambda value: isinstance(value, dict),
}


class RunState(TypedDict):
    """What a checkpoint keeps of a run beside its tensors: where it is in the plan, and what it must not change.

    `losses` are those that spikes are compared with; `fixed` has the names that messages have for its values.
    """

    stream: StreamPosition
    losses: list[float]
    fixed: dict[str, Any]


class CheckpointState(RunState):
    """What state.json holds: also the next step, torch's random states as hex, and a digest of each file."""

    step: int
    random: list[str]
    files: dict[str, str]


class BestLoss:
    """The lowest evaluation loss of a run; after `patience` evaluations without a lower one it is time to stop.

    `patience` None: it never is. An evaluation without targets has no loss, and counts for nothing. It follows from the
    evaluations alone, so a run that goes on reads those `before` from their file again.
    """

    def __init__(self, patience: int | None = None, before: Iterable[tuple[int, float | None]] = ()) -> None:
        self._patience = patience
        #: The lowest loss; None before the first.
        self.loss: float | None = None
        #: How many steps were done when it was found: the step that its checkpoint goes on with.
        self.step = 0
        #: How many evaluations have been no lower since.
        self.since = 0
        for step, loss in before:
            self.add(step, loss)

    def add(self, step: int, loss: float | None) -> bool:
        """Take the loss that was found when `step` steps were done; returns whether it is the lowest so far."""
        if loss is None:
            return False
        if self.loss is not None and loss >= self.loss:
            self.since += 1
            return False
        self.loss, self.step, self.since = loss, step, 0
        return True

    @property
    def should_stop(self) -> bool:
        """Whether the last evaluations have been no lower, as many as are waited for."""
        return self._patience is not None and self.since >= self._patience


def write_checkpoint(
    folder: RunFolder,
    step: int,
    *,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: RunState,
    keep_last: int,
    best: int | None,
    device: torch.device,
    job: Job,
) -> None:
    """Write the checkpoint from which `step` comes next; only then remove all but the newest `keep_last`.

    That from which the step `best` comes next is kept beside these.

    Raises:
        ChunkplanError: it cannot be written; those that were there still are.
    """
    for lines in (folder.metrics, folder.evaluations, folder.sequences):
        if job.is_main and lines.exists():
            sync(lines)  # a checkpoint must not outlive the lines before it
    target = folder.checkpoint(step)
    with shared_folder(target, job, _WEIGHTS, _OPTIMIZER) as temporary:
        _write_tensors(temporary / _WEIGHTS, weights, job, target)
        _write_tensors(temporary / _OPTIMIZER, optimizer, job, target)
        if job.is_main:
            files = {str(path.relative_to(temporary)): _digest(path) for path in sorted(temporary.glob("*/*"))}
            rest = {"step": step, "random": _random_states(device), "files": files}
            (temporary / _STATE).write_text(json.dumps({**state, **rest}, allow_nan=False) + "\n", encoding="utf-8")
    kept = None if best is None else folder.checkpoint(best)
    others = [each for each in folder.checkpoints() if each != kept] if job.is_main else []
    for old in others[:-keep_last]:
        remove_folder(old)


def read_state(checkpoint: Path) -> CheckpointState:
    """The state.json of a checkpoint, after a check that its files are those that were written with it.

    Raises:
        DataError: a file is not there, torn, or of another checkpoint.
    """
    path = checkpoint / _STATE
    try:
        state = read_json(path, hint=_HINT)
    except OSError as error:
        raise DataError(f"cannot be read: {error}", where=str(path), hint=_HINT) from error
    if not isinstance(state, dict):
        raise DataError("not the state of a run", where=str(path), hint=_HINT)
    for name, is_right in _ENTRIES.items():
        if name not in state:
            raise DataError(f"`{name}` is missing", where=str(path), hint=_HINT)
        if not is_right(state[name]):
            raise DataError(f"`{name}` is not what a run writes", where=str(path), hint=_HINT)
    if checkpoint.name != f"step-{state['step']:08d}" or state["stream"].get("step") != state["step"]:
        raise DataError(f"the state of step {state['step']}", where=str(path), hint=_HINT)
    for name, digest in state["files"].items():
        try:
            is_right = _digest(checkpoint / name) == digest
        except OSError as error:
            raise DataError(f"cannot be read: {error}", where=str(checkpoint / name), hint=_HINT) from error
        if not is_right:
            raise DataError("it is torn, or of another checkpoint", where=str(checkpoint / name), hint=_HINT)
    return cast(CheckpointState, state)  # as was checked, entry by entry


@torch.no_grad()
def read_tensors(checkpoint: Path, weights: Mapping[str, Tensor], job: Job) -> dict[str, Tensor]:
    """Fill `weights`, all that this process trains, and return what the optimizer remembered of them.

    The latter is by `NAME:ENTRY`, see `empty_state`.

    Raises:
        DataError: they cannot be read, or are of another model.
    """
    with _read_errors(checkpoint / _WEIGHTS):
        load(dict(weights), storage_reader=HuggingFaceStorageReader(str(checkpoint / _WEIGHTS)), **_processes(job))
    found: dict[str, Tensor] = {}
    with _read_errors(checkpoint / _OPTIMIZER):
        stored = HuggingFaceStorageReader(str(checkpoint / _OPTIMIZER))
        for key, entry in stored.read_metadata().state_dict_metadata.items():
            weight = weights.get(key.rpartition(":")[0])
            if weight is None:
                continue  # of another stage
            room = empty_state(weight, entry.properties.dtype, entry.size)  # type: ignore[union-attr]  # all tensors
            if room is None:
                raise DataError(f"no state of that weight: {key}", where=str(checkpoint / _OPTIMIZER), hint=_HINT)
            found[key] = room
        load(found, storage_reader=stored, **_processes(job))
    return found


def restore_random_states(state: CheckpointState, device: torch.device) -> None:
    """Set torch's random generators, that of `device` if it was a GPU and is one."""
    cpu, *gpu = [torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8) for text in state["random"]]
    torch.set_rng_state(cpu)
    if gpu and device.type == "cuda":
        torch.cuda.set_rng_state(gpu[0], device)


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor], job: Job, target: Path) -> None:
    """Write what this process has of `tensors` into `folder`, which is there already and will be in `target`.

    Raises:
        ChunkplanError: a process cannot write, for example because its disk is full; all raise it.
    """
    own = {name: tensor.detach() for name, tensor in tensors.items()}
    sizes: dict[str, int] = {}
    for found in job.all_gather_object({name: _local(tensor).nbytes for name, tensor in own.items()}):
        sizes |= found
    files, before = {}, 0
    for name, size in sizes.items():
        files[name] = 1 + before // _FILE_BYTES
        before += size
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=files, save_distributed=True)
    try:
        with _silent():
            save(own, storage_writer=writer, **_processes(job))
    except CheckpointException as error:
        raise ChunkplanError(f"cannot be written: {_reason(error)}", where=str(target), hint=NO_ROOM) from error


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _processes(job: Job) -> dict[str, Any]:
    return {"no_dist": job.groups is None}


@contextmanager
def _silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # that is meant
        yield


@contextmanager
def _read_errors(folder: Path) -> Iterator[None]:
    try:
        with _silent():
            yield
    except (CheckpointException, SafetensorError, OSError) as error:
        reason = _reason(error) if isinstance(error, CheckpointException) else str(error)
        raise DataError(f"cannot be read: {reason}", where=str(folder), hint=_HINT) from error


def _reason(error: CheckpointException) -> str:
    process, (first, _) = min(error.failures.items())
    text = first.strerror if isinstance(first, OSError) and first.strerror else str(first).splitlines()[0]
    return text if len(error.failures) == 1 and process == 0 else f"{text} (process {process})"


def _digest(path: Path) -> str:
    """A hash of the size of a file and of pieces of it."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for piece in range(_PIECES):
            file.seek(size * piece // _PIECES)
            digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()


def _random_states(device: torch.device) -> list[str]:
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    return [state.numpy().tobytes().hex() for state in states]


def _is_hex(text: Any) -> bool:
    try:
        return isinstance(text, str) and len(bytes.fromhex(text)) > 0
    except ValueError:
        return False
