"""The layout of a plan on processes: stages, pipelines, ranks, and shares of sequences that several of them run.

All processes of a group ask for the same exchanges in the same order, that of the plan's actions, so that what runs on
a GPU in the order in which it was asked for never waits in a cycle (docs/concepts.md, docs/context-parallel.md).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import torch
import torch.distributed as dist
from torch import Tensor

from chunkplan.errors import DataError, UsageError
from chunkplan.layers import STRAIGHT, StagePlacement, model_stage_of, stage_of
from chunkplan.planfile.likeness import how_to_build_like
from chunkplan.planfile.measured import ranks_of
from chunkplan.planfile.plan import VALIDATE_HINT, Chunk, Plan, PlanStep
from chunkplan.planfile.schema import SHARED_CHUNKS
from chunkplan.planfile.tables import read_table
from chunkplan.quantities import counted

if TYPE_CHECKING:
    from chunkplan_runtime.trees import TreePart

# Newer names of the same; the old ones warn.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

#: Tokens [start, stop) of a sequence.
Run = tuple[int, int]


class Block(NamedTuple):
    """`size` data-parallel ranks from `first` on share a chunk, each on a process of its own (docs/plan-format.md).

    `heads` that follow one another share its heads, and the `size / heads` groups of them its pages.
    """

    first: int
    size: int
    heads: int

    @property
    def ranks(self) -> range:
        """All of them."""
        return range(self.first, self.first + self.size)

    def groups_of_heads(self) -> list[tuple[int, ...]]:
        """Ranks that share heads: each has all tokens of its group for some of the heads."""
        return [tuple(range(start, start + self.heads)) for start in self.ranks[:: self.heads]]

    def groups_of_pages(self) -> list[tuple[int, ...]]:
        """Ranks that share pages, and have the same heads."""
        return [tuple(self.ranks[j :: self.heads]) for j in range(self.heads)]


def block_of(chunk: Chunk) -> Block:
    """The ranks that share a chunk of a plan."""
    return Block(chunk.cp_first_rank, chunk.cp_size, chunk.cp_heads)


def used_blocks(plan: Plan) -> list[Block]:
    """All blocks of ranks that share a chunk of the plan, ascending; raises DataError of a damaged one."""
    if plan.config.cp == "off" or plan.config.dp == 1:
        return []
    return list(_blocks_in(plan.path / "chunks.parquet", plan.content_hash))


@lru_cache(maxsize=8)
def _blocks_in(path: Path, content_hash: str) -> tuple[Block, ...]:
    names = ["cp_first_rank", "cp_size", "cp_heads"]
    chunks = read_table(path, pa.schema(map(SHARED_CHUNKS.field, names)))
    blocks = (Block(*(row[name] for name in names)) for row in chunks.group_by(names).aggregate([]).to_pylist())
    return tuple(sorted(block for block in blocks if block.size > 1))


@dataclass(frozen=True)
class RankLayout:
    """The ranks of a plan on dp x pp processes, as the one with the number `process` sees them.

    Stages are outermost: processes 0 to dp - 1 are the first stage. The replicas of a stage send each other all weights
    and gradients, which is more than what goes from stage to stage, so they lie side by side, on one machine where they
    fit. `placement`: which parts of the model each stage has.
    """

    dp: int = 1
    pp: int = 1
    process: int = 0
    placement: StagePlacement = STRAIGHT

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.dp * self.pp

    @property
    def stage(self) -> int:
        """This process's stage of the pipeline."""
        return self.process // self.dp

    @property
    def replica(self) -> int:
        """The index of this process's replica of its stage, and so of its pipeline among the dp."""
        return self.process % self.dp

    @property
    def virtual_stages(self) -> int:
        """The number of model stages that each stage has."""
        return self.placement.virtual_stages

    @property
    def num_model_stages(self) -> int:
        """The number of model stages, over all stages."""
        return self.pp * self.virtual_stages

    @property
    def is_first(self) -> bool:
        """True if this stage has the first model stage, with the embeddings."""
        return self.stage == self.stage_of(0)

    @property
    def is_last(self) -> bool:
        """True if this stage has the last model stage, with the head."""
        return self.stage == self.stage_of(self.num_model_stages - 1)

    def model_stages(self, stage: int | None = None) -> list[int]:
        """The model stages that a stage has, this one or another, by virtual stage."""
        stage = self.stage if stage is None else stage
        return [model_stage_of(stage, each, self.pp, self.placement) for each in range(self.virtual_stages)]

    def stage_of(self, model_stage: int) -> int:
        """The stage that has a model stage."""
        return stage_of(model_stage, self.pp, self.placement)[0]

    def process_of(self, stage: int, replica: int) -> int:
        """The process that has a replica of a stage."""
        return stage * self.dp + replica

    def rows(self, plan_dp: int) -> list[range]:
        """Ranks of a plan for `plan_dp` ranks that each pipeline runs one after another."""
        return [ranks_of(replica, self.dp, plan_dp) for replica in range(self.dp)]

    def dp_ranks(self, plan_dp: int) -> range:
        """The ranks of a plan that this process's pipeline runs."""
        return self.rows(plan_dp)[self.replica]

    def describe(self, process: int | None = None) -> str:
        """A process in words, this one or another, as messages name it."""
        other = self if process is None else replace(self, process=process)
        place = f"stage {other.stage} of pipeline {other.replica}" if self.pp > 1 else "data parallel"
        return f"process {other.process} of {self.world_size} ({place})"


