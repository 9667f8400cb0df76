"""Planned steps for `Trainer` of transformers and what is made from it, such as TRL's `SFTTrainer`.

A training step is one of the plan: each process takes as many micro-batches of whole sequences as there are gradient
accumulation steps, lists of rows of the trainer's dataset. Nobody pads or repeats rows so that counts are equal.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher
from accelerate.utils import broadcast_object_list
from torch.utils.data import BatchSampler
from transformers import Trainer, TrainingArguments, trainer_pt_utils

from chunkplan.arrays import Int64Array
from chunkplan.cost.model import CostModel
from chunkplan.errors import ChunkplanError, DataError, UsageError
from chunkplan.lengths import row_lengths
from chunkplan.options import in_words
from chunkplan.planfile.likeness import how_to_build_like, samples_of
from chunkplan.planfile.load import load_plan, load_same_analysis
from chunkplan.planfile.plan import Plan
from chunkplan.planfile.samples import refuse_samples
from chunkplan_runtime.feed.stream import broken_plan
from chunkplan_runtime.training.checkpoint import PlanIdentity, checkpoint_of_plan

#: Options of `plan_step` that follow from the trainer.
_OF_TRAINER = ("cp", "dp", "micro_batches", "pp", "split", "step", "targets")

#: `Trainer` takes the batches of such samplers as they are; transformers before 5.17, which axolotl has, knows none.
_TakenAsItIs: Any = getattr(trainer_pt_utils, "BatchRebalanceSampler", object)


@dataclass(eq=False)
class StepSampler(BatchSampler, _TakenAsItIs):  # type: ignore[misc]
    """The micro-batches of one process, `num_steps` steps an epoch: `steps(epoch, first)` gives those from `first` on.

    `done`: the steps that a resumed run has behind it. Instead of these come empty micro-batches, which transformers
    drops then, whatever they hold. `samples`: what determines the rows of every step, by the names in messages.
    """

    steps: Callable[[int, int], Iterator[list[list[int]]]]
    num_steps: int
    micro_batches: int
    done: Callable[[], int]
    samples: Mapping[str, Any]
    epoch: int = 0

    def __len__(self) -> int:
        return self.num_steps * self.micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        done = self.done()
        self.epoch = max(self.epoch, done // self.num_steps)  # nobody sets it where a run is resumed within an epoch
        first = max(done - self.epoch * self.num_steps, 0)
        yield from ([] for _ in range(first * self.micro_batches))
        for step in islice(self.steps(self.epoch, first), self.num_steps - first):
            yield from step


def with_plan(trainer: type[Trainer], plan: str | Path, *, analysis: str | Path | None = None) -> type[Any]:
    """A subclass of a `Trainer` class that trains the steps of a plan of `chunkplan build --micro-batches N`.

    `analysis`: where the plan's analysis is, if it has moved. Raises UsageError of no plan, or one of pairs, labels or
    rollouts, DataError of a damaged one; and when training begins, of settings that are not the plan's, and of rows,
    whose lengths alone are compared.
    """
    opened = load_plan(plan)
    found = load_same_analysis(opened, analysis, option="analysis=")
    refuse_samples(found, "with_plan")
    num_steps = opened.manifest["totals"]["num_steps"] // opened.manifest["epochs"]

    def sampler(trained: Trainer, lengths: Int64Array) -> StepSampler:
        _check_plan(trained.args, opened)
        rows = found.rows_in(lengths)
        rank, count = trained.args.process_index, trained.args.gradient_accumulation_steps

        def steps(epoch: int, first: int) -> Iterator[list[list[int]]]:
            for step in opened.iter_steps(epoch * num_steps + first):
                own = step.sequences(rank)
                if len(own) != count:
                    raise broken_plan(f"{len(own)} micro-batches, expected {count}", f"{opened.path}, step {step.step}")
                yield [rows[sequences].tolist() for sequences in own]

        return StepSampler(steps, num_steps, count, lambda: trained.state.global_step, samples_of(opened.manifest))

    return type(trainer.__name__, (_StepTrainer, trainer), {"_sampler": sampler})


def with_plan_step(trainer: type[Trainer], *, cap: int, cost: CostModel | None = None, **options: Any) -> type[Any]:
    """A subclass of a `Trainer` class that plans every step by `chunkplan.plan_step`, when it comes.

    A step has `per_device_train_batch_size` x `gradient_accumulation_steps` x processes rows, in an order by
    `data_seed` or `seed` and the epoch. The first process assigns them to micro-batches of at most `cap` tokens and
    tells the others. `cost` and `options` are as in `plan_step`; raises UsageError of those that it does not take, and
    that follow from the trainer. When an epoch begins, steps with too few rows are a UsageError, and a DataError rows
    without tokens, or with too many for the cap, alone or in a step. A run goes on with rows of the same lengths.
    """
    from chunkplan.planning.step import plan_step  # the planner, which a plan does not need
    from chunkplan.planning.whole import fewest_micro_batches

    for name in options.keys() & _OF_TRAINER:
        raise UsageError(f"with_plan_step takes no {name}: it follows from the trainer", hint="leave it out")
    how: Any = {"cap": cap, "cost": cost or CostModel(), "split": "none", **options}
    plan_step([1], dp=1, micro_batches=1, **how)  # raises what is wrong with them

    def sampler(trained: Trainer, lengths: Int64Array) -> StepSampler:
        args = trained.args
        rank, dp, count = args.process_index, args.world_size, args.gradient_accumulation_steps
        batch = args.train_batch_size * count * dp
        tail = 0 if args.dataloader_drop_last else lengths.size % batch
        _check_rows(lengths, cap, batch, tail, dp * count)
        num_steps = lengths.size // batch + (tail > 0)
        seed = args.seed if args.data_seed is None else args.data_seed
        samples = {
            "the number of rows": lengths.size,
            "the hash of their lengths, in order,": hashlib.sha256(lengths.tobytes()).hexdigest(),
            "the number of rows a step": batch,
            "data_seed": seed,
            "dataloader_drop_last": args.dataloader_drop_last,
        }

        def assigned(rows: Int64Array, number: int) -> list[list[list[int]]]:
            step = plan_step(lengths[rows], dp=dp, step=number, micro_batches=count, **how)
            return [[rows[places].tolist() for places in step.sequences(each)] for each in range(dp)]

        def steps(epoch: int, first: int) -> Iterator[list[list[int]]]:
            order = np.random.default_rng((seed, epoch)).permutation(lengths.size)
            in_steps = [(order[batch * step :][:batch], epoch * num_steps + step) for step in range(first, num_steps)]
            for rows, number in in_steps:
                if fewest_micro_batches(lengths[rows], cap) > dp * count:
                    assigned(rows, number)  # raises, and says why, before an hour of training
            for rows, number in in_steps:
                yield _of_first(rank == 0, partial(assigned, rows, number))[rank]

        return StepSampler(steps, num_steps, count, lambda: trained.state.global_step, samples)

    return type(trainer.__name__, (_StepTrainer, trainer), {"_sampler": sampler})


class _StepTrainer(Trainer):
    """The part of a trainer that takes its batches from a `StepSampler`; evaluation is as it was."""

    _sampler: Callable[[Int64Array], StepSampler]

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        _check_settings(self)
        sampler = self._sampler(row_lengths(self.train_dataset if train_dataset is None else train_dataset))
        self.remove_callback(PlanIdentity)
        self.add_callback(PlanIdentity(sampler.samples))
        return sampler

    def get_train_dataloader(self) -> Any:
        """A loader of the micro-batches of this process; raises UsageError where the trainer makes others."""
        loader: Any = super().get_train_dataloader()
        sampler = loader.batch_sampler
        if isinstance(sampler, BatchSamplerShard):
            sampler.num_processes, sampler.process_index = 1, 0  # each process has its own already
            sampler = sampler.batch_sampler
        if not isinstance(sampler, StepSampler) or isinstance(loader, DataLoaderDispatcher):
            hint = "give a train_dataset with a length, no dispatch_batches, and have transformers 5.17 or newer"
            raise UsageError(f"{type(self).__name__} does not take planned batches", hint=hint)
        return loader

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the trainer does; raises UsageError where the checkpoint is of other steps."""
        if resume_from_checkpoint:
            sampler = self._get_train_sampler()
            num_steps = math.ceil(self.args.num_train_epochs * sampler.num_steps)
            resume_from_checkpoint = checkpoint_of_plan(resume_from_checkpoint, self, sampler.samples, num_steps)
        return super().train(resume_from_checkpoint, *args, **kwargs)


