"""Plans one step from lengths in memory: the code of `build`, no files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from chunkplan.arrays import IntArray
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
    targets: Sequence[int] | IntArray | None = None,
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
        targets: the target tokens of each sequence, [n]; by default all but its first token.
        tokens: the token ids of each sequence, with share_prefixes=True; without `targets`.
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
    counted = num_tokens - 1 if targets is None else whole_numbers(targets, "targets", 0)
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
    dataset = Dataset(num_tokens, counted, None)
    if config.share_prefixes:
        dataset = _with_tokens(dataset, tokens, targets is None)
    tables = plan_block(block, dataset, config, model, lambda: False).tables
    (totals,) = tables["steps"].to_pylist()
    names = (name for name in ("chunks", "schedule", "prefixes") if name in tables and tables[name].num_rows)
    return step_of_rows(totals, *(next(rows_of_steps(tables[name]))[1] for name in names))


def _with_tokens(dataset: Dataset, tokens: Sequence[IntArray] | None, counts_all: bool) -> Dataset:
    """`dataset` with the `tokens` of its sequences, all of which count but the first of each."""
    held = [np.asarray(each) for each in tokens or ()]
    if [each.shape for each in held] != [(length,) for length in dataset.num_tokens.tolist()] or not counts_all:
        raise UsageError(
            "share_prefixes needs the tokens of all sequences, and no targets",
            hint="give tokens=[...], an array of as many ids as its length says for each sequence",
        )
    masks = [np.arange(each.size) > 0 for each in held]
    return replace(
        dataset,
        mask=masks.__getitem__,
        tokens_of=lambda sequence_id: (held[sequence_id].astype(np.int32), masks[sequence_id]),
    )


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
