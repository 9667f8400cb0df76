"""docs/tutorial.md: its commands run in order as written, offline, and print what it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.places import ROOT
from tests.support.walks import commands_of, enter, masked, run, shows

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")


@pytest.mark.soak
def test_the_commands_print_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line `...` stands for any lines; of training and parity numbers may be others."""
    enter(tmp_path, monkeypatch)
    shown = list(commands_of(PAGE))
    assert len(shown) == 16
    for command, screen in shown:
        code, printed = run(command, monkeypatch)
        assert code == (2 if screen.startswith("error: ") else 0), printed
        if command.startswith(("chunkplan train", "chunkplan parity")):
            screen, printed = masked(screen), masked(printed)
        assert shows(screen, printed), f"{command}\n{printed}"
    assert (tmp_path / "small" / "run" / "final" / "model.safetensors").exists()
    assert (tmp_path / "plan.html").stat().st_size > 1_000_000
    assert (tmp_path / "small" / "export-hf" / "dataset_info.json").exists()
