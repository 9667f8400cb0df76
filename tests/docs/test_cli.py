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
