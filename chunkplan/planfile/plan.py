"""The plan as its readers see it: streamed step by step, so that a plan of any size is read in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from chunkplan.errors import DataError
from chunkplan.planfile.schema import CHUNKS, SCHEDULE, STEPS
from chunkplan.planfile.tables import conform, read_table


@dataclass(frozen=True)
class Segment:
    """Tokens [start, end) of one sequence."""

    sequence_id: int
    start: int
    end: int


@dataclass(frozen=True)
class Chunk:
    """One row of chunks.parquet: at most ChunkSize tokens that run through the model at once.

    `group_id` is None for a standalone chunk. A zero-loss chunk has no segments. `cost` is in microseconds.
    """

    chunk_id: int
    group_id: int | None
    group_index: int
    group_size: int
    num_tokens: int
    num_target_tokens: int
    prefix_tokens: int
    keeps_activations: bool
    cost: float
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class Action:
    """One thing a stage does with a chunk; `op` is one of `schema.OPS`."""

    op: str
    chunk_id: int
    virtual_stage: int


@dataclass(frozen=True)
class PlanStep:
    """One optimizer step: its totals, the chunks of each data-parallel rank, the actions of each (rank, stage)."""

    step: int
    epoch: int
    num_sequences: int
    num_tokens: int
    num_target_tokens: int
    num_chunks: int
    chunks_lower_bound: int
    packing_lower_bound: int
    optimal: bool
    exceeds_share: bool
    peak_retained_tokens: int
    recompute_us: float
    predicted_us: float
    lower_bound_us: float
    chunks: dict[int, list[Chunk]] = field(repr=False)
    actions: dict[tuple[int, int], list[Action]] = field(repr=False)
    schedule_us: dict[tuple[int, int], float] = field(repr=False)


@dataclass(frozen=True)
class Plan:
    """A plan folder. Open it with `chunkplan.load_plan`."""

    path: Path
    manifest: dict[str, Any] = field(repr=False)

    @property
    def config(self) -> dict[str, Any]:
        """The whole resolved configuration the plan was built with."""
        config: dict[str, Any] = self.manifest["config"]
        return config

    @property
    def content_hash(self) -> str:
        """Identifies the plan: equal plans have equal hashes whatever wrote them."""
        return str(self.manifest["content_hash"])

    @property
    def analysis_path(self) -> Path:
        """Where the plan's analysis (or lengths file) was when it was built, relative to where the plan is now."""
        relative: str = self.manifest["analysis"]["path"]
        return (self.path.resolve() / relative).resolve()

    def steps(self) -> pa.Table:
        """steps.parquet."""
        return read_table(self.path / "steps.parquet", STEPS)

    def chunks(self) -> pa.Table:
        """chunks.parquet, whole."""
        return read_table(self.path / "chunks.parquet", CHUNKS)

    def schedule(self) -> pa.Table:
        """schedule.parquet, whole."""
        return read_table(self.path / "schedule.parquet", SCHEDULE)

    def iter_steps(self, start: int = 0) -> Iterator[PlanStep]:
        """The steps from `start` on, in order, read a row group at a time.

        Raises:
            DataError: a file is damaged, or chunks or schedule are not sorted by step.
        """
        chunks = _by_step(self.path / "chunks.parquet", CHUNKS, start)
        schedule = _by_step(self.path / "schedule.parquet", SCHEDULE, start)
        for row in self.steps().to_pylist():
            if row["step"] < start:
                continue
            chunks_by_rank: dict[int, list[Chunk]] = {}
            for record in _take(chunks, row["step"], self.path / "chunks.parquet"):
                del record["step"]
                record["segments"] = tuple(Segment(**segment) for segment in record["segments"])
                chunks_by_rank.setdefault(record.pop("dp_rank"), []).append(Chunk(**record))
            actions: dict[tuple[int, int], list[Action]] = {}
            schedule_us: dict[tuple[int, int], float] = {}
            for record in _take(schedule, row["step"], self.path / "schedule.parquet"):
                place = record["dp_rank"], record["stage"]
                actions[place] = [Action(**action) for action in record["actions"]]
                schedule_us[place] = record["predicted_us"]
            yield PlanStep(**row, chunks=chunks_by_rank, actions=actions, schedule_us=schedule_us)


def _by_step(path: Path, schema: pa.Schema, start: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """(step, its rows) in file order; row groups that end before `start` are not read."""
    current: int | None = None
    rows: list[dict[str, Any]] = []
    for table in _row_groups(path, start):
        for row in conform(table, schema, path).to_pylist():
            if row["step"] != current:
                if current is not None and current >= start:
                    yield current, rows
                current, rows = row["step"], []
            rows.append(row)
    if current is not None and current >= start:
        yield current, rows


def _row_groups(path: Path, start: int) -> Iterator[pa.Table]:
    try:
        file = pq.ParquetFile(path)
        for group in range(file.num_row_groups):
            statistics = file.metadata.row_group(group).column(0).statistics
            if statistics is not None and statistics.has_min_max and statistics.max < start:
                continue
            yield file.read_row_group(group)
    except PermissionError:
        raise
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"cannot be read: {error}", where=str(path), hint="build the plan again") from error


def _take(groups: Iterator[tuple[int, list[dict[str, Any]]]], step: int, path: Path) -> list[dict[str, Any]]:
    found, rows = next(groups, (None, []))
    if found != step:
        raise DataError(
            f"rows of step {step} expected, found step {found}", where=str(path), hint="build the plan again"
        )
    return rows
