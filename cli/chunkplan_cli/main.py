"""The `chunkplan` command: registers the commands and turns errors into messages and exit codes."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated

import typer

from chunkplan.errors import ChunkplanError
from chunkplan.version import __version__
from chunkplan_cli.analyze import analyze
from chunkplan_cli.build import build
from chunkplan_cli.inspect import inspect
from chunkplan_cli.parity import parity
from chunkplan_cli.terminal import print_error
from chunkplan_cli.validate import validate

_SYSTEM_HINT = "check that the path can be read or written, and that the disk has room"

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="Plan long-context fine-tuning offline: split long sequences into chunks, pack short ones, schedule them.\n\n"
    "analyze a dataset, build a plan, inspect it, then train: torchrun -m chunkplan_runtime.train --plan DIR ...",
)
for command in (analyze, build, inspect, validate, parity):
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"chunkplan {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that come before the command."""


def main() -> None:
    """Run the command line; never a traceback for what a user can mend."""
    try:
        app()
    except ChunkplanError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # the reader of a pipe has enough: `chunkplan inspect | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        print_error(ChunkplanError(f"{place}{error.strerror or error}", hint=_SYSTEM_HINT))
        sys.exit(1)
    except Exception:
        traceback.print_exc()
        print_error(ChunkplanError("this is a bug in chunkplan", hint="please report it with the lines above"))
        sys.exit(1)


if __name__ == "__main__":
    main()
