"""`chunkplan gain` as it is typed: from data to the rows, the page, and a plan as fast as was said."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from chunkplan import load_plan
from chunkplan.intake import first_look
from chunkplan.intake.reading import IntakeRequest
from tests.support.command_line import SMALL_MODEL
from tests.support.command_line import run_here as run
from tests.support.places import ROOT
from tests.support.tuning_cases import long_tail

SAMPLE = ROOT / "sample_data"
SMALL = ("--model", ".", "--chunk-sizes", "2048,8192", "--ks", "1", "--global-batch", "32", "--gpus", "2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with lengths of a long tail, and the configuration of a small model."""
    np.save(tmp_path / "lengths.npy", long_tail(400, 60_000))
    (tmp_path / "config.json").write_text(json.dumps(SMALL_MODEL))
    return tmp_path


def test_one_command_shows_every_way_and_then_the_plan(folder: Path) -> None:
    """Rows of today first, the plan last, then the box; every line fits; the limit of positions is said before all."""
    for columns in (80, 120):
        ran = run(folder, "gain", "lengths.npy", *SMALL, columns=columns)
        assert ran.returncode == 0, ran.stderr
        names = ("one sequence a micro-batch", "packed to", "packed, ZeRO-3", "context parallel (", "chunkplan ")
        order = [ran.stdout.index(name) for name in (*names, "─ nothing to gain ─")]
        assert order == sorted(order)
        assert max(len(line.rstrip()) for line in ran.stdout.splitlines()) <= columns
        assert "more than the 32,768 tokens that" in ran.stderr
        assert "next: keep packed" in ran.stderr and ran.stderr.endswith("\n      chunkplan build lengths.npy --auto\n")
    [hours] = re.findall(r"^chunkplan +(\S+) (m?s) +[\d,]+ +(\S+) +none", ran.stdout, re.M)
    seconds = float(hours[0]) / (1000 if hours[1] == "ms" else 1)
    assert float(hours[2]) == pytest.approx(13 * seconds * 2 / 3600, rel=0.02), "400 sequences are 13 steps of 32"


def test_the_plan_that_is_recommended_takes_what_was_said(folder: Path) -> None:
    """`build` of it, by the command that is printed, and `validate`: within 5 % of its step and memory."""
    document = json.loads(run(folder, "gain", "lengths.npy", *SMALL, "--json").stdout)
    for words in ("build lengths.npy --auto", "validate"):
        ran = run(folder, *shlex.split(words))
        assert ran.returncode == 0, ran.stderr
    chosen = document["chosen"]
    predicted = load_plan(folder / "chunkplan-out" / "plan").manifest["predictions"]
    found = json.loads(run(folder, "inspect", "--json").stdout)
    assert predicted["cost_model"]["checkpointing"] == chosen["checkpointing"]
    step = found["summary"]["total_us"] / found["summary"]["num_steps"] / 1e6
    assert step == pytest.approx(chosen["step_seconds"], rel=0.05)
    assert found["memory"]["memory"]["total"] == pytest.approx(chosen["memory"]["total"], rel=0.05)


def test_the_way_that_gains_are_against_can_be_named(folder: Path) -> None:
    for name in ("single", "cut"):
        document = json.loads(run(folder, "gain", "lengths.npy", *SMALL, "--json", "--baseline", name).stdout)
        row = next(each for each in document["baselines"] if each["name"] == document["speedup_over"])
        assert row["key"] == name
        assert document["speedup_over_best"] == pytest.approx(row["step_seconds"] / document["chosen"]["step_seconds"])
    ran = run(folder, "gain", "lengths.npy", "--baseline", "fsdp")
    assert ran.returncode == 2 and "single or padded or packed" in ran.stderr


def test_the_page_has_a_bar_for_each_way_before_anything_else(folder: Path) -> None:
    ran = run(folder, "gain", "lengths.npy", *SMALL, "--output", "page.html", "--json")
    assert ran.returncode == 0, ran.stderr
    text = (folder / "page.html").read_text(encoding="utf-8")
    assert text.index('<section id="ways"') < text.index('<section id="lengths"')
    for row in json.loads(ran.stdout)["baselines"]:
        assert row["name"] in text


