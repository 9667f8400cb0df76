"""Steps, ranks and chunks of a plan by number, where somebody asks for one."""

from __future__ import annotations

from chunkplan.errors import DataError, UsageError
from chunkplan.planfile.plan import Chunk, Plan, PlanStep


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
    return found


def check_rank(plan: Plan, rank: int) -> None:
    """Refuse what is no data-parallel rank of `plan`.

    Raises:
        UsageError: there is no such rank.
    """
    if not 0 <= rank < plan.config["dp"]:
        raise UsageError(f"there is no rank {rank}", hint=f"the plan has ranks 0 to {plan.config['dp'] - 1}")


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
