"""Writes cli.md: every command with its arguments, options and an example, from the command line itself.

Run it after a change of a command or of the trainer's options: python docs/generate_cli.py [OUTPUT]
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import typer.main
from page_writing import code, paragraph, table, write_page
from typer.models import CommandInfo

from chunkplan_cli.app import app
from chunkplan_runtime.train import make_parser

HEAD = """# The command line

Arguments and options of every command, each described once, in a sentence, with its default in brackets;
`chunkplan COMMAND --help` has those that are most used, `--help-all` says more. `make docs` writes this page
(`docs/generate_cli.py`). Data goes to the standard output, all else to the standard error. [errors.md](errors.md) has
exit codes and messages.
`chunkplan --install-completion` installs completion for bash, zsh, fish or PowerShell.

| variable | |
| --- | --- |
| `CHUNKPLAN_WORKSPACE` | the default of `--workspace` |
| `CHUNKPLAN_TOKENIZER` | the default of `--tokenizer` of `analyze` |
| `NO_COLOR`, `COLUMNS` | no colours; the width of reports |
"""

#: The commands that describe the options which several have, most important first; else the first that has one does.
HOMES = ("analyze", "build", "train")

SHARED = "## Options of most commands"

TRAINER = """## python -m chunkplan_runtime.train

Trains on [all processes that `torchrun` starts](training.md#several-processes). It takes the options of
[`chunkplan train`](#chunkplan-train) except for {others}; `--plan` and `--output` are required.
"""


class Row(NamedTuple):
    """An option: how it is typed, what it does in a sentence, its default in words ("" where there is none)."""

    typed: str
    words: str
    default: str

    @property
    def cells(self) -> tuple[str, str]:
        """The row of a table."""
        return f"`{self.typed}`", f"{self.words} [{self.default}]".strip() if self.default else self.words

    @property
    def key(self) -> tuple[str, str]:
        """What is the same of an option of several commands."""
        return self.typed, self.words


def sections() -> Iterator[str]:
    """Yield a section for each command, in the order of `chunkplan --help`; an option is described in one of them."""
    parsed = typer.main.get_command(app()).commands  # type: ignore[attr-defined]
    rows = {name: [*map(row, options_of(command))] for name, command in parsed.items()}
    described: dict[tuple[str, str], tuple[str, Row]] = {}
    takers: dict[tuple[str, str], list[str]] = {}
    for name in dict.fromkeys((*HOMES, *rows)):
        for each in rows[name]:
            described.setdefault(each.key, (name, each))
            takers.setdefault(each.key, []).append(name)
    most = {key: described.pop(key)[1] for key, names in takers.items() if 2 * len(names) > len(rows)}
    yield SHARED
    yield table(
        ("option", "what it does", "not of"),
        [
            (*each.cells, ", ".join(f"`{name}`" for name in rows if name not in takers[key]))
            for key, each in most.items()
        ],
    )
    for command in app().registered_commands:
        assert command.callback is not None
        name = command.callback.__name__
        yield from section(command, parsed[name], [each for each in rows[name] if each.key not in most], described)


def section(
    command: CommandInfo, parsed: Any, rows: list[Row], described: dict[tuple[str, str], tuple[str, Row]]
) -> Iterator[str]:
    """Yield the words of a command, its arguments and options, and its example."""
    assert command.help and command.epilog
    arguments = [parameter for parameter in parsed.params if parameter.param_type_name == "argument"]
    yield f"## chunkplan {parsed.name}"
    yield paragraph(f"{sentence(command.help)}.")
    own = [each.cells for each in rows if described[each.key][0] == parsed.name]
    yield table(("", ""), [(f"`{argument(each)}`", sentence(each.help)) for each in arguments] + own)
    others: dict[str, list[str]] = {}
    for each in rows:
        home, same = described[each.key]
        if home != parsed.name:
            others.setdefault(home, []).append(in_passing(each, same))
    for home, options in others.items():
        yield paragraph(f"And of [`{home}`](#chunkplan-{home}): {', '.join(options)}.")
    yield code(command.epilog.removeprefix("Example: "), "sh")


def in_passing(own: Row, same: Row) -> str:
    """An option that another command describes, with its default where it is not the same."""
    flag = own.typed.split()[0]
    default = own.default or ("off" if "/ --no-" in own.typed else "none")
    return f"`{flag}`" if own.default == same.default else f"`{flag}` (default: {default})"


def argument(parameter: Any) -> str:
    """An argument as it is typed: with dots where there may be several, in brackets where it may be left out."""
    words = parameter.metavar + ("..." if parameter.nargs == -1 else "")
    return words if parameter.required else f"[{words}]"


def options_of(command: Any) -> list[Any]:
    """The options of a command, but for its help."""
    return [each for each in command.params if each.param_type_name == "option" and each.name != "help"]


def row(parameter: Any) -> Row:
    """How an option is typed; what it does and, where its words do not say, whether it is required or has a default."""
    words, _, default = parameter.help.partition("Default: ")
    words = sentence(words)
    typed = " / ".join([*parameter.opts, *parameter.secondary_opts])
    if not parameter.is_flag:
        typed += f" {parameter.metavar}"
    if parameter.required:
        words += ", required"
    if not default and parameter.default is not None and parameter.default is not False:
        default = f"{parameter.default:g}" if isinstance(parameter.default, float) else str(parameter.default)
    return Row(typed, words, sentence(default))


def sentence(text: str) -> str:
    """The first sentence of `text`, without its dot; up to a semicolon, if no list of values goes on behind it."""
    first = re.split(r"(?<=\.)\s", text.strip())[0].removesuffix(".")
    return first if ": " in first else first.partition("; ")[0]


def trainer() -> Iterator[str]:
    """Yield what the trainer takes beside `chunkplan train`, whose options it has, and its example."""
    parser = make_parser()
    actions = [each for each in parser._actions if each.dest != "help"]
    command = options_of(typer.main.get_command(app()).commands["train"])  # type: ignore[attr-defined]
    flags = {flag for each in command for flag in (*each.opts, *each.secondary_opts)}
    also_here = {flag for each in actions for flag in each.option_strings}
    assert also_here <= flags
    yield TRAINER.format(others=" and ".join(f"`{flag}`" for flag in sorted(flags - also_here)))
    yield code(str(parser.epilog).removeprefix("Example: "), "sh")


if __name__ == "__main__":
    write_page("cli.md", [HEAD, *sections(), *trainer()])
