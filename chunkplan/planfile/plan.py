"""The plan as its readers see it: streamed step by step, so that a plan of any size is read in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from itertools import pairwise, starmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from chunkplan.config.plan import PlanConfig
from chunkplan.cost.model import CostModel
from chunkplan.errors import DataError, UsageError
from chunkplan.files.folder import MANIFEST
from chunkplan.planfile.manifest import config_of
from chunkplan.planfile.notebook import plan_html
from chunkplan.planfile.schema import CP_COLUMNS, PREFIXES, plan_schemas, to_numpy
from chunkplan.planfile.tables import conform, open_parquet, read_table
from chunkplan.quantities import short_repr

# Reads the rows of chunks.parquet or schedule.parquet step by step, a row group at a time.
#
# Columns become numpy arrays, and only the rows of one step at a time Python values: a plan of any size is read in
# bounded memory, at a cost that a training step does not notice.


#: The rows of a step: of every column a list with one entry a row. In a column of lists an entry is a list of numbers,
#: or of tuples, the fields of each struct in it.
StepRows = dict[str, list[Any]]


def rows_by_step(path: Path, schema: pa.Schema, start: int) -> Iterator[tuple[int, StepRows]]:
    """Yield (step, its rows) from step `start` on, in file order; row groups that end before `start` are not read.

    Raises:
        DataError: the file is damaged or not of `schema`.
    """
    for table in _whole_steps(path, schema, start):
        yield from rows_of_steps(table, start)


def rows_of_steps(table: pa.Table, start: int = 0) -> Iterator[tuple[int, StepRows]]:
    """Yield (step, its rows) from step `start` on of a table that is sorted by step and has one row at least."""
    flat, lists = _arrays(table)
    steps = flat["step"]
    edges = np.flatnonzero(np.diff(steps, prepend=steps[0] - 1, append=steps[-1] - 1)).tolist()
    for first_row, stop in pairwise(edges):
        if steps[first_row] < start:
            continue
        rows: StepRows = {name: values[first_row:stop].tolist() for name, values in flat.items()}
        for name, (offsets, arrays) in lists.items():
            bounds = offsets[first_row : stop + 1].tolist()
            items = [values[bounds[0] : bounds[-1]].tolist() for values in arrays]
            items = list(zip(*items, strict=True)) if len(items) > 1 else items[0]
            rows[name] = [items[i - bounds[0] : j - bounds[0]] for i, j in pairwise(bounds)]
        yield int(steps[first_row]), rows


def _whole_steps(path: Path, schema: pa.Schema, start: int) -> Iterator[pa.Table]:
    """All rows in order, in tables with at least one row, none of which ends in the middle of a step."""
    rest = schema.empty_table()
    for table in _row_groups(path, schema, start):
        table = pa.concat_tables([rest, conform(table, schema, path)])
        steps = to_numpy(table.column("step").combine_chunks())
        changes = np.flatnonzero(np.diff(steps))
        cut = int(changes[-1]) + 1 if changes.size else 0
        if cut:
            yield table.slice(0, cut)
        rest = table.slice(cut)
    if rest.num_rows:
        yield rest


def _row_groups(path: Path, schema: pa.Schema, start: int) -> Iterator[pa.Table]:
    step = pa.schema([schema.field("step")])
    with open_parquet(path, hint="build the plan again") as file:
        for group in range(file.num_row_groups):
            if start:
                # Statistics would tell too, but pyarrow ends the process when it is asked for those of a damaged file.
                steps = conform(file.read_row_group(group, step.names), step, path).column("step").combine_chunks()
                if not (to_numpy(steps) >= start).any():
                    continue
            yield file.read_row_group(group, schema.names)


_Array = npt.NDArray[Any]


def _arrays(table: pa.Table) -> tuple[dict[str, _Array], dict[str, tuple[_Array, list[_Array]]]]:
    """The plain columns; of those of lists, where the items of each row begin [num_rows + 1], and their fields."""
    flat, lists = {}, {}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        if pa.types.is_list(column.type):
            offsets = to_numpy(column.offsets)
            items = column.flatten()
            leaves = items.flatten() if pa.types.is_struct(items.type) else [items]
            lists[name] = offsets - offsets[0], [_array(leaf) for leaf in leaves]
        else:
            flat[name] = _array(column)
    return flat, lists


def _array(column: pa.Array) -> _Array:
    """Numbers and booleans as they are; words, and numbers among nulls (None), as objects."""
    if pa.types.is_dictionary(column.type):
        words = np.array(column.dictionary.to_pylist(), np.object_)
        return np.asarray(words[to_numpy(column.indices)])
    values = to_numpy(column)
    if column.null_count:
        values = values.astype(np.object_)
        values[~to_numpy(column.is_valid())] = None
    return values


#: Hint for a plan with damaged rows.
VALIDATE_HINT = "`chunkplan validate` says what is wrong with the plan"


#: What a chunk may be: whole sequences; one part of a split one, alone or with whole ones; nothing but padding.
KINDS = ("standalone", "dependent", "mixed", "zero-loss")


def kind_of(is_grouped: Any, num_wholes: Any) -> Any:
    """The place in `KINDS` of a chunk, or of many: both arguments and the result are numbers, or arrays [n].

    `num_wholes`: 1 for the first segment, and those besides that begin with their sequence.
    """
    return (num_wholes == 0) * 3 + (num_wholes > 0) * is_grouped * (1 + (num_wholes > 1))


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
    `operations.KEPT_ATTENTION`. `last_dependent`: the highest group_index of the chunks of its group that attend to
    it, its own where none does; left out, the last one's.
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
    last_dependent: int = field(default=-1, repr=False)

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if self.last_dependent < 0:
            object.__setattr__(self, "last_dependent", self.group_size - 1)

    @property
    def kind(self) -> str:
        """The kind of the chunk: one of `KINDS`."""
        besides = [each for each in self.segments[1:] if each.start == 0 and self.cp_size == 1]
        return KINDS[kind_of(self.group_id is not None, (bool(self.segments) or self.cp_size > 1) + len(besides))]

    def to_dict(self) -> Mapping[str, Any]:
        """Its columns, for JSON; those that say how ranks or sequences share it only where they do."""
        unsaid = {*(CP_COLUMNS if self.cp_size == 1 else ())}
        if self.last_dependent == self.group_size - 1:
            unsaid.add("last_dependent")
        return {name: value for name, value in asdict(self).items() if name not in unsaid}


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
    """One optimizer step: its totals, the chunks of each data-parallel rank, the actions of each (rank, stage).

    `prefixes`: of each sequence that begins in another one of its step, the other one and how many of its tokens.
    `extra_forward_us`: forwards that the loss adds, in `predicted_us`.
    """

    step: int
    epoch: int
    num_sequences: int
    num_tokens: int
    num_target_tokens: int
    num_chunks: int
    chunks_lower_bound: int = field(repr=False)
    packing_lower_bound: int = field(repr=False)
    optimal: bool = field(repr=False)
    exceeds_share: bool = field(repr=False)
    peak_retained_tokens: int = field(repr=False)
    recompute_us: float = field(repr=False)
    predicted_us: float
    lower_bound_us: float = field(repr=False)
    chunks: dict[int, list[Chunk]] = field(repr=False)
    actions: dict[tuple[int, int], list[Action]] = field(repr=False)
    schedule_us: dict[tuple[int, int], float] = field(repr=False)
    slots: dict[tuple[int, int], list[int]] = field(repr=False)
    prefixes: dict[int, tuple[int, int]] = field(repr=False, default_factory=dict)
    extra_forward_us: float = field(default=0.0, repr=False)

    __repr__ = short_repr

    @property
    def prefix_words(self) -> str:
        """The tokens that are run, in words, where sequences share prefixes; else ""."""
        run = sum(chunk.num_tokens for chunks in self.chunks.values() for chunk in chunks)
        return f", of which {run:,} are run with shared prefixes" if self.prefixes else ""

    def sequences(self, rank: int) -> list[list[int]]:
        """The ids of the sequences in each chunk of a data-parallel rank; those of a zero-loss chunk are none."""
        return [[segment.sequence_id for segment in chunk.segments] for chunk in self.chunks[rank]]


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
        """The columns of its files, by name: `steps`, `chunks`, `schedule`, and `prefixes` where they are shared."""
        return plan_schemas(self.manifest["config"])

    @property
    def content_hash(self) -> str:
        """Identifies the plan: equal plans have equal hashes whatever wrote them."""
        return str(self.manifest["content_hash"])

    @property
    def analysis_path(self) -> Path:
        """Path of the plan's analysis (or lengths file), relative to the plan as when it was built."""
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

    def prefixes(self) -> pa.Table:
        """Read all of prefixes.parquet; without rows where no sequence begins in another one."""
        if "prefixes" not in self.schemas:
            return PREFIXES.empty_table()
        return read_table(self.path / "prefixes.parquet", PREFIXES, may_be_empty=True)

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
        is_sharing = "prefixes" in self.schemas
        prefixes = rows_by_step(self.path / "prefixes.parquet", PREFIXES, start) if is_sharing else iter(())
        of_step = next(prefixes, None)  # the next step with prefixes
        steps = self.steps()
        for row in zip(*(to_numpy(column.combine_chunks()).tolist() for column in steps.columns), strict=True):
            totals = dict(zip(steps.column_names, row, strict=True))
            if totals["step"] < start:
                continue
            step, shared = totals["step"], None
            if of_step is not None and of_step[0] <= step:
                shared = _take(iter([of_step]), step, self.path / "prefixes.parquet")
                of_step = next(prefixes, None)
            yield step_of_rows(totals, _take(chunks, step, chunks_path), _take(schedule, step, schedule_path), shared)


