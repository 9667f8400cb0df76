"""`chunkplan diff`: what two plans, or two analyses, have in common and what not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chunkplan_cli.declared import JsonOption
from chunkplan_cli.terminal import print_json, stdout


def diff(
    before: Annotated[
        Path, typer.Argument(metavar="BEFORE", help="A plan, or an analysis: its folder or a file of lengths.")
    ],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help="What to compare it with, of the same kind.")],
    as_json: JsonOption = False,
) -> None:
    """Compare two plans, or two analyses: settings, data and results, side by side.

    The exit code is 0 also where they differ. `inspect` shows one of them; `validate` checks its content hash.

    Example: chunkplan diff chunkplan-out/plan other/plan
    """
    from chunkplan.reporting.difference import diff as run
    from chunkplan_cli.difference_report import print_difference

    difference = run(before, after)
    if as_json:
        print_json(difference.to_dict())
    else:
        print_difference(stdout(), difference)
