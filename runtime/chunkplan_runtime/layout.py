"""Which process does what: data-parallel replicas of a pipeline, and the rows of a plan that each one serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby

from chunkplan.errors import UsageError
from chunkplan.layers import STRAIGHT, StagePlacement, model_stage_of, stage_of
from chunkplan.planfile.plan import Plan
from chunkplan.quantities import counted
from chunkplan_runtime.sharing import used_blocks


@dataclass(frozen=True)
class RankLayout:
    """A process, by its `rank`, among dp x pp of them.

    Stages are outermost: ranks 0 to dp - 1 are the first stage. The replicas of a stage send each other all weights and
    gradients, which is more than what goes from stage to stage, so they lie side by side, on one machine where they
    fit. `placement`: which parts of the model each stage has.
    """

    dp: int = 1
    pp: int = 1
    rank: int = 0
    placement: StagePlacement = STRAIGHT

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return self.dp * self.pp

    @property
    def stage(self) -> int:
        """This process's stage of the pipeline."""
        return self.rank // self.dp

    @property
    def dp_rank(self) -> int:
        """Which of the dp pipelines this process is in: the index of its replica of the stage."""
        return self.rank % self.dp

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

    def rank_of(self, stage: int, dp_rank: int) -> int:
        """The rank of the process that has a stage of a pipeline."""
        return stage * self.dp + dp_rank

    def replicas_by_machine(self, stage: int, machine_size: int) -> list[list[int]]:
        """The ranks of the replicas of a stage, those on each machine of `machine_size` processes.

        Nothing where they lie on one machine, are not equally many on each, or are alone there.
        """
        ranks = range(stage * self.dp, (stage + 1) * self.dp)
        rows = [list(row) for _, row in groupby(ranks, lambda rank: rank // machine_size)]
        return rows if len(rows) > 1 and {1} != {len(row) for row in rows} == {len(rows[0])} else []

    def rows(self, plan_dp: int) -> list[range]:
        """By pipeline, which data-parallel ranks of a plan for `plan_dp` of them it runs, one after another."""
        share = plan_dp // self.dp
        return [range(dp_rank * share, (dp_rank + 1) * share) for dp_rank in range(self.dp)]

    def dp_ranks(self, plan_dp: int) -> range:
        """The data-parallel ranks of a plan that this process's pipeline runs."""
        return self.rows(plan_dp)[self.dp_rank]

    def describe(self, rank: int | None = None) -> str:
        """A process in words, this one or that of `rank`, as messages name it."""
        other = self if rank is None else replace(self, rank=rank)
        place = f"stage {other.stage} of pipeline {other.dp_rank}" if self.pp > 1 else "data parallel"
        return f"process {other.rank} of {self.world_size} ({place})"


def one_pipeline(plan: Plan) -> RankLayout:
    """The layout of one process for each stage of a plan, as the first one sees it."""
    config = plan.config
    return RankLayout(1, config.pp, 0, config.placement)


def _by_torchrun(numbers: list[int]) -> str:
    """How a run is started on one of `numbers` of processes."""
    processes = "process" if numbers == [1] else "processes"
    return f"`torchrun --nproc-per-node N` with {' or '.join(map(str, numbers))} {processes} in all"


def choose_layout(
    plan: Plan, world_size: int, rank: int, how_to_start: Callable[[list[int]], str] = _by_torchrun
) -> RankLayout:
    """The layout of `world_size` processes for a plan, as seen from `rank`.

    `how_to_start` says what is typed for one of the numbers of processes that fit, for a hint.

    Raises:
        UsageError: they cannot share the plan's stages and data-parallel ranks evenly, or the sequences that some of
            these ranks share.
        DataError: the plan is damaged.
    """
    pp, plan_dp = plan.config.pp, plan.config.dp
    dividing = [dp for dp in range(1, plan_dp + 1) if plan_dp % dp == 0]
    blocks = used_blocks(plan)
    fitting = [pp * dp for dp in dividing if all(block.fits(plan_dp // dp) for block in blocks)]
    if world_size in fitting:
        return replace(one_pipeline(plan), dp=world_size // pp, rank=rank)
    if world_size % pp == 0 and world_size // pp in dividing:
        num_ranks = plan_dp // (world_size // pp)
        uneven = next(block for block in blocks if not block.fits(num_ranks))
        message = (
            f"processes of {num_ranks} data-parallel ranks each cannot share what ranks {uneven.first} to "
            f"{uneven.first + uneven.size - 1} of the plan share, {uneven.heads} of them by heads, evenly"
        )
    else:
        shape = counted(plan_dp, "data-parallel rank") + (f" of {pp} stages each" if pp > 1 else "")
        message = f"{world_size} {'process' if world_size == 1 else 'processes'} cannot share the plan's {shape} evenly"
    raise UsageError(
        message,
        where=str(plan.path),
        hint=f"{how_to_start(fitting)}, or build the plan with another --dp" + (" or --pp" if pp > 1 else ""),
    )
