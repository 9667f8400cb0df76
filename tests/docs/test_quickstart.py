"""docs/quickstart.md: its commands run in order as written, offline, and print what it shows."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.places import ROOT
from tests.support.walks import commands_of, enter, masked, run, shows

PAGE = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")


@pytest.mark.soak
def test_the_commands_print_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line `...` stands for any lines; of training and parity numbers may be others."""
    enter(tmp_path, monkeypatch)
    shown = list(commands_of(PAGE))
    assert len(shown) == 13
    norms = []
    for command, screen in shown:
        if not command.startswith("chunkplan "):
            subprocess.run(shlex.split(command), check=True)
            continue
        code, printed = run(command, monkeypatch)
        assert code == 0, printed
        norms += re.findall(r"^step 2 \(3/3\)  (loss \S+  grad \S+)  ", printed, re.M)
        if command.startswith(("chunkplan train", "chunkplan parity")):
            screen, printed = masked(screen), masked(printed)
        assert shows(screen, printed), f"{command}\n{printed}"
    assert len(norms) == 2 and norms[0] == norms[1]
    assert (tmp_path / "small" / "run" / "final" / "model.safetensors").exists()
    assert (tmp_path / "small" / "run" / "metrics.jsonl").read_text().count("\n") == 3
    assert (tmp_path / "plan.html").stat().st_size > 1_000_000


@pytest.mark.soak
def test_gains_are_those_that_gain_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    """Every row of the table, to the digits that it has."""
    enter(tmp_path, monkeypatch)
    rows = re.findall(r"^\| `(--gpus .*?)` \| (.*?): (.*?) s \| (.*?) s \| (.*?) \|$", PAGE, re.M)
    found_rows = []
    for options, *_ in rows:
        given = f"sample_data --tokenizer sample_data/tokenizer --json {options}"
        found = json.loads(command("gain", *shlex.split(given)).out)
        [best] = [row["step_seconds"] for row in found["baselines"] if row["name"] == found["speedup_over"]]
        seconds, gain = found["chosen"]["step_seconds"], found["speedup_over_best"]
        found_rows.append((options, found["speedup_over"], f"{best:.2f}", f"{seconds:.2f}", f"{gain:.2f}"))
    assert rows == found_rows and len(rows) == 5


@pytest.mark.docs
def test_screens_fit_a_terminal_of_80_columns() -> None:
    """But for messages, which are not wrapped."""
    lines = [line for screen in re.findall(r"```console\n(.*?)```", PAGE, re.S) for line in screen.splitlines()]
    assert [line for line in lines if len(line) > 80 and not line.startswith("chosen as in ")] == []


@pytest.mark.docs
def test_the_readme_has_the_rows_of_the_first_screen() -> None:
    """Its table of ways to train is what `gain` prints here, without the lines below each row."""
    [table] = re.findall(r"```text\n(way .*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    [command] = re.findall(r"^chunkplan gain (.*?) +#", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    typed, screen = next(commands_of(PAGE))
    assert shlex.split(typed) == ["chunkplan", "gain", *shlex.split(command)]
    assert [line for line in table.splitlines() if line not in screen.splitlines()] == []
    assert len(table.splitlines()) > 5
