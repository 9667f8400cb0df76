"""Every name at the top of the package has an example in its docstring, which runs."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import numpy as np
import pytest

import chunkplan
from tests.support.places import ROOT

NAMES = [name for name in chunkplan.__all__ if not name.startswith("__")]

#: These make what others read.
FIRST = ("analyze", "build", "build_like", "write_shard")


def example_of(name: str) -> str:
    docstring = inspect.getdoc(getattr(chunkplan, name)) or ""
    found = re.search(r"^Example: `(.*)`$|^Example:\n((?:    .*\n?)+)", docstring, re.M)
    assert found, f"{name} has no example"
    return found[1] or inspect.cleandoc(found[2])


def test_the_examples_of_docstrings_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lengths = [900, 12, 7000, 33] * 2
    records = [{"text": "some words of text " * (length // 4)} for length in lengths]
    Path("train.jsonl").write_text("\n".join(map(json.dumps, records)))
    np.save("lengths.npy", np.array(lengths))
    Path("path/to").mkdir(parents=True)
    Path("path/to/model").symlink_to(ROOT / "sample_data" / "tokenizer")
    names = {"chunkplan": chunkplan, "Path": Path, "plan_step": chunkplan.plan_step}
    for name in [*FIRST, *(each for each in NAMES if each not in FIRST)]:
        exec(example_of(name), names)
        if name == "build":
            names["plan"] = chunkplan.load_plan("plan")
            chunkplan.build_like("plan", "plan-of-two-stages", pp=2)
        elif name == "write_shard":
            chunkplan.write_shard(chunkplan.IntakeRequest(paths="train.jsonl", cache=Path("cache")), "shard-2", (2, 2))
