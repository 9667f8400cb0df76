"""What the documents say is so: commands run, paths exist, contracts are complete."""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow as pa
import pytest

import chunkplan
from chunkplan.cost.hardware import Hardware
from chunkplan.cost.memory import stage_memory
from chunkplan.cost.shape import Layer, ModelShape
from chunkplan.cost.token_bytes import ResidentTokens
from chunkplan.errors import UsageError
from chunkplan.operations import OPS
from chunkplan.options import options_of as declared_by
from chunkplan.packing import PACKERS
from chunkplan.planfile import schema
from chunkplan.tuning.document import tuning_document
from chunkplan.validation.checks_analysis import ANALYSIS_INVARIANTS
from chunkplan.validation.validate import PLAN_INVARIANTS
from chunkplan_runtime.training.config import TrainConfig
from tests.support.places import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
FORMAT = (ROOT / "docs" / "plan-format.md").read_text(encoding="utf-8")
PLANNER = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
CHANGES = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Where to change what")[1].split("\n## ")[0]
TUNING = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
COST_MODEL = (ROOT / "docs" / "cost-model.md").read_text(encoding="utf-8")
PICTURES = sorted((ROOT / "docs").glob("*.svg"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = Path(sys.executable).parent

#: Whose options documents name: those of `chunkplan`, and the trainer.
PROGRAMS = (
    *(
        "gain",
        "analyze",
        "merge",
        "tune",
        "build",
        "inspect",
        "diff",
        "simulate",
        "validate",
        "parity",
        "calibrate",
        "export",
    ),
    "train",
)

#: Where an option in a document may be from, if it is not part of a whole command.
COMMANDS = {
    "data.md": ("analyze", "merge"),
    "planner.md": ("build",),
    "context-parallel.md": ("build",),
    "schedules.md": ("simulate", "build"),
    "tuning.md": ("gain", "tune", "build"),
    "cost-model.md": ("tune", "build", "calibrate"),
    "integrations.md": PROGRAMS,
    "quickstart.md": PROGRAMS,
    "concepts.md": ("build", "train"),
    "errors.md": PROGRAMS,
}


#: Words at most, as `wc -w` counts them.
MOST_WORDS = {"README.md": 900, "CONTRIBUTING.md": 1000, "CHANGELOG.md": 1500}
MOST_WORDS |= {"docs/README.md": 200, "docs/quickstart.md": 2500, "docs/integrations.md": 2200, "docs/balance.md": 500}
MOST_WORDS_OF_ALL = 29_600

#: Pages that programs write, in which things are looked up.
GENERATED = {f"docs/{name}.md" for name in ("cli", "python-api", "gpu-report", "models", "templates")}


@pytest.mark.docs
def test_the_documents_are_short() -> None:
    """The README and the pages that people write, all together; and by themselves those that are read first."""
    counts = {path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").split()) for path in DOCUMENTS}
    assert {name: counts[name] for name, most in MOST_WORDS.items() if counts[name] > most} == {}
    written = {"README.md", *(name for name in counts if name.startswith("docs/"))} - GENERATED
    assert len(written) > 12 and counts.keys() >= GENERATED
    assert sum(counts[name] for name in written) <= MOST_WORDS_OF_ALL


@pytest.mark.docs
def test_the_table_of_contents_has_every_page_once() -> None:
    links = re.findall(r"^- \[(\S+)\]\(\1\): ", (ROOT / "docs" / "README.md").read_text(encoding="utf-8"), re.M)
    assert sorted(links) == sorted({path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"})


@pytest.mark.docs
def test_the_readme_names_every_command() -> None:
    [table] = re.findall(r"^\| command \|.*?\n\n", README, re.M | re.S)
    named = {name for row in table.splitlines()[2:] for name in re.findall(r"`([\w.]+)`", row.split(" | ")[0])}
    shown = subprocess.run([str(SCRIPTS / "chunkplan")], capture_output=True, text=True, check=True).stdout
    assert named == {*re.findall(r"^│ ([a-z]+)  ", shown, re.M), "chunkplan_runtime.train"}


def leaves(kind: pa.DataType) -> set[str]:
    if pa.types.is_list(kind):
        return leaves(kind.value_type)
    if pa.types.is_struct(kind):
        return {field.name for field in kind}
    return set()


@pytest.mark.docs
def test_the_format_names_every_column_op_and_invariant() -> None:
    for name in ("SEQUENCES", "TOKENS", "SAMPLE_COLUMNS", "TOKEN_COLUMNS", "STEPS", "CHUNKS", "SCHEDULE"):
        for field in getattr(schema, name):
            assert f"`{field.name}`" in FORMAT, f"{name}.{field.name}"
            for leaf in leaves(field.type):
                assert leaf in FORMAT
    for word in (*OPS, *PLAN_INVARIANTS, *ANALYSIS_INVARIANTS):
        assert f"`{word}`" in FORMAT, word
    assert f"Schema version {schema.SCHEMA_VERSION}." in FORMAT


@pytest.mark.docs
def test_the_format_names_every_entry_of_an_analysis(tmp_path: Path) -> None:
    """Those of its manifest with all that is inside, and of a line of rejected.jsonl."""
    (tmp_path / "a.jsonl").write_text('{"text": "a b c"}\n{"text": ""}\n')
    options = chunkplan.IntakeOptions(on_error="skip")
    tokenizer = ROOT / "sample_data" / "tokenizer"
    analysis = chunkplan.analyze([tmp_path / "a.jsonl"], tmp_path / "analysis", options, tokenizer=tokenizer)
    text = FORMAT.split("## The analysis")[1].split("## The plan")[0]
    manifest = analysis.manifest
    inside = [manifest[name] for name in ("totals", "tokenizer", "options", "truncated", "content_hashes")]
    [rejected] = map(json.loads, (analysis.path / "rejected.jsonl").read_text().splitlines())
    for entry in (manifest, *inside, manifest["sources"][0], manifest["tokens"][0], rejected):
        for name in entry:
            assert f"`{name}`" in text, name


@pytest.mark.docs
def test_the_format_names_every_entry_of_a_configuration() -> None:
    for field in dataclasses.fields(chunkplan.PlanConfig):
        assert re.search(rf"^\|.*`{field.name}`.*\|.*\|.*\|$", FORMAT, re.M), field.name


@pytest.mark.docs
def test_the_format_names_every_entry_of_a_cost_model() -> None:
    [table] = re.findall(r"^`predictions` has .*?\n\n(.*?)\n\n", FORMAT, re.M | re.S)
    for kind in (chunkplan.CostModel, ModelShape, Layer, Hardware):
        for field in dataclasses.fields(kind):
            assert f"`{field.name}`" in table, field.name


@pytest.mark.docs
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_prose_is_wrapped(document: Path) -> None:
    """At 120 columns; what cannot be wrapped is code, screens, tables, pictures."""
    prose = re.sub(r"^ *```.*?^ *```$", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)
    assert [line for line in prose.splitlines() if len(line) > 120 and not line.startswith(("|", "!["))] == []


@pytest.mark.docs
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_relative_links_lead_somewhere(document: Path) -> None:
    """To a file that exists and, of a page, to a title in it."""
    prose = re.sub(r"^ *```.*?^ *```$", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)
    wrong = []
    for path, anchor in re.findall(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]*))?\)", prose):
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            wrong.append(f"{path}#{anchor}")
    assert wrong == []


@cache
def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives the titles of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.docs
@pytest.mark.parametrize("document", COMMANDS)
def test_the_options_a_document_names_are_those_of_the_command_line(document: str) -> None:
    """In a span or line that begins with a command those of that command, in other spans of `COMMANDS`."""
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    spans = re.findall(r"`([^`\n]*--[^`\n]*)`", text)
    spans += re.findall(r"^(?:\$ )?(chunkplan \w+ [^\n]*--[^\n]*)$", text, re.M)
    known = {command: options_of(command) for command in PROGRAMS}
    assert spans
    for span in spans:
        command = re.match(rf"(?:chunkplan )?({'|'.join(PROGRAMS)}) ", span)
        commands = (command[1],) if command else COMMANDS[document]
        assert set(re.findall(OPTION, span)) <= set().union(*(known[name] for name in commands)), span


OPTION = r"(?<!\S)--[a-z][a-z-]*"


@cache
def options_of(command: str) -> set[str]:
    """Those that `--help-all` names; of the trainer also what torchrun is given."""
    if command == "train":
        return {*(one.flag for one in declared_by(TrainConfig).values()), "--nproc-per-node", "--nproc", "--workspace"}
    ran = subprocess.run(
        [str(SCRIPTS / "chunkplan"), command, "--help-all"],
        env={"PATH": "", "COLUMNS": "200", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return set(re.findall(OPTION, ran.stdout))


@pytest.mark.docs
def test_the_planner_names_the_packers_there_are() -> None:
    [table] = re.findall(r"`--packing` refines it:\n\n(.*?)\n\n", PLANNER, re.S)
    assert set(re.findall(r"^\| `([a-z-]+)` \|", table, re.M)) == set(PACKERS)


@pytest.mark.docs
def test_the_files_to_change_exist() -> None:
    paths = re.findall(r"`((?:[a-z0-9_*]+/)+(?:[a-z0-9_*]+\.py)?)`", CHANGES)
    assert len(paths) > 30
    for path in paths:
        assert [*ROOT.glob(path), *(ROOT / "chunkplan").glob(path)], path


def test_the_python_of_the_planner_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block after another in an empty folder. The step is the one of the picture; the rows are as few as can be."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PLANNER, re.S):
        exec(block, names)
    monkeypatch.syspath_prepend(ROOT / "docs")
    drawn = runpy.run_path(str(ROOT / "docs" / "draw_planner.py"))
    assert (names["lengths"], names["plan"].config.k) == (drawn["LENGTHS"], drawn["CONFIG"].k)
    assert names["step"].optimal and names["rows"].is_optimal


@pytest.mark.soak
def test_the_python_and_the_screens_of_the_tuning_run_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the letter, at 100 columns. And its tables name every entry of the document that `--output` writes."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", TUNING, re.S):
        exec(block, names)
    assert names["plan"].config.chunk_size == names["best"].config.chunk_size
    document = tuning_document(names["tuning"])
    for entry in {*document, *document["options"], *document["data"], *document["baselines"][0], *document["chosen"]}:
        assert f"`{entry}`" in TUNING.split("## tune.json")[1], entry
    screens = re.findall(r"```console\n\$ chunkplan (.*?)\n(.*?)```", TUNING, re.S)
    assert len(screens) == 2
    for arguments, screen in screens:
        assert tuning_screen(arguments, tmp_path) == screen.splitlines()
    [(less, *times)] = re.findall(
        r"`(--gpu-memory \w+)`\s+a step of the example takes (\S+ s), and (\S+ s) with", TUNING
    )
    shown = tuning_screen(f"{screens[0][0]} {less}", tmp_path)
    [box] = re.findall(r"```text\n(│ setting.*?)```", TUNING, re.S)
    assert set(box.splitlines()) < set(shown)
    assert all(any(time in line for line in shown) for time in times)


def tuning_screen(arguments: str, folder: Path) -> list[str]:
    """What `chunkplan` with these arguments prints on a terminal of 100 columns: its lines, or the error."""
    ran = subprocess.run(
        [str(SCRIPTS / "chunkplan"), *shlex.split(arguments)],
        env={"PATH": "", "COLUMNS": "100", "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    return [line.rstrip() for line in (ran.stdout if ran.returncode == 0 else ran.stderr).splitlines()]


@pytest.mark.docs
def test_the_profiles_and_models_of_the_cost_model_are_those_there_are(tmp_path: Path) -> None:
    [table] = re.findall(r"^\| profile \|.*?\n\n", COST_MODEL, re.M | re.S)
    shipped = {path.stem for path in (ROOT / "chunkplan" / "cost" / "profiles").glob("*.toml")}
    rows = re.findall(r"^\| `(\w+)` \|.*?\| (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", table, re.M)
    assert {row[0] for row in rows} == shipped
    for name, *figures in rows:
        profile = chunkplan.load_hardware(name)
        rates = (profile.flops / 1e12, profile.attention_flops / 1e12, profile.copy_bytes / 1e12)
        assert [float(figure) for figure in figures] == [*rates, profile.memory_bytes / 2**30]
    for text in (COST_MODEL, TUNING):
        assert f"{chunkplan.CostModel().offload_chunk_size:,} tokens" in text
    (tmp_path / "config.json").write_text('{"model_type": "none"}')
    with pytest.raises(UsageError) as caught:
        chunkplan.read_model_config(tmp_path)
    [sentence] = re.findall(r"`model_type` may be (.*?):", COST_MODEL, re.S)
    assert re.findall(r"`(\w+)`", sentence) == caught.value.hint.partition("the known types are ")[2].split(", ")


@pytest.mark.docs
def test_what_is_predicted_for_the_paper_is_what_its_benchmark_computes() -> None:
    """Every row of the table, to the digits that it has."""
    ran = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "paper.py")], capture_output=True, text=True, check=True
    )
    found = {figures["experiment"]: figures for figures in map(json.loads, ran.stdout.splitlines())}
    row = r"^\| ([\d.]+) \| `(.*?)` \| `(.*?)` \| (\d+\.?(\d*)) \| ([+-]?\d+)% \|$"
    rows = re.findall(row, COST_MODEL, re.M)
    assert len(rows) > 8
    for published, experiment, figure, predicted, decimals, off in rows:
        value = found[experiment][figure]
        assert float(predicted) == pytest.approx(value, abs=0.51 * 10 ** -len(decimals)), experiment
        assert int(off) == pytest.approx(100 * (value / float(published) - 1), abs=0.51), experiment


@pytest.mark.docs
def test_what_is_predicted_for_table_5_is_what_the_model_of_memory_says() -> None:
    rows = re.findall(r"^\| (\d+)K \| predicted \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", COST_MODEL, re.M)
    assert len(rows) == 2
    cost = chunkplan.CostModel(tp=4)
    for context, *gibibytes in rows:
        for chunk_size, stated in zip((2048, 4096, 8192), gibibytes, strict=True):
            [memory] = stage_memory(
                cost,
                dp=1,
                layers=(28,),
                held=[ResidentTokens(chunk_size, kv=int(context) << 10, kv_gradients=int(context) << 10)],
                chunk_size=chunk_size,
                kv_gradient_bytes=2,
            )
            assert memory.total / 2**30 == pytest.approx(float(stated), abs=0.051)


@pytest.mark.soak
def test_pictures_are_those_that_the_scripts_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte. They are of real plans: run `python docs/draw_NAME.py` when the planner makes other ones."""
    monkeypatch.syspath_prepend(ROOT / "docs")  # as when a script is run by itself
    for script in (ROOT / "docs").glob("draw_*.py"):
        monkeypatch.setattr(sys, "argv", [script.name, str(tmp_path)])
        runpy.run_path(str(script), run_name="__main__")
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in PICTURES}
    assert [path.name for path in PICTURES if path.read_bytes() != (tmp_path / path.name).read_bytes()] == []


@pytest.mark.docs
@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_is_whole(path: Path) -> None:
    """Well-formed, described for those who cannot see it, nothing outside, no letter under 11 units."""
    picture = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    space = "{http://www.w3.org/2000/svg}"
    width, height = (float(value) for value in picture.attrib["viewBox"].split()[2:])
    assert picture.findtext(f"{space}title") and picture.findtext(f"{space}desc")
    texts = picture.findall(f"{space}text")
    assert min(float(text.attrib["font-size"]) for text in texts) >= 11
    for element in [*texts, *picture.findall(f"{space}rect")]:
        x, y = float(element.get("x", 0)), float(element.get("y", 0))
        assert 0 <= x <= x + float(element.get("width", 0)) <= width
        assert 0 <= y <= y + float(element.get("height", 0)) <= height


@pytest.mark.docs
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
