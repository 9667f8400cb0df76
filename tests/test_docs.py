"""What the documents say is so: commands run, paths exist, contracts are complete."""

from __future__ import annotations

import dataclasses
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow as pa
import pytest

import chunkplan
from chunkplan.packing import PACKERS
from chunkplan.planfile import schema
from chunkplan.planfile.checks_analysis import ANALYSIS_INVARIANTS
from chunkplan.validation import PLAN_INVARIANTS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FORMAT = (ROOT / "docs" / "plan-format.md").read_text(encoding="utf-8")
PLANNER = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
SCRIPT = ROOT / "docs" / "draw_planner.py"
DRAWN = runpy.run_path(str(SCRIPT))
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_five_minutes_of_the_readme_run_as_written(tmp_path: Path) -> None:
    """Every command of that section, in order, in an empty folder beside the sample data; none touches the network."""
    (tmp_path / "sample_data").symlink_to(ROOT / "sample_data")
    [block] = re.findall(r"## In five minutes\n.*?```sh\n(.*?)```", README, re.DOTALL)
    commands = [line for line in block.replace("\\\n", " ").splitlines() if line.strip()]
    assert len(commands) == 6
    scripts = Path(sys.executable).parent
    for command in commands:
        program, *arguments = shlex.split(command)
        ran = subprocess.run(
            [str(scripts / program), *arguments],
            cwd=tmp_path,
            env={"PATH": str(scripts), "HF_HUB_OFFLINE": "1", "COLUMNS": "80", "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
    assert (tmp_path / "chunkplan-out" / "run" / "metrics.jsonl").read_text().count("\n") == 3


def test_the_rooms_of_the_readme_are_those_of_the_repository() -> None:
    [block] = re.findall(r"## The rooms\n.*?```\n(.*?)```", README, re.DOTALL)
    folder = ROOT
    for line in block.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = ROOT / name if name.endswith("/") else ROOT
            assert (ROOT / name).exists(), name
        else:
            assert (folder / name).exists(), name
    named = set(re.findall(r"^    (\S+)", block, re.MULTILINE))
    rooms = {path.name + "/" for path in (ROOT / "chunkplan").iterdir() if (path / "__init__.py").exists()}
    assert rooms <= named


def leaves(kind: pa.DataType) -> set[str]:
    if pa.types.is_list(kind):
        return leaves(kind.value_type)
    if pa.types.is_struct(kind):
        return {field.name for field in kind}
    return set()


def test_the_format_names_every_column_op_and_invariant() -> None:
    for name in ("SEQUENCES", "TOKENS", "STEPS", "CHUNKS", "SCHEDULE"):
        for field in getattr(schema, name):
            assert f"`{field.name}`" in FORMAT, f"{name}.{field.name}"
            for leaf in leaves(field.type):
                assert leaf in FORMAT
    for word in (*schema.OPS, *PLAN_INVARIANTS, *ANALYSIS_INVARIANTS):
        assert f"`{word}`" in FORMAT, word
    assert f"Schema version {schema.SCHEMA_VERSION}." in FORMAT


def test_the_format_names_every_entry_of_a_configuration() -> None:
    for field in dataclasses.fields(chunkplan.PlanConfig):
        assert re.search(rf"^\|.*`{field.name}`.*\|.*\|.*\|$", FORMAT, re.M), field.name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_relative_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", document.read_text(encoding="utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_the_options_the_planner_names_are_those_of_the_command_line() -> None:
    """In a code span that begins with `chunkplan COMMAND` those of that command, in others those of `build`."""
    named: dict[str, set[str]] = {"build": set()}
    for span in re.findall(r"`([^`\n]*--[^`\n]*)`", PLANNER):
        command = re.match(r"chunkplan (\w+)", span)
        named.setdefault(command[1] if command else "build", set()).update(re.findall(r"(?<!\S)--[a-z-]+", span))
    assert {"--holdout", "--mix", "--split", "--packing"} <= named["build"]
    for command_name, options in named.items():
        ran = subprocess.run(
            [str(Path(sys.executable).parent / "chunkplan"), command_name, "--help"],
            env={"PATH": "", "COLUMNS": "200", "NO_COLOR": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert options <= set(re.findall(r"(?<!\S)--[a-z-]+", ran.stdout)), command_name


def test_the_planner_names_the_packers_there_are() -> None:
    [table] = re.findall(r"`--packing` takes a second\slook:\n\n(.*?)\n\n", PLANNER, re.S)
    assert set(re.findall(r"^\| `([a-z-]+)` \|", table, re.M)) == set(PACKERS)


def test_the_files_the_planner_names_exist() -> None:
    paths = re.findall(r"`((?:[a-z0-9_*]+/)+(?:[a-z0-9_*]+\.py)?)`", PLANNER)
    assert len(paths) > 20
    for path in paths:
        assert [*ROOT.glob(path), *(ROOT / "chunkplan").glob(path)], path


def test_the_python_of_the_planner_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block after another in an empty folder. The step is the one of the picture; the rows are as few as can be."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PLANNER, re.S):
        exec(block, names)
    assert (names["lengths"], names["plan"].config["k"]) == (DRAWN["LENGTHS"], DRAWN["CONFIG"].k)
    assert names["step"].optimal and names["rows"].is_optimal


def test_the_picture_is_the_one_that_its_script_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte. It is of a real plan: run `python docs/draw_planner.py` when the planner makes another one."""
    monkeypatch.setattr(sys, "argv", ["draw_planner.py", str(tmp_path / "drawn.svg")])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert (tmp_path / "drawn.svg").read_bytes() == (ROOT / "docs" / "planner.svg").read_bytes()


def test_the_picture_is_whole() -> None:
    """Well-formed, described for those who cannot see it, nothing outside, no letter under 11 units."""
    picture = ElementTree.fromstring((ROOT / "docs" / "planner.svg").read_text(encoding="utf-8"))
    space = "{http://www.w3.org/2000/svg}"
    width, height = (float(value) for value in picture.attrib["viewBox"].split()[2:])
    assert picture.findtext(f"{space}title") and picture.findtext(f"{space}desc")
    texts = picture.findall(f"{space}text")
    assert min(float(text.attrib["font-size"]) for text in texts) >= 11
    for element in [*texts, *picture.findall(f"{space}rect")]:
        x, y = float(element.get("x", 0)), float(element.get("y", 0))
        assert 0 <= x <= x + float(element.get("width", 0)) <= width
        assert 0 <= y <= y + float(element.get("height", 0)) <= height


def test_the_sample_data_is_what_its_readme_says(tmp_path: Path) -> None:
    """Records, tokens and longest of every file; all together within the 5 MB that a clone may cost."""
    text = (ROOT / "sample_data" / "README.md").read_text(encoding="utf-8")
    sources = ROOT / "sample_data"
    analysis = chunkplan.analyze([sources], tmp_path / "analysis", tokenizer=sources / "tokenizer")
    for index, source in enumerate(analysis.manifest["sources"]):
        path = Path(source["path"])
        lengths = analysis.num_tokens[analysis.source == index]
        [row] = re.findall(rf"^\| `{path.name}` \| `.*?\| ([0-9,]+ \| [0-9,]+) \| [0-9,]+ \| ([0-9,]+) \|", text, re.M)
        assert row == (f"{len(lengths):,} | {lengths.sum():,}", f"{lengths.max():,}")
    assert sum(path.stat().st_size for path in sources.rglob("*")) <= 5_000_000
    assert [(analysis.num_tokens > low).sum() for low in (8192, 32768, 100_000)] == [20, 4, 1]
