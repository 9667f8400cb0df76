"""Calls `TrainerCallback`s of transformers at the moments of a run, and does what they ask for.

They get what transformers' own Trainer gives them: arguments, a `TrainerState` and a `TrainerControl`, the model and
the optimizer. docs/training.md has the moments. The trackers of `--report-to` are such callbacks too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from chunkplan.errors import UsageError
from chunkplan.visible import one_line
from chunkplan_runtime.distributed.job import Job
from chunkplan_runtime.training.checkpoint import BestLoss
from chunkplan_runtime.training.config import TrainConfig
from chunkplan_runtime.training.metrics import EvaluationRow, StepRow, as_entries
from chunkplan_runtime.training.train_step import TrainStep

#: By tracker the packages that transformers takes it from: one of them has to be there.
_PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",), "mlflow": ("mlflow",)}

#: Entries of metrics.jsonl that are logged, by the name that they are logged under: where it has one, transformers'.
_SAME = ("router_loss", "tokens", "target_tokens", "tokens_per_second", "seconds", "wait_seconds", "mfu")
LOGGED = {"loss": "loss", "grad_norm": "grad_norm", "lr": "learning_rate", **{name: name for name in _SAME}}
LOGGED["peak_memory_bytes"] = "peak_memory_bytes"

#: The same of evals.jsonl.
LOGGED_OF_EVALUATIONS = {"eval_loss": "eval_loss", "target_tokens": "eval_target_tokens", "seconds": "eval_seconds"}

#: What a callback may ask for.
_REQUESTS = ("should_training_stop", "should_save", "should_evaluate", "should_log")


@dataclass
class _Arguments(TrainingArguments):
    """The options of a run under the names that transformers has for them; as a document, those of the run itself."""

    config: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Leave devices and processes as they are, which those of transformers would set up."""

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return torch.device(str(self.config["device"]))

    @property
    def n_gpu(self) -> int:
        """How many GPUs a process has."""
        return int(self.device.type == "cuda")

    def to_dict(self) -> dict[str, object]:
        """The options of the run, for trackers."""
        return self.config


def trackers(config: TrainConfig) -> dict[str, type[TrainerCallback]]:
    """The classes of the trackers of `--report-to`, by name."""
    for name in config.report_to or ():
        if not any(map(find_spec, _PACKAGES[name])):
            raise UsageError(
                f"--report-to {name} needs {' or '.join(_PACKAGES[name])}, which is not installed",
                hint=f"pip install {_PACKAGES[name][-1]}",
            )
    if not config.report_to:
        return {}
    from transformers.integrations.integration_utils import get_reporting_integration_callbacks

    integrations: Any = get_reporting_integration_callbacks
    return dict(zip(config.report_to, integrations(list(config.report_to)), strict=True))


def _fails(name: str, error: Exception) -> UsageError:
    said = " ".join(str(error).split())
    return UsageError(
        f"--report-to {name} does not work: {type(error).__name__}: {one_line(said)}",
        hint=f"set {name} up as it asks for, or leave it out of --report-to",
    )


class _Flow(DefaultFlowCallback):
    """Has a run log every step, evaluate and save as its options say, before other callbacks change that."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Say what follows the step that was done."""
        done = state.global_step
        control.should_log = True
        control.should_evaluate = done == state.max_steps or (state.eval_steps > 0 and done % state.eval_steps == 0)
        control.should_save = state.save_steps > 0 and done % state.save_steps == 0


