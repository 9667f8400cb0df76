"""Reads a `TrainConfig` from flags and a TOML file. Both are made from its fields: same names, flags win."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from chunkplan.errors import ChunkplanError, UsageError
from chunkplan.options import Option, options_of, read_toml
from chunkplan_runtime.training.config import TrainConfig

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
    values = {**(read_toml(file, TrainConfig) if file is not None else {}), **given}
    for name, one in options_of(TrainConfig).items():
        if one.is_required and name not in values:
            raise UsageError(f"{one.flag} is missing", hint="give it as a flag, or in the file of --config")
    return TrainConfig(**values)


def make_parser(report: Callable[[ChunkplanError], int]) -> argparse.ArgumentParser:
    """All flags, as `read_options` reads them; `report` is called with what does not parse."""

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            """As every other mistake is told, rather than with all options."""
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
    parser.add_argument("--config", type=Path, metavar="FILE", help="A TOML file with options; flags win.")
    declared = options_of(TrainConfig).values()
    groups = {name: parser.add_argument_group(name) for name in dict.fromkeys(one.group for one in declared)}
    for one in declared:
        _add(groups[one.group], one)
    return parser


def _add(group: Any, one: Option) -> None:
    words = one.help + (f" Default: {one.default_words}." if one.default_words else "")
    if one.domain.metavar == "":
        group.add_argument(one.flag, action=argparse.BooleanOptionalAction, help=words)
        return
    metavar = "|".join(one.domain.choices) or one.domain.metavar
    group.add_argument(one.flag, type=one.read, metavar=metavar, help=words)
