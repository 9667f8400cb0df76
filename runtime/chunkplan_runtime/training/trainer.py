"""The trainer: opens everything that a run needs, refuses what cannot be done, and trains."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.utils.logging import disable_progress_bar

from chunkplan.config.losses import LOSSES
from chunkplan.cost.model import CostModel
from chunkplan.errors import ChunkplanError, UsageError
from chunkplan.options import options_of
from chunkplan.planfile.likeness import samples_of
from chunkplan_runtime.distributed.job import Job, refuse_differences
from chunkplan_runtime.execution.losses import check_loss, find_loss
from chunkplan_runtime.feed.scores import Scores
from chunkplan_runtime.feed.stream import StepWork
from chunkplan_runtime.models.model import read_config
from chunkplan_runtime.training import checkpoint as checkpoints
from chunkplan_runtime.training import final, metrics, setup
from chunkplan_runtime.training.callbacks import Callbacks, trackers
from chunkplan_runtime.training.config import TrainConfig, fixed_options, shared_options
from chunkplan_runtime.training.interrupt import Interrupt
from chunkplan_runtime.training.run_folder import RunFolder, append_lines, cut_back, lines_before, remove_folder
from chunkplan_runtime.training.samples import Sampler
from chunkplan_runtime.training.screen import Screen, compare, describe_run
from chunkplan_runtime.training.train_step import Gradients, TrainStep

#: Options that are as the plan was timed unless they are given.
_PLANNED = ["kv_offload", "checkpointing", "lora_rank", "load_in_4bit", "optimizer", "fused_kernels", "compile"]

#: Characters of a sample on the screen; samples.jsonl has all.
_SHOWN_OF_SAMPLE = 200


def train(config: TrainConfig, job: Job, callbacks: Sequence[TrainerCallback] = ()) -> None:
    """Train, and leave metrics, checkpoints and the model in `config.output`. Everything refusable is refused first.

    `config` is as `choose_device` left it; all processes of `job` call this with the same one.

    Raises:
        ChunkplanError: loss or gradients are not finite, or the disk is full.
        UsageError: an option, a path, the model or the plan cannot be used, or a run cannot be resumed.
        DataError: plan, analysis, model files or a checkpoint are damaged or do not belong together.
    """
    disable_progress_bar()  # type: ignore[no-untyped-call]  # a run has one of its own
    folder = RunFolder(config.output)
    try:
        if job.is_main:
            folder.lock()  # first: what a run at work has written is not of an earlier one
            folder.check(config.resume)
        trackers(config)
        TrainingRun(config, folder, job, callbacks).finish()
    except torch.OutOfMemoryError as error:
        raise ChunkplanError(
            f"the GPU's memory is full: {str(error).splitlines()[0]}",
            hint="use --checkpointing full or --kv-offload, or build the plan with a smaller --chunk-size or --k; "
            + folder.how_to_resume(),
        ) from error
    finally:
        folder.unlock()


class TrainingRun:
    """A run that stands where its last checkpoint was written; the main process prints, and all write checkpoints."""

    def __init__(self, config: TrainConfig, folder: RunFolder, job: Job, callbacks: Sequence[TrainerCallback]) -> None:
        """Open data and model, compare them with those of the other processes, and go to the last checkpoint."""
        if config.loss not in (None, "own"):
            find_loss(config.loss, config.loss_options or ())  # refused now if it is none
        model_config = read_config(config.model or config.model_config or "", router_loss=True)
        self.data = data = setup.open_data(config, model_config, job.layout)
        self.tokenizer = final.find_tokenizer(config)
        final.check_tokenizer(self.tokenizer, data.analysis, model_config.vocab_size)
        self.config = config = _resolve(config, data, self.tokenizer, job)
        self.stream, self.num_steps = data.stream(data.plan), data.num_steps(config)
        self.fixed = {**samples_of(data.plan.manifest), **_config_identity(data), **fixed_options(config)}
        reference = None if config.reference is None else Scores(config.reference)
        self.fixed["reference scores"] = reference and reference.identity
        loss = find_loss(config.loss or "sft", config.loss_options or ())
        has_reference = bool(config.lora_rank) or "reference_log_probs" in data.analysis.token_columns
        of_data = data.analysis.samples, reference, has_reference, data.analysis.token_columns
        check_loss(loss, data.plan, *of_data)
        if reference is not None:
            reference.check_covers([data.plan, data.evaluation], data.analysis.num_target_tokens)
        hashes = {"plan": data.plan.content_hash, "evaluation plan": data.evaluation and data.evaluation.content_hash}
        refuse_differences(job.all_gather_object({**hashes, **self.fixed, **shared_options(config)}))
        earlier = checkpoints.find_resume_point(folder, config, data, job)
        tokens_note = setup.compare_tokens(data.analysis, job)
        if data.evaluation is not None:
            data.stream(data.evaluation)  # refused now if the model does not take it
        model = setup.build_model(config, model_config, data.plan, job)
        if config.merge_adapters:
            final.check_mergeable(model.whole.model)
        refuse_differences(job.all_gather_object({"weights": model.identity}))
        self.fixed["frozen weights"] = setup.fingerprint(model.own, model.whole, job, only_frozen=True)
        if earlier is not None:
            checkpoints.refuse_other_run(earlier, self.fixed, config, self.num_steps)
        prompt = config.sample_prompt
        self.sampler = None if prompt is None else Sampler(prompt, self.tokenizer, model.whole, job.layout)
        self.flops = metrics.FlopCounter(model.whole)
        self.comparison = compare(config, data, job)
        description = describe_run(config, data, model, self.num_steps, self.tokenizer, self.comparison, job)
        self.description = description + tokens_note
        self.train_step = TrainStep(model.own, config, self.num_steps, job, loss, reference)
        self.start, losses = 0, []
        if earlier is not None:
            self.start, losses = earlier.state["step"], earlier.state["losses"]
            self.stream.load_state_dict({**self.stream.state_dict(), "step": self.start})
            self.train_step.restore(earlier.checkpoint)
            checkpoints.restore_random_states(earlier.state, self.train_step.model.device)
        before = [(row["step"] + 1, row["eval_loss"]) for row in lines_before(folder.evaluations, self.start)]
        self.best = checkpoints.BestLoss(config.early_stopping, job.broadcast_object(before))
        self.spikes, self.largest = metrics.SpikeWatch(config.loss_spike_factor, losses), metrics.LargestStep()
        self.whole, self.job, self.folder, self.interrupt = model.whole, job, folder, Interrupt(job)
        self.screen = Screen(self.start, self.num_steps, silent=not job.is_main)
        self.callbacks = Callbacks(callbacks, config, job, self.train_step, self.num_steps, self.best)

    def finish(self) -> None:
        """Run the steps that are left, write their files, and save the model."""
        say, folder = self.screen.say, self.folder
        for line in self.description:
            say(line)
        if self.config.resume:
            say(f"resumed   at step {self.start}" if self.start else "resumed   from the beginning: no checkpoint")
        if self.config.resume and self.job.is_main:
            folder.remove_left_behind()
            if folder.final.exists():  # of fewer steps
                remove_folder(folder.final)
                say(f"removed   {folder.final}: the run goes on, and writes it again")
            for lines in folder.lines:
                cut_back(lines, self.start)
        if self.config.push_to_hub and self.job.is_main:
            say(f"uploads   final/ to {final.open_repository(self.config.push_to_hub)} at the end")
        with self.screen, self.interrupt:
            self._train()
        if self.best.should_stop:
            say(f"stopped   early: {self.best.since} evaluations were no lower than {self.best.loss:.4f}")
        elif self.callbacks.control.should_training_stop:
            say(f"stopped   by a callback, after {self.callbacks.state.global_step:,} of {self.num_steps:,} steps")
        planned = self.comparison.times
        if self.job.groups and self.largest.write(self.data.plan, folder.measured, self.job, planned=planned):
            say(f"measured  {folder.measured}: `chunkplan simulate --run {shlex.quote(str(folder.path))}` shows it")
        if self.config.keeps_best and self.best.loss is not None:
            checkpoint = folder.checkpoint(self.best.step)
            what = f"evaluation loss {self.best.loss:.4f} after step {self.best.step - 1}"
            if self.job.broadcast_object(checkpoint.is_dir()):
                checkpoints.read_state(checkpoint)  # refused if it is damaged
                self.train_step.restore(checkpoint)
                say(f"best      {checkpoint}: {what}; final/ has its weights")
            else:
                say(f"best      {what}; its checkpoint was not kept, so final/ has the last weights")
        self.callbacks.call("on_train_end")
        self.job.at_step(self.num_steps - 1)  # a job that ends leaves no model that looks whole
        merges = self.config.merge_adapters
        final.save_final(self.train_step, self.whole, self.tokenizer, folder.final, self.job, merges=merges)
        say(f"saved     {folder.final}")
        say(f"metrics   {folder.metrics}")
        if self.config.push_to_hub and self.job.is_main:
            say(f"uploaded  {final.upload(folder.final, self.config.push_to_hub)}")

    def _train(self) -> None:
        """Run the steps that are left until something says to stop, with what follows each of them."""
        callbacks, epoch = self.callbacks, -1
        callbacks.state.global_step, callbacks.state.epoch = self.start, self.data.epochs_done(self.start)
        callbacks.call("on_train_begin")
        steps = () if self._is_to_stop() else islice(self.stream, self.num_steps - self.start)
        waits_since = time.perf_counter()
        for work in steps:
            waited = time.perf_counter() - waits_since
            if work.step.epoch != epoch:
                if epoch > -1:
                    callbacks.call("on_epoch_end")
                callbacks.call("on_epoch_begin")
            epoch = work.step.epoch
            callbacks.call("on_step_begin")
            row = self._do_step(work, waited)
            done = work.step.step + 1
            callbacks.state.global_step, callbacks.state.epoch = done, self.data.epochs_done(done)
            callbacks.end_step(row)
            is_best = callbacks.control.should_evaluate and self._evaluate(work.step.step)
            if self.sampler is not None and done % self.config.sample_every == 0:
                self._sample(self.sampler, work.step.step)
            is_interrupted = any(self.job.all_gather_object(self.interrupt.is_asked))
            if callbacks.control.should_save or (is_best and self.config.keeps_best) or is_interrupted:
                self._save(done)
            if is_interrupted:
                raise KeyboardInterrupt
            if self._is_to_stop():
                break
            if self.config.save_every:
                self.interrupt.defer()
            waits_since = time.perf_counter()
        if epoch > -1:
            callbacks.call("on_epoch_end")

    def _is_to_stop(self) -> bool:
        return self.best.should_stop or self.callbacks.control.should_training_stop

    def _do_step(self, work: StepWork, waited: float) -> metrics.Row:
        """Run a step of the plan, update the weights, report it and append its lines to their files."""
        step, device = work.step, self.train_step.model.device
        self.job.at_step(step.step)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        started = time.perf_counter()
        gradients = self.train_step.compute_gradients(work)
        if not gradients.is_finite:
            sequences = "; ".join(metrics.describe_worst(gradients.sequences, self.data.analysis))
            what = f"loss {gradients.loss}, gradient norm {gradients.norm}; {sequences}"
            raise self._not_finite(f"step {step.step}", what)
        self.largest.look_at(step, gradients.times)
        self.callbacks.call("on_pre_optimizer_step")
        rate = self.train_step.update(step)
        self.callbacks.call("on_optimizer_step")
        row = self._step_row(work, gradients, time.perf_counter() - started, rate, waited)
        if self.job.is_main:
            folder = self.folder
            folder.path.mkdir(parents=True, exist_ok=True)  # a run that does no step leaves none
            folder.lock()
            if self.config.log_sequences:
                own = ((each.sequence_id, each.loss, each.num_target_tokens) for each in gradients.sequences)
                names = ("step", "sequence_id", "loss", "target_tokens")
                append_lines(folder.sequences, (dict(zip(names, (step.step, *loss), strict=True)) for loss in own))
            append_lines(folder.metrics, [row])
            if step.step == self.start:  # after the metrics: these tell a run from any other folder with a config.json
                metrics.write_config(folder.config, self.config, self.data.plan)
        self.screen.show_step(row)
        if row["spike"]:
            self.screen.say(f"step {step.step} is a spike: {'; '.join(row['spike'])}")
        return row

    def _step_row(
        self, work: StepWork, gradients: Gradients, seconds: float, rate: float, waited: float
    ) -> metrics.Row:
        """The line of a step that took `seconds`; all processes make it."""
        step, layout, comparison, analysis = work.step, self.job.layout, self.comparison, self.data.analysis
        spike = step.num_target_tokens > 0 and self.spikes.is_spike(gradients.loss)
        peak_flops = comparison.peak_flops and comparison.peak_flops * layout.world_size
        peak_bytes = self.job.all_gather_object(metrics.peak_memory(self.train_step.model.device))
        row: metrics.Row = {
            "step": step.step,
            "epoch": step.epoch,
            "loss": gradients.loss,
            "target_tokens": step.num_target_tokens,
            "tokens": step.num_tokens,
            "grad_norm": gradients.norm,
            "tokens_per_second": step.num_tokens / seconds,
            "seconds": seconds,
            "predicted_seconds": metrics.predicted_seconds(step, layout) if comparison.times else None,
            "source_losses": metrics.source_losses(gradients.sequences, analysis),
            "lr": rate,
            "mfu": self.flops.count(step) / seconds / peak_flops if peak_flops else None,
            "peak_memory_bytes": max(peak_bytes),
            "wait_seconds": waited,
            "spike": metrics.describe_worst(gradients.sequences, analysis) if spike else [],
        }
        if gradients.metrics:
            row["loss_metrics"] = gradients.metrics
        if gradients.router_loss is not None:
            row["router_loss"] = gradients.router_loss
        if self.job.groups is not None:
            row["processes"] = metrics.stage_rows(gradients.spent, layout)
        return row

    def _evaluate(self, step: int) -> bool:
        """Evaluate by all steps of the evaluation plan; returns whether its loss is the lowest so far."""
        data = self.data
        if data.evaluation is None:
            return False
        started = time.perf_counter()
        found = self.train_step.evaluate(data.stream(data.evaluation))
        loss = found.loss
        row: metrics.Row = {
            "step": step,
            "eval_loss": loss,
            "target_tokens": found.num_target_tokens,
            "seconds": time.perf_counter() - started,
            "source_losses": metrics.source_losses(found.sequences, data.analysis),
        }
        if found.metrics:
            row["loss_metrics"] = found.metrics
        if loss is not None and not math.isfinite(loss):
            raise self._not_finite(f"evaluation after step {step}", f"loss {loss}")
        if self.job.is_main:
            append_lines(self.folder.evaluations, [row])
        what = "no targets" if loss is None else f"loss {loss:.4f}"
        self.screen.say(f"evaluation after step {step}: {what}, {row['seconds']:.1f} s")
        self.callbacks.evaluated(row)
        return self.best.add(step + 1, loss)

    def _sample(self, sampler: Sampler, step: int) -> None:
        text = sampler.generate()
        append_lines(self.folder.samples, [{"step": step, "prompt": self.config.sample_prompt, "text": text}])
        self.screen.say(f"sample after step {step}: {shorten(text, _SHOWN_OF_SAMPLE, placeholder=' ...')}")

    def _save(self, step: int) -> None:
        """Write the checkpoint from which `step` comes next."""
        best = self.best
        kept = best.step if self.config.keeps_best and best.loss is not None else None
        stream, losses = self.stream.state_dict(), self.spikes.losses
        state = {"stream": stream, "losses": losses, "fixed": self.fixed, "num_steps": self.num_steps}
        checkpoints.write_checkpoint(
            self.folder,
            step,
            **self.train_step.tensors(),
            state=state,
            keep_last=self.config.keep_last,
            best=kept,
            device=self.train_step.model.device,
            job=self.job,
        )
        self.callbacks.state.best_model_checkpoint = None if kept is None else str(self.folder.checkpoint(kept))
        self.callbacks.call("on_save")

    def _not_finite(self, where: str, what: str) -> ChunkplanError:
        return ChunkplanError(
            f"not finite: {what}",
            where=where,
            hint=(f"look at {self.config.loss}, " if self.config.loss not in (None, *LOSSES) else "")
            + "try a smaller --lr, --max-grad-norm 1 or --precision fp32 in a new run, or leave these sequences out; "
            + self.folder.how_to_resume(),
        )


def _resolve(config: TrainConfig, data: setup.TrainingData, tokenizer: list[Path], job: Job) -> TrainConfig:
    """`config` with what the plan says, or what was found, in place of what was left open; refused if it cannot be."""
    cost = data.plan.manifest["predictions"]["cost_model"]
    planned: Any = {name: cost.get(name, options_of(CostModel)[name].default) for name in [*_PLANNED, "sharding"]}
    found = {name: value for name, value in planned.items() if getattr(config, name) is None}
    if found.get("lora_rank") and config.model is None:
        raise UsageError(
            f"the plan is for adapters of rank {found['lora_rank']}, and random weights need to be trained themselves",
            where=str(data.plan.path),
            hint="give --model in place of --model-config, or --lora-rank 0",
        )
    if not found.get("lora_rank", config.lora_rank) and "load_in_4bit" in found:
        found["load_in_4bit"] = False
    if "sharding" in found and (job.layout.dp == 1 or found["sharding"] == "none"):
        found["sharding"] = "optimizer"
    if config.loss is None and data.plan.config.loss != "sft":
        found["loss"] = data.plan.config.loss
    found |= {"analysis": data.analysis.path, "eval_plan": data.evaluation and data.evaluation.path}
    resolved = replace(config, **found, tokenizer=str(tokenizer[0].parent) if tokenizer else None)
    resolved = replace(resolved, lr=resolved.highest_lr)
    setup.check_layout(resolved, job.layout)
    return resolved


def _config_identity(data: setup.TrainingData) -> dict[str, Any]:
    """The model's config, without what says only where it came from."""
    origin = ("transformers_version", "_name_or_path", "dtype", "architectures")
    entries = json.loads(data.model_config.to_json_string(use_diff=False))  # in which infinity has a name
    return {f"model.{name}": value for name, value in entries.items() if name not in origin}
