"""Recorded walks: the commands of a page run in order as written, offline, and print what the page shows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from chunkplan_cli.app import run_command
from tests.support.places import ROOT

#: What depends on the machine: times, and what is left of digits by another order of sums.
NUMBER = r"\d[\d,.]*(?:e[-+]\d+)?"

#: Printed by a slow machine or a first run alone.
_SLOW = r"[\w ,.-]+: [\d.,]+ of [\d.,]+ \w+ \(\d+%\)|compiling the planner's loops[:,] "


def enter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be in an empty folder beside the sample data, in a terminal of 80 columns."""
    (folder / "sample_data").symlink_to(ROOT / "sample_data")
    monkeypatch.chdir(folder)
    for name in ("CHUNKPLAN_TOKENIZER", "CHUNKPLAN_WORKSPACE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"COLUMNS": "80", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)


def commands_of(page: str) -> Iterator[tuple[str, str]]:
    """(a command, what is shown of what it prints)."""
    screens = "".join(re.findall(r"```console\n(.*?)```", page, re.S)).replace("\\\n", " ")
    yield from re.findall(r"^\$ (.*)\n((?:[^$\n].*\n|\n)*)", screens, re.M)


def run(command: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """Its exit code, and what it prints on both streams, one text as on a terminal; in this process.

    Left out are the line of progress that a slow machine prints every few seconds, and that on what takes so long.
    """
    printed = StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        monkeypatch.setattr("sys.argv", shlex.split(command))
        with pytest.raises(SystemExit) as end:
            run_command()
        code = int(end.value.code or 0)
    lines = [line.rstrip() for line in printed.getvalue().splitlines()]
    return code, "".join(f"{line}\n" for line in lines if not re.match(_SLOW, line))


def masked(text: str) -> str:
    """The same with N for every number."""
    return re.sub(NUMBER, "N", text)


def shows(screen: str, printed: str) -> bool:
    """Whether `printed` is what `screen` shows, where a line `...` stands for any lines."""
    return re.fullmatch(re.escape(screen).replace(re.escape("...\n"), r"(?:.*\n)*"), printed) is not None