def one_pipeline(plan: Plan) -> RankLayout:
    """The layout of one process for each stage of a plan, as the first one sees it."""
    return RankLayout(pp=plan.config.pp, placement=plan.config.placement)


_GO_ON = "give that as --plan, and --resume to go on with a run of this one"


def refuse_other_replicas(
    plan: Plan, dp: int, *, start: str = "", like: Plan | None = None, then: str = _GO_ON
) -> None:
    """Raise UsageError where ranks of a plan share sequences, and there are more or fewer replicas than it has ranks.

    Its hint: how to `start` as many as it has; what is done `then` with a plan `like` that one, or another, for others.
    """
    if dp != plan.config.dp and used_blocks(plan):
        raise UsageError(
            f"ranks of the plan share sequences: it runs on as many replicas as it has ranks, {plan.config.dp}, not "
            f"{dp}",
            where=str(plan.path),
            hint=_or_build_like(like or plan, dp, plan.config.pp, start, then),
        )


def _or_build_like(plan: Plan, dp: int, pp: int, start: str, then: str = _GO_ON) -> str:
    command = how_to_build_like(plan, dp, pp)
    return f"{start}or `{command}` builds one of the same steps for these: {then}".removeprefix("or ")


def choose_layout(
    plan: Plan, world_size: int, process: int, *, like: Plan | None = None, then: str = _GO_ON
) -> RankLayout:
    """The layout of `world_size` processes for a plan, as seen from `process`.

    `like` and `then`: see `refuse_other_replicas`. Raises UsageError: they cannot share the plan's stages and
    data-parallel ranks evenly, or see `refuse_other_replicas`; DataError: the plan is damaged.
    """
    pp, plan_dp = plan.config.pp, plan.config.dp
    fitting = [plan_dp] if used_blocks(plan) else [dp for dp in range(1, plan_dp + 1) if plan_dp % dp == 0]
    dp, is_uneven = divmod(world_size, pp)
    if not is_uneven and dp in fitting:
        return replace(one_pipeline(plan), dp=dp, process=process)
    numbers = " or ".join(str(pp * each) for each in fitting)
    processes = "process" if numbers == "1" else "processes"
    start = f"`torchrun --nproc-per-node N` or `chunkplan train --nproc N` with {numbers} {processes} in all, "
    if not is_uneven and dp:
        refuse_other_replicas(plan, dp, start=start, like=like, then=then)
    num_stages = gcd(world_size, pp)
    shape = counted(plan_dp, "data-parallel rank") + (f" of {pp} stages each" if pp > 1 else "")
    raise UsageError(
        f"{world_size} {'process' if world_size == 1 else 'processes'} cannot share the plan's {shape} evenly",
        where=str(plan.path),
        hint=_or_build_like(like or plan, world_size // num_stages, num_stages, start, then),
    )


class Span(NamedTuple):
    """A segment: tokens [start, stop) of a sequence of `length`, which are [chunk_start, chunk_stop) of its chunk.

    `group_id` is that of the chunk. With a `tree` tokens are those of that, named by its first sequence.
    """

    sequence_id: int
    start: int
    stop: int
    length: int
    chunk_start: int
    group_id: int | None = None
    tree: TreePart | None = None

    @property
    def chunk_stop(self) -> int:
        """One past the segment's last token in the chunk."""
        return self.chunk_start + self.stop - self.start

    @property
    def is_split(self) -> bool:
        """True if the sequence has tokens in other chunks too."""
        return self.stop - self.start < self.length

    def first_seen(self, window: int | None, tile: int | None = None) -> int:
        """The first token of the sequence that one of the segment sees: in a `window` that ends with it, or its tile.

        A sequence has a tile every so many tokens.
        """
        if self.tree is not None:
            return self.tree.first_seen(window, tile)
        if tile is not None:
            return self.start // tile * tile
        return 0 if window is None else max(0, self.start - window + 1)

    @property
    def occurrence(self) -> tuple[int, int | None]:
        """A key of a split sequence in flight that no other one has, nor itself where a step has it twice."""
        return self.sequence_id, self.group_id


@dataclass(frozen=True)
class OwnedTokens:
    """The tokens of a sequence that one group by pages keeps: `runs` of them, ascending, none of which touch."""

    runs: tuple[Run, ...]

    @cached_property
    def _counts(self) -> tuple[int, ...]:
        """The number of its tokens before each of the runs."""
        return tuple(accumulate((stop - start for start, stop in self.runs), initial=0))

    def before(self, token: int) -> int:
        """The number of its tokens before `token` of the sequence, which is the index of that one."""
        run = bisect_left(self.runs, (token,)) - 1
        return self._counts[run] + min(token, self.runs[run][1]) - self.runs[run][0] if run >= 0 else 0

    def within(self, start: int, stop: int) -> tuple[Run, ...]:
        """Its runs within the tokens [start, stop)."""
        cut = ((max(first, start), min(last, stop)) for first, last in self.runs)
        return tuple((first, last) for first, last in cut if first < last)


@dataclass(frozen=True)
class SharedPart:
    """A part of a sequence, `span`, that several processes run together, as one of them sees it.

    `heads`: the processes that share heads with this one, by their place among the replicas of a stage, this one alone
    where none do; `slices` has what each of them has of the part. `pages`: those that share pages with this one, which
    has the place `place` among them; `holdings` has what each of them keeps of the whole sequence.
    """

    span: Span
    heads: tuple[int, ...]
    slices: tuple[tuple[Run, ...], ...]
    pages: tuple[int, ...]
    holdings: tuple[OwnedTokens, ...]
    place: int

    @property
    def is_paged(self) -> bool:
        """True if pages are shared: keys and values of others have to be fetched."""
        return len(self.pages) > 1

    @property
    def runs(self) -> tuple[Run, ...]:
        """The query tokens of this process and those that it shares heads with in the part, ascending."""
        return self.holdings[self.place].within(self.span.start, self.span.stop)


def shared_part(chunk: Chunk, parts: Sequence[Run], rank: int) -> SharedPart | None:
    """The shares of ranks in a chunk of a sequence cut into `parts`, as `rank` sees it; None if it has all of it."""
    block = block_of(chunk)
    if block.size == 1:
        return None
    stop = chunk.prefix_tokens + chunk.cp_tokens
    span = Span(chunk.segments[0].sequence_id, chunk.prefix_tokens, stop, parts[-1][1], 0, chunk.group_id)
    by_pages, by_heads = divmod(rank - block.first, block.heads)
    heads = block.groups_of_heads()[by_pages]
    slices = tuple(_joined(_slices_of(chunk, each - block.first)) for each in heads)
    holdings = _holdings(tuple(parts), block.size // block.heads)
    return SharedPart(span, heads, slices, block.groups_of_pages()[by_heads], holdings, by_pages)


@lru_cache(maxsize=256)
def _holdings(parts: tuple[Run, ...], num_groups: int) -> tuple[OwnedTokens, ...]:
    """The tokens that each of the groups by pages keeps of a sequence that is cut into `parts`."""
    return tuple(
        OwnedTokens(_joined(run for start, stop in parts for run in _zigzag_slices(start, stop, group, num_groups)))
        for group in range(num_groups)
    )


def _slices_of(chunk: Chunk, member: int) -> list[Run]:
    """The slices of a shared chunk that the `member`-th rank of its block has."""
    group, place = divmod(member, chunk.cp_heads)
    start = chunk.prefix_tokens
    pair = _zigzag_slices(start, start + chunk.cp_tokens, group, chunk.cp_size // chunk.cp_heads)
    return [_cut(first, last, place, chunk.cp_heads) for first, last in pair]


def _zigzag_slices(start: int, stop: int, group: int, num_groups: int) -> list[Run]:
    """The zigzag slices of [start, stop) of the `group`-th group by pages: one from the front and one from behind."""
    if num_groups == 1:
        return [(start, stop)]
    return [_cut(start, stop, index, 2 * num_groups) for index in (group, 2 * num_groups - 1 - group)]


def _cut(start: int, stop: int, index: int, num_slices: int) -> Run:
    tokens = stop - start
    return start + tokens * index // num_slices, start + tokens * (index + 1) // num_slices


def _joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Runs that do not overlap, ascending, with those in one that touch."""
    joined: list[Run] = []
    for start, stop in sorted(runs):
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return tuple(joined)


def check_sharing(step: PlanStep, dp_rank: int) -> None:
    """Raise DataError of sharing that would deadlock processes, or mix up tokens.

    That is a rank that has other slices of the chunks of a block than are its own, or does something else with them
    than the first rank of it.
    """
    told, shared = None, dict[Block, set[int]]()
    for chunk in step.chunks.get(dp_rank, []):
        block = block_of(chunk)
        if block.size > 1:
            shared.setdefault(block, set()).add(chunk.chunk_id)
            found = [(segment.start, segment.end) for segment in chunk.segments]
            if dp_rank not in block.ranks or found != _slices_of(chunk, dp_rank - block.first):
                told = told or f"rank {dp_rank} has other slices of chunk {chunk.chunk_id} than are its own"
    for block, chunk_ids in shared.items():
        if _order(step, dp_rank, chunk_ids) != _order(step, block.first, chunk_ids):
            told = told or f"ranks {block.first} and {dp_rank} do not do the same with the chunks that they share"
    if told:
        raise DataError(told, where=f"step {step.step}", hint=VALIDATE_HINT)


def _order(step: PlanStep, rank: int, chunk_ids: set[int]) -> list[tuple[int, str, int, bool]]:
    """(stage, op, chunk, whether that keeps attention) of what all stages of a rank do with these chunks.

    Without weight halves of backwards, in which nothing is exchanged. Who attends again in a recompute exchanges keys
    and values.
    """
    keep = {chunk.chunk_id for chunk in step.chunks.get(rank, []) if chunk.kept_attention}
    return [
        (stage, action.op, action.chunk_id, action.chunk_id in keep)
        for (of_rank, stage), actions in step.actions.items()
        for action in actions
        if of_rank == rank and action.chunk_id in chunk_ids and action.op != "backward_weight"
    ]


class Activity(NamedTuple):
    """The activity of a process, in words, and the processes that it waits for in an exchange with them."""

    words: str = ""
    waits_for: tuple[int, ...] = ()


NO_ACTIVITY = Activity()


class Pending(NamedTuple):
    """`rows` on their way, [num_rows of all members, width]; those `sent` have to stay until then."""

    rows: Tensor
    sent: Tensor
    work: dist.Work

    def wait(self) -> Tensor:
        """Wait until they are here; on a GPU its stream waits, not the host."""
        self.work.wait()
        return self.rows


@dataclass
class Exchanges:
    """The `groups` of processes that share heads or pages with this one, by their places among the replicas of a stage.

    `at`: what is waited for, in words that go on with a sentence, and the processes that have to come.
    """

    layout: RankLayout = field(default_factory=RankLayout)
    groups: Mapping[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    at: Activity = NO_ACTIVITY

    @contextmanager
    def waiting(self, what: str, members: tuple[int, ...]) -> Iterator[None]:
        """Within the block this process waits for the others of `members`, and says for what."""
        others = [member for member in members if member != self.layout.replica]
        processes = tuple(self.layout.process_of(self.layout.stage, member) for member in others)
        self.at = Activity(f", {what} {named_processes(processes)}", processes)
        yield
        self.at = NO_ACTIVITY  # after an error it stays

    def all_to_all(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int], members: tuple[int, ...]
    ) -> Tensor:
        """Send each of `members` the next so many of `rows` [num_rows, width], and get as many as it says."""
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows, list(received), list(sent), group=self.groups[members])
        return out

    def gather(self, rows: Tensor, members: tuple[int, ...]) -> Pending:
        """Start to fetch the rows [num_rows, width] of all `members`, of whom each gives as many."""
        out = rows.new_empty(len(members) * rows.shape[0], rows.shape[1])
        return Pending(out, rows, all_gather(out, rows, group=self.groups[members], async_op=True))

    def reduce(self, rows: Tensor, members: tuple[int, ...]) -> Tensor:
        """The sum over `members` of what they have of this one's rows: [num_rows / members, width]."""
        out = rows.new_empty(rows.shape[0] // len(members), rows.shape[1])
        reduce_scatter(out, rows, group=self.groups[members])
        return out

    def use_once(self, device: torch.device) -> None:
        """Use every group once for all that it is for, at the same time; raise UsageError where its backend cannot."""
        for members in sorted(self.groups):
            rows, ones = torch.zeros(len(members), 1, device=device), [1] * len(members)
            try:
                self.all_to_all(rows, ones, ones, members)
                self.gather(rows[:1], members).wait()
                self.reduce(rows, members)
            except RuntimeError as error:
                if is_lost_connection(error):
                    raise
                raise UsageError(
                    f"processes cannot share sequences: the backend {dist.get_backend(self.groups[members])} does not "
                    f"exchange tensors on {device} ({str(error).splitlines()[0]})",
                    hint="build the plan with `--cp off`, or train with a torch that has gloo and NCCL",
                ) from error


def is_lost_connection(error: RuntimeError) -> bool:
    """True if the error is one that torch.distributed raises when another process is gone."""
    # gloo raises plain RuntimeErrors, with the place in its source
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def named_processes(processes: Sequence[int]) -> str:
    """Processes by their numbers, in words."""
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"
