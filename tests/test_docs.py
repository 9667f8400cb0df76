"""What the documents say is so: commands run, paths exist, contracts are complete."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow as pa

import chunkplan
from chunkplan.planfile import schema
from chunkplan.planfile.checks_analysis import ANALYSIS_INVARIANTS
from chunkplan.validation import PLAN_INVARIANTS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FORMAT = (ROOT / "docs" / "plan-format.md").read_text(encoding="utf-8")


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
