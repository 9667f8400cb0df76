"""Builds a plan from an analysis: the Python twin of `chunkplan build`."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from chunkplan.arrays import BoolArray, Int32Array, Int64Array
from chunkplan.config.losses import resolve_loss
from chunkplan.config.plan import PlanConfig
from chunkplan.cost.model import CostModel
from chunkplan.errors import DataError, UsageError
from chunkplan.files.folder import refuse_other_content, replace_folder
from chunkplan.layers import split_layers
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.likeness import refuse_to_replace, values_like
from chunkplan.planfile.load import evaluation_folder, load_analysis, load_plan, load_same_analysis
from chunkplan.planfile.manifest import read_manifest
from chunkplan.planfile.plan import Plan
from chunkplan.planfile.plan_writer import PlanWriter
from chunkplan.planfile.schema import plan_schemas
from chunkplan.planning.batches import SampleGroups, batch_sizes, epoch_steps, step_blocks
from chunkplan.planning.memory import memory_rates_of
from chunkplan.planning.method import Dataset, Planned, check_shared, plan_block
from chunkplan.planning.selection import (
    check_selection,
    describe_selection,
    expected_copies,
    has_reference,
    resolve_mix,
)
from chunkplan.planning.splitting import count_parts
from chunkplan.schedule.holdings import highest_peak
from chunkplan.summary import SUMMED, chunk_frame

#: More would not fit the memory of most machines: planning takes about 100 bytes a segment.
_MAX_SEGMENTS = 1 << 28

#: Called with (steps planned, steps).
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class BuiltPlan:
    """A plan's manifest, its table `steps`, and its `chunk_frame` with the columns that a summary looks at.

    `peaks` int64 [pp, 8]: what each stage holds when that takes most memory of all steps and ranks, see
    `peak_snapshots`; `ranks` int64 [pp]: where that is, as step x dp + rank.
    """

    manifest: dict[str, Any]
    steps: pa.Table
    chunks: pl.DataFrame
    peaks: Int64Array
    ranks: Int64Array


def build(
    analysis: Analysis | str | Path,
    output: str | Path,
    config: PlanConfig,
    *,
    cost: CostModel | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Plan the dataset of `analysis` (an analysis, its folder, or a lengths file) and write the plan to `output`.

    Example: `chunkplan.build("analysis", "plan", chunkplan.PlanConfig(chunk_size=8192, k=4))`

    Where the config holds sequences out, or the analysis has some to evaluate on, a plan of these goes to the folder
    beside it whose name ends in `-eval`. Plans already there are replaced once the new ones are complete. `cost`
    predicts times, by default those of Qwen2.5-7B on H100s. `workers` threads plan side by side, by default one a
    processor; the plan is the same for any number of them. `progress` is called with (steps planned, steps).

    Raises:
        UsageError: there is no analysis, `output` holds something else, cannot be written or is being written by
            another run, or no step is left after dropping.
        DataError: the analysis is damaged or was replaced meanwhile, or a sequence is too long and may not be split.
    """
    output = Path(output)
    built = build_plans(analysis, output, config, cost=cost, workers=workers, progress=progress)
    return Plan(path=output, manifest=built[output].manifest)


def build_like(
    plan: str | Path,
    output: str | Path,
    *,
    analysis: str | Path | None = None,
    cost: CostModel | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    **changes: Any,
) -> Plan:
    """`build` of the steps that `plan` has, with the same samples in each: for other ranks, stages or chunks.

    Example: `chunkplan.build_like("plan", "plan-of-4", dp=4)`

    `changes` are fields of `PlanConfig`; all else is as in `plan`, but for what cannot hold with them: such a schedule,
    virtual stages, layers of stages or `cp` fall back to their defaults. A run of `plan` goes on with the new one from
    any of its checkpoints. `analysis`: where that of `plan` is, if it has moved.

    Raises:
        UsageError: as `build`, or `changes` would give steps other samples, or `output` is `plan`.
        DataError: as `build`, or `plan` or its analysis is damaged, or `analysis` another one.
    """
    like = load_plan(plan)
    refuse_to_replace(like.path, Path(output))
    loaded = load_same_analysis(like, analysis)
    cost = cost or like.cost
    values, _ = values_like(like.config, with_sources(loaded, changes, like.config.holdout), cost.shape)
    return build(loaded, output, PlanConfig(**values), cost=cost, workers=workers, progress=progress)


def with_sources(analysis: Analysis, values: Mapping[str, Any], holdout: float | int | None) -> Mapping[str, Any]:
    """Options of a plan with that `holdout`, of which `mix` has the weights of sources of `analysis` by their paths."""
    return {**values, "mix": resolve_mix(analysis, values["mix"], holdout)} if values.get("mix") else values


