"""Checkpoints: everything that a run needs to go on as if it had not been stopped, on disk whole or not at all.

`weights` holds the trained weights (as fp32 master weights where there are such), `optimizer` what it remembers of
them, each a file a process; `state.json` the rest: the position in the plan, random states, and what the run must not
change.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypedDict, cast

import torch
from torch import Tensor

from chunkplan.errors import DataError
from chunkplan.files.folder import sync
from chunkplan.files.json_file import read_json
from chunkplan_runtime.distributed.job import Job
from chunkplan_runtime.feed.stream import StreamPosition
from chunkplan_runtime.training.optimizer import empty_state
from chunkplan_runtime.training.run_folder import RunFolder
from chunkplan_runtime.training.save import remove_folder, shared_folder
from chunkplan_runtime.training.tensor_files import HINT, read_tensors, stored_tensors, write_tensors

_WEIGHTS, _OPTIMIZER, _STATE = "weights", "optimizer", "state.json"
#: Entries of the state, and whether a value is one.
_ENTRIES: dict[str, Callable[[Any], bool]] = {
    "step": lambda value: type(value) is int and value >= 0,
    "processes": lambda value: type(value) is int and value >= 1,
    "random": lambda value: isinstance(value, list) and all(_is_hex(text) for text in value) and len(value) > 0,
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
    """What state.json holds: also the next step, how many processes wrote it, and torch's random states as hex."""

    step: int
    processes: int
    random: list[str]


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
        for name, tensors in ((_WEIGHTS, weights), (_OPTIMIZER, optimizer)):
            write_tensors(temporary / name, tensors, step, job, target)
        if job.is_main:
            rest = {"step": step, "processes": job.layout.world_size, "random": _random_states(device)}
            (temporary / _STATE).write_text(json.dumps({**state, **rest}, allow_nan=False) + "\n", encoding="utf-8")
    kept = None if best is None else folder.checkpoint(best)
    others = [each for each in folder.checkpoints() if each != kept] if job.is_main else []
    for old in others[:-keep_last]:
        remove_folder(old)


def read_state(checkpoint: Path) -> CheckpointState:
    """The state.json of a checkpoint, checked.

    Raises:
        DataError: it is not there, or damaged.
    """
    path = checkpoint / _STATE
    try:
        state = read_json(path, hint=HINT)
    except OSError as error:
        raise DataError(f"cannot be read: {error}", where=str(path), hint=HINT) from error
    if not isinstance(state, dict):
        raise DataError("not the state of a run", where=str(path), hint=HINT)
    for name, is_right in _ENTRIES.items():
        if name not in state:
            raise DataError(f"`{name}` is missing", where=str(path), hint=HINT)
        if not is_right(state[name]):
            raise DataError(f"`{name}` is not what a run writes", where=str(path), hint=HINT)
    if checkpoint.name != f"step-{state['step']:08d}" or state["stream"].get("step") != state["step"]:
        raise DataError(f"the state of step {state['step']}", where=str(path), hint=HINT)
    return cast(CheckpointState, state)  # as was checked, entry by entry


@torch.no_grad()
def read_weights(checkpoint: Path, weights: Mapping[str, Tensor], state: CheckpointState, job: Job) -> None:
    """Fill `weights`, all that the model has on this process, with those of a checkpoint.

    Raises:
        DataError: they cannot be read, or are others.
    """
    stored = stored_tensors(checkpoint / _WEIGHTS, state["step"], state["processes"])
    expected = {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()}
    found = {name: stored.get(name) for name in expected} if job.layout.pp > 1 else stored
    if found != expected:
        name = min(name for name in {**found, **expected} if found.get(name) != expected.get(name))
        raise DataError(f"the weight {name} is not the model's", where=str(checkpoint / _WEIGHTS), hint=HINT)
    read_tensors(checkpoint / _WEIGHTS, dict(weights), job)


def read_optimizer(
    checkpoint: Path, weights: Mapping[str, Tensor], state: CheckpointState, job: Job
) -> dict[str, Tensor]:
    """What the optimizer remembered of `weights`, by `NAME:ENTRY`: see `empty_state`.

    Raises:
        DataError: it cannot be read, or is of others.
    """
    read: dict[str, Tensor] = {}
    for key, (dtype, shape) in stored_tensors(checkpoint / _OPTIMIZER, state["step"], state["processes"]).items():
        weight = weights.get(key.rpartition(":")[0])
        if weight is None and job.layout.pp > 1:
            continue  # of another stage
        room = None if weight is None else empty_state(weight, dtype, shape)
        if room is None:
            raise DataError(f"no such weight: {key} {tuple(shape)}", where=str(checkpoint / _OPTIMIZER), hint=HINT)
        read[key] = room
    read_tensors(checkpoint / _OPTIMIZER, read, job)
    return read


def restore_random_states(state: CheckpointState, device: torch.device) -> None:
    """Set torch's random generators, that of `device` if it was a GPU and is one."""
    cpu, *gpu = [torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8) for text in state["random"]]
    torch.set_rng_state(cpu)
    if gpu and device.type == "cuda":
        torch.cuda.set_rng_state(gpu[0], device)


def _random_states(device: torch.device) -> list[str]:
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    return [state.numpy().tobytes().hex() for state in states]


def _is_hex(text: Any) -> bool:
    try:
        return isinstance(text, str) and len(bytes.fromhex(text)) > 0
    except ValueError:
        return False
