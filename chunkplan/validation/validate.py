"""Checks every invariant of a plan or an analysis by name: the Python twin of `chunkplan validate`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from chunkplan.errors import ChunkplanError
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.hashing import combine_hashes
from chunkplan.planfile.load import is_analysis, load_analysis, load_plan, load_plan_analysis
from chunkplan.planfile.plan import Plan
from chunkplan.planfile.plan_writer import hash_plan
from chunkplan.quantities import short_repr
from chunkplan.validation.checks_analysis import ANALYSIS_INVARIANTS, check_analysis
from chunkplan.validation.checks_chunks import CHUNK_CHECKS, STRUCTURAL, WITHOUT_ANALYSIS, first_violation
from chunkplan.validation.checks_schedule import SCHEDULE_CHECKS, peak_retained
from chunkplan.validation.chunk_columns import ChunkColumns, Violation
from chunkplan.validation.schedule_columns import ScheduleColumns, iter_blocks, match_rows

#: Every invariant of a plan, in the order it is checked.
PLAN_INVARIANTS = ("content-hash", *CHUNK_CHECKS, "schedule-rows", *SCHEDULE_CHECKS)


@dataclass(frozen=True)
class Validation:
    """Results of a validation; `unchecked` could not be checked because of another violation.

    `exact` is false where the lengths are estimated, `is_own_analysis` where a plan was built from another analysis
    than the one it would have been compared with.
    """

    path: str
    kind: str
    exact: bool
    content_hash: str
    passed: tuple[str, ...]
    violations: tuple[Violation, ...]
    unchecked: tuple[str, ...]
    is_own_analysis: bool = True

    __repr__ = short_repr

    @property
    def ok(self) -> bool:
        """True if every invariant holds."""
        return not self.violations and not self.unchecked

    def to_dict(self) -> dict[str, Any]:
        """The document that `chunkplan validate --json` prints."""
        return {"ok": self.ok, **asdict(self)}


def validate(path: str | Path, *, analysis: str | Path | None = None) -> Validation:
    """Check the plan or the analysis (or lengths file) at `path`; a plan together with its analysis.

    Example: `chunkplan.validate("plan")`

    Args:
        analysis: where the plan's analysis is, if it is no longer where the plan's manifest says.

    Raises:
        UsageError: there is nothing at `path`, or the plan's analysis is not there.
        DataError: a file cannot be read at all.
    """
    path = Path(path)
    if is_analysis(path):
        return _validate_analysis(load_analysis(path))
    plan = load_plan(path)
    return _validate_plan(plan, load_plan_analysis(plan, analysis))


def _validate_analysis(analysis: Analysis) -> Validation:
    violations = [] if analysis.path.is_file() else list(check_analysis(analysis))
    return _validation(analysis, analysis, "analysis", ANALYSIS_INVARIANTS, violations)


def _validate_plan(plan: Plan, analysis: Analysis) -> Validation:
    tables: dict[str, pa.Table] = {name: getattr(plan, name)() for name in plan.schemas}
    with ThreadPoolExecutor(1) as pool:
        hashes = pool.submit(hash_plan, tables, plan.manifest["config"])
        columns = ChunkColumns.of(plan, analysis, tables["steps"], tables["chunks"])
        is_own = plan.manifest["analysis"]["content_hash"] == analysis.content_hash
        violations, unchecked = _check_chunks(columns, is_own)
        if not unchecked:
            found, unchecked = _check_schedules(columns, ScheduleColumns.of(tables["schedule"]))
            violations += found
        violations = _check_hashes(plan, hashes.result()) + _check_manifest(plan, analysis, is_own) + violations
    if not is_own:
        message = f"the plan was built from another analysis than {analysis.path}"
        violations = [Violation("content-hash", message), *violations]
    result = _validation(plan, analysis, "plan", PLAN_INVARIANTS, violations, unchecked)
    return replace(result, is_own_analysis=is_own)


def _validation(
    checked: Plan | Analysis,
    analysis: Analysis,
    kind: str,
    invariants: Sequence[str],
    violations: Sequence[Violation],
    unchecked: Sequence[str] = (),
) -> Validation:
    broken = {violation.invariant for violation in violations}
    return Validation(
        path=str(checked.path),
        kind=kind,
        exact=analysis.is_exact,
        content_hash=checked.content_hash,
        passed=tuple(name for name in invariants if name not in broken and name not in unchecked),
        violations=tuple(violations),
        unchecked=tuple(name for name in unchecked if name not in broken),
    )


def _check_hashes(plan: Plan, hashes: dict[str, str]) -> list[Violation]:
    """The violations of content hashes: files that do not hold what the manifest was written for."""
    stated = plan.manifest["content_hashes"]
    violations = [
        Violation("content-hash", f"{name} is not what the manifest was written for")
        for name, actual in hashes.items()
        if actual != stated.get(name)
    ]
    if combine_hashes(stated) != plan.content_hash:
        violations.append(Violation("content-hash", "the plan's hash is not that of its files' hashes"))
    return violations


def _check_manifest(plan: Plan, analysis: Analysis, is_own: bool) -> list[Violation]:
    """Check entries that no hash covers: those on the plan's own analysis, and that its cost model is one."""
    stated = plan.manifest["analysis"]
    actual = {"exact": analysis.is_exact, "has_tokens": analysis.has_tokens, "sample": analysis.sample}
    violations = [
        Violation("totals", f"manifest says {name} = {stated[name]} of the analysis, which has {value}")
        for name, value in actual.items()
        if is_own and stated.get(name, value) != value
    ]
    try:
        _ = plan.cost
    except ChunkplanError as error:
        violations.append(Violation("totals", f"no cost model: {error.message}"))
    return violations


