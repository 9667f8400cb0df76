"""Reads a `TrainConfig` from flags and a TOML file. Both are made from its fields: same names, flags win."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from chunkplan.errors import UsageError
from chunkplan.options import options_of, read_toml
from chunkplan_runtime.training.config import TrainConfig

_EXAMPLE = """Example: torchrun --nproc-per-node 8 -m chunkplan_runtime.train \\
  --plan chunkplan-out/plan --model NAME --output chunkplan-out/run"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise it as every other mistake is raised, rather than print a list of all options."""
        raise UsageError(message, hint=f"`{self.prog} --help` shows what it takes")


def read_options(arguments: list[str] | None) -> TrainConfig:
    """The configuration that `arguments` (default: those of the process) and the file of their `--config` say.

    Raises:
        UsageError: an option is missing, unknown, or not what it may be; the TOML file is not there, or damaged.
    """
    given = vars(make_parser().parse_args(arguments))
    file = given.pop("config", None)
    values = {**(read_toml(file, TrainConfig) if file is not None else {}), **given}
    for name, one in options_of(TrainConfig).items():
        if one.is_required and name not in values:
            raise UsageError(f"{one.flag} is missing", hint="give it as a flag, or in the file of --config")
    return TrainConfig(**values)


def make_parser() -> argparse.ArgumentParser:
    """All flags, as `read_options` reads them."""
    parser = _Parser(
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
        words = one.help + (f" Default: {one.default_words}." if one.default_words else "")
        if one.domain.metavar == "":
            groups[one.group].add_argument(one.flag, action=argparse.BooleanOptionalAction, help=words)
        else:
            metavar = "|".join(one.domain.choices) or one.domain.metavar
            groups[one.group].add_argument(one.flag, type=one.read, metavar=metavar, help=words)
    return parser
