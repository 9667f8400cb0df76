"""Plans one step from lengths in memory: the code of `build`, no files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from chunkplan.arrays import BoolArray, IntArray
from chunkplan.config.plan import PlanConfig
from chunkplan.cost.model import CostModel
from chunkplan.domains import MOST
from chunkplan.errors import DataError, UsageError
from chunkplan.options import options_of
from chunkplan.planfile.plan import PlanStep, rows_of_steps, step_of_rows
from chunkplan.planning.batches import StepBlock
from chunkplan.planning.method import Dataset, check_shared, plan_block

#: Options of a plan that one step has not, or has as arguments.
_OF_DATA, _GIVEN = (options_of(PlanConfig)["epochs"].group,), ("dp", "chunk_size")


def plan_step(
    lengths: Sequence[int] | IntArray,
    *,
    dp: int,
    cap: int,
    cost: CostModel | None = None,
    targets: Sequence[int] | Sequence[BoolArray] | IntArray | None = None,
    tokens: Sequence[IntArray] | None = None,
    step: int = 0,
    **options: Any,
) -> PlanStep:
    """Plan one optimizer step: the chunks of each rank, their order, the predicted time and its lower bound.

    Example:
        step = plan_step([900, 30, 4000, 77], dp=2, cap=4096, micro_batches="fewest", split="none")
        step.sequences(0)  # the places in `lengths` of what rank 0 trains, a list for each micro-batch

    Args:
        lengths: the tokens of each sequence, [n]; its place is its `sequence_id`.
        dp: data-parallel ranks.
        cap: most tokens of a micro-batch, the chunk size.
        cost: the cost model; by default that of a 7B model on an H100. Keep it for all steps: its rates are cached.
        targets: the target tokens of each sequence, [n], or the mask of these, bool [length] each; by default all but
            its first token.
        tokens: the token ids of each sequence, with share_prefixes=True; `targets` are then masks, or left out.
        step: its number, for messages.
        options: fields of `PlanConfig` that are of one step, such as `k`, `pp`, `cp`, `split`, `micro_batches` and
            `equal_sequences`.

    Raises:
        UsageError: options do not go together.
        DataError: a length is no number of tokens, or the sequences cannot be planned so.
    """
    known = [name for name, one in options_of(PlanConfig).items() if one.group not in _OF_DATA and name not in _GIVEN]
    for name in options.keys() - known:
        raise UsageError(f"plan_step has no option {name!r}", hint=f"these are its options: {', '.join(sorted(known))}")
    if not isinstance(cost or CostModel(), CostModel) or not isinstance(step, int) or step < 0:
        told = f"cost is {type(cost).__name__}" if step >= 0 else f"step is {step}"
        raise UsageError(told, hint='give cost=CostModel(hardware="h100") or None, and steps from 0')
    num_tokens = whole_numbers(lengths, "lengths", 1)
    masks = None if targets is None or not len(targets) or np.ndim(targets[0]) == 0 else _masks_of(targets, num_tokens)
    given: Any = targets if masks is None else [each.sum() for each in masks]
    counted = num_tokens - 1 if targets is None else whole_numbers(given, "targets", 0)
    if counted.size != num_tokens.size:
        raise UsageError(
            f"{counted.size} targets of {num_tokens.size} lengths", hint="give one number for each sequence"
        )
    asked: tuple[Any, Any] = (dp, cap)
    ranks, chunk_size = (each.item() if isinstance(each, np.integer) else each for each in asked)
    model = (cost or CostModel()).on_stages(options.get("pp", 1))
    config = PlanConfig(chunk_size=chunk_size, dp=ranks, global_batch=num_tokens.size, **{"k": 1, **options})
    if config.split == "none" and num_tokens.max() > cap:
        first = int(np.argmax(num_tokens > cap))
        raise DataError(
            f"sequence {first} has {num_tokens[first]:,} tokens, above the cap of {cap:,}, and nothing may be split",
            where=f"step {step}",
            hint=f"use a cap of {num_tokens.max()} or more, or let sequences be split",
        )
    block = StepBlock(step, 0, np.arange(num_tokens.size, dtype=np.int32), np.array([num_tokens.size]))
    config.check_layers(model.shape.num_layers, model.shape.name)
    check_shared(config, model)
    if config.share_prefixes and targets is None:
        masks = [np.arange(length) > 0 for length in num_tokens]
    dataset = Dataset(num_tokens, counted, None if masks is None else masks.__getitem__)
    if config.share_prefixes:
        dataset = _with_tokens(dataset, tokens, masks)
    tables = plan_block(block, dataset, config, model, lambda: False).tables
    (totals,) = tables["steps"].to_pylist()
    names = (name for name in ("chunks", "schedule", "prefixes") if name in tables and tables[name].num_rows)
    return step_of_rows(totals, *(next(rows_of_steps(tables[name]))[1] for name in names))


def _masks_of(targets: Sequence[Any] | IntArray, num_tokens: IntArray) -> list[BoolArray]:
    """The masks of sequences, whose first tokens are no targets; raises DataError where one is of another length."""
    masks = [np.asarray(each, np.bool_) & (np.arange(len(each)) > 0) for each in targets]
    for place, (mask, length) in enumerate(zip(masks, num_tokens.tolist(), strict=False)):
        if mask.size != length:
            hint = "give a bool for each token of a sequence"
            raise DataError(f"targets[{place}] is a mask of {mask.size:,} tokens, not {length:,}", hint=hint)
    return masks


def _with_tokens(dataset: Dataset, tokens: Sequence[IntArray] | None, masks: list[BoolArray] | None) -> Dataset:
    """`dataset` with the `tokens` of its sequences, and which of them are targets."""
    held = [np.asarray(each) for each in tokens or ()]
    lengths = [(length,) for length in dataset.num_tokens.tolist()]
    if [each.shape for each in held] != lengths or masks is None:
        raise UsageError(
            "share_prefixes needs the tokens of all sequences, and of targets their masks",
            hint="give tokens=[...], an array of as many ids as its length says for each sequence",
        )
    return replace(dataset, tokens_of=lambda number: (held[number].astype(np.int32), masks[number]))


def whole_numbers(values: Sequence[int] | IntArray, name: str, least: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """`values` as int32 [n]; raises DataError where one is no whole number from `least` on, or there are none."""
    try:
        given = np.asarray(values)
    except ValueError:  # lists of several lengths
        given = np.empty((0, 0), np.object_)
    if given.shape == (0,):
        told = f"there are no {'sequences' if name == 'lengths' else name}"
        raise DataError(told, where=name, hint="give the tokens of each sequence")
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise DataError(f"{name} is no list of whole numbers", where=name, hint="give the tokens of each sequence")
    wrong = np.flatnonzero((given < least) | (given > MOST))
    if wrong.size:
        raise DataError(
            f"{name}[{wrong[0]}] is {given[wrong[0]]}, expected {least} to {MOST:,}",
            where=name,
            hint="leave out sequences without tokens",
        )
    return given.astype(np.int32)


def prewarm(*, dp: int = 2, cap: int = 64, **options: Any) -> None:
    """Compile, or read from disk, the loops that `plan_step` runs with these options, and import what it imports.

    Example: `chunkplan.prewarm(dp=8, cap=8192)`
    """
    plan_step([cap, *range(1, 4 * dp)], dp=dp, cap=cap, **options)
