"""Writes cli.md: every command with its arguments, options and an example, from the command line itself.

Run it after a change of a command or of the trainer's options: python docs/generate_cli.py [OUTPUT]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import typer.main
from page_writing import code, paragraph, table, write_page
from typer.models import CommandInfo

from chunkplan_cli.main import app
from chunkplan_runtime.training.options import make_parser

HEAD = """# The command line

`chunkplan COMMAND --help` shows what is here of each command. Data goes to the standard output, everything else
(progress, notes, warnings, errors) to the standard error; `--json` prints one complete document instead of a report.
Reports fit 80 columns and need no colour; `NO_COLOR=1` turns colours off. An error says where, what was found and what
was expected, and a `hint:` what to try next.

This page is written by `python docs/generate_cli.py` (`make docs`) from the commands themselves.
"""

EXIT_CODES = """## Exit codes

| exit code | of `chunkplan`, and of `python -m chunkplan_runtime.train` |
| --- | --- |
| 0 | done |
| 1 | a bug, a killed process; training with a full disk or bad numbers; of `parity`, gradients that are not exact |
| 2 | usage: an option or a path is wrong, or an extra is not installed |
| 3 | a file is not what it should be |
| 4 | `validate`: an invariant is broken |
| 130, 143 | interrupted by Ctrl-C; ended by SIGTERM. What was there before is still there |
"""

ENVIRONMENT = """## The environment

| variable | |
| --- | --- |
| `CHUNKPLAN_WORKSPACE` | the folder of the latest analysis and plan, where `--workspace` does not say |
| `CHUNKPLAN_TOKENIZER` | the tokenizer of `analyze`, where `--tokenizer` does not say |
| `NO_COLOR`, `COLUMNS` | no colours; the width of reports, which otherwise is that of the terminal |
"""

COMPLETION = """## Completion

`chunkplan --install-completion` teaches the shell that it is called from (bash, zsh, fish or PowerShell) to complete
commands, options, the names that an option may take, such as those of schedules, packers, hardware profiles and
formats, and the steps and ranks of a plan. `chunkplan --show-completion` prints what it would install. For another
shell than the one at hand:

```sh
_CHUNKPLAN_COMPLETE=source_zsh chunkplan > ~/.zfunc/_chunkplan
```
"""

TRAINER = """## python -m chunkplan_runtime.train

Trains a model with a plan, under torchrun on several processes. `--config FILE` takes a TOML file with the same names;
flags win. [training.md](training.md) says what the options do, [distributed.md](distributed.md) what is different on
several processes.
"""


def commands() -> Iterator[str]:
    """Yield a section for each command, in the order of `chunkplan --help`."""
    parsed = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for command in app.registered_commands:
        assert command.callback is not None
        yield from section(command, parsed[command.callback.__name__].params)


def section(command: CommandInfo, parameters: list[Any]) -> Iterator[str]:
    """Yield the words of a command, how it is called, what it takes, and its example."""
    assert command.callback is not None and command.help and command.epilog
    name = command.callback.__name__
    arguments = [parameter for parameter in parameters if parameter.param_type_name == "argument"]
    options = [parameter for parameter in parameters if parameter not in arguments and parameter.name != "help"]
    yield f"## chunkplan {name}"
    yield from map(paragraph, command.help.split("\n\n"))
    yield code(" ".join(["chunkplan", name, *map(argument, arguments), "[OPTIONS]"]), "text")
    if arguments:
        yield table(("argument", "what it is"), [(f"`{argument(each)}`", each.help) for each in arguments])
    yield table(("option", "what it does"), [option(each) for each in options])
    yield code(command.epilog.removeprefix("Example: "), "sh")


def argument(parameter: Any) -> str:
    """An argument as it is typed: with dots where there may be several, in brackets where it may be left out."""
    words = parameter.metavar + ("..." if parameter.nargs == -1 else "")
    return words if parameter.required else f"[{words}]"


def option(parameter: Any) -> tuple[str, str]:
    """How an option is typed; what it does and, where its words do not say, whether it is required or has a default."""
    words, default = parameter.help, parameter.default
    typed = " / ".join([*parameter.opts, *parameter.secondary_opts])
    if not parameter.is_flag:
        typed += f" {parameter.metavar}"
    if parameter.required:
        words += " Required."
    elif default is not None and default is not False and "Default:" not in words:
        words += f" Default: {default:g}." if isinstance(default, float) else f" Default: {default}."
    return f"`{typed}`", words


def trainer() -> Iterator[str]:
    """Yield the options of the trainer, group by group, and its example."""
    parser = make_parser(lambda error: 2)
    yield TRAINER
    for group in parser._action_groups:  # argparse has no public way to ask for them
        # An old name of an option, which is still taken, has no help.
        actions = [each for each in group._group_actions if each.dest != "help" and each.help != argparse.SUPPRESS]
        if actions:
            yield table((f"{group.title}", "what it does"), map(flag_row, actions))
    yield code(str(parser.epilog).removeprefix("Example: "), "sh")


def flag_row(action: argparse.Action) -> tuple[str, str]:
    """How an option of the trainer is typed, and what it does."""
    flags = " / ".join(action.option_strings)
    takes = "|".join(action.choices) if action.choices else action.metavar or ""
    return f"`{flags} {takes}`" if takes else f"`{flags}`", str(action.help)


if __name__ == "__main__":
    write_page("cli.md", [HEAD, EXIT_CODES, ENVIRONMENT, COMPLETION, *commands(), *trainer()])
