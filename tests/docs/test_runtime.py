"""docs/runtime.md names the kernels and models there are, and its command runs as written."""

from __future__ import annotations

import re
import shlex

import pytest

from chunkplan_cli.app import run_command
from chunkplan_runtime.attention.kernels import KERNELS
from chunkplan_runtime.models.checks import MODEL_TYPES
from tests.support.places import ROOT

DOCUMENT = (ROOT / "docs" / "runtime.md").read_text()


@pytest.mark.docs
def test_it_names_the_kernels_in_the_order_they_are_preferred():
    table = DOCUMENT[DOCUMENT.index("| kernel | runs on") :].split("\n\n")[0]
    assert re.findall(r"^\| `([a-z0-9-]+)` \|", table, re.MULTILINE) == list(KERNELS)


@pytest.mark.docs
def test_it_names_the_models_there_are():
    (listed,) = re.findall(r"held by the tests of this\s+project: ([^.]*)\.", DOCUMENT)
    assert tuple(re.split(r",\s+", listed)) == MODEL_TYPES


@pytest.mark.docs
def test_the_readme_counts_the_models_that_are_proved() -> None:
    exact = (ROOT / "docs" / "models.md").read_text().split("\n## Exact\n")[1].split("\n## ")[0]
    on_two, on_one = exact.split("On one stage only:")
    types = re.findall(r"`([\w-]+)`[,.]", on_two) + re.findall(r"^\| `([\w-]+)` \|", on_one, re.M)
    [counted] = re.findall(r"\[(\d+) types\]\(docs/models.md\)", (ROOT / "README.md").read_text())
    assert int(counted) == len(types) == len(set(types)) >= 100


def test_its_command_runs_as_written(monkeypatch, capsys):
    (command,) = re.findall(r"```sh\n(chunkplan .*)\n```", DOCUMENT)
    monkeypatch.setattr("sys.argv", shlex.split(command))
    with pytest.raises(SystemExit) as end:
        run_command()
    shown = capsys.readouterr()
    assert not end.value.code, shown.err
    assert "exact: worst relative error" in shown.out