def _check_settings(trainer: Trainer) -> None:
    """Refuse settings by which a process would train something else than it is given; raises UsageError."""
    args, parallel = trainer.args, trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size()
    averaged = args.average_tokens_across_devices or args.world_size == 1
    refused = {
        "padding_free=False": (getattr(trainer, "padding_free", True), "set it to True: padding goes beyond the cap"),
        "average_tokens_across_devices=False": (averaged, "leave it out: processes have different numbers of targets"),
        "ignore_data_skip=True": (not args.ignore_data_skip, "leave it out: a resumed run goes on at its next step"),
        "parallelism_config": (parallel == 1, "leave tp, cp and sp out: every process has rows of its own"),
    }
    for name, (is_as_needed, hint) in refused.items():
        if not is_as_needed:
            raise UsageError(f"{name} does not go with planned steps", hint=hint)


def _check_plan(args: TrainingArguments, plan: Plan) -> None:
    """Refuse a plan that is not for these settings; raises UsageError."""
    config, epochs, num_steps = plan.config, plan.manifest["epochs"], plan.manifest["totals"]["num_steps"]
    count, told = args.gradient_accumulation_steps, ""
    if (config.dp, config.pp) != (args.world_size, 1):
        told = f"the plan is for dp {config.dp} and pp {config.pp}, processes: {args.world_size}"
        hint = f"`{how_to_build_like(plan, args.world_size, 1)}` builds one of the same steps"
    elif config.micro_batches != count:
        told = f"gradient_accumulation_steps={count}, the plan has micro-batches: {in_words(config.micro_batches)}"
        other = f", or set gradient_accumulation_steps={config.micro_batches}"
        hint = f"build the plan with `--micro-batches {count}`" + other * isinstance(config.micro_batches, int)
    elif args.max_steps > num_steps:
        told = f"max_steps={args.max_steps:,}, the plan has {num_steps:,} steps, epochs: {epochs}"
        hint = f"set max_steps={num_steps} or less, or build the plan with more --epochs"
    elif args.max_steps <= 0 and args.num_train_epochs != epochs:
        told = f"num_train_epochs={args.num_train_epochs:g}, the plan has {num_steps:,} steps, epochs: {epochs}"
        hint = f"set num_train_epochs={epochs}, or build the plan with other --epochs; max_steps may stop earlier"
    if told:
        raise UsageError(told, where=str(plan.path), hint=hint)


