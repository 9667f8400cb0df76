"""docs/walk.md: its program and its commands run in order as written, offline, and print what the page shows."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.support.places import ROOT
from tests.support.walks import commands_of, enter, masked, run, shows

PAGE = (ROOT / "docs" / "walk.md").read_text(encoding="utf-8")

#: Where the standard library is that of the recording, screens are the same to the letter.
RECORDED = "3.11.7"


def write_data() -> None:
    """Run the program of the page."""
    [program] = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    exec(program, {})


def cpu_seconds() -> float:
    """Those of this process and of the processes that it has waited for."""
    return sum(os.times()[:4])


def compared(text: str, *, exact: bool) -> str:
    """What is compared of a screen: where it is not to be exact no number, and no width that depends on one."""
    return text if exact else re.sub(r"[ █]+", " ", masked(text))


def walk(commands: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run commands, and compare what they print; with `pytest -s` the time that each took is shown."""
    is_recorded = platform.python_version() == RECORDED
    for command, screen in commands:
        if not command.startswith("chunkplan "):
            subprocess.run(shlex.split(command), check=True)
            continue
        before = cpu_seconds()
        code, printed = run(command, monkeypatch)
        print(f"{cpu_seconds() - before:5.1f} s  {command}")
        assert code == 0, printed
        exact = is_recorded and not command.startswith("chunkplan train")
        assert shows(compared(screen, exact=exact), compared(printed, exact=exact)), f"{command}\n{printed}"


@pytest.mark.soak
def test_the_commands_print_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(tmp_path, monkeypatch)
    write_data()
    commands = list(commands_of(PAGE))
    assert len(commands) == 15
    walk(commands, monkeypatch)
    assert (tmp_path / "cut" / "run" / "metrics.jsonl").read_text().count("\n") == 2
