"""The terminal: stdout is data, stderr is everything else; readable without colour and at 80 columns."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from chunkplan.errors import ChunkplanError
from chunkplan.visible import harmless, one_line


class _SafeConsole(Console):
    """Shows controls in names and messages from elsewhere as question marks; those of its own styles come later."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(harmless(segment.text), segment.style)


class _Stdout(_SafeConsole):
    def on_broken_pipe(self) -> None:
        """The reader of a pipe has enough: `main` ends the command as done, where rich would call it an error."""
        raise BrokenPipeError


def stdout() -> Console:
    """The console for what was asked for. Made when used, so that a test or a pipe may replace sys.stdout."""
    return _Stdout(file=sys.stdout, highlight=False)


def stderr() -> Console:
    """The console for progress, notes and errors."""
    return _SafeConsole(file=sys.stderr, highlight=False)


def print_json(document: Any) -> None:
    """Print one JSON document to stdout, plain whatever the terminal."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def note(*lines: str) -> None:
    """Lines on stderr."""
    for line in lines:
        stderr().print(Text(one_line(line)), soft_wrap=True)


def warn(message: str) -> None:
    """A line on stderr that must not be overlooked."""
    stderr().print(Text.assemble(("warning: ", "bold yellow"), one_line(message)), soft_wrap=True)


def print_error(error: ChunkplanError) -> None:
    """`error: where: what` and, below it, `hint: what to do`."""
    stderr().print(Text.assemble(("error: ", "bold red"), one_line(str(error))), soft_wrap=True)
    stderr().print(Text.assemble(("hint: ", "bold cyan"), one_line(error.hint)), soft_wrap=True)
