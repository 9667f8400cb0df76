"""What reaches a terminal is ours: names and messages from elsewhere are only shown."""

from __future__ import annotations

import pytest
from rich.table import Table
from rich.text import Text

from chunkplan.errors import UsageError
from chunkplan_cli.terminal import note, one_line, print_error, stdout, warn

HOSTILE = "a\x1b[2J\x1b]0;title\x07\x9b31m\x08b"


def test_controls_in_names_are_shown_and_not_obeyed_while_styles_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    table = Table(HOSTILE)
    table.add_row(Text(HOSTILE, style="bold"))
    stdout().print(table)
    shown = capsys.readouterr().out
    assert "\x1b[1m" in shown
    for control in ("\x1b[2J", "\x1b]0", "\x07", "\x9b", "\x08"):
        assert control not in shown
    assert "?[2J" in shown


def test_an_error_does_not_obey_the_name_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(UsageError(f"there is no {HOSTILE}", hint=f"not {HOSTILE}", where=f"/data/{HOSTILE}"))
    shown = capsys.readouterr().err
    assert shown.count("?[2J") == 3
    assert "\x1b" not in shown


def test_a_name_cannot_begin_a_line_that_looks_like_ours(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a\nerror: b\r\nhint: c\n"
    print_error(UsageError(f"there is no {name}", hint=f"not {name}", where=name))
    note(name, "next")
    warn(name)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["error:", "hint:", "a?error:", "next", "warning:"]
    assert one_line(name) not in name
