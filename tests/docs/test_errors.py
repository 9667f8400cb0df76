"""docs/errors.md: every message of its tables is one that the source can print, and what is met most often is there."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest

from chunkplan.files.writing import hold
from chunkplan.planfile.schema import SCHEMA_VERSION
from chunkplan.validation.checks_analysis import ANALYSIS_INVARIANTS
from chunkplan.validation.validate import PLAN_INVARIANTS
from chunkplan_runtime.train import main as train
from tests.support.command_line import run_here
from tests.support.places import ROOT

PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
TOKENIZER = ROOT / "sample_data" / "tokenizer"

#: Below so many letters that do not vary, a string of the source could be anything.
LEAST_LETTERS = 5

#: The share of the letters of a message that have to stand in the source. The others are what varies in an example.
LEAST_KNOWN = 2 / 3


def messages_of_the_page() -> list[str]:
    """The first cells of the tables of messages, each message by itself."""
    tables = re.findall(r"^\| message \|.*\n\|.*\n((?:\|.*\n)+)", PAGE, re.M)
    cells = [row.split(" | ")[0] for table in tables for row in table.splitlines()]
    return [double or single for cell in cells for double, single in re.findall(r"`` (.*?) ``|`(.*?)`", cell)]


def letters_of(text: str) -> int:
    return len(re.findall("[A-Za-z]", text))


#: A string of the source: a pattern with a group for each part, and of each whether it is one that does not vary.
Template = tuple[re.Pattern[str], list[bool]]


@pytest.fixture(scope="module")
def templates() -> list[Template]:
    """Every string in the source."""
    files = [path for folder in ("chunkplan", "cli", "runtime") for path in (ROOT / folder).rglob("*.py")]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    named = {
        target.id: node.value.value
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.isupper()
    }
    found = {}
    for node in nodes:
        texts = [texts_of(part, named) for part in (node.values if isinstance(node, ast.JoinedStr) else [node])]
        if sum(letters_of(some[0]) for some in texts if some) >= LEAST_LETTERS:
            found["".join(f"({'|'.join(map(re.escape, some)) or '.*?'})" for some in texts)] = [*map(bool, texts)]
    return [(re.compile(pattern), fixed) for pattern, fixed in found.items()]


def texts_of(part: ast.AST, named: dict[str, str]) -> list[str]:
    """What a part of a string may say, `named` being the constants with a name; nothing if it varies."""
    match part:
        case ast.FormattedValue(value=ast.Name(id=name)) if name in named:
            return [named[name], "…"]
        case ast.FormattedValue(value=ast.IfExp(body=ast.Constant(value=one), orelse=ast.Constant(value=other))):
            return [str(one), str(other), "…"]
        case ast.Constant(value=value):
            return [str(value)]
    return []


def letters_known(text: str, templates: list[Template], *, inside: bool = True) -> int:
    """How many letters of `text` stand in the string of the source that fits best, and in those `inside` of it."""
    most = 0
    for pattern, fixed in templates:
        if match := pattern.fullmatch(text):
            parts = [*zip(match.groups(), fixed, strict=True)]
            letters = sum(letters_of(part) for part, stands in parts if stands)
            if inside:
                letters += sum(letters_known(part, templates, inside=False) for part, stands in parts if not stands)
            most = max(most, letters)
    return most


def is_known(message: str, templates: list[Template]) -> bool:
    """Whether most of it stands in the source."""
    return letters_known(message, templates) >= LEAST_KNOWN * letters_of(message)


@pytest.mark.docs
def test_every_message_is_one_of_the_source(templates: list[Template]) -> None:
    messages = messages_of_the_page()
    assert len(messages) > 70
    assert [message for message in messages if not is_known(message, templates)] == []


@pytest.mark.docs
def test_a_message_with_another_word_is_none_of_the_source(templates: list[Template]) -> None:
    """The longest word of each."""
    others = [
        message.replace(max(re.findall("[A-Za-z]+", message), key=len), "zzqx") for message in messages_of_the_page()
    ]
    assert [message for message in others if is_known(message, templates)] == []


@pytest.mark.docs
def test_all_that_validate_can_find_is_explained() -> None:
    table = PAGE.split("| broken |")[1].split("\n\n")[0]
    explained = {name for row in table.splitlines()[2:] for name in re.findall(r"`([a-z-]+)`", row.split(" | ")[0])}
    assert explained == {*PLAN_INVARIANTS, *ANALYSIS_INVARIANTS}


@pytest.mark.docs
def test_every_extra_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    table = PAGE.split("| extra |")[1]
    explained = {name for row in table.splitlines()[2:] for name in re.findall(r"`([a-z]+)`", row.split(" | ")[0])}
    assert explained == project["optional-dependencies"].keys() - {"dev"}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which much is wrong."""
    folder = tmp_path_factory.mktemp("wrong")
    np.save(folder / "lengths.npy", np.array([100, 3000, 20]))
    np.save(folder / "empty.npy", np.array([100, 0, 20]))
    (folder / "data.csv").touch()
    (folder / "other.json").write_text("{}")
    (folder / "data.jsonl").write_text('{"text": "a text of some words"}\n' * 3)
    (folder / "bad.jsonl").write_text('{"text": "fine"}\n{"text": " "}\n{"text": "cut')
    (folder / "kto.jsonl").write_text('{"prompt": "a", "completion": "b", "label": false}\n')
    (folder / "blank.jsonl").write_text('{"text": ""}\n')
    (folder / "links").mkdir()
    (folder / "links" / "gone.jsonl").symlink_to("nowhere")
    (folder / "other.jsonl").write_text('{"body": "a text of some words"}\n')
    (folder / "chat.jsonl").write_text('{"messages": [{"role": "assistant", "content": "Hello."}]}\n')
    (folder / "full" / "chunkplan-out" / "plan").mkdir(parents=True)
    (folder / "full" / "chunkplan-out" / "plan" / "precious.txt").touch()
    (folder / "other").mkdir()
    (folder / "other" / "manifest.json").write_text("{}")
    (folder / "plain").mkdir()
    shutil.copy(TOKENIZER / "tokenizer.json", folder / "plain")
    for command in ("build lengths.npy --chunk-size 1024 --k 1", "analyze data.jsonl --output analysis"):
        assert run_here(folder, *shlex.split(command)).returncode == 0
    manifest = json.loads((folder / "chunkplan-out" / "plan" / "manifest.json").read_text())
    for name, version in (("old", 1), ("new", SCHEMA_VERSION + 1)):
        shutil.copytree(folder / "chunkplan-out" / "plan", folder / name)
        (folder / name / "manifest.json").write_text(json.dumps({**manifest, "schema_version": version}))
    shutil.copytree(folder / "chunkplan-out" / "plan", folder / "torn")
    (folder / "torn" / "steps.parquet").write_bytes(b"PAR1")
    return folder


