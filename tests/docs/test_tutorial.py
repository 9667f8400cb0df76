"""docs/tutorial.md: its commands run in order as written, offline, and print what it shows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from chunkplan_cli.main import main
from tests.support.places import ROOT

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")

#: What depends on the machine: times, and what is left of digits by another order of sums.
NUMBER = r"\d[\d,.]*(?:e[-+]\d+)?"

#: What only a slow machine prints.
SLOW = r"\w+: [\d.,]+ of [\d.,]+ .*( left|%\))$|compiling the planner's loops: "


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder beside the sample data, in a terminal of 80 columns."""
    (tmp_path / "sample_data").symlink_to(ROOT / "sample_data")
    monkeypatch.chdir(tmp_path)
    for name in ("CHUNKPLAN_TOKENIZER", "CHUNKPLAN_WORKSPACE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"COLUMNS": "80", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def commands() -> Iterator[tuple[str, str]]:
    """(a command, what is shown of what it prints)."""
    screens = "".join(re.findall(r"```console\n(.*?)```", PAGE, re.S)).replace("\\\n", " ")
    yield from re.findall(r"^\$ (.*)\n((?:[^$\n].*\n|\n)*)", screens, re.M)


def run(command: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """Its exit code, and what it prints on both streams, one text as on a terminal; in this process.

    Left out are the line of progress that a slow machine prints every few seconds, and that on what takes so long.
    """
    printed = StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        monkeypatch.setattr("sys.argv", shlex.split(command))
        with pytest.raises(SystemExit) as end:
            main()
        code = int(end.value.code or 0)
    lines = [line.rstrip() for line in printed.getvalue().splitlines()]
    return code, "".join(f"{line}\n" for line in lines if not re.match(SLOW, line))


def test_the_commands_print_what_is_shown(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line `...` stands for any lines; of training and parity numbers may be others."""
    shown = list(commands())
    assert len(shown) == 16
    for command, screen in shown:
        code, printed = run(command, monkeypatch)
        assert code == (2 if screen.startswith("error: ") else 0), printed
        if command.startswith(("chunkplan train", "chunkplan parity")):
            screen, printed = (re.sub(NUMBER, "N", text) for text in (screen, printed))
        pattern = re.escape(screen).replace(re.escape("...\n"), r"(?:.*\n)*")
        assert re.fullmatch(pattern, printed), f"{command}\n{printed}"
    assert (here / "small" / "run" / "final" / "model.safetensors").exists()
    assert (here / "plan.html").stat().st_size > 1_000_000
    assert (here / "small" / "export-hf" / "dataset_info.json").exists()