def step_of_rows(
    totals: Mapping[str, Any], chunks: StepRows, schedule: StepRows, prefixes: StepRows | None = None
) -> PlanStep:
    """A step of the `totals` in its row of steps.parquet, and of its rows of the other files."""
    names = [entry.name for entry in fields(Chunk) if entry.name in chunks]
    segments = [tuple(starmap(Segment, of_chunk)) for of_chunk in chunks["segments"]]
    chunks_by_rank: dict[int, list[Chunk]] = {}
    columns = (segments if name == "segments" else chunks[name] for name in names)
    for dp_rank, *entries in zip(chunks["dp_rank"], *columns, strict=True):
        chunks_by_rank.setdefault(dp_rank, []).append(Chunk(**dict(zip(names, entries, strict=True))))
    places = list(zip(schedule["dp_rank"], schedule["stage"], strict=True))
    return PlanStep(
        **totals,
        chunks=chunks_by_rank,
        actions={place: list(starmap(Action, done)) for place, done in zip(places, schedule["actions"], strict=True)},
        schedule_us=dict(zip(places, schedule["predicted_us"], strict=True)),
        slots=dict(zip(places, schedule["slots"], strict=True)) if "slots" in schedule else {},
        prefixes={
            sequence_id: (prefix_of, num_tokens)
            for _, sequence_id, prefix_of, num_tokens in zip(*(prefixes or {}).values(), strict=True)
        },
    )


