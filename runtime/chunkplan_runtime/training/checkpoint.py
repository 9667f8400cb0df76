"""Checkpoints: all that a run needs to go on as if it had not been stopped, and whether a run may go on from one.

`weights` and `optimizer` are written by torch.distributed.checkpoint, each process what it has, for any number of them
to read; `state.json` has the rest, with what must not change by the names in messages, and hashes of all files.

A run may go on with the same samples, model and way of learning, also of a plan for other ranks or of more epochs, and
for another number of steps where those that are done had the same learning rates.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.optim import SGD
from transformers import TrainerCallback, TrainingArguments, get_scheduler
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import get_last_checkpoint

from chunkplan.errors import DataError, UsageError
from chunkplan.files.folder import sync
from chunkplan.files.json_file import read_json
from chunkplan.planfile.likeness import EPOCHS, samples_of
from chunkplan.quantities import counted
from chunkplan_runtime.distributed.job import Job, shorten
from chunkplan_runtime.training.config import TrainConfig
from chunkplan_runtime.training.run_folder import RunFolder, remove_folder, shared_folder, why
from chunkplan_runtime.training.setup import TrainingData

_WEIGHTS, _OPTIMIZER, _STATE, _HASH = "weights", "optimizer", "state.json", "hash"

warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # that is meant

_HINT = "remove this checkpoint to go on from the one before"

#: How much a process writes into a file at most, but for one tensor: torch makes each file in memory.
_FILE_BYTES = 1 << 28

#: How many pieces of a file, of how many bytes, tell it from others.
_PIECES, _PIECE_BYTES = 16, 1 << 12

#: The options that say no more than after how many steps a run ends.
_ENDS = ("--max-steps", "--max-epochs")

_TRAINER_STATE = "trainer_state.json"  # which transformers leaves in a checkpoint when everything else is there


class BestLoss:
    """The lowest evaluation `loss` of a run, after how many steps, and how many evaluations `since` were no lower.

    After `patience` of these it is time to stop. Evaluations without targets do not count.
    """

    def __init__(self, patience: int | None = None, before: Iterable[tuple[int, float | None]] = ()) -> None:
        self._patience = patience
        self.loss: float | None = None
        self.step, self.since = 0, 0
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
        """True if as many evaluations as are waited for have been no lower."""
        return self._patience is not None and self.since >= self._patience


def write_checkpoint(
    folder: RunFolder,
    step: int,
    *,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: Mapping[str, Any],
    keep_last: int,
    best: int | None,
    device: torch.device,
    job: Job,
) -> None:
    """Write the checkpoint from which `step` comes next; only then remove all but the newest `keep_last` and `best`.

    Raises ChunkplanError: it cannot be written; those that were there still are.
    """
    for lines in folder.lines:
        if job.is_main and lines.exists():
            sync(lines)  # a checkpoint must not outlive the lines before it
    target = folder.checkpoint(step)
    with shared_folder(target, job) as temporary:
        for name, tensors in ((_WEIGHTS, weights), (_OPTIMIZER, optimizer)):
            own = {name: tensor.detach() for name, tensor in tensors.items()}
            local = {name: each.to_local() if isinstance(each, DTensor) else each for name, each in own.items()}
            sizes: dict[str, int] = {}
            for found in job.all_gather_object({name: each.nbytes for name, each in local.items()}):
                sizes |= found
            files = {name: 1 + end // _FILE_BYTES for name, end in zip(sizes, accumulate(sizes.values()), strict=True)}
            folder_of = str(temporary / name)
            writer = HuggingFaceStorageWriter(folder_of, fqn_to_index_mapping=files, save_distributed=True)
            save(own, storage_writer=writer, no_dist=job.groups is None)  # if one cannot write, all raise that
        if job.is_main:
            digests = {str(path.relative_to(temporary)): _digest(path) for path in sorted(temporary.glob("*/*"))}
            states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
            random = [each.numpy().tobytes().hex() for each in states]
            whole = {**state, "step": step, "random": random, "files": digests}
            (temporary / _STATE).write_text(json.dumps({**whole, _HASH: _hash(whole)}, allow_nan=False) + "\n")
    kept = None if best is None else folder.checkpoint(best)
    others = [each for each in folder.checkpoints() if each != kept] if job.is_main else []
    for old in others[:-keep_last]:
        remove_folder(old)


def read_state(checkpoint: Path) -> Mapping[str, Any]:
    """The state.json of a checkpoint; raises DataError where a file is not there, torn, or of another checkpoint."""
    path = checkpoint / _STATE
    try:
        state = read_json(path, hint=_HINT)
        expected = state.pop(_HASH, None) if isinstance(state, dict) else None
        if expected != _hash(state) or checkpoint.name != f"step-{state['step']:08d}":
            raise DataError("not what a run wrote there", where=str(path), hint=_HINT)
        for name, digest in state["files"].items():
            path = checkpoint / name
            if _digest(path) != digest:
                raise DataError("it is torn, or of another checkpoint", where=str(path), hint=_HINT)
    except OSError as error:
        raise DataError(f"cannot be read: {error}", where=str(path), hint=_HINT) from error
    return cast("Mapping[str, Any]", state)


@torch.no_grad()
def read_tensors(
    checkpoint: Path, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], job: Job
) -> set[str]:
    """Fill `weights` and what is remembered of `optimizer`, whose names it returns; DataError: they are damaged."""
    no_dist = job.groups is None
    try:
        load(dict(weights), storage_reader=HuggingFaceStorageReader(str(checkpoint / _WEIGHTS)), no_dist=no_dist)
        stored = HuggingFaceStorageReader(str(checkpoint / _OPTIMIZER))
        names = optimizer.keys() & stored.read_metadata().state_dict_metadata.keys()
        load({name: optimizer[name] for name in sorted(names)}, storage_reader=stored, no_dist=no_dist)
    except (CheckpointException, SafetensorError, OSError) as error:
        raise DataError(f"cannot be read: {why(error)}", where=str(checkpoint), hint=_HINT) from error
    return names


def restore_random_states(state: Mapping[str, Any], device: torch.device) -> None:
    """Set torch's random generators, that of `device` if it was a GPU and is one."""
    cpu, *gpu = [torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8) for text in state["random"]]
    torch.set_rng_state(cpu)
    if gpu and device.type == "cuda":
        torch.cuda.set_rng_state(gpu[0], device)


