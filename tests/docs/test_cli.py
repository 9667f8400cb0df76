"""The pages that programs write are what they would write now, and what stands in them runs."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import typer.main

import chunkplan
import chunkplan_runtime
from chunkplan_cli.app import app
from tests.support.places import ROOT

DOCS = ROOT / "docs"


@pytest.mark.docs
@pytest.mark.parametrize("name", ["cli", "python_api", "templates", pytest.param("models", marks=pytest.mark.soak)])
def test_a_generated_page_is_what_its_program_writes_now(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte: run `make docs` after a change of a command, an option, a signature or a docstring."""
    script = DOCS / f"generate_{name}.py"
    monkeypatch.syspath_prepend(DOCS)  # as when it is run by itself
    monkeypatch.setattr(sys, "argv", [script.name, str(tmp_path / "page.md")])
    runpy.run_path(str(script), run_name="__main__")
    page = DOCS / f"{name.replace('_', '-')}.md"
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == page.read_text(encoding="utf-8")


#: In the order of the help.
COMMANDS = [command.callback.__name__ for command in app.registered_commands if command.callback]


@pytest.mark.docs
def test_every_command_has_a_section() -> None:
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert re.findall(r"^## chunkplan (\w+)$", page, re.M) == COMMANDS


@pytest.mark.docs
def test_every_option_of_a_command_is_in_its_section_and_described_once() -> None:
    """Those of most commands are described before, and are in all sections but those that their row names."""
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    shared = {
        flag: re.findall(r"`(\w+)`", not_of)
        for flag, not_of in re.findall(r"^\| `(--[\w-]+).*` \| .* \| (.*) \|$", page.split("## chunkplan")[0], re.M)
    }
    assert {*shared} == {"--workspace", "--json"}
    parsed = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, command in parsed.items():
        section = page.split(f"\n## chunkplan {name}\n")[1].split("\n## ")[0]
        rows = re.findall(r"^\| `(--[\w-]+)", section, re.M)
        passing = re.findall(r"`(--[\w-]+)`", " ".join(re.findall(r"^And of .*?\n\n", section, re.M | re.S)))
        elsewhere = [flag for flag, not_of in shared.items() if name not in not_of]
        options = [each.opts[0] for each in command.params if each.param_type_name == "option" and each.name != "help"]
        assert sorted([*rows, *passing, *elsewhere]) == sorted(options), name


@pytest.mark.docs
def test_every_public_name_has_an_entry() -> None:
    page = (DOCS / "python-api.md").read_text(encoding="utf-8")
    for module in (chunkplan, chunkplan_runtime):
        for name in module.__all__:
            assert name == "__version__" or f"### {module.__name__}.{name}\n" in page, name


@pytest.mark.docs
def test_every_command_has_its_functions() -> None:
    page = (DOCS / "python-api.md").read_text(encoding="utf-8")
    table = page.split("| command | in Python |")[1].split("\n\n")[0]
    rows = [re.findall(r"`([\w.]+)`", row) for row in table.splitlines()[2:]]
    assert sorted(command for command, *_ in rows) == sorted(COMMANDS)
    for _, *functions in rows:
        assert functions
        for name in functions:
            assert f"\n### {name}\n" in page, name


@pytest.mark.docs
def test_everything_that_is_given_back_is_described() -> None:
    """Every class of ours that a function of the page returns is on it, and those of the fields of what is returned."""
    page = (DOCS / "python-api.md").read_text(encoding="utf-8")
    given_back = page.split("\n## What they give back\n")[1].split("\n## ")[0]
    fields = [line for block in re.findall(r"```python\n(.*?)```", given_back, re.S) for line in block.splitlines()[1:]]
    annotations = re.findall(r"^\S*.* -> (.*)$", page, re.M) + fields
    returned = set(re.findall(r"\b[A-Z]\w+", " ".join(annotations))) - {"None", "DataFrame", "Any", "Path"}
    assert len(returned) > 8
    for name in (name for name in returned if not name.endswith("Array")):  # those are numpy's
        assert re.search(rf"[`#] ?[\w.]+\.{name}`?( \||$)", page, re.M), name


def test_the_example_of_the_python_api_runs_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (DOCS / "python-api.md").read_text(encoding="utf-8")
    example = re.findall(r"```python\n(.*?)```", page, re.S)[0]
    (tmp_path / "sample_data").symlink_to(ROOT / "sample_data")
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "1030 145542"
    assert any(line.startswith("total_us ") for line in others)