def _take(groups: Iterator[tuple[int, StepRows]], step: int, path: Path) -> StepRows:
    found, rows = next(groups, (None, {}))
    if found != step:
        raise DataError(
            f"rows of step {step} expected, found step {found}", where=str(path), hint="build the plan again"
        )
    return rows


# Steps, ranks and chunks of a plan by number, where somebody asks for one.


def find_step(plan: Plan, number: int) -> PlanStep:
    """One step of `plan`.

    Raises:
        UsageError: there is no such step.
        DataError: the plan is damaged.
    """
    num_steps = plan.manifest["totals"]["num_steps"]
    if not 0 <= number < num_steps:
        raise UsageError(f"there is no step {number}", hint=f"the plan has steps 0 to {num_steps - 1}")
    found = next(plan.iter_steps(number), None)
    if found is None or found.step != number:
        raise DataError(
            f"step {number} is missing", where=str(plan.path / "steps.parquet"), hint="build the plan again"
        )
    for table, place, what in _complaints(found, plan.config.dp, plan.config.pp):
        where = f"{plan.path / table}.parquet, step {number}, {place}"
        raise DataError(what, where=where, hint=VALIDATE_HINT)
    return found


def _complaints(step: PlanStep, dp: int, pp: int) -> Iterator[tuple[str, str, str]]:
    """Inconsistencies in the rows of a step: the table, the place and the message."""
    ranks = {*range(dp)}
    for rank in sorted(step.chunks.keys() ^ ranks):
        yield "chunks", f"rank {rank}", "no chunks" if rank in ranks else "the plan has no such rank"
    for rank, chunks in step.chunks.items():
        if [chunk.chunk_id for chunk in chunks] != [*range(len(chunks))]:
            yield "chunks", f"rank {rank}", "the chunks are not numbered from 0 in order"
    stages = {(rank, stage) for rank in ranks for stage in range(pp)}
    for rank, stage in sorted(step.actions.keys() ^ stages):
        what = "no actions" if (rank, stage) in stages else "the plan has no such stage"
        yield "schedule", f"rank {rank}, stage {stage}", what


def check_rank(plan: Plan, rank: int) -> None:
    """Refuse what is no data-parallel rank of `plan`.

    Raises:
        UsageError: there is no such rank.
    """
    if not 0 <= rank < plan.config.dp:
        raise UsageError(f"there is no rank {rank}", hint=f"the plan has ranks 0 to {plan.config.dp - 1}")


def find_chunk(step: PlanStep, rank: int, chunk_id: int) -> Chunk:
    """One chunk of a rank of `step`.

    Raises:
        UsageError: there is no such chunk.
    """
    chunks = step.chunks.get(rank, [])
    if not 0 <= chunk_id < len(chunks):
        raise UsageError(
            f"there is no chunk {chunk_id} in step {step.step} on rank {rank}",
            hint=f"it has chunks 0 to {len(chunks) - 1}",
        )
    return chunks[chunk_id]
