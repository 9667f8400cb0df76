"""Imports are silent, and what chunkplan needs is listed with its licence."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys

import pytest
from packaging.utils import canonicalize_name

from tests.support.places import ROOT

LICENCES = (ROOT / "LICENCES.md").read_text(encoding="utf-8")
LISTED = runpy.run_path(str(ROOT / "docs" / "list_licences.py"))

#: Imports every module of three packages, and every public name; none is left out for a package that is not there.
IMPORT_ALL = """
import importlib, pkgutil
names = 0
for package in map(importlib.import_module, ("chunkplan", "chunkplan_runtime", "chunkplan_cli")):
    for name in getattr(package, "__all__", []):
        getattr(package, name)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:  # a module for another framework imports that
            own = module.name.startswith("chunkplan.adapters.") and not error.name.startswith("chunkplan")
            if not own:
                raise
        names += 1
print(names)
"""


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)


def test_an_import_gives_no_warning_and_needs_nothing_but_python() -> None:
    """Neither packages of others nor the network: -S leaves site-packages out."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import chunkplan; print(chunkplan.__version__)"
    done = python("-S", "-W", "error", "-c", code)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_module_and_no_public_name_gives_a_warning() -> None:
    done = python("-W", "error", "-c", IMPORT_ALL)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 150


def rows(title: str) -> dict[str, list[str]]:
    """The table below a title: package -> its other cells."""
    [section] = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", LICENCES, re.M | re.S)
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", section, re.M)]
    return {name: cells for name, *cells in table[2:]}


def test_every_dependency_is_listed_with_its_licence() -> None:
    asked = LISTED["project"]()
    listed = {"": rows("Always installed"), "dev": rows("For development only")}
    for extra, requirements in asked.items():
        table = listed.get(extra, rows("With extras"))
        for each in requirements:
            assert table[each.name][1], each.name
            assert extra in ("", "dev") or extra in table[each.name][2].split(", ")
    for name, (_, licence, *_) in (listed[""] | rows("With extras")).items():
        assert "GPL" not in licence, name


def test_the_list_is_what_its_program_writes_for_the_pinned_versions() -> None:
    """No row of it is stale, and no package is missing that the core's packages need here.

    Which of them need another one is that of the oldest Python, in which they need most.
    """
    lines = re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    pinned = {canonicalize_name(name): version for name, version in lines}
    listed = rows("Always installed") | rows("With extras") | rows("For development only")
    installed = listed.keys() - LISTED["NOT_INSTALLED"].keys()
    assert {name: listed[name][0] for name in installed} == {name: pinned[name] for name in installed}
    if other := [name for name in installed if LISTED["version"](name) != pinned[name]]:
        pytest.skip(f"other versions than those of constraints.txt are installed: {', '.join(other)}")
    columns = r"^\|.*\|$" if sys.version_info < (3, 12) else r"^\|[^|]*\|[^|]*\|[^|]*\|"
    written, read = (set(re.findall(columns, text, re.M)) for text in (LISTED["write"](), LICENCES))
    assert written <= read


def test_the_licences_of_the_sample_data_are_named() -> None:
    readme = (ROOT / "sample_data" / "README.md").read_text(encoding="utf-8")
    [section] = re.findall(r"^## Sources and licences\n(.*?)(?=^## )", readme, re.M | re.S)
    for data in (ROOT / "sample_data").glob("*.jsonl"):
        assert f"`{data.name}`" in section


def test_windows_is_refused_before_anything_is_built_or_imported() -> None:
    """Locks and signals there are others: what cannot run says so at once, and says what can be done."""
    # Python's own modules, with which the change would have them look for Windows, are imported before it.
    for before, then in (
        ("hatchling.build, hatchling.builders.wheel", "hatchling.build.build_wheel('dist')"),
        ("importlib.metadata", "import chunkplan"),
    ):
        program = f"import sys, {before}; sys.platform = 'win32'; {then}"
        done = subprocess.run((sys.executable, "-c", program), cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode != 0
        assert done.stderr.splitlines()[-1].endswith("install it in WSL, which is Linux on Windows")
