"""The training loop: one optimizer step per step of the plan, one line of metrics each."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from chunkplan.errors import ChunkplanError
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.plan import Plan
from chunkplan_runtime.distributed.job import Job
from chunkplan_runtime.feed.stream import PlanStream, StepWork
from chunkplan_runtime.models.model import check_plan
from chunkplan_runtime.profiling.timeline import stage_rows
from chunkplan_runtime.training.agreement import refuse_other_processes, versions
from chunkplan_runtime.training.checkpoint import read_state, refuse_other_run, restore_random_states, write_checkpoint
from chunkplan_runtime.training.comparison import compare
from chunkplan_runtime.training.config import TrainConfig, what_all_have, what_it_learns_by
from chunkplan_runtime.training.data import TrainingData, open_data
from chunkplan_runtime.training.final import save_final
from chunkplan_runtime.training.flops import FlopCounter
from chunkplan_runtime.training.largest_step import LargestStep
from chunkplan_runtime.training.learner import Learner
from chunkplan_runtime.training.losses import SpikeWatch, describe_worst, source_losses
from chunkplan_runtime.training.metrics import RunLog, peak_memory, predicted_seconds, reset_peak_memory, step_row
from chunkplan_runtime.training.model_setup import build_model, check_layout, fingerprint, own_stage, read_its_config
from chunkplan_runtime.training.run_folder import RunFolder
from chunkplan_runtime.training.run_lock import RunLock
from chunkplan_runtime.training.run_summary import describe_run
from chunkplan_runtime.training.save import remove_left_behind
from chunkplan_runtime.training.screen import Screen
from chunkplan_runtime.training.tokenizer import check_tokenizer, find_tokenizer


def train(config: TrainConfig, job: Job) -> None:
    """Train, and leave metrics, checkpoints and the model in `config.output`. Everything refusable is refused first.

    `config` is as `choose_device` left it. All processes of `job` call this with the same one.

    Raises:
        ChunkplanError: loss or gradients are not finite, or the disk is full.
        UsageError: an option, a path, the model or the plan cannot be used, or a run cannot be resumed.
        DataError: plan, analysis, model files or a checkpoint are damaged or do not belong together.
    """
    disable_progress_bar()  # type: ignore[no-untyped-call]  # a run has one of its own
    folder = RunFolder(config.output)
    lock = RunLock(config.output)
    try:
        if job.is_main:
            lock.take()  # first: what a run at work has written is not of an earlier one
            folder.check(config.resume)
        model_config = read_its_config(config)
        data = open_data(config, model_config, job.layout)
        tokenizer = find_tokenizer(config)
        check_tokenizer(tokenizer, data.analysis, model_config.vocab_size)
        config = _resolve(config, data, tokenizer)
        Run(config, folder, data, tokenizer, lock, job).finish()
    except torch.OutOfMemoryError as error:
        raise ChunkplanError(
            f"the GPU's memory is full: {str(error).splitlines()[0]}",
            hint="use --checkpointing or --kv-offload, or build the plan with a smaller --chunk-size or --k; "
            + folder.how_to_resume(),
        ) from error
    finally:
        lock.release()


class Run:
    """A run that can begin: everything is loaded, and it stands where its last checkpoint was written.

    Of several processes the main one speaks and writes lines; checkpoints are written by all.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        data: TrainingData,
        tokenizer: list[Path],
        lock: RunLock,
        job: Job,
    ) -> None:
        self._config, self._folder, self._data, self._tokenizer = config, folder, data, tokenizer
        self._lock, self._job = lock, job
        self._stream = data.stream(data.plan)
        self._num_steps = data.num_steps(config)
        #: What may not change when a run is resumed, by the name to tell it by.
        self._fixed = {"plan": data.plan.content_hash, **_essence(data), **what_it_learns_by(config)}
        hashes = {"analysis": data.analysis.content_hash, "evaluation plan": _hash_of(data.evaluation)}
        refuse_other_processes({**self._fixed, **hashes, **what_all_have(config), **versions()}, job)
        check_layout(config, data.plan, job.layout)
        if data.evaluation is not None:
            data.stream(data.evaluation)  # refused now if it cannot be used
        model = build_model(config, data.model_config, job)
        refuse_other_processes({"weights": fingerprint(model)}, job)
        self._fixed["frozen weights"] = fingerprint(model, only_frozen=True)
        self._first, state = 0, None
        checkpoint = job.ask_main(next(reversed(folder.checkpoints()), None))
        if checkpoint is not None:
            state = read_state(checkpoint)
            refuse_other_run(state, self._fixed, checkpoint)
            self._stream.load_state_dict(state["stream"])
            self._first = state["step"]
        for plan in (data.plan, data.evaluation):
            if plan is not None:
                check_plan(model, plan)
        self._flops = FlopCounter(model)
        self._comparison = compare(config, data, job)
        self._description = describe_run(config, data, model, self._num_steps, tokenizer, self._comparison)
        self._learner = Learner(own_stage(model, config, job.layout), config, self._num_steps, job)
        self._spikes = SpikeWatch(config.spike, state["losses"] if state else ())
        if checkpoint is not None and state is not None:
            self._learner.restore(checkpoint, state)
            restore_random_states(state, self._learner.model.device)
        self._log = RunLog(folder, config, data.plan)
        self._largest = LargestStep()
        self._screen = Screen(self._first, self._num_steps, silent=not job.is_main)

    def finish(self) -> None:
        """Do the steps that are left and save the model."""
        say = self._screen.say
        for line in self._description:
            say(line)
        if self._config.resume:
            say(f"resumed   at step {self._first}" if self._first else "resumed   from the beginning: no checkpoint")
            if self._job.is_main:
                for left in (self._folder.path, self._folder.path / "checkpoints"):
                    remove_left_behind(left)
                self._log.cut_back(self._first)
        with self._screen:
            for work, waited in islice(_timed(self._stream), self._num_steps - self._first):
                self._do_step(work, waited)
                done = work.step.step + 1
                if _is_due(done, self._config.eval_every) or done == self._num_steps:
                    self._evaluate(work.step.step)
                if _is_due(done, self._config.save_every):
                    self._save(done)
        if self._job.groups is not None:
            planned = self._comparison.times
            report = self._largest.report(self._data.plan, self._folder.timeline, self._job, planned=planned)
            for line in [*report, f"timeline  {self._folder.timeline}"] if report else ():
                say(line)
        self._job.at_step(self._num_steps - 1)  # a job that ends leaves no model that looks whole
        save_final(self._learner, self._config, self._data.model_config, self._tokenizer, self._folder.final, self._job)
        say(f"saved     {self._folder.final}")
        say(f"metrics   {self._folder.metrics}")

    def _do_step(self, work: StepWork, waited: float) -> None:
        device = self._learner.model.device
        self._job.at_step(work.step.step)
        reset_peak_memory(device)
        started = time.perf_counter()
        gradients = self._learner.compute_gradients(work)
        if not gradients.is_finite:
            sequences = "; ".join(describe_worst(gradients.sequences, self._data.analysis))
            raise self._not_finite(
                f"step {work.step.step}", f"loss {gradients.loss}, gradient norm {gradients.norm}; {sequences}"
            )
        self._largest.look_at(work.step, gradients.times)
        rate = self._learner.update(work.step)
        seconds = time.perf_counter() - started
        spike = work.step.num_target_tokens > 0 and self._spikes.is_spike(gradients.loss)
        worst = describe_worst(gradients.sequences, self._data.analysis) if spike else []
        comparison, layout = self._comparison, self._job.layout
        peak_flops = comparison.peak_flops and comparison.peak_flops * layout.world_size
        predicted = predicted_seconds(work.step, layout) if comparison.times else None
        row: dict[str, Any] = {
            **step_row(work.step, gradients, self._data.analysis, seconds, predicted),
            "lr": rate,
            "mfu": self._flops.count(work.step) / seconds / peak_flops if peak_flops else None,
            "peak_memory_bytes": max(self._job.tell_all(peak_memory(device))),
            "wait_seconds": waited,
            "spike": worst,
        }
        if self._job.groups is not None:
            row["processes"] = stage_rows(gradients.spent, layout)
        if self._job.is_main:
            self._folder.path.mkdir(parents=True, exist_ok=True)  # a run that does no step leaves none
            self._lock.take()
            self._log.write_step(row, gradients.sequences)
        self._screen.show_step(row)
        if worst:
            self._screen.say(f"step {work.step.step} is a spike: {'; '.join(worst)}")

    def _evaluate(self, step: int) -> None:
        data = self._data
        if data.evaluation is None:
            return
        row = evaluate(self._learner, data.stream(data.evaluation), data.analysis)
        loss = row["eval_loss"]
        if loss is not None and not math.isfinite(loss):
            raise self._not_finite(f"evaluation after step {step}", f"loss {loss}")
        if self._job.is_main:
            self._log.write_evaluation({"step": step, **row})
        what = "no targets" if loss is None else f"loss {loss:.4f}"
        self._screen.say(f"evaluation after step {step}: {what}, {row['seconds']:.1f} s")

    def _save(self, step: int) -> None:
        """Write the checkpoint from which `step` comes next."""
        position = self._stream.state_dict()
        assert position["step"] == step
        state = {"stream": position, "losses": self._spikes.losses, "fixed": self._fixed}
        write_checkpoint(
            self._folder,
            step,
            **self._learner.tensors(),
            state=state,
            keep_last=self._config.keep_last,
            device=self._learner.model.device,
            job=self._job,
        )

    def _not_finite(self, where: str, what: str) -> ChunkplanError:
        return ChunkplanError(
            f"not finite: {what}",
            where=where,
            hint="try a smaller --lr, --clip 1 or --precision fp32 in a new run, or leave these sequences out; "
            + self._folder.how_to_resume(),
        )


