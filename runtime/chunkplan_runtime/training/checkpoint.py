"""Checkpoints: everything that a run needs to go on as if it had not been stopped, on disk whole or not at all.

`model.safetensors` holds the trained weights (their float32 masters where there are such), `optimizer.safetensors` what
AdamW remembers, `state.json` the rest: the position in the plan, random states, and what the run must not change.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from chunkplan.errors import DataError, UsageError
from chunkplan.planfile.folder import sync
from chunkplan_runtime.training.run_folder import RunFolder
from chunkplan_runtime.training.save import remove_folder, whole_folder

_MODEL, _OPTIMIZER, _STATE = "model.safetensors", "optimizer.safetensors", "state.json"
#: Entries of the state, and whether a value is one.
_ENTRIES: dict[str, Callable[[Any], bool]] = {
    "step": lambda value: type(value) is int and value >= 0,
    "random": lambda value: isinstance(value, list) and all(_is_hex(text) for text in value) and len(value) > 0,
    "stream": lambda value: isinstance(value, dict),
    "losses": lambda value: isinstance(value, list) and all(type(loss) in (int, float) for loss in value),
    "fixed": lambda value: isinstance(value, dict),
}

_HINT = "remove this checkpoint to go on from the one before"


def write_checkpoint(
    folder: RunFolder,
    step: int,
    *,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: Mapping[str, Any],
    keep_last: int,
    device: torch.device,
) -> None:
    """Write the checkpoint from which `step` comes next; only then remove all but the newest `keep_last`.

    Raises:
        ChunkplanError: it cannot be written; those that were there still are.
    """
    for lines in (folder.metrics, folder.evaluations, folder.sequences):
        if lines.exists():
            sync(lines)  # a checkpoint must not outlive the lines before it
    with whole_folder(folder.checkpoint(step)) as temporary:
        for name, tensors in ((_MODEL, weights), (_OPTIMIZER, optimizer)):
            whole = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
            save_file(whole, temporary / name, metadata={"step": str(step)})
        document = {**state, "step": step, "random": _random_states(device)}
        (temporary / _STATE).write_text(json.dumps(document, allow_nan=False) + "\n", encoding="utf-8")
    for old in folder.checkpoints()[:-keep_last]:
        remove_folder(old)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """state.json of a checkpoint.

    Raises:
        DataError: it is not there, or damaged.
    """
    path = checkpoint / _STATE
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
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
    return state


def refuse_other_run(state: Mapping[str, Any], fixed: Mapping[str, Any], checkpoint: Path) -> None:
    """Refuse to go on with another plan, model or way of learning; `fixed` are these now, by name.

    Raises:
        UsageError: naming all that differ.
    """
    now = json.loads(json.dumps(fixed))
    before = state["fixed"]
    differ = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if differ:
        changes = "; ".join(f"{name} was {_short(before.get(name))}, is {_short(now.get(name))}" for name in differ)
        raise UsageError(
            f"{checkpoint} is of another run: {changes}",
            hint="resume with what it was started with, or start anew in another --output",
        )


@torch.no_grad()
def read_weights(checkpoint: Path, weights: Mapping[str, Tensor]) -> None:
    """Fill `weights` with those of a checkpoint.

    Raises:
        DataError: they cannot be read, or are others.
    """
    stored = _load(checkpoint / _MODEL)
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in stored.items()}
    expected = {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()}
    if shapes != expected:
        name = min(name for name in {**shapes, **expected} if shapes.get(name) != expected.get(name))
        raise DataError(f"the weight {name} is not the model's", where=str(checkpoint / _MODEL), hint=_HINT)
    for name, tensor in weights.items():
        tensor.copy_(stored[name])


def read_optimizer(checkpoint: Path) -> dict[str, Tensor]:
    """What the optimizer remembered.

    Raises:
        DataError: it cannot be read.
    """
    return _load(checkpoint / _OPTIMIZER)


def restore_random_states(state: Mapping[str, Any], device: torch.device) -> None:
    """Set torch's random generators, that of `device` if it was a GPU and is one."""
    cpu, *gpu = [torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8) for text in state["random"]]
    torch.set_rng_state(cpu)
    if gpu and device.type == "cuda":
        torch.cuda.set_rng_state(gpu[0], device)


def _random_states(device: torch.device) -> list[str]:
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    return [state.numpy().tobytes().hex() for state in states]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:12]}..."


def _is_hex(text: Any) -> bool:
    try:
        return isinstance(text, str) and len(bytes.fromhex(text)) > 0
    except ValueError:
        return False


def _load(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            step = (file.metadata() or {}).get("step")
        if path.parent.name != f"step-{int(step or 0):08d}":
            raise DataError(f"of step {step}", where=str(path), hint=_HINT)
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"cannot be read: {error}", where=str(path), hint=_HINT) from error
