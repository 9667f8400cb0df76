"""What a shell completes where an option takes one of some names, or a step or rank of a plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import typer

from chunkplan.errors import ChunkplanError

#: Of more steps or ranks the first ones are offered.
_MOST_NUMBERS = 10_000

Completer = Callable[[str], list[str]]


def one_of(names: tuple[str, ...]) -> Completer:
    """Complete an option that takes one of `names`; the shell picks those that fit what is typed."""

    def complete(incomplete: str) -> list[str]:
        return list(names)

    return complete


def some_of(names: tuple[str, ...]) -> Completer:
    """Complete the last name of an option that takes several with commas between."""

    def complete(incomplete: str) -> list[str]:
        before, comma, _ = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names if name not in before.split(",")]

    return complete


def steps(context: typer.Context) -> list[str]:
    """Complete the steps of the plan that the command is about, as far as it has been typed."""
    return _numbers_below(context, "totals", "num_steps")


def ranks(context: typer.Context) -> list[str]:
    """Complete the data-parallel ranks of the plan that the command is about."""
    return _numbers_below(context, "config", "dp")


def _numbers_below(context: typer.Context, *entry: str) -> list[str]:
    """List the numbers from 0 up to one of the plan's manifest; nothing where no plan can be read."""
    from chunkplan.files.json_file import read_json
    from chunkplan.workspace import Workspace

    typed = context.params  # without what stands before an option whose value is missing, which is in `args`
    folder = next(iter(context.args), None) or typed.get("path") or typed.get("plan")
    folder = folder or Workspace.find(typed.get("workspace")).plan
    try:
        found = read_json(Path(folder) / "manifest.json", hint="")
        for name in entry:
            found = found[name]
        return [str(number) for number in range(min(int(found), _MOST_NUMBERS))]
    except (ChunkplanError, OSError, LookupError, TypeError, ValueError):
        return []
