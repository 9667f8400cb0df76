"""What reaches a terminal is ours: names and messages from elsewhere are only shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text

from chunkplan.errors import UsageError, harmless, one_line
from chunkplan.files.folder import MANIFEST
from chunkplan_cli.terminal import note, print_error, stdout, warn
from chunkplan_runtime.train import main as train
from tests.support.training_checks import make_training, options

HOSTILE = "a\x1b[2J\x1b]0;title\x07\x9b31m\x08b"

#: The same, and what turns the text that follows, and begins a line of its own.
WORSE = f"{HOSTILE}\u202ec\nerror: d\n"


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


def test_what_turns_the_direction_of_text_is_shown_and_letters_of_any_script_stay() -> None:
    assert harmless("a\u202eb\u2066c\td\n") == "a?b?c\td\n"
    for text in ("שלום", "می\u200cخواهم", "👩\u200d🔬", "e\u0301"):
        assert harmless(text) == text


@pytest.fixture
def made(tmp_path: Path, tiny_config: Callable[..., Any], random_sequences: Callable[..., Any]) -> Path:
    return make_training(tmp_path / "made", tiny_config, random_sequences)


def change(folder: Path, edit: Callable[[Any], None]) -> None:
    """Change the manifest in a folder."""
    manifest = json.loads((folder / MANIFEST).read_text())
    edit(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def assert_is_harmless(shown: str) -> None:
    """Names from elsewhere are in it, with nothing that a terminal obeys, and they begin no line."""
    assert "?[2J" in shown
    assert harmless(shown) == shown
    assert not any(line.startswith("error: d") for line in shown.splitlines())


def test_errors_of_the_trainer_do_not_obey_a_plan(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(made / "plan", lambda manifest: manifest["analysis"].update(path=f"../{WORSE}"))
    assert train(options(made, made / "run")) == 2
    shown = capsys.readouterr().err
    assert_is_harmless(shown)
    assert [line.partition(" ")[0] for line in shown.splitlines()] == ["error:", "hint:"]


def test_errors_of_the_trainer_do_not_obey_its_file_of_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(f"{json.dumps(WORSE)} = 1\n")
    assert train(["--config", str(tmp_path / "run.toml")]) == 2
    assert_is_harmless(capsys.readouterr().err)


def test_what_the_trainer_says_does_not_obey_a_plan_or_its_analysis(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name of a profile before the first step, that of a source with a loss that is not finite."""

    def rename(manifest: dict[str, Any]) -> None:
        manifest["predictions"]["cost_model"]["hardware"]["name"] = WORSE

    change(made / "plan", rename)
    sources = [WORSE.replace("\n", ""), HOSTILE]
    change(made / "analysis", lambda manifest: [entry.update(path=sources.pop()) for entry in manifest["sources"]])
    assert train(options(made, made / "run", "--lr", "1e38", "--max-steps", "4")) == 1
    shown = capsys.readouterr().err
    started, _, ended = shown.partition("\nerror: ")
    assert_is_harmless(started)
    assert_is_harmless(ended)
