"""Calls `TrainerCallback`s of transformers, such as trackers, at the moments of a run that docs/training.md names."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from chunkplan.errors import UsageError, one_line
from chunkplan_runtime.distributed.job import Job
from chunkplan_runtime.training.checkpoint import BestLoss
from chunkplan_runtime.training.config import TrainConfig
from chunkplan_runtime.training.metrics import Row, as_entries
from chunkplan_runtime.training.train_step import TrainStep

#: Entries of metrics.jsonl that are logged, by the name that they are logged under: where it has one, transformers'.
_SAME = ("loss", "grad_norm", "router_loss", "tokens", "target_tokens", "tokens_per_second", "seconds", "wait_seconds")
LOGGED = {"lr": "learning_rate"} | {name: name for name in (*_SAME, "mfu", "peak_memory_bytes")}

#: The same of evals.jsonl.
LOGGED_OF_EVALUATIONS = {"eval_loss": "eval_loss", "target_tokens": "eval_target_tokens", "seconds": "eval_seconds"}

#: Requests that a callback may make.
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
        """The number of GPUs of a process."""
        return int(self.device.type == "cuda")

    def to_dict(self) -> dict[str, object]:
        """The options of the run, for trackers."""
        return self.config


def trackers(config: TrainConfig) -> dict[TrainerCallback, str]:
    """The trackers of `--report-to`, with their names. Raises UsageError: one is not installed, or does not work."""
    if not config.report_to:
        return {}
    from transformers.integrations.integration_utils import get_reporting_integration_callbacks

    integrations: Any = get_reporting_integration_callbacks
    if config.wandb_project:
        os.environ["WANDB_PROJECT"] = config.wandb_project  # where the integration looks for it
    made = {}
    for name, make in zip(config.report_to, integrations(list(config.report_to)), strict=True):
        with _named(name):
            made[make()] = name
    return made


@contextmanager
def _named(tracker: str | None) -> Iterator[None]:
    """Raise what a tracker raises as an error that names it."""
    try:
        yield
    except Exception as error:
        if tracker is None:
            raise
        said = one_line(" ".join(str(error).split()))
        raise UsageError(
            f"--report-to {tracker} does not work: {type(error).__name__}: {said}",
            hint=f"install {tracker} and set it up as it asks for, or leave it out of --report-to",
        ) from error


def agree(control: TrainerControl, job: Job) -> None:
    """Give all processes the requests of the callbacks of each."""
    wanted = job.all_gather_object({name: getattr(control, name) for name in _REQUESTS})
    for name in _REQUESTS:
        setattr(control, name, any(each[name] for each in wanted))


class Callbacks(CallbackHandler):
    """The callbacks of a run, called as transformers does; what those of one process ask for is done by all."""

    def __init__(
        self,
        given: Sequence[TrainerCallback],
        config: TrainConfig,
        job: Job,
        train_step: TrainStep,
        num_steps: int,
        best: BestLoss,
    ) -> None:
        """`num_steps` and `best`: of the run."""
        self._trackers = trackers(config) if job.is_main else {}
        self._job, self._best = job, best
        self._are_there = any(job.all_gather_object(bool(given or self._trackers)))
        self.callbacks = [*given, *self._trackers]
        self.model, self.optimizer = train_step.model.model, train_step.optimizer
        self._arguments = _Arguments(
            output_dir=str(config.output),
            run_name=config.run_name or config.output.name,
            config=as_entries(config),
            learning_rate=config.highest_lr,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
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
        self.state.best_metric, self.state.best_global_step = self._best.loss, self._best.step or None
        self.control = getattr(self, event)(self._arguments, self.state, self.control, **more)
        if self._are_there:
            agree(self.control, self._job)
        if self.control.should_epoch_stop:
            raise UsageError(
                f"a callback set should_epoch_stop in {event}: steps of a plan are not left out",
                hint="set should_training_stop, or build the plan with fewer --epochs",
            )

    def call_event(self, event: str, args: Any, state: Any, control: TrainerControl, **more: Any) -> TrainerControl:
        """Call all callbacks of this process; an error of a tracker names it."""
        more |= {"model": self.model, "optimizer": self.optimizer}
        more |= dict.fromkeys(("processing_class", "lr_scheduler", "train_dataloader", "eval_dataloader"))
        for callback in self.callbacks:
            with _named(self._trackers.get(callback)):
                found = getattr(callback, event)(args, state, control, **more)
            control = found or control
        return control

    def end_step(self, row: Row) -> None:
        """After the update of a step, whose state is set; `control` then says what follows it."""
        state, control, done = self.state, self.control, self.state.global_step
        state.num_input_tokens_seen += row["tokens"]
        control.should_log = True
        control.should_evaluate = done == state.max_steps or (state.eval_steps > 0 and done % state.eval_steps == 0)
        control.should_save = state.save_steps > 0 and done % state.save_steps == 0
        self.call("on_step_end")
        if self.control.should_log:
            of_loss = row.get("loss_metrics", {})
            self._log({**row, **of_loss}, {**LOGGED, **{name: name for name in of_loss}})

    def evaluated(self, row: Row) -> None:
        """After an evaluation, whose loss `best` does not know yet."""
        self.call("on_evaluate", metrics=self._log(row, LOGGED_OF_EVALUATIONS))

    def _log(self, row: Row, names: Mapping[str, str]) -> dict[str, float]:
        """Log what a row has of `names`, where that is a number, with the epoch."""
        found = {logged: row.get(name) for name, logged in names.items()}
        logs = {name: each for name, each in found.items() if isinstance(each, (int, float)) and math.isfinite(each)}
        logs["epoch"] = self.state.epoch
        if self._are_there:
            self.state.log_history.append({**logs, "step": self.state.global_step})
        self.call("on_log", logs=dict(logs))
        return logs