def _check_rows(lengths: Int64Array, cap: int, batch: int, tail: int, groups: int) -> None:
    """Refuse rows of which a step of `batch`, or the last of `tail` unless 0, has too few or none for some group."""
    for row in np.flatnonzero((lengths < 1) | (lengths > cap))[:1].tolist():
        hint = f"leave it out, cut it, or use cap={lengths.max()}" if lengths[row] else "leave such rows out"
        raise DataError(f"{lengths[row]:,} tokens, expected 1 to {cap:,}", where=f"row {row} of the dataset", hint=hint)
    if (fewest := tail or lengths.size // batch * batch) < groups:
        told = f"the last step of an epoch has {fewest} of {lengths.size:,} rows, all processes {groups} micro-batches"
        raise UsageError(told, hint="change per_device_train_batch_size or dataloader_drop_last")


def _of_first(is_first: bool, make: Callable[[], Any]) -> Any:
    """The result of `make()` of the first process, on all of them; where it fails, all raise an error."""
    made: list[Any] = [None]
    if is_first:
        try:
            made = [make()]
        except ChunkplanError as error:
            made = [error]
        except Exception as error:  # which may be one that cannot be sent
            broadcast_object_list([RuntimeError(f"the first process failed: {error!r}")])
            raise
    broadcast_object_list(made)
    if isinstance(made[0], Exception):
        raise made[0]
    return made[0]
