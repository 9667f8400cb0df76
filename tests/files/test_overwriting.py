"""No file that a command is asked to write takes the place of what it reads, or lands in a plan or an analysis."""

from __future__ import annotations

import json
import os
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import chunkplan.cost
from chunkplan.errors import UsageError
from chunkplan.files.writing import refuse_overwriting, whole_file
from tests.support.command_line import Run
from tests.support.places import ROOT

MODEL = ROOT / "sample_data" / "model" / "config.json"
PROFILE = Path(str(chunkplan.cost.__file__)).parent / "profiles" / "h100.toml"

#: By what they would damage.
COMMANDS = {
    "a plan's manifest": "inspect plan --html plan/manifest.json",
    "a plan's folder": "inspect plan --html plan/page.html",
    "a plan of the workspace": "inspect --workspace . --html plan/chunks.parquet",
    "the analysis of a plan": "inspect plan --html lengths.npy",
    "an analysis": "inspect analysis --html analysis/sequences.parquet",
    "the data of an analysis": "inspect analysis --html data.jsonl",
    "lengths": "inspect lengths.npy --html lengths.npy",
    "a link to lengths": "inspect lengths.npy --html link.npy",
    "a tuning": "inspect plan --html tuning.json --tuning tuning.json",
    "lengths of a tuning": "tune lengths.npy --output lengths.npy",
    "an analysis that is tuned for": "tune analysis --output analysis/tuning.json",
    "a model": "tune lengths.npy --model model --output model/config.json",
    "a profile": "tune lengths.npy --hardware mine.toml --output mine.toml",
    "a plan that is simulated": "simulate plan --trace plan/steps.parquet",
    "a model that is simulated": (
        "simulate --lengths 9 --chunk-size 9 --k 1 --model model/config.json --trace model/config.json"
    ),
    "a plan that is exported": "export --to jsonl plan --allow-split --output plan",
    "an analysis that is exported": "export --to jsonl analysis --chunk-size 99 --allow-split --output analysis",
    "the base of a calibration": "calibrate --model model --base mine.toml --output mine.toml",
    "a model that is calibrated for": "calibrate --model model --output model/config.json",
}


@pytest.fixture
def folder(tmp_path: Path, command: Run) -> Path:
    np.save(tmp_path / "lengths.npy", np.array([300, 100, 27]))
    (tmp_path / "link.npy").symlink_to("lengths.npy")
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": "a text of some words"}) + "\n")
    (tmp_path / "tuning.json").write_text("{}")
    (tmp_path / "mine.toml").write_text(f"# Measured by chunkplan calibrate\n{PROFILE.read_text()}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_bytes(MODEL.read_bytes())
    assert command("build", "lengths.npy", "--chunk-size", 128, "--k", 1, "--output", "plan").code == 0
    assert command("analyze", "data.jsonl", "--output", "analysis").code == 0
    return tmp_path


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("what", COMMANDS)
def test_what_is_read_is_never_written_over(what: str, folder: Path, command: Run) -> None:
    before = contents(folder)
    ran = command(*shlex.split(COMMANDS[what]))
    assert (ran.code, ran.out) == (2, "")
    assert "hint: " in ran.err
    assert contents(folder) == before


def test_beside_what_is_read_there_is_room(folder: Path, command: Run) -> None:
    assert command("simulate", "plan", "--trace", "plan.json").code == 0
    assert command("simulate", "--lengths", 9, "--chunk-size", 9, "--k", 1, "--trace", "plan.json").code == 0


def test_the_message_names_both(tmp_path: Path) -> None:
    refuse_overwriting(tmp_path / "plan-2" / "page.html", [tmp_path / "plan", None])
    with pytest.raises(UsageError, match=r"writing .*/plan/page\.html would damage .*/plan, which is read"):
        refuse_overwriting(tmp_path / "plan" / "page.html", [None, tmp_path / "plan"])


def test_a_pipe_is_written_into_and_stays_one(tmp_path: Path) -> None:
    """So do devices, such as /dev/stdout where that is one."""
    os.mkfifo(pipe := tmp_path / "pipe")
    with ThreadPoolExecutor() as pool:
        read = pool.submit(pipe.read_text)
        with whole_file(pipe) as file:
            file.write("a page")
        assert read.result(timeout=10) == "a page"
    assert pipe.is_fifo()


def test_a_link_stays_one_and_what_it_points_at_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "page.html").symlink_to("behind.html")
    (tmp_path / "behind.html").write_text("old")
    with whole_file(tmp_path / "page.html") as file:
        file.write("new")
    assert (tmp_path / "page.html").readlink() == Path("behind.html")
    assert (tmp_path / "behind.html").read_text() == "new"


def test_a_folder_is_no_file(tmp_path: Path, command: Run) -> None:
    np.save(tmp_path / "lengths.npy", np.array([300]))
    (tmp_path / "folder").mkdir()
    ran = command("inspect", "lengths.npy", "--html", "folder")
    assert (ran.code, ran.err) == (2, "error: folder is a folder\nhint: give the name of a file in it\n")


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("plan.html/page.html", "cannot write plan.html/page.html"),
        ("missing/page.html", "cannot write missing/page.html: No such file or directory"),
        ("model", "model is a folder"),
        (f"{'x' * 250}.html", "File name too long"),
        ("lengths.npy", "writing lengths.npy would damage"),
        ("data.jsonl", "writing data.jsonl would damage"),
    ],
)
def test_where_a_page_goes_is_looked_at_before_it_is_made(folder: Path, command: Run, page: str, said: str) -> None:
    """So that a plan whose page cannot be made, as it is damaged, is not what is complained of."""
    (folder / "plan.html").write_text("")
    made_of = "analysis" if page == "data.jsonl" else "lengths.npy"
    assert command("build", made_of, "--chunk-size", 128, "--k", 1, "--output", "plan").code == 0
    (folder / "plan" / "chunks.parquet").write_bytes(b"not a table")
    before = contents(folder)
    ran = command("inspect", "plan", "--html", page)
    assert (ran.code, ran.out, contents(folder)) == (2, "", before)
    assert said in ran.err
    assert command("inspect", "plan", "--html", "page.html").code == 3
    assert not (folder / "page.html").exists()
