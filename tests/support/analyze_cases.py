"""Records as files, and analyses of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.load import load_analysis
from tests.support.command_line import Run
from tests.support.places import ROOT

TOKENIZER = ROOT / "sample_data" / "tokenizer"


def write(name: str, *records: Any) -> None:
    """Records as JSON lines; strings are written as they are."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    Path(name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def analyzed(run: Run, *arguments: object) -> Analysis:
    """The analysis that `chunkplan analyze ARGUMENTS` with the sample tokenizer leaves in the workspace."""
    ran = run("analyze", *arguments, "--tokenizer", TOKENIZER)
    assert ran.code == 0, ran.err
    return load_analysis(Path("chunkplan-out/analysis"))