def _check_chunks(columns: ChunkColumns, is_own: bool) -> tuple[list[Violation], list[str]]:
    """The violations of steps and chunks, and the invariants that could not be looked at.

    That is because of them, or because the analysis is not the plan's own.
    """
    violations, unchecked = [], []
    names = [*CHUNK_CHECKS, "schedule-rows", *SCHEDULE_CHECKS]
    for position, name in enumerate(CHUNK_CHECKS):
        if not is_own and name not in WITHOUT_ANALYSIS:
            unchecked.append(name)
            continue
        if found := first_violation(name, columns):
            violations.append(found)
            if name in STRUCTURAL:
                return violations, unchecked + names[position + 1 :]
    return violations, unchecked if is_own else unchecked + names[len(CHUNK_CHECKS) :]


def _check_schedules(columns: ChunkColumns, schedule: ScheduleColumns) -> tuple[list[Violation], list[str]]:
    """One row for every (step, rank, stage), and what each rank's stages do: the first violation of each invariant.

    And the invariants that could not be looked at.
    """
    ranks, missing = match_rows(columns, schedule)
    violations = [missing] if missing else []
    if ranks is None:
        return violations, list(SCHEDULE_CHECKS)
    found: dict[str, Violation] = {}
    dp = columns.config.dp
    most, num_ranks = np.zeros((2, columns.num_steps), np.int64)
    for block in iter_blocks(ranks):
        for name, check in SCHEDULE_CHECKS.items():
            if name == "slots":  # in which all ranks of a step meet
                block = block.take(np.bincount(block.place // dp)[block.place // dp] == dp)
            if complaint := check(block):
                step, dp_rank = divmod(int(block.place[complaint.rank]), dp)
                found.setdefault(name, Violation(name, complaint.message, step, dp_rank, complaint.chunk_id))
                block = block.take(~complaint.bad)
        if block.num_ranks:
            np.maximum.at(most, block.place // dp, peak_retained(block))
            np.add.at(num_ranks, block.place // dp, 1)
    stated = columns.steps["peak_retained_tokens"]
    wrong = np.flatnonzero((num_ranks == dp) & (stated != most))
    if wrong.size and "memory" not in found:
        message = f"stages hold {most[wrong[0]]} tokens of activations at most, the step says {stated[wrong[0]]}"
        found["memory"] = Violation("memory", message, int(wrong[0]), count=wrong.size)
    return violations + [found[name] for name in SCHEDULE_CHECKS if name in found], []
