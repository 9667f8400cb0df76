"""Which process does what: its stage, its pipeline, and which ranks of a plan that runs (see docs/concepts.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from chunkplan.errors import UsageError
from chunkplan.layers import STRAIGHT, StagePlacement, model_stage_of, stage_of
from chunkplan.planfile.likeness import how_to_build_like
from chunkplan.planfile.measured import ranks_of
from chunkplan.planfile.plan import Chunk, Plan
from chunkplan.planfile.schema import SHARED_CHUNKS
from chunkplan.planfile.tables import read_table
from chunkplan.quantities import counted


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
        """Those that share heads: each has all the tokens that they hold together for some of the heads."""
        return [tuple(range(start, start + self.heads)) for start in self.ranks[:: self.heads]]

    def groups_of_pages(self) -> list[tuple[int, ...]]:
        """Those that share pages, and have the same heads."""
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
    """How the ranks of a plan lie on dp x pp processes, as the one with the number `process` sees it.

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
        """How many processes there are."""
        return self.dp * self.pp

    @property
    def stage(self) -> int:
        """This process's stage of the pipeline."""
        return self.process // self.dp

    @property
    def replica(self) -> int:
        """Which replica of its stage this process has, and so in which of the dp pipelines it is."""
        return self.process % self.dp

    @property
    def virtual_stages(self) -> int:
        """How many parts of the model each stage has."""
        return self.placement.virtual_stages

    @property
    def num_model_stages(self) -> int:
        """How many parts a model is cut into, over all stages."""
        return self.pp * self.virtual_stages

    @property
    def is_first(self) -> bool:
        """Whether this stage has the first model stage, with the embeddings."""
        return self.stage == self.stage_of(0)

    @property
    def is_last(self) -> bool:
        """Whether this stage has the last model stage, with the head."""
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
        """By pipeline, which ranks of a plan for `plan_dp` of them it runs, one after another."""
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

    `like` and `then`: see `refuse_other_replicas`.

    Raises:
        UsageError: they cannot share the plan's stages and data-parallel ranks evenly, or see `refuse_other_replicas`.
        DataError: the plan is damaged.
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
