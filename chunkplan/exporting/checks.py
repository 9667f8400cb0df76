"""Checks that an export's source is intact: content hashes, and the order and size of chunks."""

from __future__ import annotations

import pyarrow as pa

from chunkplan.errors import DataError, UsageError
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.hashing import combine_hashes
from chunkplan.planfile.plan import Plan
from chunkplan.planfile.plan_writer import hash_plan
from chunkplan.validation.checks_analysis import check_tokens
from chunkplan.validation.checks_chunks import first_violation
from chunkplan.validation.chunk_columns import ChunkColumns, Violation

PLAN_HINT = "`chunkplan validate` names what is wrong with the plan; build it again"
_ANALYSIS_HINT = "`chunkplan validate` names what is wrong with the analysis; analyze again"


def read_chunks(plan: Plan, analysis: Analysis) -> ChunkColumns:
    """The steps and chunks of a plan: those that it was built with, in order, none larger than it may be.

    Raises:
        DataError: a file is damaged or was changed.
    """
    tables = {"steps": plan.steps(), "chunks": plan.chunks()}
    check_plan(plan, tables)
    columns = ChunkColumns.of(plan, analysis, **tables)
    if found := first_violation("chunk-ids", columns) or first_violation("chunk-size", columns):
        raise _refusal(plan, found)
    return columns


def check_plan(plan: Plan, tables: dict[str, pa.Table]) -> None:
    """Check that the tables of a plan are those it was built with.

    Raises:
        UsageError: sequences begin in others, which no format says.
        DataError: one was changed.
    """
    if plan.config.share_prefixes:
        raise UsageError(
            "sequences of the plan share prefixes, which other trainers do not run",
            where=str(plan.path),
            hint="export a plan built without --share-prefixes",
        )
    stated = plan.manifest["content_hashes"]
    changed = [name for name, found in hash_plan(tables, plan.manifest["config"]).items() if found != stated[name]]
    if changed or combine_hashes(stated) != plan.content_hash:
        raise _refusal(plan, Violation("content-hash", _not_as_written(*changed[:1])))


def check_source(analysis: Analysis) -> None:
    """Check that the tokens are those that were analyzed, by reading all of them.

    Raises:
        DataError: they are not, or a file is damaged.
    """
    if combine_hashes(analysis.manifest["content_hashes"]) != analysis.content_hash:
        raise _refusal(analysis, Violation("content-hash", _not_as_written()))
    if found := next(check_tokens(analysis), None):
        raise _refusal(analysis, found)


def _not_as_written(name: str = "the hash of all") -> str:
    return f"{name} is not what the manifest was written for"


def _refusal(source: Plan | Analysis, found: Violation) -> DataError:
    where = ", ".join(filter(None, [str(source.path), found.where]))
    hint = PLAN_HINT if isinstance(source, Plan) else _ANALYSIS_HINT
    return DataError(f"{found.invariant}: {found.message}", where=where, hint=hint)
