"""What is installed is what should be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("chunkplan", "chunkplan_runtime", "chunkplan_cli")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources, without the network."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("chunkplan", "runtime", "cli"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel"], cwd=source, check=True)
    [built] = (source / "dist").glob("*.whl")
    return built


def test_a_wheel_holds_the_three_packages_whole_and_nothing_else(wheel: Path) -> None:
    """Every Python file of the three packages is there; nothing called `runtime`, `cli` or `tests` is."""
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == set(PACKAGES)
    for folder in ("chunkplan", "runtime/chunkplan_runtime", "cli/chunkplan_cli"):
        root = (ROOT / folder).parent
        for path in (ROOT / folder).rglob("*.py"):
            assert path.relative_to(root).as_posix() in names


def test_an_installed_wheel_runs_the_console_script(wheel: Path, tmp_path: Path) -> None:
    """Installed into an empty folder, away from the sources, the script runs and all three packages come from it."""
    target = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel],
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