def build_plans(
    analysis: Analysis | str | Path,
    output: Path,
    config: PlanConfig,
    *,
    cost: CostModel | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
    check: Callable[[BuiltPlan], None] = lambda built: None,
) -> dict[Path, BuiltPlan]:
    """`build`, with all there is to know about every plan, by folder; a dry run writes nothing.

    What `check` raises of the plan of `output` leaves everything as it is.
    """
    if not isinstance(analysis, Analysis):
        analysis = load_analysis(analysis)
    holds_out = config.holdout is not None or bool(analysis.is_evaluation.any())
    targets = [output, evaluation_folder(output)] if holds_out else [output]
    for target in targets:
        refuse_other_content(target, "plan")
    if len(targets) == 2 and config.part == "train" and targets[1].exists() and not is_evaluation(targets[1]):
        raise UsageError(
            f"{targets[1]} is not the plan of held-out sequences, which this build would replace it with",
            hint="move it away, or write the plan elsewhere with --output",
        )
    if config.mix:
        config = replace(config, mix=resolve_mix(analysis, config.mix, config.holdout))
    config = replace(config, loss=resolve_loss(config.loss, analysis.samples, str(analysis.path)))
    configs = {output: config}
    if holds_out and config.part == "train":
        held_out = replace(config, part="eval", mix=None, epochs=1, last_batch="keep")
        held_out = replace(held_out, micro_batches=None, equal_sequences=False)  # there may be too few for all ranks
        configs[evaluation_folder(output)] = held_out
    built = {}
    with ExitStack() as all_or_nothing, _refusing_replaced(analysis):
        for target, target_config in configs.items():
            folder = None if dry_run else all_or_nothing.enter_context(replace_folder(target, "plan"))
            built[target] = _build_one(
                analysis,
                target,
                target_config,
                (cost or CostModel()).on_stages(target_config.pp),
                PlanWriter(folder, plan_schemas(target_config.entries())),
                workers or os.cpu_count() or 1,
                progress,
            )
        check(built[output])
    return built


@contextmanager
def _refusing_replaced(analysis: Analysis) -> Iterator[None]:
    """Refuse what the block makes of an analysis whose place another took meanwhile, or says of it as damaged."""
    try:
        yield
    except DataError:
        _refuse_replaced(analysis)
        raise
    _refuse_replaced(analysis)


def _refuse_replaced(analysis: Analysis) -> None:
    folder = analysis.path
    if folder.is_dir() and read_manifest(folder, "analysis")["content_hash"] != analysis.content_hash:
        raise DataError("was replaced while it was planned", where=str(folder), hint="run the command again")


def is_evaluation(folder: Path) -> bool:
    """True if a folder is empty or holds a plan of held-out sequences."""
    return not any(folder.iterdir()) or load_plan(folder).config.part == "eval"


def _build_one(
    analysis: Analysis,
    output: Path,
    config: PlanConfig,
    cost: CostModel,
    writer: PlanWriter,
    workers: int,
    progress: Progress | None,
) -> BuiltPlan:
    """Plan and write; `output` is where the plan will be."""
    config.check_layers(cost.shape.num_layers, cost.shape.name)
    check_shared(config, cost)
    if config.stage_layers == split_layers(cost.shape.num_layers, config.pp * config.virtual_stages):
        config = replace(config, stage_layers=None)  # the same plan, so that it has the same manifest
    check_selection(analysis, config)
    copies = lru_cache(maxsize=1)(partial(expected_copies, analysis, config))
    dataset = _dataset_of(analysis, config)
    num_steps, num_occurrences, longest = _check_sizes(analysis, copies, config, cost, dataset.groups)
    blocks = plan_steps(dataset, copies, config, cost, workers=workers)
    step_tables, chunk_frames, moments, ranks = [], [], [], []
    steps_done = 0
    for planned in blocks:
        tables = planned.tables
        writer.add(tables)
        step_tables.append(tables["steps"])
        chunk_frames.append(chunk_frame(tables["chunks"], planned.chunks).select(SUMMED))
        moments.append(planned.peaks)
        ranks.append(planned.ranks)
        steps_done += tables["steps"].num_rows
        if progress is not None:
            progress(steps_done, num_steps)
    steps, chunks = pa.concat_tables(step_tables), pl.concat(chunk_frames)
    sums = {name: pc.sum(steps.column(name)).as_py() for name in ("num_sequences", "num_tokens", "num_target_tokens")}
    manifest = writer.finish(
        config=config.entries(),
        seed=config.seed,
        epochs=config.epochs,
        analysis={
            "path": Path(os.path.relpath(analysis.path.resolve(), output.resolve())).as_posix(),
            "content_hash": analysis.content_hash,
            "exact": analysis.is_exact,
            "has_tokens": analysis.has_tokens,
            "sample": analysis.sample,
        },
        selection=describe_selection(analysis, config),
        totals={
            "num_steps": steps.num_rows,
            "num_chunks": chunks.height,
            **sums,
            "longest_sequence": longest,
            "num_dropped_sequences": num_occurrences - sums["num_sequences"],
            **({"num_run_tokens": int(chunks["num_tokens"].sum())} if config.share_prefixes else {}),
        },
        predictions={
            "cost_model": cost.to_dict(),
            "predicted_us": sum(steps.column("predicted_us").to_pylist()),
            "lower_bound_us": sum(steps.column("lower_bound_us").to_pylist()),
        },
    )
    most, blocks_of = highest_peak(np.stack(moments), memory_rates_of(config, cost))
    return BuiltPlan(manifest, steps, chunks, most, np.stack(ranks)[blocks_of, np.arange(config.pp)])


