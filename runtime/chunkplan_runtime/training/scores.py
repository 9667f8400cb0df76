"""Scores a data set: the log-probability of every target token of a plan's first epoch, by forwards alone, to Parquet.

A file has the sequences of some steps in a row, and is there whole or not at all: a run that stopped goes on behind the
last one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from transformers import TrainerCallback

from chunkplan.errors import DataError, UsageError
from chunkplan.files.writing import writing
from chunkplan.planfile.analysis import Analysis
from chunkplan.quantities import counted
from chunkplan_runtime.distributed.job import Job, refuse_differences
from chunkplan_runtime.execution.step_loss import Columns, by_sequence, target_columns
from chunkplan_runtime.feed.scores import ANALYSIS, IDENTITY, SCORES
from chunkplan_runtime.models.model import read_config
from chunkplan_runtime.training import setup
from chunkplan_runtime.training.config import TrainConfig
from chunkplan_runtime.training.run_folder import RunFolder
from chunkplan_runtime.training.screen import Screen
from chunkplan_runtime.training.train_step import make_executor

#: Target tokens of a file, at least, but for the last one.
FILE_TOKENS = 2_000_000

#: Seconds between two lines of progress.
_LINE_SECONDS = 10.0

_SCHEMA = pa.schema(
    {
        "sequence_id": pa.int64(),
        "source": pa.string(),
        "record": pa.int64(),
        "num_target_tokens": pa.int32(),
        "log_prob": pa.float64(),
        "positions": pa.list_(pa.int32()),
        "log_probs": pa.list_(pa.float32()),
    }
)


def score(config: TrainConfig, job: Job, callbacks: Sequence[TrainerCallback] = ()) -> None:
    """Write scores of the sequences of a plan's first epoch below `config.output`, from the main process.

    Raises:
        UsageError: the plan is not for these processes or this model, or the folder is at use or has other scores.
        DataError: plan, analysis, model or an earlier file is damaged.
    """
    folder = RunFolder(config.output)
    try:
        if job.is_main:
            with writing(folder.path):
                folder.path.mkdir(parents=True, exist_ok=True)
            folder.lock()
        _score(config, job)
    finally:
        folder.unlock()


def _score(config: TrainConfig, job: Job) -> None:
    model_config = read_config(str(config.model), router_loss=True)
    data = setup.open_data(config, model_config, job.layout)
    precision = "bf16-pure" if config.precision == "bf16" else config.precision  # nothing is added up
    config = replace(config, precision=precision, analysis=data.analysis.path, lora_rank=0, checkpointing="none")
    setup.check_layout(config, job.layout)
    model = setup.build_model(config, model_config, data.plan, job)
    weights = model.identity or setup.fingerprint(model.own, model.whole, Job())
    identity = f"plan {data.plan.content_hash}, weights {weights}, {precision}"
    refuse_differences(job.all_gather_object({"plan": data.plan.content_hash, "weights": weights}))
    start, totals = job.broadcast_object(_found(config.output, identity) if job.is_main else (0, np.zeros(2)))
    steps, _ = make_executor(model.own, config, job)
    steps.ranks.model.model.eval()
    num_steps = data.num_steps(replace(config, max_epochs=1))
    stream = data.stream(data.plan)
    stream.load_state_dict({**stream.state_dict(), "step": start})
    screen = Screen(start, num_steps, silent=not job.is_main)
    screen.say(f"scores    {config.model} in {precision}, {num_steps - start:,} of {counted(num_steps, 'step')} left")
    rows: list[Columns] = []
    first, said = start, time.monotonic()
    with screen, job.reporting(lambda: steps.ranks.activity, lambda: None):
        for work in islice(stream, num_steps - start):
            job.at_step(work.step.step)
            everyone = job.all_gather_object(target_columns(work.ranks, steps.score(work)))
            done = work.step.step + 1
            if not job.is_main:
                continue
            rows += everyone
            if done == num_steps or sum(len(ids) for ids, *_ in rows) >= FILE_TOKENS:
                totals = totals + _write(config.output, rows, first, done, data.analysis, identity)
                first, rows = done, []
            if done == num_steps or time.monotonic() - said > _LINE_SECONDS:
                screen.say(f"step {done - 1} ({done}/{num_steps})")
                said = time.monotonic()
    steps.free()
    loss = -totals[1] / max(totals[0], 1)
    perplexity = math.exp(loss) if loss < 700 else math.inf
    screen.say(f"mean      loss {loss:.4f}, perplexity {perplexity:,.2f}, of {int(totals[0]):,} target tokens")
    screen.say(f"saved     {config.output}: a row for each sequence, in Parquet files")


def _write(
    folder: Path, rows: Sequence[Columns], first: int, stop: int, analysis: Analysis, identity: str
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Write the scores of steps [first, stop); returns the number of target tokens and their sum."""
    _, is_first, (ids, positions, losses) = by_sequence(rows)
    starts = np.flatnonzero(is_first)
    offsets = np.append(starts, len(ids)).astype(np.int32)
    sequences, log_probs = ids[starts], -losses.astype(np.float64)
    sources = [source["path"] for source in analysis.manifest.get("sources") or []]
    columns = {
        "sequence_id": sequences,
        "source": [sources[place] for place in analysis.source[sequences]] if sources else [None] * len(sequences),
        "record": analysis.record[sequences],
        "num_target_tokens": np.diff(offsets),
        "log_prob": np.add.reduceat(log_probs, starts) if len(starts) else log_probs,
        "positions": pa.ListArray.from_arrays(offsets, pa.array(positions, pa.int32())),
        "log_probs": pa.ListArray.from_arrays(offsets, pa.array(log_probs, pa.float32())),
    }
    totals = np.array([len(ids), log_probs.sum()])
    entry = f"{identity}\n{totals[0]} {totals[1]}".encode()
    table = pa.table(columns, schema=_SCHEMA.with_metadata({IDENTITY: entry, ANALYSIS: analysis.content_hash}))
    path = folder / f"steps-{first:08d}-{stop - 1:08d}.parquet"
    with writing(path, room_hint="make room, and run it again: it goes on behind the last file"):
        temporary = path.with_suffix(".tmp")
        pq.write_table(table, temporary)
        temporary.replace(path)
    return totals


def _found(folder: Path, identity: str) -> tuple[int, np.ndarray[Any, np.dtype[np.float64]]]:
    """The step behind those that the files of a folder have, and the sums of their target tokens."""
    step, totals = 0, np.zeros(2)
    for path in sorted(folder.iterdir()):
        match = SCORES.fullmatch(path.name)
        if path.suffix == ".tmp":
            continue
        if match is None:
            raise UsageError(f"{folder} has other files than scores: {path.name}", hint="give another --output")
        try:
            entry = (pq.read_schema(path).metadata or {}).get(IDENTITY, b"").decode()
        except pa.ArrowInvalid as error:
            raise DataError(f"not Parquet: {error}", where=str(path), hint="remove it, and run this again") from error
        found, _, sums = entry.partition("\n")
        if found != identity or int(match[1]) != step:
            told = f"{path} has scores of another plan, model or precision"
            raise UsageError(told, hint="give another --output, or remove it")
        step, totals = int(match[2]) + 1, totals + np.array([float(each) for each in sums.split()])
    return step, totals
