"""The commands of `chunkplan`: registers them, and turns errors into messages and exit codes."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from copy import copy
from importlib import import_module
from inspect import getdoc
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import typer
from typer.core import TyperCommand

from chunkplan.errors import HELP_HINT, ChunkplanError, UsageError
from chunkplan.extras import not_installed
from chunkplan.options import Advanced
from chunkplan_cli.main import INTERRUPTED
from chunkplan_cli.terminal import note, print_error

_SYSTEM_HINT = "check that the path can be read or written, and that the disk has room"

#: Errors of the system for a wrong path, rather than for a machine in trouble.
_USERS_TO_FIX = {errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EROFS}

_FIRST = ("gain", "analyze", "merge", "tune", "build", "inspect", "train", "score")
_COMMANDS = (*_FIRST, "diff", "simulate", "validate", "export", "parity", "calibrate")


def app(*words: str) -> typer.Typer:
    """Return the command line with the command that `words` begin with, or with all, whose modules it imports.

    The last paragraph of a command's docstring is its example, which ends its help, below the options.
    """
    typer_app = typer.Typer(
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        help="Plan long-context fine-tuning offline: split long sequences into chunks, pack short ones, schedule "
        "them.\n\nSee what your data would gain, analyze them, tune for a model and GPUs, build a plan, inspect it, "
        "train.",
        epilog="Example: chunkplan gain train.jsonl --gpus 8",
        callback=_options,
    )
    for name in words[:1] if {*words[:1]} & {*_COMMANDS} else _COMMANDS:
        command = _command(name, is_listed=words in (("--help",), ("-h",)))
        *paragraphs, example = (" ".join(paragraph.split()) for paragraph in (getdoc(command) or "").split("\n\n"))
        typer_app.command(name, cls=_Command, help="\n\n".join(paragraphs), epilog=example)(command)
    return typer_app


def _command(name: str, is_listed: bool) -> Callable[..., None]:
    """The command, or its docstring alone, read from the source, since importing all commands takes longest."""
    module = "train" if name == "score" else name
    if not is_listed:
        return cast(Callable[..., None], getattr(import_module(f"chunkplan_cli.{module}"), name))
    source = Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")

    def command() -> None: ...

    command.__doc__ = re.findall(rf'^def {name}\(.*?"""(.*?)"""', source, re.DOTALL | re.MULTILINE)[0]
    return command


class _Command(TyperCommand):
    """A command whose help says what is typed, without types of Python.

    `--help` leaves out options that are `Advanced`, `--help-all` has a panel for each group.
    """

    _help_all: Any = None

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the arguments and options of the command, `--help` and `--help-all` among them."""
        parameters: list[Any] = super().get_params(ctx)
        if self._help_all is None:
            self._help_all = _changed(parameters[-1], name="help_all", opts=["--help-all"], callback=_show_all)
            self._help_all.help = "Show every option and exit."
        parameters = [*parameters, self._help_all]
        for parameter in parameters:
            if parameter.param_type_name == "argument":
                parameter.display_type_rich = lambda ctx: None
            elif parameter.is_flag:
                parameter.metavar = ""
        return parameters

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, or all of it."""
        shown = copy(self)
        kept = [one for one in self.params if not isinstance(getattr(one, "rich_help_panel", None), Advanced)]
        num_left_out = len(self.params) - len(kept)
        if num_left_out and not ctx.meta.get("all"):
            shown._help_option = _changed(self.get_help_option(ctx), opts=["--help"])
            shown.params = [_changed(one, rich_help_panel=None, secondary_opts=[]) for one in kept]
            shown.epilog = f"{self.epilog}\n\n{num_left_out} more options: {ctx.command_path} --help-all"
        super(_Command, shown).format_help(ctx, formatter)


def _changed(parameter: Any, **attributes: Any) -> Any:
    changed = copy(parameter)
    vars(changed).update(attributes)
    return changed


def _show_all(ctx: Any, parameter: Any, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        ctx.meta["all"] = True
        typer.echo(ctx.get_help())
        ctx.exit()


def _print_version(wanted: bool) -> None:
    if wanted:
        from chunkplan.version import __version__

        print(f"chunkplan {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take the options that come before the command."""


def run_command() -> NoReturn:
    """Run the command line and exit; never a traceback for what a user can fix."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # leave nothing half-written behind
    try:
        code = _called(sys.argv[1:])
        if code == INTERRUPTED:  # typer turns a keyboard interrupt into this
            note("interrupted")
        print(end="", flush=True)
        sys.exit(code)
    except typer.TyperException as error:
        message = " ".join(getattr(error, "format_message", error.__str__)().split()).rstrip(".")
        message = message.replace("Value error, ", "")  # typer passes on what it hears of its own parser
        _fail(UsageError(message, hint=HELP_HINT))
    except ChunkplanError as error:
        _fail(error)
    except (KeyboardInterrupt, typer.Abort):
        note("interrupted")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader of a pipe has enough: `chunkplan inspect | head`
        _drop_unwritten()
        sys.exit(0)
    except OSError as error:
        _drop_unwritten()
        # What writes files says which: a full one without a name is what was printed to.
        name = error.filename or ("standard output" if error.errno == errno.ENOSPC else None)
        place = f"{name}: " if name else ""
        kind = UsageError if error.errno in _USERS_TO_FIX else ChunkplanError
        _fail(kind(f"{place}{error.strerror or error}", hint=_SYSTEM_HINT))
    except Exception as error:
        missing = not_installed(error)
        if missing is not None:
            _fail(missing)
        traceback.print_exc()
        _fail(ChunkplanError("this is a bug in chunkplan", hint="please report it with the lines above"))


def _called(words: list[str]) -> Any:
    """Run the command line; a signal that arrives as compiled code returns ends it as any other does."""
    try:
        return app(*words)(words or ["--help"], prog_name="chunkplan", standalone_mode=False)
    except SystemError as error:  # Python says so of what its handler raised then
        if isinstance(error.__cause__, (SystemExit, KeyboardInterrupt)):
            raise error.__cause__ from None
        raise


def _drop_unwritten() -> None:
    """Drop what was printed and stdout does not take: Python would complain of it as it ends."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: ChunkplanError) -> NoReturn:
    if error.hint == HELP_HINT:
        error.hint = f"`{_program()} --help` shows what it takes"
    print_error(error)
    sys.exit(error.exit_code)


def _program() -> str:
    """Return the command as typed: Typer's errors do not always name the command."""
    given = sys.argv[1] if len(sys.argv) > 1 else ""
    return f"chunkplan {given}" if given in _COMMANDS else "chunkplan"