class Callbacks:
    """The callbacks of a run, on each of its processes.

    What the callbacks of one process ask for is done by all: stop, save, evaluate. Trackers are on the main one alone.
    """

    def __init__(
        self, given: Sequence[TrainerCallback], config: TrainConfig, job: Job, train_step: TrainStep, num_steps: int
    ) -> None:
        """`num_steps`: of the run."""
        self._trackers: dict[TrainerCallback, str] = {}
        for name, tracker in (trackers(config) if job.is_main else {}).items():
            try:
                self._trackers[tracker()] = name
            except Exception as error:
                raise _fails(name, error) from error
        self._job = job
        self._are_there = any(job.all_gather_object(bool(given or self._trackers)))
        callbacks: Any = [_Flow(), *given, *self._trackers]
        make: Any = CallbackHandler
        self._handler = make(callbacks, train_step.model.model, None, train_step.optimizer, None)
        self._arguments = _arguments(config, num_steps)
        self.control = TrainerControl()
        self.state = TrainerState(
            max_steps=num_steps,
            logging_steps=1,
            eval_steps=config.eval_every,
            save_steps=config.save_every,
            is_world_process_zero=job.is_main,
            is_local_process_zero=job.is_main,
        )

    def call(self, event: str, **more: Any) -> None:
        """Call all callbacks of all processes, such as `on_step_end`; `more` are arguments of that event."""
        do: Any = getattr(self._handler, event)
        try:
            self.control = do(self._arguments, self.state, self.control, **more)
        except Exception as error:
            callers = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
            for tracker, name in self._trackers.items():
                if any(each is tracker for each in callers):
                    raise _fails(name, error) from error
            raise
        if self._are_there:
            wanted = self._job.all_gather_object({name: getattr(self.control, name) for name in _REQUESTS})
            for name in _REQUESTS:
                setattr(self.control, name, any(each[name] for each in wanted))
        if self.control.should_epoch_stop:
            raise UsageError(
                f"a callback set should_epoch_stop in {event}: steps of a plan are not left out",
                hint="set should_training_stop, or build the plan with fewer --epochs",
            )

    def begin(self, start: int, epochs_done: float, best: BestLoss) -> None:
        """Before the first step, which is `start` of the plan."""
        self.state.global_step, self.state.epoch = start, epochs_done
        self._know(best)
        self.call("on_train_begin")

    def end_step(self, row: StepRow, epochs_done: float) -> None:
        """After the update of a step; `control` then says what follows it."""
        self.state.global_step, self.state.epoch = row["step"] + 1, epochs_done
        self.state.num_input_tokens_seen += row["tokens"]
        self.call("on_step_end")
        if self.control.should_log:
            self._log(_numbers(row, LOGGED))

    def evaluated(self, row: EvaluationRow, best: BestLoss) -> None:
        """After an evaluation; `best` does not know it yet."""
        metrics = _numbers(row, LOGGED_OF_EVALUATIONS)
        self._log(metrics)
        self._know(best)
        self.call("on_evaluate", metrics={**metrics, "epoch": self.state.epoch})

    def saved(self, best: BestLoss, checkpoint: Path | None) -> None:
        """After a checkpoint; `checkpoint`: the best one, where it is kept."""
        self._know(best)
        self.state.best_model_checkpoint = None if checkpoint is None else str(checkpoint)
        self.call("on_save")

    def _know(self, best: BestLoss) -> None:
        self.state.best_metric, self.state.best_global_step = best.loss, best.step or None

    def _log(self, numbers: dict[str, float]) -> None:
        logs = {**numbers, "epoch": self.state.epoch}
        if self._are_there:
            self.state.log_history.append({**logs, "step": self.state.global_step})
        self.call("on_log", logs=logs)


def _numbers(row: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, float]:
    """What a row has of `names`, where that is a number."""
    found = {logged: row.get(name) for name, logged in names.items()}
    return {name: value for name, value in found.items() if isinstance(value, (int, float)) and math.isfinite(value)}


def _arguments(config: TrainConfig, num_steps: int) -> TrainingArguments:
    return _Arguments(
        output_dir=str(config.output),
        run_name=config.output.name,
        config=as_entries(config),
        learning_rate=config.lr,
        weight_decay=config.weight_decay,
        max_grad_norm=config.clip,
        max_steps=num_steps,
        logging_steps=1,
        eval_strategy="steps" if config.eval_every else "no",
        eval_steps=config.eval_every or None,
        save_steps=config.save_every,
        save_total_limit=config.keep_last,
        load_best_model_at_end=config.keeps_best,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        seed=config.seed,
        report_to=list(config.report_to or ()),
    )