def test_data_are_read_as_analyze_reads_them(tmp_path: Path) -> None:
    """Little is read whole, into the analysis that `build` and `train` take; without a tokenizer that is said."""
    records = [{"text": "word " * length} for length in (5, 50, 500, 5000)] * 8
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "config.json").write_text(json.dumps(SMALL_MODEL))
    ran = run(tmp_path, "gain", "data.jsonl", *SMALL, "--tokenizer", str(SAMPLE / "tokenizer"))
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.endswith(" chunkplan build --auto\n")
    assert run(tmp_path, "build", "--auto").returncode == 0
    ran = run(tmp_path, "gain", "data.jsonl", *SMALL)
    assert "no tokenizer: the lengths are estimated from bytes" in ran.stderr
    for words, code in ((("nowhere.jsonl",), 2), (("nowhere.npy",), 2), (("config.json", "--gpus", "7"), 3)):
        assert run(tmp_path, "gain", *words).returncode == code


def test_records_too_long_for_the_model_are_cut_and_the_plan_is_built_for_the_same_model(tmp_path: Path) -> None:
    lines = (json.dumps({"text": "word " * count}) for count in (10, 20_000, 300, 40))
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "config.json").write_text(json.dumps(SMALL_MODEL | {"max_position_embeddings": 4096}))
    ran = run(tmp_path, "gain", "data.jsonl", *SMALL)
    assert ran.returncode == 0, ran.stderr
    assert "1 sequence cut to the 4,096 tokens that" in ran.stderr and "refuses" not in ran.stderr
    assert "the longest 4,096" in " ".join(ran.stdout.split())
    ran = run(tmp_path, "build", "--auto", "--model", ".", "--dry-run")
    assert ran.returncode == 0 and "chosen as in chunkplan-out/tuning.json" in ran.stderr, ran.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpus", "1", "--baseline", "zero-3"), "zero-3 takes 2 GPUs or more"),
        (("--output", "none/page.html"), "none is not a folder"),
    ],
)
def test_what_cannot_be_answered_is_refused_first(folder: Path, words: tuple[str, ...], message: str) -> None:
    ran = run(folder, "gain", "lengths.npy", *SMALL, *words)
    assert ran.returncode == 2 and f"error: {message}\nhint: " in ran.stderr and not ran.stdout


def test_lengths_of_much_data_are_estimated_from_a_sample_and_none_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every record is there, the longest too, near what the tokenizer counts; what a source has stays its own."""
    monkeypatch.setattr(first_look, "COUNTED", 250_000)
    request = IntakeRequest(
        paths=[SAMPLE / "code.jsonl", SAMPLE / "chat.jsonl"], cache=tmp_path / "cache", tokenizer=SAMPLE / "tokenizer"
    )
    guessed, estimate = first_look.first_look(request, tmp_path / "whole", tmp_path / "scratch")
    assert estimate is not None and 0 < estimate.num_counted < estimate.num_records
    monkeypatch.setattr(first_look, "COUNTED", 100_000_000)
    counted, nothing = first_look.first_look(request, tmp_path / "whole", tmp_path / "scratch")
    assert nothing is None and guessed.num_sequences == counted.num_sequences
    assert guessed.num_tokens.sum() == pytest.approx(counted.num_tokens.sum(), rel=0.05)
    assert guessed.num_tokens.max() == pytest.approx(counted.num_tokens.max(), rel=0.15)
    assert np.median(np.abs(guessed.num_tokens / counted.num_tokens - 1)) < 0.15


@pytest.mark.soak
def test_a_plan_of_a_long_tail_takes_what_was_said(tmp_path: Path) -> None:
    """As above, with all sizes and layouts of eight GPUs, on 20,000 sequences of up to 256K tokens."""
    np.save(tmp_path / "lengths.npy", long_tail(20_000, 262_144))
    document = json.loads(run(tmp_path, "gain", "lengths.npy", "--gpus", "8", "--json").stdout)
    for words in ("build lengths.npy --auto", "validate"):
        assert run(tmp_path, *shlex.split(words)).returncode == 0
    found = json.loads(run(tmp_path, "inspect", "--json").stdout)
    step = found["summary"]["total_us"] / found["summary"]["num_steps"] / 1e6
    assert step == pytest.approx(document["chosen"]["step_seconds"], rel=0.05)
    assert found["memory"]["memory"]["total"] == pytest.approx(document["chosen"]["memory"]["total"], rel=0.05)
