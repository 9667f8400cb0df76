"""What is built is whole and the same twice; what is installed is what was built."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.packages import Built, build_copy, build_in
from tests.support.places import ROOT

PACKAGES = ("chunkplan", "chunkplan_runtime", "chunkplan_cli")
SOURCES = ("chunkplan", "runtime/chunkplan_runtime", "cli/chunkplan_cli")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build_copy(tmp_path_factory.mktemp("source"))


def files(folder: Path) -> list[Path]:
    """All below it that is not compiled."""
    return [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]


def test_a_wheel_holds_the_three_packages_whole_and_nothing_else(built: Built) -> None:
    """Every file of the three is there, `py.typed` and the licence too; nothing called `runtime` or `tests` is."""
    names = zipfile.ZipFile(built.wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == set(PACKAGES)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    for folder in SOURCES:
        assert f"{Path(folder).name}/py.typed" in names
        assert {path.relative_to((ROOT / folder).parent).as_posix() for path in files(ROOT / folder)} <= {*names}


def test_an_sdist_holds_what_tests_docs_and_demo_need(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers()}
    for folder in ("tests", "docs", "sample_data", "benchmarks", "examples", "recipes", *SOURCES):
        assert {path.relative_to(ROOT).as_posix() for path in files(ROOT / folder)} <= names
    assert {"README.md", "CHANGELOG.md", "LICENSE", "Makefile", "constraints.txt", "demo.sh", "pyproject.toml"} <= names


def test_what_is_built_of_the_sdist_is_the_same_to_the_byte(built: Built, tmp_path: Path) -> None:
    with tarfile.open(built.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    [folder] = tmp_path.iterdir()
    again = build_in(folder)
    assert again.wheel.read_bytes() == built.wheel.read_bytes()
    assert again.sdist.read_bytes() == built.sdist.read_bytes()


def test_the_metadata_ask_for_what_is_documented(built: Built) -> None:
    """Without an extra what LICENCES.md has; extras that a document or a message names exist."""
    with zipfile.ZipFile(built.wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    asked = [each for each in metadata.get_all("Requires-Dist", []) if "extra ==" not in each]
    licences = (ROOT / "LICENCES.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| (\S+) \|.*\| (?:.*, )?chunkplan(?:, .*)? \|$", licences, re.M)
    assert sorted(re.match(r"[\w-]+", each)[0] for each in asked) == sorted(documented)
    assert metadata["License-Expression"] == "Apache-2.0"
    texts = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    texts += [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    named = {
        extra
        for path in texts
        for extras in re.findall(r"(?:\.\[|pip_install\(\")([\w,]+)(?:\]|\"\))", path.read_text(encoding="utf-8"))
        for extra in extras.split(",")
    }
    assert named > {"runtime", "report"} and named <= set(metadata.get_all("Provides-Extra", []))


def test_an_installed_wheel_runs_the_console_script(built: Built, tmp_path: Path) -> None:
    """Installed into an empty folder, away from the sources, the script runs and all three packages come from it."""
    target = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, built.wheel],
        check=True,
    )
    environment = {**os.environ, "PYTHONPATH": str(target)}
    code = f"import {', '.join(PACKAGES)}; print(*({'.__file__, '.join(PACKAGES)}.__file__,), sep='\\n')"
    homes = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert [Path(home).parent.parent for home in homes] == [target] * 3
    shown = subprocess.run(
        [sys.executable, target / "bin" / "chunkplan", "--help"],
        cwd=tmp_path,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "analyze" in shown
