"""Where a command finds what it is about: what was given, or what lies in the workspace."""

from __future__ import annotations

import shlex
from pathlib import Path

from chunkplan.errors import UsageError
from chunkplan.workspace import Workspace


def find_analysis(given: Path | None, place: Workspace) -> Path:
    """Return the analysis that was given, or that of the workspace; raises UsageError where there is none."""
    if given is None and not place.analysis.exists():
        raise UsageError(
            f"there is no analysis in the workspace {place.root}", hint="run `chunkplan analyze DATA`, or give ANALYSIS"
        )
    return given or place.analysis


def find_plan(given: Path | None, place: Workspace, others: str) -> Path:
    """Return the plan, or whatever else was given in its place, or the plan of the workspace.

    Raises:
        UsageError: there is none; `others` is what may be given, as in "PLAN".
    """
    if given is None and not place.plan.exists():
        command = ["chunkplan", "build", "--auto", "--gpus", "8"]
        command += [] if place == Workspace.find() else ["--workspace", str(place.root)]
        raise UsageError(
            f"there is no plan in the workspace {place.root}", hint=f"run `{shlex.join(command)}`, or give {others}"
        )
    return given or place.plan