#: A command, its exit code, and the message of the page that it ends with.
WRONG = [
    ("inspect --workspace none", 2, "there is no plan in the workspace …"),
    ("build --workspace none --chunk-size 8 --k 1", 2, "there is no analysis in the workspace …"),
    ("inspect none", 2, "there is no plan at …"),
    ("inspect full", 2, "… has no manifest.json"),
    ("inspect other", 3, "not the manifest of an analysis or a plan"),
    ("simulate analysis", 3, "expected the manifest of one …, found one of kind …"),
    ("inspect old", 3, "written by schema version … (chunkplan …); this chunkplan reads version …"),
    ("inspect new", 3, "written by schema version … (chunkplan …); this chunkplan reads version …"),
    ("inspect torn", 3, "cannot be read: …"),
    ("build lengths.npy --chunk-size 9 --k 1 --workspace full/chunkplan-out", 2, "… exists and is not just …: …"),
    ("analyze none.jsonl", 2, "there is no file …"),
    ("analyze plain", 2, "… has no data in it or below"),
    ("analyze data.csv", 2, "… has a suffix that is not known"),
    ("analyze bad.jsonl", 3, "not JSON: …"),
    ("analyze kto.jsonl", 3, "`…` is false: a bad answer, as data for KTO have them, and every answer is trained"),
    ("analyze blank.jsonl", 3, "no sequence in … (…)"),
    ("analyze links", 3, "a link that leads nowhere"),
    ("analyze other.jsonl", 3, "no schema fits the keys of the records: …; closest is … (…)"),
    ("analyze other.jsonl --column text=title", 3, "no record has the key `…` of …; found: …"),
    ("analyze data.jsonl --max-record-mb 0.00001", 3, "… bytes, more than the … that are read of one record"),
    ("analyze data.jsonl --tokenizer other.json", 3, "not a tokenizer: …"),
    ("analyze chat.jsonl --tokenizer plain", 2, "there are conversations and the tokenizer … has no chat template"),
    ("merge plain", 2, "… is no shard of an analysis: it has no …"),
    ("build lengths.npy --chunk-size 8192", 2, "--k is missing"),
    ("build lengths.npy --chunk-size 0 --k 1", 2, "… is …, expected …"),
    ("build lengths.npy --chunk-size 99 --k 1 --no-split", 3, "sequence … has … tokens, and nothing may be split"),
    (
        "build lengths.npy --chunk-size 99 --k 1 --last-batch drop",
        2,
        "all … sequences would be dropped: a global batch has …",
    ),
    ("build data.jsonl --chunk-size 99 --k 1", 2, "… is neither an analysis nor a file of lengths"),
    ("build empty.npy --chunk-size 99 --k 1", 3, "the length of sequence … is …, expected 1 to 2147483647"),
    (
        "build lengths.npy --chunk-size 99 --k 1 --holdout 3",
        2,
        "a holdout of … takes … of the … sequences: none is left for …",
    ),
    ("build analysis --chunk-size 99 --k 1 --mix none.jsonl=2", 2, "the analysis has no source …"),
    ("build lengths.npy --chunk-size 99 --k 1 --schedule 1f1b", 2, "schedule … is for …, pp is …"),
    (
        "build lengths.npy --chunk-size 999 --k 3 --pp 2 --max-activation-tokens 999",
        2,
        "a stage has to hold activations of … tokens at once, max-activation-tokens allows …",
    ),
    (
        "build lengths.npy --chunk-size 3000 --k 1 --pp 2 --max-activation-tokens 3000 --schedule 1f1b",
        2,
        "… holds activations of … tokens on stage …, max-activation-tokens allows …",
    ),
    ("build lengths.npy --chunk-size 999 --k 1 --pp 99", 2, "… has … layers, too few for …"),
    (
        "build lengths.npy --chunk-size 999 --k 1 --pp 2 --stage-layers 5,4",
        2,
        "stage-layers has … layers, … has …",
    ),
    (
        "tune lengths.npy --gpus 7919",
        2,
        "… GPUs cannot be used whole…: they are pipelines of up to … stages, and no more of these than the … sequences "
        "of a step",
    ),
    ("tune lengths.npy --hardware none", 2, "… is no hardware profile, and no file that can be read"),
    ("tune lengths.npy --model ./none", 2, "…: no config.json that can be read"),
    ("simulate --step 99", 2, "there is no step …"),
    ("simulate --rank 9", 2, "there is no rank …"),
    ("inspect --step 0 --rank 0 --chunk 9", 2, "there is no chunk … in step … on rank …"),
    ("inspect --step 0 --rank 0 --chunk 0 --text", 2, "the analysis … holds lengths only, no tokens"),
    ("diff chunkplan-out/plan analysis", 2, "… is a plan, … an analysis"),
    ("export --to hf", 2, "the analysis … holds lengths only, no tokens"),
]