def _digest(path: Path) -> str:
    """A hash of the size of a file and of pieces of it."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for piece in range(_PIECES):
            file.seek(size * piece // _PIECES)
            digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()


def _hash(state: object) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def changes(before: Mapping[str, Any], now: Mapping[str, Any], *, of_epochs: bool = False) -> dict[str, str]:
    """Settings that differ from before, by name, in words; a plan of more epochs only where `of_epochs` asks for it."""
    differ = [name for name in {**now, **before} if before.get(name) != now.get(name)]
    if not of_epochs and before.get(EPOCHS, 0) < now.get(EPOCHS, 0):
        differ.remove(EPOCHS)  # its first steps are the same
    return {name: f"{name} was {shorten(before.get(name))}, is {shorten(now.get(name))}" for name in differ}


def rate_mismatch(done: int, before: int, now: int, rates: Callable[[int], list[float]]) -> str:
    """The reason why a run of `done` steps planned for `before` cannot have `now`, by its learning rates; "" if it can.

    `rates`: learning rates of the steps that are done, by how many there are in all.
    """
    if now < done:
        return f"it has done {done:,} steps already"
    differ = rates(before) != rates(now)
    return "learning rates of the steps that are done go by how many there are" if differ else ""


class ResumePoint(NamedTuple):
    """A run that goes on: its last checkpoint, and what that says."""

    checkpoint: Path
    state: Mapping[str, Any]


def find_resume_point(folder: RunFolder, config: TrainConfig, data: TrainingData, job: Job) -> ResumePoint | None:
    """The run in `folder` that is to go on; None where it has no checkpoint.

    Raises UsageError: it is finished, with all steps that are asked for; DataError: its last checkpoint is damaged.
    """
    found = next(reversed(folder.checkpoints()), None), folder.final.exists()
    checkpoint, is_finished = job.broadcast_object(found)
    if checkpoint is None:
        return None
    state = read_state(checkpoint)
    before, now, done = state["fixed"], samples_of(data.plan.manifest), state["num_steps"]
    if not is_finished or data.num_steps(config) > done or changes({name: before.get(name) for name in now}, now):
        return ResumePoint(checkpoint, state)
    epochs, steps = data.plan.manifest["epochs"], data.plan.manifest["totals"]["num_steps"]
    asked = {"--max-epochs": (config.max_epochs, epochs), "--max-steps": (config.max_steps, steps)}
    if more := [f"{flag} is {number:,}" for flag, (number, most) in asked.items() if number and number > most]:
        raise folder.finished(
            f"its plan has {counted(epochs, 'epoch')}, {counted(steps, 'step')}: {', '.join(more)}",
            hint="build the plan again with more --epochs, and nothing else changed: the same command goes on then",
        )
    raise folder.finished(f"no more than its {done:,} steps are asked for")


def refuse_other_run(earlier: ResumePoint, fixed: Mapping[str, Any], config: TrainConfig, num_steps: int) -> None:
    """Raise UsageError where samples, model or way of learning, `fixed` by name, are not those of the earlier run."""
    done = earlier.state["step"]

    def rates(steps: int) -> list[float]:
        return [config.learning_rate(step, steps) for step in range(done)]

    why_not = rate_mismatch(done, earlier.state["num_steps"], num_steps, rates)
    differ = changes(earlier.state["fixed"], json.loads(json.dumps(fixed)), of_epochs=bool(why_not))
    if told := [text for name, text in differ.items() if why_not or name not in _ENDS]:
        hint = "resume with what it was started with, or start anew in another --output"
        raise UsageError(
            f"{earlier.checkpoint} is of another run: {'; '.join(told)}", hint=f"{why_not}: {hint}" if why_not else hint
        )


class PlanIdentity(TrainerCallback, ExportableState):
    """Puts into every checkpoint of a `Trainer` which samples its steps have: of a plan `samples_of`."""

    def __init__(self, samples: Mapping[str, Any]) -> None:
        self.samples = samples

    def state(self) -> dict[str, Any]:
        """The state that transformers saves in a checkpoint, and restores this callback from when it resumes."""
        return {"args": {"samples": self.samples}, "attributes": {}}


def checkpoint_of_plan(asked: str | bool, trainer: Any, samples: Mapping[str, Any], num_steps: int) -> str:
    """The checkpoint that a `Trainer` of `num_steps` steps of `samples` goes on from: `asked`, or its last one.

    Raises UsageError: there is none, or it is of other samples, or its steps would have had other learning rates.
    """
    args: TrainingArguments = trainer.args
    find: Any = get_last_checkpoint
    folder = Path(args.output_dir or "")
    found = str(asked) if asked is not True else find(str(folder)) if folder.is_dir() else None
    if found is None or not (Path(found) / _TRAINER_STATE).is_file():
        hint = "leave resume_from_checkpoint out to start from the beginning"
        raise UsageError(f"there is no checkpoint in {found or folder}", hint=hint)
    state = TrainerState.load_from_json(str(Path(found) / _TRAINER_STATE))
    identity: Any = (state.stateful_callbacks or {}).get(PlanIdentity.__name__)
    before = None if identity is None else identity["args"].get("samples")
    told = "it does not say which samples its steps have"
    if isinstance(before, Mapping):
        told = "; ".join(changes(before, samples).values())
    if told:
        hint = "go on with what it was begun with, or start anew from its weights"
        raise UsageError(f"a checkpoint of another plan: {told}", where=found, hint=hint)

    def rates(steps_in_all: int) -> list[float]:
        """Learning rates of the steps that are done and the next; none where losses decide."""
        if trainer.lr_scheduler is not None and not trainer._created_lr_scheduler:  # it was given
            return []
        optimizer = SGD([torch.zeros(1)], lr=args.learning_rate)
        warmup, more = args.get_warmup_steps(steps_in_all), cast("dict[str, Any] | None", args.lr_scheduler_kwargs)
        schedule: Any = get_scheduler(args.lr_scheduler_type, optimizer, warmup, steps_in_all, more)
        steps = range(state.global_step + 1)
        return [factor(step) for factor in getattr(schedule, "lr_lambdas", ()) for step in steps]

    now = args.max_steps if args.max_steps > 0 else num_steps
    if why_not := rate_mismatch(state.global_step, state.max_steps, now, rates):
        raise UsageError(
            f"a checkpoint of a run of {state.max_steps:,} steps, this one has {now:,}: {why_not}",
            where=found,
            hint=f"go on with max_steps={state.max_steps}, or start anew; "
            'lr_scheduler_type="constant" lets a run become longer',
        )
    return found
