"""The pages that programs write are what they would write now, and what stands in them runs."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.support.places import ROOT

DOCS = ROOT / "docs"


@pytest.mark.docs
@pytest.mark.parametrize(
    "name", ["balance", "cli", "python_api", "templates", pytest.param("models", marks=pytest.mark.soak)]
)
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


def test_the_recipes_of_the_planner_run_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (DOCS / "python-api.md").read_text(encoding="utf-8")
    recipes = re.findall(r"```python\n(.*?)```", page, re.S)[:3]
    (tmp_path / "sample_data").symlink_to(ROOT / "sample_data")
    monkeypatch.chdir(tmp_path)
    variables: dict[str, object] = {}
    for recipe in recipes:
        exec(recipe, variables)
    printed = capsys.readouterr().out.splitlines()
    assert any(re.fullmatch(r"chunkplan [\d.]+ [\d.]+", line) for line in printed)
    assert sum(line.startswith("0 0 ") for line in printed) == 1
    assert any(line.startswith("total_us ") for line in printed)
