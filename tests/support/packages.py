"""What tests of packaging share: wheel and sdist, built of a copy of the sources."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tests.support.places import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Built:
    wheel: Path
    sdist: Path


def build_in(folder: Path) -> Built:
    """Both, without the network."""
    subprocess.run([sys.executable, "-m", "hatchling", "build"], cwd=folder, check=True, capture_output=True)
    [wheel], [sdist] = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    return Built(wheel, sdist)


def build_copy(folder: Path) -> Built:
    """Of what an sdist holds, copied into `folder`."""
    copy_sources(folder)
    return build_in(folder)


def copy_sources(folder: Path) -> None:
    """What an sdist holds, and nothing beside it."""
    for name in ("pyproject.toml", ".gitignore"):
        shutil.copy(ROOT / name, folder)
    for pattern in PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]:
        for path in ROOT.glob(pattern.removeprefix("/")):
            if path.is_dir():
                shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(path, folder)
