"""Flags of a command that come from configurations: their names, groups, help and completion are the fields'.

Also finds the subject of a command: the given path, or that in the workspace.
"""

from __future__ import annotations

import functools
import inspect
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from chunkplan.cost.model_config import config_file
from chunkplan.errors import ChunkplanError, UsageError
from chunkplan.options import Advanced, Config, Option, Options, options_of
from chunkplan.tuning.options import TuneOptions
from chunkplan.workspace import Workspace

# Shell completion for options that take one of some names, or a step or rank of a plan.


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


# Combined meaning of the options of a model and of GPUs.


def tune_options(asked: CliValues) -> TuneOptions:
    """Make the options of a tuning; what is not given takes its default."""
    if "gpus" in asked and not asked.keys().isdisjoint({"dp", "pp"}):
        raise UsageError("--gpus and --dp, --pp exclude each other", hint="give --gpus without them, or the others")
    return TuneOptions(**asked)


def files_read(machine: CliValues) -> tuple[Path | str, ...]:
    """Return the files behind a model and a hardware profile that were given, which nothing may be written over."""
    model, hardware = machine.typed.get("shape"), machine.typed.get("hardware")
    return (*([config_file(Path(model))] if model else []), *([hardware] if hardware else []))


#: The panel of the help for options that are of no other.
OPTIONS = "Options"

Command = TypeVar("Command", bound=Callable[..., None])


class CliValues(dict[str, Any]):
    """Values that were given, by field of a configuration, which checks them; what was not given is not in it.

    `typed` has the text of each that was typed as one.
    """

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        super().__init__(values or {})
        self.typed: dict[str, str] = {}


def takes(
    *advanced: str, **configs: type[Options] | tuple[type[Options], tuple[str, ...]]
) -> Callable[[Command], Command]:
    """Give a command the flags of configurations; all of those named in `advanced` are for `--help-all`.

    Each name is that of a parameter of the command, which gets the `CliValues` that were given. Its value here is
    a configuration, or one with the names of those of its fields that are taken.
    """

    def decorate(command: Command) -> Command:
        taken = {name: _declared(config) for name, config in configs.items()}
        parameters: list[inspect.Parameter] = []
        hints = get_type_hints(command, include_extras=True)
        for parameter in inspect.signature(command).parameters.values():
            if parameter.name not in taken:
                parameters.append(parameter.replace(annotation=hints[parameter.name]))
                continue
            for one in taken[parameter.name]:
                is_advanced = parameter.name in advanced
                parameters += _parameters(replace(one, group=Advanced(one.group)) if is_advanced else one)

        @functools.wraps(command)
        def run(**values: Any) -> None:
            flags: dict[str, str] = {}
            for name, options in taken.items():
                values[name] = CliValues()
                for one in options:
                    typed = values.pop(one.name)
                    given = [flag for flag in one.also if values.pop(_variable(flag))]
                    if typed in (None, []) and not given:
                        continue
                    found = _value(one, typed, given)
                    for field in found:
                        if flags.setdefault(field, one.flag) != one.flag:
                            raise _exclude([flags[field], one.flag])
                    values[name].update(found)
                    if isinstance(typed, str):
                        values[name].typed[one.name] = typed
            command(**values)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run  # type: ignore[return-value]

    return decorate


def make(config: type[Config], given: CliValues) -> Config:
    """The configuration of the values that were given; raises UsageError where one that is required was not."""
    for name, one in options_of(config).items():
        if one.is_required and name not in given:
            raise UsageError(f"{one.flag} is missing", hint=one.hint)
    return config(**given)


def _declared(config: type[Options] | tuple[type[Options], tuple[str, ...]]) -> list[Option]:
    if isinstance(config, tuple):
        return [options_of(config[0])[name] for name in config[1]]
    return [one for one in options_of(config).values() if one.flag]


def _value(one: Option, typed: Any, given: list[str]) -> CliValues:
    """Parse the value typed for an option; several fields where the flag fills several."""
    if given:
        if len(given) > 1 or typed not in (None, []):
            both = [*given, *([one.flag] if typed not in (None, []) else [])]
            raise _exclude(both)
        return CliValues({one.name: one.also[given[0]]})
    if isinstance(typed, bool):
        return CliValues({one.name: not one.default if one.flag.startswith("--no-") else typed})
    value = one.read(typed)
    return CliValues(value if one.fills else {one.name: value})


def _exclude(flags: list[str]) -> UsageError:
    return UsageError(f"{' and '.join(flags[:2])} exclude each other", hint="leave one of them out")


def _parameters(one: Option) -> list[inspect.Parameter]:
    """The flag of an option, and those that stand for one of its values."""
    domain = one.domain
    is_switch = domain.metavar == ""
    flags = [f"{one.flag}/--no-{one.flag[2:]}" if is_switch and not one.flag.startswith("--no-") else one.flag]
    kind: Any = bool if is_switch else list[str] if domain.is_repeated else str
    shown = f" Default: {one.default_words}." if one.default_words else " Required." if one.is_required else ""
    declared = typer.Option(
        *flags,
        help=one.help + shown,
        metavar=domain.metavar or None,
        rich_help_panel=one.group,
        show_default=False,
        autocompletion=_completer(one),
    )
    found = [_parameter(one.name, Annotated[kind | None, declared], None)]
    for flag, value in one.also.items():
        words = typer.Option(flag, help=f"The same as {one.flag} {value}.", rich_help_panel=one.group)
        found.append(_parameter(_variable(flag), Annotated[bool, words], False))
    return found


def _completer(one: Option) -> Callable[[str], list[str]] | None:
    names = one.domain.choices or one.domain.completed
    if not names:
        return None
    return some_of(names) if one.domain.metavar.endswith("...") else one_of(names)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _variable(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


#: Arguments and options of many commands.
AnalysisArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="ANALYSIS",
        help="An analysis, or a .parquet/.npy file with one column of lengths. Default: WORKSPACE/analysis.",
        show_default=False,
    ),
]
WorkspaceOption = Annotated[
    Path | None, typer.Option("--workspace", metavar="DIR", help="Default: CHUNKPLAN_WORKSPACE, then ./chunkplan-out.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of the report.")]


def output_option(help: str, *, metavar: str = "DIR") -> Any:
    """The `--output` of a command, whose help says what is written and where it goes without it."""
    return typer.Option("--output", metavar=metavar, help=help)


def find_analysis(given: Path | None, place: Workspace) -> Path:
    """Return the analysis that was given, or that of the workspace; raises UsageError where there is none."""
    if given is None and not place.analysis.exists():
        command = shlex.join(["chunkplan", "analyze", "DATA", *_workspace_flags(place)])
        raise UsageError(
            f"there is no analysis in the workspace {place.root}", hint=f"run `{command}`, or give ANALYSIS"
        )
    return given or place.analysis


def find_plan(given: Path | None, place: Workspace, others: str) -> Path:
    """Return the given path, or the plan of the workspace.

    Raises:
        UsageError: there is none; `others` is what may be given, as in "PLAN".
    """
    if given is None and not place.plan.exists():
        command = shlex.join(["chunkplan", "build", "--auto", "--gpus", "8", *_workspace_flags(place)])
        raise UsageError(f"there is no plan in the workspace {place.root}", hint=f"run `{command}`, or give {others}")
    return given or place.plan


def _workspace_flags(place: Workspace) -> list[str]:
    return [] if place == Workspace.find() else ["--workspace", str(place.root)]