def _resolve(config: TrainConfig, data: TrainingData, tokenizer: list[Path]) -> TrainConfig:
    """`config` with what was found in place of what was left open."""
    cost = data.plan.manifest["predictions"]["cost_model"]
    return replace(
        config,
        kv_offload=cost["kv_offload"] if config.kv_offload is None else config.kv_offload,
        checkpointing=cost["checkpointing"] == "full" if config.checkpointing is None else config.checkpointing,
        analysis=data.analysis.path,
        eval_plan=data.evaluation.path if data.evaluation is not None else None,
        tokenizer=str(tokenizer[0].parent) if tokenizer else None,
    )


def _essence(data: TrainingData) -> dict[str, Any]:
    """The model's config, without what says only where it came from."""
    origin = ("transformers_version", "_name_or_path", "dtype", "architectures")
    return {f"model.{name}": value for name, value in data.model_config.to_dict().items() if name not in origin}


def _hash_of(plan: Plan | None) -> str | None:
    return None if plan is None else plan.content_hash


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


def evaluate(learner: Learner, stream: PlanStream, analysis: Analysis) -> dict[str, Any]:
    """The mean loss of a target token over all steps of `stream`, in total and by source, and how long it took."""
    started = time.perf_counter()
    losses = learner.evaluate(stream)
    num_target_tokens = sum(loss.num_target_tokens for loss in losses)
    return {
        "eval_loss": sum(loss.loss for loss in losses) / num_target_tokens if num_target_tokens else None,
        "target_tokens": num_target_tokens,
        "seconds": time.perf_counter() - started,
        "source_losses": source_losses(losses, analysis),
    }
