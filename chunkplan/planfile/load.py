"""Opens what a path names: an analysis, a bare file of lengths, or a plan."""

from __future__ import annotations

from pathlib import Path

from chunkplan.errors import DataError, UsageError
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.folder import MANIFEST
from chunkplan.planfile.lengths_file import load_lengths
from chunkplan.planfile.manifest import read_manifest
from chunkplan.planfile.plan import Plan
from chunkplan.planfile.schema import SEQUENCES
from chunkplan.planfile.tables import read_columns


def load_analysis(path: str | Path) -> Analysis:
    """Open an analysis folder, or a bare file of lengths (see `lengths_file.load_lengths`).

    Raises:
        UsageError: there is nothing at `path`.
        DataError: what is there is not an analysis, is damaged, or was written by a newer schema.
    """
    path = Path(path)
    if path.is_file() or (not path.exists() and path.suffix in (".npy", ".parquet")):
        return load_lengths(path)
    manifest = read_manifest(path, "analysis")
    columns, found = read_columns(path / "sequences.parquet", SEQUENCES)
    del columns["sequence_id"]
    if manifest["content_hashes"]["sequences"] != found:
        raise DataError(
            "the lengths are not those the manifest was written for (content hash differs)",
            where=str(path / "sequences.parquet"),
            hint="analyze again",
        )
    if bool(manifest["tokens"]) != ("tokens" in manifest["content_hashes"]):
        raise DataError(
            "`tokens` names no part files, but there is a hash of tokens, or the other way round",
            where=str(path / MANIFEST),
            hint="analyze again",
        )
    return Analysis(
        path=path,
        content_hash=manifest["content_hash"],
        manifest=manifest,
        **columns,
    )


def load_plan_analysis(plan: Plan, analysis: str | Path | None = None) -> Analysis:
    """The analysis a plan was built from: at `analysis`, or where the plan says it was.

    Raises:
        UsageError: it is not there.
        DataError: what is there is not an analysis, or is damaged.
    """
    if analysis is None and not plan.analysis_path.exists():
        raise UsageError(
            f"the analysis of the plan {plan.path} is not at {plan.analysis_path}",
            hint="say where it is with --analysis, or build the plan again",
        )
    return load_analysis(plan.analysis_path if analysis is None else analysis)


def load_plan(path: str | Path) -> Plan:
    """Open a plan folder. Only the manifest is read; steps, chunks and actions are read when asked for.

    Raises:
        UsageError: there is no plan at `path`.
        DataError: what is there is not a plan, or was written by a newer schema.
    """
    path = Path(path)
    manifest = read_manifest(path, "plan")
    for name in ("steps.parquet", "chunks.parquet", "schedule.parquet"):
        if not (path / name).is_file():
            raise DataError(f"{name} is missing", where=str(path), hint="build the plan again")
    return Plan(path=path, manifest=manifest)


def evaluation_folder(plan: Path) -> Path:
    """Where the plan of what a build to `plan` holds out goes."""
    return plan.with_name(f"{plan.name}-eval")


def load_held_out(plan: Plan) -> Plan | None:
    """The plan of what was held out of `plan`, if it was and lies where the build left it.

    Raises:
        DataError: what lies there is not that.
    """
    folder = evaluation_folder(plan.path.resolve())
    if plan.config["holdout"] is None or plan.config["part"] != "train" or not folder.is_dir():
        return None
    found = load_plan(folder)
    if found.config["part"] != "eval" or found.config["holdout"] != plan.config["holdout"]:
        raise DataError(
            f"not what {plan.path} holds out", where=str(folder), hint="build the plan again, or name the one to take"
        )
    return found
