"""A run that can begin, and its loop: one optimizer step per step of the plan, one line of metrics each."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from chunkplan.errors import ChunkplanError
from chunkplan_runtime.distributed.job import Job
from chunkplan_runtime.feed.stream import PlanStream, StepWork
from chunkplan_runtime.models.model import CausalLM
from chunkplan_runtime.profiling.timeline import stage_rows
from chunkplan_runtime.training.callbacks import Callbacks
from chunkplan_runtime.training.checkpoint import BestLoss, RunState, read_state, write_checkpoint
from chunkplan_runtime.training.comparison import Comparison
from chunkplan_runtime.training.config import TrainConfig
from chunkplan_runtime.training.data import TrainingData
from chunkplan_runtime.training.final import save_final
from chunkplan_runtime.training.flops import FlopCounter
from chunkplan_runtime.training.largest_step import LargestStep
from chunkplan_runtime.training.losses import SpikeWatch, describe_worst, source_losses
from chunkplan_runtime.training.metrics import (
    EvaluationRow,
    RunLog,
    StepRow,
    peak_memory,
    predicted_seconds,
    reset_peak_memory,
    step_row,
)
from chunkplan_runtime.training.run_folder import RunFolder, RunLock, remove_folder
from chunkplan_runtime.training.screen import Screen
from chunkplan_runtime.training.train_step import TrainStep


@dataclass
class TrainingRun:
    """A run that can begin: everything is loaded, and it stands where its last checkpoint was written.

    Of several processes the main one prints and writes lines; checkpoints are written by all.

    Attributes:
        config: the options, with what was found in place of what was left open.
        tokenizer: the files that go with the weights.
        start: the step that comes next, of `num_steps`.
        fixed: what may not change when a run is resumed, by the name that a message has for it.
        whole: the model; of several processes each has one without numbers, of which it trains a part.
        description: the lines to print before the first step.
        best: the evaluations before it.
    """

    config: TrainConfig
    data: TrainingData
    tokenizer: list[Path]
    job: Job
    folder: RunFolder
    lock: RunLock
    log: RunLog
    screen: Screen
    stream: PlanStream
    start: int
    num_steps: int
    fixed: dict[str, Any]
    whole: CausalLM
    train_step: TrainStep
    spikes: SpikeWatch
    flops: FlopCounter
    comparison: Comparison
    description: list[str]
    best: BestLoss
    callbacks: Callbacks
    largest: LargestStep = field(default_factory=LargestStep)

    def finish(self) -> None:
        """Do the steps that are left, write their files, and save the model.

        Raises:
            ChunkplanError: loss or gradients are not finite, or the disk is full.
        """
        say = self.screen.say
        for line in self.description:
            say(line)
        if self.config.resume:
            say(f"resumed   at step {self.start}" if self.start else "resumed   from the beginning: no checkpoint")
            if self.job.is_main:
                self.folder.remove_left_behind()
                if self.folder.final.exists():  # of fewer steps
                    remove_folder(self.folder.final)
                    say(f"removed   {self.folder.final}: the run goes on, and writes it again")
                self.log.cut_back(self.start)
        with self.screen:
            self._train()
        if self.best.should_stop:
            say(f"stopped   early: {self.best.since} evaluations were no lower than {self.best.loss:.4f}")
        elif self.callbacks.control.should_training_stop:
            say(f"stopped   by a callback, after {self.callbacks.state.global_step:,} of {self.num_steps:,} steps")
        if self.job.groups is not None:
            planned = self.comparison.times
            if self.largest.write(self.data.plan, self.folder.measured, self.job, planned=planned):
                run = shlex.quote(str(self.folder.path))
                say(f"measured  {self.folder.measured}: `chunkplan simulate --run {run}` shows it")
        if self.config.keeps_best:
            self._take_best()
        self.callbacks.call("on_train_end")
        self.job.at_step(self.num_steps - 1)  # a job that ends leaves no model that looks whole
        merges = self.config.merge_adapters
        save_final(self.train_step, self.whole, self.tokenizer, self.folder.final, self.job, merges=merges)
        say(f"saved     {self.folder.final}")
        say(f"metrics   {self.folder.metrics}")

    def _train(self) -> None:
        """Do the steps that are left, as far as nothing says to stop, with what follows each of them."""
        callbacks, config, epoch = self.callbacks, self.config, -1
        callbacks.begin(self.start, self.data.epochs_done(self.start), self.best)
        if self._is_to_stop():
            return
        for work, waited in islice(_timed(self.stream), self.num_steps - self.start):
            if work.step.epoch != epoch > -1:
                callbacks.call("on_epoch_end")
            callbacks.begin_step(is_first_of_epoch=work.step.epoch != epoch)
            done, epoch, is_best = work.step.step + 1, work.step.epoch, False
            row = self._do_step(work, waited)
            callbacks.end_step(
                row,
                self.data.epochs_done(done),
                evaluates=_is_due(done, config.eval_every) or done == self.num_steps,
                saves=_is_due(done, config.save_every),
            )
            if callbacks.control.should_evaluate:
                is_best = self._evaluate(work.step.step)
            if callbacks.control.should_save or (is_best and config.keeps_best):
                self._save(done)
            if self._is_to_stop():
                break
        if epoch > -1:
            callbacks.call("on_epoch_end")

    def _is_to_stop(self) -> bool:
        """Whether evaluations or a callback say that there is no further step."""
        return self.best.should_stop or self.callbacks.control.should_training_stop

    def _do_step(self, work: StepWork, waited: float) -> StepRow:
        device = self.train_step.model.device
        self.job.at_step(work.step.step)
        reset_peak_memory(device)
        started = time.perf_counter()
        gradients = self.train_step.compute_gradients(work)
        if not gradients.is_finite:
            sequences = "; ".join(describe_worst(gradients.sequences, self.data.analysis))
            raise self._not_finite(
                f"step {work.step.step}", f"loss {gradients.loss}, gradient norm {gradients.norm}; {sequences}"
            )
        self.largest.look_at(work.step, gradients.times)
        self.callbacks.call("on_pre_optimizer_step")
        rate = self.train_step.update(work.step)
        self.callbacks.call("on_optimizer_step")
        seconds = time.perf_counter() - started
        spike = work.step.num_target_tokens > 0 and self.spikes.is_spike(gradients.loss)
        worst = describe_worst(gradients.sequences, self.data.analysis) if spike else []
        comparison, layout = self.comparison, self.job.layout
        peak_flops = comparison.peak_flops and comparison.peak_flops * layout.world_size
        predicted = predicted_seconds(work.step, layout) if comparison.times else None
        row: StepRow = {
            **step_row(work.step, gradients, self.data.analysis, seconds, predicted),
            "lr": rate,
            "mfu": self.flops.count(work.step) / seconds / peak_flops if peak_flops else None,
            "peak_memory_bytes": max(self.job.all_gather_object(peak_memory(device))),
            "wait_seconds": waited,
            "spike": worst,
        }
        if self.job.groups is not None:
            row["processes"] = stage_rows(gradients.spent, layout)
        if self.job.is_main:
            self.folder.path.mkdir(parents=True, exist_ok=True)  # a run that does no step leaves none
            self.lock.take()
            self.log.write_step(row, gradients.sequences)
        self.screen.show_step(row)
        if worst:
            self.screen.say(f"step {work.step.step} is a spike: {'; '.join(worst)}")
        return row

    def _evaluate(self, step: int) -> bool:
        """Find the mean loss of a target token over all steps of the evaluation plan, in total and by source.

        Returns whether it is the lowest so far.
        """
        data = self.data
        if data.evaluation is None:
            return False
        started = time.perf_counter()
        losses = self.train_step.evaluate(data.stream(data.evaluation))
        num_target_tokens = sum(loss.num_target_tokens for loss in losses)
        row: EvaluationRow = {
            "step": step,
            "eval_loss": sum(loss.loss for loss in losses) / num_target_tokens if num_target_tokens else None,
            "target_tokens": num_target_tokens,
            "seconds": time.perf_counter() - started,
            "source_losses": source_losses(losses, data.analysis),
        }
        loss = row["eval_loss"]
        if loss is not None and not math.isfinite(loss):
            raise self._not_finite(f"evaluation after step {step}", f"loss {loss}")
        if self.job.is_main:
            self.log.write_evaluation(row)
        what = "no targets" if loss is None else f"loss {loss:.4f}"
        self.screen.say(f"evaluation after step {step}: {what}, {row['seconds']:.1f} s")
        self.callbacks.evaluated(row, self.best)
        return self.best.add(step + 1, loss)

    def _save(self, step: int) -> None:
        """Write the checkpoint from which `step` comes next."""
        position, best = self.stream.state_dict(), self.best
        kept = best.step if self.config.keeps_best and best.loss is not None else None
        assert position["step"] == step
        state: RunState = {"stream": position, "losses": self.spikes.losses, "fixed": self.fixed}
        write_checkpoint(
            self.folder,
            step,
            **self.train_step.tensors(),
            state=state,
            keep_last=self.config.keep_last,
            best=kept,
            device=self.train_step.model.device,
            job=self.job,
        )
        self.callbacks.saved(best, None if kept is None else self.folder.checkpoint(kept))

    def _take_best(self) -> None:
        """Have the weights of the lowest evaluation loss, whose checkpoint was kept; of none those that there are."""
        best = self.best
        if best.loss is None:
            return
        checkpoint = self.folder.checkpoint(best.step)
        what = f"evaluation loss {best.loss:.4f} after step {best.step - 1}"
        if not self.job.broadcast_object(checkpoint.is_dir()):  # of a run that did not keep it at first
            self.screen.say(f"best      {what}; its checkpoint was not kept, so final/ has the last weights")
            return
        read_state(checkpoint)  # refused if it is damaged
        self.train_step.restore(checkpoint)
        self.screen.say(f"best      {checkpoint}: {what}; final/ has its weights")

    def _not_finite(self, where: str, what: str) -> ChunkplanError:
        return ChunkplanError(
            f"not finite: {what}",
            where=where,
            hint="try a smaller --lr, --clip 1 or --precision fp32 in a new run, or leave these sequences out; "
            + self.folder.how_to_resume(),
        )


def _is_due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


def _timed(stream: Iterable[StepWork]) -> Iterator[tuple[StepWork, float]]:
    """The steps, each with the seconds that waiting for it took."""
    steps = iter(stream)
    while True:
        started = time.perf_counter()
        work = next(steps, None)
        if work is None:
            return
        yield work, time.perf_counter() - started