def _check_sizes(
    analysis: Analysis,
    copies_in: Callable[[int], Int32Array],
    config: PlanConfig,
    cost: CostModel,
    groups: SampleGroups | None,
) -> tuple[int, int, int]:
    """Refuse what cannot be planned; returns steps and occurrences of sequences over all epochs, and the longest."""
    is_long = analysis.num_tokens > config.chunk_size
    num_parts = count_parts(analysis.num_tokens[is_long].astype(np.int64), config.chunk_size, config.split, cost)
    num_steps = num_occurrences = num_segments = 0
    is_planned = np.zeros(analysis.num_sequences, bool)
    for epoch in range(config.epochs):
        copies = copies_in(epoch)
        in_epoch = int(copies.sum(dtype=np.int64))
        sizes = batch_sizes(in_epoch, config) if groups is None else epoch_steps(copies, config, epoch, groups)[1]
        if config.last_batch == "drop" and not sizes.size:
            raise UsageError(
                f"all {in_epoch} sequences would be dropped: a global batch has {config.global_batch}",
                hint="lower --global-batch, or use --last-batch keep",
            )
        num_steps += sizes.size
        num_occurrences += in_epoch
        num_segments += in_epoch + int((copies[is_long] * (num_parts - 1)).sum())
        is_planned |= copies > 0
    longest = int(analysis.num_tokens.max(where=is_planned, initial=0))
    if num_segments > _MAX_SEGMENTS:
        raise UsageError(
            f"the plan would have {num_segments:,} segments, at most {_MAX_SEGMENTS:,} are possible",
            hint="use a larger --chunk-size or fewer epochs, or plan the data in parts",
        )
    if config.split == "none" and longest > config.chunk_size:
        sequence = int(np.argmax(is_planned & is_long))
        raise DataError(
            f"sequence {sequence} has {analysis.num_tokens[sequence]:,} tokens, and nothing may be split",
            where=analysis.place(sequence),
            hint=f"use a --chunk-size of {longest} or more"
            + (", or split it: --split full in place of none" if config.micro_batches is None else ""),
        )
    return num_steps, num_occurrences, longest


def _dataset_of(analysis: Analysis, config: PlanConfig) -> Dataset:
    """The dataset of `analysis`, whose tokens several threads read."""
    groups, lengths = SampleGroups.of(analysis.group), (analysis.num_tokens, analysis.num_target_tokens)
    if not analysis.has_tokens and not config.share_prefixes:
        return Dataset(*lengths, None, groups=groups)
    reader, one_at_a_time = analysis.tokens(), threading.Lock()

    def tokens_of(sequence_id: int) -> tuple[Int32Array, BoolArray]:
        with one_at_a_time:
            return reader(sequence_id)

    def mask(sequence_id: int) -> BoolArray:
        return tokens_of(sequence_id)[1]

    shared = tokens_of if config.share_prefixes else None
    return Dataset(*lengths, mask, shared, groups, has_reference(analysis))


# Plans a whole dataset, some steps at a time, on several threads.
#
# The same lengths, targets and configuration give the same tables in any process and with any number of workers:
# shuffles come from the raw stream of a bit generator, costs are whole nanoseconds, ties are broken by position,
# solvers are limited by deterministic measures.

#: Blocks that each worker may be ahead of whoever takes the rows.
_AHEAD = 2

#: Seconds after which a thread that waits looks whether it was interrupted: where a library has put a signal handler of
#: its own around Python's (polars does), a wait goes on as if nothing had come.
_LOOK_SECONDS = 0.2

Result = TypeVar("Result")


def result_of(future: Future[Result]) -> Result:
    """Wait for what a thread makes, and raise what it raised; unlike `Future.result`, an interrupt ends it soon."""
    while not wait((future,), _LOOK_SECONDS).done:
        pass
    return future.result()


def plan_steps(
    dataset: Dataset, copies: Callable[[int], Int32Array], config: PlanConfig, cost: CostModel, *, workers: int = 1
) -> Iterator[Planned]:
    """Plan a dataset: rows of the tables of the contract and fullest moments, some steps at a time.

    `copies` says how often each sequence occurs in an epoch, int32 [num_sequences]. `workers` threads plan side by
    side.
    """
    waiting: deque[Future[Planned]] = deque()
    cancelled = threading.Event()  # threads cannot be interrupted: refinements, which may take long, look at this
    with ThreadPoolExecutor(workers) as pool:
        try:
            for block in step_blocks(copies, config, dataset.groups):
                waiting.append(pool.submit(plan_block, block, dataset, config, cost, cancelled.is_set))
                if len(waiting) > _AHEAD * workers:
                    yield result_of(waiting.popleft())
            while waiting:
                yield result_of(waiting.popleft())
        finally:
            cancelled.set()
            pool.shutdown(cancel_futures=True)
