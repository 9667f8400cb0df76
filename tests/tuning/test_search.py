"""What `tune` finds without simulating all choices: as good as all of them, and the same every time."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chunkplan.tuning.options import LADDER
from chunkplan.tuning.sampling import sample_steps
from chunkplan.tuning.search import Search
from chunkplan.tuning.tune import tune
from tests.support.places import ROOT
from tests.support.tuning_cases import GIB, long_tail, options_with

sys.path.insert(0, str(ROOT / "benchmarks"))
from tune_table import TABLE, Case, run

ROWS = {Case(*(row[name] for name in Case._fields)): row for row in json.loads(TABLE.read_text(encoding="utf-8"))}

#: What is found is at most this much slower than what a thorough search finds.
WITHIN = 1.02

FAST = [Case("sample", 8, "7B", 0), Case("sample", 8, "1B", 0)]


@pytest.mark.parametrize("case", FAST, ids=str)
def test_what_is_found_is_as_fast_as_what_a_thorough_search_found(case: Case, tmp_path: Path) -> None:
    found, _ = run(case, tmp_path)
    assert found.best.step_ns / 1e9 <= WITHIN * ROWS[case]["step_seconds"]
    assert found.best.fits and found.best is found.recommended


@pytest.mark.soak
@pytest.mark.parametrize("case", [case for case in ROWS if case not in FAST], ids=str)
def test_what_is_found_of_the_other_cases_is_as_fast(case: Case, tmp_path: Path) -> None:
    found, _ = run(case, tmp_path)
    assert found.best.step_ns / 1e9 <= WITHIN * ROWS[case]["step_seconds"]


@pytest.mark.soak
@pytest.mark.parametrize("case", list(ROWS)[:6], ids=str)
def test_a_thorough_search_finds_what_the_table_has(case: Case, tmp_path: Path) -> None:
    found, _ = run(case, tmp_path, thorough=True)
    assert found.best.step_ns / 1e9 == pytest.approx(ROWS[case]["step_seconds"], abs=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"pp": 2},
        {"tp": 1, "dp": 4, "pp": 1, "schedules": None, "cp": "auto"},
        pytest.param(
            {"tp": 1, "dp": 2, "pp": 2, "schedules": None, "cp": "auto", "lora_rank": 16, "gpu_memory": 40 * GIB},
            marks=pytest.mark.soak,
        ),
    ],
    ids=["plan only", "groups of ranks", "adapters on a pipeline"],
)
def test_with_any_layout_it_is_near_a_thorough_search_and_nothing_slower_is_listed(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """Rows of the front end at 1.5 times the best."""
    np.save(tmp_path / "lengths.npy", long_tail(3_000))
    fast, thorough = (
        tune(tmp_path / "lengths.npy", options_with(**changes, thorough=thorough)) for thorough in (False, True)
    )
    assert fast.best.step_ns <= WITHIN * thorough.best.step_ns
    assert (fast.recommended is None) == (thorough.recommended is None)
    assert len(fast.choices) < len(thorough.choices)
    for found in (fast, thorough):
        front = [found.choices[place].step_ns for place in found.pareto]
        assert front and front[-1] <= 1.5 * front[0]


def test_the_answer_is_the_same_on_any_number_of_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "lengths.npy", long_tail(2_000))
    given = {"tp": 1, "dp": 2, "pp": 2, "chunk_sizes": (2048, 8192), "ks": (1, 4)}
    options = options_with(**given, schedules=None, cp="auto", thorough=False)
    found = []
    for cores in (1, 5):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        found.append(tune(tmp_path / "lengths.npy", options))
    assert found[0] == found[1]


def test_of_what_cannot_fit_or_be_faster_nothing_is_hopeful() -> None:
    """Until something fits, everything is; what the runtime cannot run does not rule out what it can."""
    options = options_with(tp=1, pp=1, schedules=None, thorough=False, lora_rank=16)
    [layout] = options.layouts()
    config = options.plan_config(layout, 2048, 1, "algorithm2")
    cost, shared = options.cost(layout, LADDER[0]), options.cost(layout._replace(tp=4), LADDER[0])
    search = Search(sample_steps(long_tail(200), config, cost, 3), options)
    assert search.is_hopeful(config, cost) and search.least_ns == math.inf
    bound = search.bound_ns(config, [cost])
    search.note(config, shared, 0.5 * bound)
    assert search.is_hopeful(config, cost) and not search.is_hopeful(config, shared)
    search.note(config, cost, 0.9 * bound)
    assert not search.is_hopeful(config, cost) and search.least_ns == 0.9 * bound
    assert Search(search.sample, options_with(gpu_memory=GIB)).bound_ns(config, [cost]) == math.inf
