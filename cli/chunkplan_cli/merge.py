"""`chunkplan merge`: shards of an analysis -> the analysis."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chunkplan_cli.analysis_report import describe_old, print_analysis, print_next
from chunkplan_cli.declared import JsonOption, WorkspaceOption, output_option


def merge(
    shards: Annotated[list[Path], typer.Argument(metavar="SHARD", help="The folders of all N shards, in any order.")],
    output: Annotated[Path | None, output_option("Where to write the analysis. Default: WORKSPACE/analysis.")] = None,
    workspace: WorkspaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Join the shards of an analysis: the result is the same as from one machine.

    Each shard comes from `chunkplan analyze DATA --shard I/N` with the same data and options.

    Example: chunkplan merge chunkplan-out/shard-*-of-8
    """
    from chunkplan.intake.shard import merge as run
    from chunkplan.workspace import Workspace

    target = output or Workspace.find(workspace).analysis
    replaced = describe_old(target)
    print_analysis(run(shards, target), as_json=as_json, replaced=replaced)
    print_next(output, workspace)
