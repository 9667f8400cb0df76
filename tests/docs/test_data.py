"""What docs/data.md says is so: its records become what it shows, its commands print its screens."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import chunkplan
from chunkplan.intake.backends import BACKENDS
from chunkplan.intake.records import REASONS
from chunkplan.intake.schemas import SCHEMAS
from chunkplan.intake.schemas.messages import ROLES
from chunkplan.intake.schemas.rollouts import ROLLOUT_ROLES
from chunkplan.intake.sources import COMPRESSIONS, describe
from tests.support.intake_checks import marked_texts
from tests.support.places import ROOT

DATA = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
TOKENIZER = ROOT / "sample_data" / "tokenizer"
SCRIPTS = Path(sys.executable).parent


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the sample data, the document's `bad.jsonl`, and its folder `data` with files that are none."""
    (tmp_path / "sample_data").symlink_to(ROOT / "sample_data")
    [bad] = re.findall(r"Take this `bad.jsonl`:\n\n```text\n(.*?)```", DATA, re.S)
    (tmp_path / "bad.jsonl").write_text(bad, encoding="utf-8")
    (tmp_path / "data").mkdir()
    for name in ("code.jsonl", "math.jsonl"):
        shutil.copy(ROOT / "sample_data" / name, tmp_path / "data")
    for name, content in (("empty.jsonl", ""), ("stats.json", '{"records": 7, "mean": 3}'), ("torn.parquet", "PAR1")):
        (tmp_path / "data" / name).write_text(content, encoding="utf-8")
    (tmp_path / "data.csv").write_text("text\nsome words\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("needing", ["bad.jsonl|rejected.jsonl|analyze data", pytest.param("", marks=pytest.mark.soak)])
def test_the_screens_are_what_the_commands_print(here: Path, needing: str) -> None:
    """Commands in order, in one folder, those of a few subjects, or all; a line `...` stands for any lines."""
    screens = "".join(re.findall(r"```console\n(.*?)```", DATA, re.S))
    commands = re.findall(r"^\$ (.*)\n((?:[^$\n].*\n|\n)*)", screens, re.M)
    assert len(commands) == 6
    environment = {"PATH": f"{SCRIPTS}:/bin:/usr/bin", "COLUMNS": "100", "PYTHONUNBUFFERED": "1", "HOME": str(here)}
    for command, screen in commands:
        if not re.search(needing, command):
            continue
        ran = subprocess.run(
            ["bash", "-c", command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert ran.returncode in ((2, 3) if screen.startswith("error: ") else (0,)), ran.stdout
        printed = "".join(f"{line.rstrip()}\n" for line in ran.stdout.splitlines())
        pattern = re.escape(screen).replace(re.escape("...\n"), r"(?:.*\n)*")
        assert re.fullmatch(pattern, printed), f"{command}\n{printed}"


def test_the_records_become_what_is_shown(tmp_path: Path) -> None:
    [block] = re.findall(r"⏎ is a line end:\n\n```text\n(.*?)```", DATA, re.S)
    shown: dict[str, str] = {}
    for record, line, *others in (example.split("\n") for example in block.strip().split("\n\n")):
        json.loads(record)
        (tmp_path / "data.jsonl").write_text(record + "\n", encoding="utf-8")
        analysis = chunkplan.analyze([tmp_path / "data.jsonl"], tmp_path / "analysis", tokenizer=TOKENIZER)
        schema, _, sequence = line.partition(": ")
        assert analysis.manifest["sources"][0]["schema"] == schema
        shown[schema] = sequence
        if not analysis.has_tokens:
            assert sequence == f"{analysis.num_tokens[0]:,} tokens"
            continue
        assert [sequence, *others] == marked_texts(analysis)
    assert shown.keys() == SCHEMAS.keys()
    for name in SCHEMAS:
        assert f"**{name}**" in DATA


@pytest.mark.docs
def test_the_tables_are_complete() -> None:
    reasons = dict(re.findall(r"^\| `([a-z0-9-]+)` \| (.*) \|$", DATA.split("| reason |")[1].split("\n\n")[0], re.M))
    assert reasons == REASONS
    table = DATA.split("| name | what it is")[1].split("\n\n")[0]
    for row in table.splitlines()[2:]:
        names, _, compressed = (cell.strip() for cell in row.strip("|").split("|"))
        for suffix in re.findall(r"`(\.\w+)`", names):
            assert describe(f"data{suffix}"), suffix
            with_compression = [end for end in COMPRESSIONS if describe(f"data{suffix}{end}")]
            assert re.findall(r"`(\.\w+)`", compressed) == with_compression
    known = ("jsonl", "ndjson", "json", "txt", "csv", "tsv", "parquet", "arrow", "npy")
    assert re.findall(r"`\.(\w+)`", " ".join(row.split("|")[1] for row in table.splitlines()[2:])) == list(known)
    roles = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", DATA.split("| role | names")[1].split("\n\n")[0], re.M))
    named = {name: role for role, names in roles.items() for name in re.findall(r"`(\w+)`", names)}
    assert named == {**ROLES, "developer": "system"}
    items = DATA.split("**Rollouts.**")[1].split("\n\n")[1].split("- ")[1:]
    named_keys = {item.split("`")[1]: re.findall(r"`(\w+)`", item) for item in items}
    expected = {role: [*keys] for role, keys in ROLLOUT_ROLES.items() if role not in ("score", "response_length")}
    assert named_keys == {**expected, "reward": [*expected["reward"], "score"]}
    backends = DATA.split("| `--tokenizer` |")[1].split("\n\n")[0].splitlines()[2:]
    assert len(backends) == len(BACKENDS)


def test_its_python_runs_as_written(here: Path) -> None:
    names: dict[str, Any] = {}
    [block] = re.findall(r"```python\n(.*?)```", DATA, re.S)
    exec(block, names)
    assert names["analysis"].manifest["rejected"]["too-long"] > 0
    assert len(names["input_ids"]) == len(names["target"])


def test_its_toml_is_read_as_written(here: Path) -> None:
    block, settings = re.findall(r"```toml\n(.*?)```", DATA, re.S)
    (here / "data.toml").write_text(block, encoding="utf-8")
    (here / "mine").mkdir()
    (here / "mine" / "data.log").write_text('{"prompt": "a", "answer": "b"}\n')
    (here / "mine" / "humaneval.jsonl").write_text('{"prompt": "a", "canonical_solution": "b"}\n')
    command = ["analyze", "mine", "--config", "data.toml", "--tokenizer", str(TOKENIZER), "--json"]
    ran = subprocess.run([SCRIPTS / "chunkplan", *command], capture_output=True, text=True, check=True)
    assert ran.stderr.startswith("options from data.toml: max-length, on-error, formats, columns\n")
    read = {Path(source["path"]).name: source["columns"]["completion"] for source in json.loads(ran.stdout)["sources"]}
    assert read == {"data.log": "answer", "humaneval.jsonl": "canonical_solution"}
    (here / "chunkplan-out" / "workspace.toml").write_text(settings, encoding="utf-8")
    command = ["analyze", "mine/humaneval.jsonl", "--json"]
    ran = subprocess.run([SCRIPTS / "chunkplan", *command], capture_output=True, text=True, check=True)
    assert ran.stderr.startswith("options from chunkplan-out/workspace.toml: columns\n")
    document = json.loads(ran.stdout)
    assert (document["exact"], document["sources"][0]["columns"]["completion"]) == (True, "canonical_solution")