def assert_is_on_the_page(message: str, printed: str) -> None:
    """The error that was `printed` is `message` of the page, and has a hint."""
    assert message in messages_of_the_page()
    [error] = re.findall(r"^error: (.*)\nhint: .", printed, re.M)
    assert re.search(".*".join(map(re.escape, message.split("…"))), error), error


@pytest.mark.parametrize(("command", "code", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_what_is_met_most_often_is_on_the_page(here: Path, command: str, code: int, message: str) -> None:
    ran = run_here(here, *shlex.split(command))
    assert ran.returncode == code, ran.stderr
    assert_is_on_the_page(message, ran.stderr)


def test_what_a_second_run_in_one_workspace_is_told_is_on_the_page(here: Path) -> None:
    with hold(here / "chunkplan-out" / "plan"):
        ran = run_here(here, *shlex.split("build lengths.npy --chunk-size 99 --k 1"))
    assert ran.returncode == 2
    assert_is_on_the_page("another run is writing … (…)", ran.stderr)


#: The same of the trainer, with the plan of lengths that `here` has.
WRONG_RUNS = [
    ("--model-config {config}", "the analysis … holds lengths only, no tokens"),
    ("--model-config {config} --device cuda:99", "--device is …, this torch (…) sees … GPUs"),
    ("--model-config {config} --plan none", "there is no plan at …"),
]


@pytest.mark.soak  # not slow, but for the time it takes to import torch
@pytest.mark.parametrize(("options", "message"), WRONG_RUNS, ids=[message for _, message in WRONG_RUNS])
def test_what_the_trainer_refuses_most_often_is_on_the_page(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: str, message: str
) -> None:
    monkeypatch.chdir(here)
    options = options.format(config=ROOT / "sample_data" / "model" / "config.json")
    assert train(["--plan", "chunkplan-out/plan", "--output", "run", *shlex.split(options)]) == 2
    assert_is_on_the_page(message, capsys.readouterr().err)


def test_the_screen_of_the_page_is_what_is_printed(here: Path) -> None:
    [(command, screen)] = re.findall(r"```console\n\$ chunkplan (.*)\n((?:.*\n)+?)```", PAGE)
    assert run_here(here, *shlex.split(command)).stderr == screen
