"""What a hint says of an extra installs it, wherever this project came from."""

from __future__ import annotations

import subprocess
import tomllib

import pytest
from packaging.requirements import Requirement

from chunkplan import extras
from chunkplan.extras import pip_install
from tests.support.places import ROOT

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


def packages_of(extra: str) -> set[Requirement]:
    """Of an extra, and of those that it names."""
    found = set()
    for each in map(Requirement, EXTRAS[extra]):
        found |= {one for named in each.extras for one in packages_of(named)} if each.name == "chunkplan" else {each}
    return found


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_hint_has_the_packages_of_the_extra_and_is_a_line_for_a_shell(extra: str) -> None:
    typed = f'pip() {{ printf "%s\\n" "$@"; }}; {pip_install(extra)}'
    words = subprocess.run(["sh", "-c", typed], capture_output=True, text=True, check=True).stdout.split()
    assert words[0] == "install"
    assert set(map(Requirement, words[1:])) == packages_of(extra)


def test_no_hint_names_a_package_that_an_index_may_not_have() -> None:
    sources = [path for folder in ("chunkplan", "cli", "runtime") for path in (ROOT / folder).rglob("*.py")]
    assert [str(path) for path in sources if "chunkplan[" in path.read_text(encoding="utf-8")] == []


def test_without_metadata_the_hint_is_for_a_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise extras.PackageNotFoundError(name)

    monkeypatch.setattr(extras, "requires", absent)
    assert pip_install("report") == "pip install '.[report]'  # in the clone"
