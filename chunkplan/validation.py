"""Checks every invariant of a plan or an analysis by name: the Python twin of `chunkplan validate`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chunkplan.errors import DataError
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.checks_analysis import ANALYSIS_INVARIANTS, check_analysis
from chunkplan.planfile.checks_chunks import CHUNK_CHECKS, STRUCTURAL, ChunkColumns
from chunkplan.planfile.checks_schedule import SCHEDULE_CHECKS, RankSchedule
from chunkplan.planfile.folder import MANIFEST
from chunkplan.planfile.hashing import combine_hashes
from chunkplan.planfile.load import load_analysis, load_plan, load_plan_analysis
from chunkplan.planfile.plan import Plan
from chunkplan.planfile.plan_writer import hash_plan
from chunkplan.planfile.violation import Violation

#: Every invariant of a plan, in the order it is checked.
PLAN_INVARIANTS = ("content-hash", *CHUNK_CHECKS, "schedule-rows", *SCHEDULE_CHECKS)


@dataclass(frozen=True)
class Validation:
    """What was looked at and what was found. `unchecked` could not be looked at because of another violation.

    `exact` is false where the lengths are estimated.
    """

    path: str
    kind: str
    exact: bool
    content_hash: str
    passed: tuple[str, ...]
    violations: tuple[Violation, ...]
    unchecked: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether every invariant holds."""
        return not self.violations and not self.unchecked

    def to_dict(self) -> dict[str, Any]:
        """As one JSON document."""
        return {"ok": self.ok, **asdict(self)}


def validate(path: str | Path, *, analysis: str | Path | None = None) -> Validation:
    """Check the plan or the analysis (or lengths file) at `path`; a plan together with its analysis.

    Args:
        analysis: where the plan's analysis is, if it is no longer where the plan's manifest says.

    Raises:
        UsageError: there is nothing at `path`, or the plan's analysis is not there.
        DataError: a file cannot be read at all.
    """
    path = Path(path)
    if path.is_file() or is_analysis(path):
        return _validate_analysis(load_analysis(path))
    plan = load_plan(path)
    return _validate_plan(plan, load_plan_analysis(plan, analysis))


def is_analysis(path: Path) -> bool:
    """Whether a folder looks like an analysis rather than a plan."""
    return (path / "sequences.parquet").exists() and (path / MANIFEST).exists()


def _validate_analysis(analysis: Analysis) -> Validation:
    violations = [] if analysis.path.is_file() else list(check_analysis(analysis))
    return _validation(analysis.path, "analysis", analysis, analysis.content_hash, ANALYSIS_INVARIANTS, violations, [])


def _validate_plan(plan: Plan, analysis: Analysis) -> Validation:
    violations = _check_hashes(plan, analysis)
    unchecked: list[str] = []
    columns = ChunkColumns.read(plan, analysis)
    names = list(CHUNK_CHECKS)
    for position, name in enumerate(names):
        found = CHUNK_CHECKS[name](columns)
        if found:
            violations.append(found)
            if name in STRUCTURAL:
                unchecked = [*names[position + 1 :], "schedule-rows", *SCHEDULE_CHECKS]
                break
    if not unchecked:
        try:
            violations += _check_schedules(plan)
        except DataError as error:  # rows of a step are missing or out of order
            violations.append(Violation("schedule-rows", error.message))
            unchecked = list(SCHEDULE_CHECKS)
    return _validation(plan.path, "plan", analysis, plan.content_hash, PLAN_INVARIANTS, violations, unchecked)


def _validation(
    path: Path,
    kind: str,
    analysis: Analysis,
    content_hash: str,
    invariants: tuple[str, ...],
    violations: list[Violation],
    unchecked: list[str],
) -> Validation:
    broken = {violation.invariant for violation in violations}
    return Validation(
        path=str(path),
        kind=kind,
        exact=analysis.is_exact,
        content_hash=content_hash,
        passed=tuple(name for name in invariants if name not in broken and name not in unchecked),
        violations=tuple(violations),
        unchecked=tuple(unchecked),
    )


def _check_hashes(plan: Plan, analysis: Analysis) -> list[Violation]:
    """The files hold what the manifest was written for, and the analysis is the one the plan was built from."""
    stated = plan.manifest["content_hashes"]
    tables = {"steps": plan.steps(), "chunks": plan.chunks(), "schedule": plan.schedule()}
    violations = [
        Violation("content-hash", f"{name} is not what the manifest was written for")
        for name, actual in hash_plan(tables, plan.config).items()
        if actual != stated[name]
    ]
    if combine_hashes(stated) != plan.content_hash:
        violations.append(Violation("content-hash", "the plan's hash is not that of its files' hashes"))
    if plan.manifest["analysis"]["content_hash"] != analysis.content_hash:
        violations.append(Violation("content-hash", f"the plan was built from another analysis than {analysis.path}"))
    return violations


def _check_schedules(plan: Plan) -> list[Violation]:
    """One schedule row for every (step, rank, stage), and what each rank's stages do; the first violation of each."""
    found: dict[str, Violation] = {}
    config = plan.config
    num_places = config["dp"] * config["pp"]
    num_rows = 0
    for step in plan.iter_steps():
        num_rows += len(step.actions)
        astray = [rank for rank, stage in step.actions if not (0 <= rank < config["dp"] and 0 <= stage < config["pp"])]
        if astray or len(step.actions) != num_places:
            absent = (rank for rank in step.chunks if any((rank, s) not in step.actions for s in range(config["pp"])))
            rank = astray[0] if astray else next(absent)
            found.setdefault("schedule-rows", Violation("schedule-rows", "rows missing or extra", step.step, rank))
            continue
        for rank, chunks in step.chunks.items():
            stages = [step.actions[rank, stage] for stage in range(config["pp"])]
            schedule = RankSchedule(chunks=chunks, stages=stages, config=config)
            for name, check in SCHEDULE_CHECKS.items():
                complaint = check(schedule)
                if complaint:
                    found.setdefault(name, Violation(name, complaint[0], step.step, rank, complaint[1]))
                    break
    if num_rows != plan.schedule().num_rows:
        found.setdefault(
            "schedule-rows", Violation("schedule-rows", "rows come twice, or for steps that are not there")
        )
    return list(found.values())
