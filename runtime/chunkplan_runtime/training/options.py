"""Reads a `TrainConfig` from flags and a TOML file. Both are made from its fields: same names, flags win."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from chunkplan.errors import ChunkplanError, UsageError
from chunkplan.options import Option, options_of, read_toml
from chunkplan.visible import one_line
from chunkplan_runtime.training.config import RENAMED, TrainConfig

_EXAMPLE = """Example: torchrun --nproc-per-node 8 -m chunkplan_runtime.train \\
  --plan chunkplan-out/plan --model NAME --output chunkplan-out/run"""


def read_options(arguments: list[str] | None, report: Callable[[ChunkplanError], int]) -> TrainConfig:
    """The configuration that `arguments` (default: those of the process) and the file of their `--config` say.

    `report` is called with what does not parse, and gives the exit code to leave with.

    Raises:
        UsageError: an option is missing, or not what it may be; the TOML file is not there.
        DataError: the TOML file is damaged, or an entry is unknown or of another type.
    """
    try:
        given = vars(make_parser(report).parse_args(arguments))
    except UsageError as error:  # of a value that an option cannot have
        sys.exit(report(error))
    file = given.pop("config", None)
    in_file = read_toml(file, TrainConfig, renamed=RENAMED) if file is not None else {}
    values = {**_by_new_names(in_file, f"{file}: ", ""), **_by_new_names(given, "", "--")}
    for name, one in options_of(TrainConfig).items():
        if one.is_required and name not in values:
            raise UsageError(f"{one.flag} is missing", hint="give it as a flag, or in the file of --config")
    return TrainConfig(**values)


def _by_new_names(values: dict[str, Any], where: str, dashes: str) -> dict[str, Any]:
    """`values` of flags, or of a file, with those of old names under the new ones; a note on stderr names these.

    Raises:
        UsageError: a value is given by both names.
    """
    values = dict(values)
    for old, new in RENAMED.items():
        field = new.replace("-", "_")
        if old not in values:
            continue
        if field in values:
            raise UsageError(
                f"{where}{dashes}{new} and {dashes}{old} are both given, and are one option",
                hint=f"leave {dashes}{old} out: it is the old name",
            )
        values[field] = values.pop(old)
        if is_main_process():
            note = f"note: {where}{dashes}{old} is called {dashes}{new} now; the next version knows only that name"
            print(one_line(note), file=sys.stderr)
    return values


def is_main_process() -> bool:
    """Whether this process prints for all of those that a launcher started, before they know of each other."""
    return os.environ.get("RANK", "0") == "0"


def make_parser(report: Callable[[ChunkplanError], int]) -> argparse.ArgumentParser:
    """All flags, as `read_options` reads them; `report` is called with what does not parse."""

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            """Report it as every other mistake is reported, rather than with a list of all options."""
            sys.exit(report(UsageError(message, hint=f"`{self.prog} --help` shows what it takes")))

    parser = Parser(
        prog="python -m chunkplan_runtime.train",
        usage="%(prog)s --plan DIR (--model NAME | --model-config FILE) --output DIR [options]",
        description="Train a model with a plan: gradients equal to those of whole sequences, in chunks.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,  # an example that is broken elsewhere cannot be pasted
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    words = "A TOML file with these options, such as lr = 1e-5; the command line wins."
    parser.add_argument("--config", type=Path, metavar="FILE", help=words)
    declared = options_of(TrainConfig).values()
    groups = {name: parser.add_argument_group(name) for name in dict.fromkeys(one.group for one in declared)}
    for one in declared:
        _add(groups[one.group], one)
    for old, new in RENAMED.items():
        one = options_of(TrainConfig)[new.replace("-", "_")]
        parser.add_argument(f"--{old}", type=one.read, help=argparse.SUPPRESS)
    return parser


def _add(group: Any, one: Option) -> None:
    words = one.help + (f" Default: {one.default_words}." if one.default_words else "")
    if one.domain.metavar == "":
        group.add_argument(one.flag, action=argparse.BooleanOptionalAction, help=words)
        return
    metavar = "|".join(one.domain.choices) or one.domain.metavar
    group.add_argument(one.flag, type=one.read, metavar=metavar, help=words)
