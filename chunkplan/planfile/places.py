"""Steps, ranks and chunks of a plan by number, where somebody asks for one."""

from __future__ import annotations

from collections.abc import Iterator

from chunkplan.errors import DataError, UsageError
from chunkplan.planfile.plan import VALIDATE_HINT, Chunk, Plan, PlanStep


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
    """What a look at the rows of a step stumbles over: the table, the place and the words."""
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
