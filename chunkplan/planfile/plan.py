"""The plan as its readers see it: streamed step by step, so that a plan of any size is read in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from itertools import starmap
from pathlib import Path
from typing import Any

import pyarrow as pa

from chunkplan.config.plan import PlanConfig
from chunkplan.cost.model import CostModel
from chunkplan.errors import DataError
from chunkplan.files.folder import MANIFEST
from chunkplan.planfile.arrow import to_numpy
from chunkplan.planfile.manifest import config_of
from chunkplan.planfile.notebook import plan_html
from chunkplan.planfile.schema import CP_COLUMNS, plan_schemas
from chunkplan.planfile.step_rows import StepRows, rows_by_step
from chunkplan.planfile.tables import read_table

#: What to try where rows of a plan are not what they should be.
VALIDATE_HINT = "`chunkplan validate` says what is wrong with the plan"


#: What a chunk may be: whole sequences; one part of a split one, alone or with whole ones; nothing but padding.
KINDS = ("standalone", "dependent", "mixed", "zero-loss")


def kind_of(is_grouped: Any, num_segments: Any) -> Any:
    """The place in `KINDS` of a chunk, or of many: both arguments and the result are numbers, or arrays [n]."""
    return (num_segments == 0) * 3 + (num_segments > 0) * is_grouped * (1 + (num_segments > 1))


@dataclass(frozen=True)
class Segment:
    """Tokens [start, end) of one sequence."""

    sequence_id: int
    start: int
    end: int


@dataclass(frozen=True)
class Chunk:
    """One row of chunks.parquet: at most ChunkSize tokens that run through the model at once.

    `group_id` is None for a standalone chunk. A zero-loss chunk has no segments. `cost` is in microseconds. Where
    `cp_size` ranks from `cp_first_rank` on share a chunk of `cp_tokens` tokens, its segments are the rank's slices of
    it: `cp_heads` ranks at a time share the heads, and these groups of ranks its pages. Where `cp_size` is 1 the other
    three say nothing. `kept_attention`: where it keeps what attention gave in its first forward, one of
    `operations.KEPT_ATTENTION`.
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
    cp_first_rank: int = 0
    cp_size: int = 1
    cp_heads: int = 1
    cp_tokens: int = 0
    kept_attention: str = ""

    @property
    def kind(self) -> str:
        """What it holds: one of `KINDS`."""
        num_segments = len(self.segments) if self.cp_size == 1 else 1
        return KINDS[kind_of(self.group_id is not None, num_segments)]

    def to_dict(self) -> Mapping[str, Any]:
        """Its columns, for JSON; those that say how ranks share it only where they do."""
        return {name: value for name, value in asdict(self).items() if self.cp_size > 1 or name not in CP_COLUMNS}


@dataclass(frozen=True)
class Action:
    """One thing a stage does with a chunk; `op` is one of `operations.OPS`."""

    op: str
    chunk_id: int
    virtual_stage: int

    def __str__(self) -> str:
        return f"{self.op} of chunk {self.chunk_id} on virtual stage {self.virtual_stage}"


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
    slots: dict[tuple[int, int], list[int]] = field(repr=False)


@dataclass(frozen=True)
class Plan:
    """A plan folder. Open it with `chunkplan.load_plan`."""

    path: Path
    manifest: dict[str, Any] = field(repr=False)

    @cached_property
    def config(self) -> PlanConfig:
        """The whole resolved configuration the plan was built with."""
        return config_of(self.manifest)

    @cached_property
    def cost(self) -> CostModel:
        """The cost model by which its times were predicted.

        Raises:
            DataError: the manifest does not describe one.
        """
        return CostModel.from_dict(self.manifest["predictions"]["cost_model"], where=str(self.path / MANIFEST))

    @property
    def schemas(self) -> dict[str, pa.Schema]:
        """The columns of its files, by name: `steps`, `chunks`, `schedule`."""
        return plan_schemas(self.manifest["config"])

    @property
    def content_hash(self) -> str:
        """Identifies the plan: equal plans have equal hashes whatever wrote them."""
        return str(self.manifest["content_hash"])

    @property
    def analysis_path(self) -> Path:
        """Where the plan's analysis (or lengths file) was when it was built, relative to where the plan is now."""
        relative: str = self.manifest["analysis"]["path"]
        return Path(os.path.realpath(self.path / relative))

    def _repr_html_(self) -> str:
        return plan_html(self.path, self.manifest)

    def steps(self) -> pa.Table:
        """Read all of steps.parquet."""
        return self._read("steps")

    def chunks(self) -> pa.Table:
        """Read all of chunks.parquet."""
        return self._read("chunks")

    def schedule(self) -> pa.Table:
        """Read all of schedule.parquet."""
        return self._read("schedule")

    def _read(self, name: str) -> pa.Table:
        return read_table(self.path / f"{name}.parquet", self.schemas[name])

    def iter_steps(self, start: int = 0) -> Iterator[PlanStep]:
        """The steps from `start` on, in order, read a row group at a time.

        Raises:
            DataError: a file is damaged, or chunks or schedule are not sorted by step.
        """
        chunks_path, schedule_path = self.path / "chunks.parquet", self.path / "schedule.parquet"
        chunks = rows_by_step(chunks_path, self.schemas["chunks"], start)
        schedule = rows_by_step(schedule_path, self.schemas["schedule"], start)
        names = [entry.name for entry in fields(Chunk) if entry.name in self.schemas["chunks"].names]
        steps = self.steps()
        for row in zip(*(to_numpy(column.combine_chunks()).tolist() for column in steps.columns), strict=True):
            totals = dict(zip(steps.column_names, row, strict=True))
            if totals["step"] < start:
                continue
            chunks_by_rank: dict[int, list[Chunk]] = {}
            rows = _take(chunks, totals["step"], chunks_path)
            rows["segments"] = [tuple(starmap(Segment, segments)) for segments in rows["segments"]]
            for dp_rank, *entries in zip(rows["dp_rank"], *(rows[name] for name in names), strict=True):
                chunks_by_rank.setdefault(dp_rank, []).append(Chunk(**dict(zip(names, entries, strict=True))))
            actions: dict[tuple[int, int], list[Action]] = {}
            schedule_us: dict[tuple[int, int], float] = {}
            slots: dict[tuple[int, int], list[int]] = {}
            rows = _take(schedule, totals["step"], schedule_path)
            for dp_rank, stage, done, predicted_us in zip(*(rows[name] for name in _SCHEDULE_COLUMNS), strict=True):
                actions[dp_rank, stage] = list(starmap(Action, done))
                schedule_us[dp_rank, stage] = predicted_us
            if "slots" in rows:
                slots = dict(zip(zip(rows["dp_rank"], rows["stage"], strict=True), rows["slots"], strict=True))
            yield PlanStep(**totals, chunks=chunks_by_rank, actions=actions, schedule_us=schedule_us, slots=slots)


_SCHEDULE_COLUMNS = ("dp_rank", "stage", "actions", "predicted_us")


def _take(groups: Iterator[tuple[int, StepRows]], step: int, path: Path) -> StepRows:
    found, rows = next(groups, (None, {}))
    if found != step:
        raise DataError(
            f"rows of step {step} expected, found step {found}", where=str(path), hint="build the plan again"
        )
    return rows
