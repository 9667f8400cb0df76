"""`chunkplan validate`: every invariant by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from chunkplan.errors import one_line
from chunkplan.quantities import counted
from chunkplan_cli.declared import JsonOption, WorkspaceOption
from chunkplan_cli.terminal import facts_grid, note, print_json, stdout, warn

if TYPE_CHECKING:
    from chunkplan.validation.validate import Validation

_WRITERS = {"analysis": "analyze", "plan": "build"}


def validate(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="PLAN|ANALYSIS", help="What to check. Default: WORKSPACE/plan.", show_default=False),
    ] = None,
    analysis: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The plan's analysis, if it is not where it was.")
    ] = None,
    workspace: WorkspaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check every invariant of the files of a plan or an analysis. Exit code 4 if one is broken.

    `inspect` shows what is in them, `diff` compares two; `parity` checks the gradients that the runtime computes.

    Example: chunkplan validate chunkplan-out/plan
    """
    from chunkplan.validation.validate import validate as run
    from chunkplan.workspace import Workspace

    result = run(path or Workspace.find(workspace).plan, analysis=analysis)
    if as_json:
        print_json(result.to_dict())
    else:
        _print(result)
    if not result.exact:
        warn("the lengths are estimated from bytes")
    if not result.ok:
        note(f"hint: {_hint(result)}")
        raise typer.Exit(4)
    if result.kind == "plan":
        note("a plan has no tokens: `chunkplan validate ANALYSIS` checks those")


def _hint(result: Validation) -> str:
    if not result.is_own_analysis:
        return "say where the plan's own analysis is with --analysis, or build the plan again from this one"
    return f"the {result.kind} was damaged or changed; write it again with `chunkplan {_WRITERS[result.kind]}`"


def _print(result: Validation) -> None:
    console = stdout()
    broken = {violation.invariant for violation in result.violations}
    outcome = f"{len(result.passed)} invariants hold" if result.ok else f"{counted(len(broken), 'invariant')} broken"
    console.print(one_line(f"{result.kind} {result.path}: {outcome}"), soft_wrap=True)
    for violation in result.violations:
        more = f" (and {violation.count - 1:,} more)" if violation.count > 1 else ""
        where = f"{violation.where}: " if violation.where else ""
        found = one_line(f"{violation.invariant}: {where}{violation.message}{more}")
        console.print(Text.assemble(("BROKEN  ", "bold red"), found), soft_wrap=True)
    checked = {"not checked": result.unchecked, "ok": result.passed}
    console.print(facts_grid((name, ", ".join(names)) for name, names in checked.items() if names))
