"""Damage to any file of a plan or of an analysis is refused, found by `validate`, or changes nothing that is read."""

from __future__ import annotations

import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tests.support import corruption_cases
from tests.support.corruption_cases import damages, files_of, outcome, read, write_pair

#: Of every file. There are 4 of a plan and 4 of an analysis.
DAMAGES = 35


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders, each with an analysis and its plan, of different sequences."""
    folder = tmp_path_factory.mktemp("written")
    for seed in (0, 1):
        write_pair(folder / str(seed), seed)
    return folder


@pytest.mark.parametrize("kind", ["plan", "analysis"])
def test_damage_is_refused_or_found_or_changes_nothing(written: Path, tmp_path: Path, kind: str) -> None:
    folder = shutil.copytree(written / "0", tmp_path / "damaged")
    original, random = read(folder, kind), np.random.default_rng(0)
    assert outcome(folder, kind, original) == "same"
    for path in files_of(folder / kind):
        content = path.read_bytes()
        outcomes = set()
        for what, damaged in islice(damages(content, random), DAMAGES):
            path.unlink()  # what is mapped by the case before stays as it is
            path.write_bytes(damaged)
            try:
                outcomes.add(outcome(folder, kind, original))
            except Exception as error:
                raise AssertionError(f"{path.name}: {what}") from error
        assert outcomes & {"refused", "found"}
        path.write_bytes(content)


@pytest.mark.parametrize("kind", ["plan", "analysis"])
def test_a_file_of_another_plan_or_analysis_is_found_or_refused(written: Path, tmp_path: Path, kind: str) -> None:
    original = read(written / "0", kind)
    for path in files_of(written / "0" / kind):
        folder = shutil.copytree(written / "0", tmp_path / path.name)
        inside = path.relative_to(written / "0")
        shutil.copyfile(written / "1" / inside, folder / inside)
        assert outcome(folder, kind, original) in ("found", "refused"), inside


@pytest.mark.parametrize("kind", ["plan", "analysis"])
def test_a_plan_or_analysis_that_lacks_a_file_is_refused_or_found(written: Path, tmp_path: Path, kind: str) -> None:
    original = read(written / "0", kind)
    for path in files_of(written / "0" / kind):
        folder = shutil.copytree(written / "0", tmp_path / path.name)
        (folder / path.relative_to(written / "0")).unlink()
        assert outcome(folder, kind, original) in ("found", "refused"), path.name


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["plan", "analysis"])
def test_thousands_of_damages_end_no_process_and_take_no_memory(written: Path, tmp_path: Path, kind: str) -> None:
    """In a process of its own, with 3 GiB of address space: what a length that is a lie asks for is not there."""
    folder = shutil.copytree(written / "0", tmp_path / "damaged")
    command = [sys.executable, corruption_cases.__file__, folder, kind, "2", "45"]
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=150, check=False)
    assert ended.returncode == 0, ended.stdout[-300:] + ended.stderr[-3000:]
