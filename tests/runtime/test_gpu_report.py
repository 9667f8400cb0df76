"""`make gpu-report` runs at toy sizes on a CPU, without the planner; its page and its plans are those that are here."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from chunkplan.planfile.load import load_plan
from tests.support.places import ROOT

BENCHMARKS = ROOT / "benchmarks"

#: Runs a program where these packages are not installed.
BARE = """
import runpy, sys
sys.modules.update(dict.fromkeys({missing}))
sys.argv = sys.argv[1:]
sys.path.insert(0, {benchmarks!r})
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)


def report(folder, *words, missing=()):
    """What the program printed, and the file that it wrote."""
    code = BARE.format(missing={"polars", "ortools", "numba", "typer", "rich", *missing}, benchmarks=str(BENCHMARKS))
    program = [sys.executable, "-c", code, str(BENCHMARKS / "gpu_report.py"), "--device", "cpu", "--size", "toy"]
    paths = os.pathsep.join(str(ROOT / each) for each in ("", "runtime", "cli"))
    ran = subprocess.run(
        [*program, "--output", str(folder), *words],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    files = list(folder.glob("*.json"))
    return ran, json.loads(files[0].read_text()) if files else None


@pytest.mark.soak
def test_all_parts_run_at_toy_sizes_by_make(tmp_path):
    """Where no process can import what the planner needs."""
    (tmp_path / "missing").mkdir()
    for name in ("polars", "ortools", "numba"):
        (tmp_path / "missing" / f"{name}.py").write_text(f"raise ModuleNotFoundError('none here', name={name!r})")
    parts = "kernels,tests,probe,calibrate,steps,nccl,offload,long,million"
    words = ["make", "gpu-report", "SIZE=toy", f"OUTPUT={tmp_path}", f"PARTS={parts}", f"PYTHON={sys.executable}"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(tmp_path / "missing")}
    ran = subprocess.run(words, cwd=ROOT, env=environment, text=True, capture_output=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    [file] = tmp_path.glob("*.json")
    found = json.loads(file.read_text())
    assert {row["outcome"].split()[0] for row in found["tests"]} == {"skipped"}
    assert len(found["calibrate"]["chunks"]) == 9 and "calibrated_chunks" not in found
    assert all("predicted s, calibrated" in row for part in ("steps", "long", "million") for row in found[part])
    losses = {row["trainer"]: [] for row in found["nccl"] if "trainer" in row}
    for row in found["nccl"]:
        losses.get(row.get("trainer"), []).append(row.get("loss"))
    one, several = losses.values()
    assert several == pytest.approx(one, abs=1e-5)


def test_what_cannot_be_measured_is_refused_in_one_line(benchmarks, tmp_path, monkeypatch, capsys):
    import gpu_report

    for words, expected in (
        (["--size", "toy", "--parts", "kernel"], "no part kernel; choose of kernels,"),
        (["--size", "toy", "--parts", ","], "no part is named; choose of kernels,"),
        (["--size", "full"], "there is no GPU"),
    ):
        monkeypatch.setattr(sys, "argv", ["gpu_report.py", "--device", "cpu", "--output", str(tmp_path), *words])
        with pytest.raises(SystemExit) as ended:
            gpu_report._main()
        assert (ended.value.code, [*tmp_path.iterdir()]) == (2, [])
        assert expected in capsys.readouterr().err.splitlines()[-1]


def test_a_step_that_takes_too_long_ends_with_what_is_done(benchmarks):
    import gpu_steps

    rows = []
    run = gpu_steps.Run(torch.device("cpu"), True, {"h100": "h100"}, rows.append)
    gpu_steps.run_plan(run, "0.5b-1m", (True,))
    whole = {row["step"]: row for row in rows}
    rows.clear()
    gpu_steps.run_plan(run, "0.5b-1m", (True,), seconds=0)
    assert len(rows) == 2
    for row in rows:
        assert re.fullmatch(r"1 of \d+ actions", row["done"]) and "loss" not in row
        assert 0 < row["predicted s, h100"] < whole[row["step"]]["predicted s, h100"]


def test_streams_are_at_work_for_what_their_kernels_and_copies_take(benchmarks):
    """The main one has most kernels; copies on it are its work."""
    from gpu_streams import Work, at_work

    found = at_work(
        [
            Work("attention", 7, 10**9, 3 * 10**9),
            Work("Memcpy DtoD (Device -> Device)", 7, 5 * 10**9, 10**9),
            Work("Memcpy HtoD (Pinned -> Device)", 20, 10**9, 2 * 10**9),
            Work("Memcpy HtoD (Pageable -> Device)", 20, 4 * 10**9, 10**9),
            Work("Memcpy DtoH (Device -> Pinned)", 21, 6 * 10**9, 5 * 10**9),
            Work("fill", 20, 3 * 10**9, 10**8),
        ]
    )
    assert found == {
        "in all, s": 10.0,
        "kernels and copies of the main stream, s": 4.0,
        "main stream idle, s": 6.0,
        "copies to the host, s": 5.0,
        "copies to the GPU, s": 3.0,
        "kernels beside, s": 0.1,
        "pageable copies, s": 1.0,
    }


@pytest.mark.soak
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_report_that_is_stopped_ends_its_program_and_keeps_its_rows(tmp_path, number, code):
    """Stopped while processes of torchrun begin."""
    paths = os.pathsep.join(str(ROOT / each) for each in ("", "runtime", "cli"))
    words = ["--device", "cpu", "--size", "toy", "--output", str(tmp_path), "--parts", "kernels,nccl"]
    with subprocess.Popen(
        [sys.executable, str(BENCHMARKS / "gpu_report.py"), *words],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None and program.stderr is not None
        assert any(line.startswith("kernels: done") for line in program.stdout)
        started = []
        while len(started) < 3:  # torchrun and two processes, which take seconds to begin
            time.sleep(0.01)
            started = [each for one in children(program.pid) for each in (one, *children(one))]
        program.send_signal(number)
        told = program.stderr.read()
    assert program.returncode == code and "Traceback" not in told
    assert [each for each in started if is_alive(each)] == []
    [file] = tmp_path.glob("*.json")
    assert len(json.loads(file.read_text())["attention_tflops"]) == 6


def children(pid):
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid):
    """Whether it runs; one that was ended may wait for its parent to hear of it."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(") ")[2][0] not in "ZX"


def test_predictions_of_a_report_are_those_of_the_planner(benchmarks, tmp_path):
    """Which plays the schedule of a step; the report, without the planner, adds up its actions."""
    import gpu_plans
    import gpu_steps

    from chunkplan_runtime.feed.stream import PlanStream, open_plan

    plan = gpu_plans.PLANS["7b-lora-32k"]
    opened = open_plan(gpu_plans.FOLDER / "7b-lora-32k", gpu_plans.write_tokens(plan, tmp_path / "analysis"))
    gpu_plans.make(tmp_path, ("7b-lora-32k",))
    [anew] = load_plan(tmp_path / "7b-lora-32k").iter_steps()
    [work] = PlanStream(*opened, vocab_size=152064, max_positions=None, prefetch=0)
    seconds = gpu_steps.predicted_seconds(plan.cost(), work, work.ranks[0].actions)
    assert seconds == pytest.approx(anew.predicted_us / 1e6, rel=1e-6)


@pytest.mark.parametrize(
    "names", [("toy", "toy-dp8", "1.5b-8k"), pytest.param((), marks=pytest.mark.soak, id="all of them")]
)
def test_plans_are_those_that_the_program_makes(benchmarks, tmp_path, names):
    import gpu_plans

    names = names or tuple(gpu_plans.PLANS)
    gpu_plans.make(tmp_path, names)
    for name in names:
        kept = load_plan(gpu_plans.FOLDER / name).manifest
        assert load_plan(tmp_path / name).manifest["content_hash"] == kept["content_hash"], name
    assert {path.name for path in gpu_plans.FOLDER.iterdir()} == {*gpu_plans.PLANS, "lengths.json"}


@pytest.mark.docs
def test_the_page_is_that_of_the_files_that_are_kept():
    page = runpy.run_path(str(BENCHMARKS / "gpu_page.py"))["page"](BENCHMARKS / "measured")
    assert (ROOT / "docs" / "gpu-report.md").read_text(encoding="utf-8") == page


@pytest.mark.docs
def test_figures_of_a_gpu_in_the_readme_are_those_that_are_kept():
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    figures = r"\| One (\w+), 1.5B, ([\d,]+) tokens in \d+ chunks \| ([\d.]+) s, .*? \(predicted ([\d.]+) s, "
    [(gpu, tokens, seconds, predicted)] = re.findall(figures, text)
    found = json.loads((BENCHMARKS / "measured" / "h200-2026-11-27.json").read_text())
    assert gpu in found["machine"]["gpu"]
    [row] = [row for row in found["steps"] if row.get("plan") == "1.5b-8k" and f"{row['tokens']:,}" == tokens]
    assert (f"{row['seconds']:.2f}", f"{row['predicted s, profile h200']:.2f}") == (seconds, predicted)


def test_all_tests_of_a_gpu_are_in_the_files_that_are_run_there(benchmarks):
    marked = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"^@?\s*pytest\.mark\.gpu\b", path.read_text(encoding="utf-8"), re.M)
    }
    import gpu_report

    assert marked == {*gpu_report.GPU_TESTS}
    assert " ".join(gpu_report.GPU_TESTS) in (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n\t\t", "")
