"""The command line as people type it: real files, real exit codes, stdout for data and stderr for the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from chunkplan.extras import pip_install
from tests.support.command_line import Run
from tests.support.places import ROOT

SAMPLE = ROOT / "sample_data"


@pytest.fixture
def run(command: Run) -> Run:
    """Run `chunkplan ARGUMENTS` in an empty folder."""
    return command


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """`dataset.jsonl` in the current folder: 40 short texts and one of 3,000 words."""
    path = tmp_path / "dataset.jsonl"
    lines = [json.dumps({"text": f"a short text, number {number} of many " * (number % 5 + 1)}) for number in range(40)]
    lines.append(json.dumps({"text": "word " * 3000}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_the_planner_never_imports_torch(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array([5, 600]))
    code = (
        "import sys; from chunkplan_cli.main import main\n"
        "for words in (['build', 'lengths.npy', '--chunk-size', '128', '--k', '1'], ['inspect'], ['validate']):\n"
        "    sys.argv = ['chunkplan', *words]\n"
        "    try: main()\n"
        "    except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=tmp_path)


def test_the_uses_work_as_typed(run: Run, dataset: Path) -> None:
    """Without a tokenizer lengths are estimated, loudly; build and inspect take the latest; each names the next."""
    analyzed = run("analyze", "dataset.jsonl")
    assert analyzed.code == 0
    assert "ESTIMATED" in analyzed.out
    assert "next: chunkplan gain --gpus 8" in analyzed.err
    built = run("build", "--chunk-size", 8192, "--k", 4)
    assert built.code == 0
    assert "ESTIMATED" in built.out
    assert "estimated from bytes" in built.err
    assert "ESTIMATED" in run("inspect", "--step", 0).out
    assert json.loads(run("inspect", "--step", 0, "--json").out)["exact"] is False
    assert "estimated" in run("validate").err
    assert "next: chunkplan inspect" in built.err
    assert "plan in chunkplan-out/plan" in built.err
    inspected = run("inspect")
    assert inspected.out.startswith(built.out)
    assert run("validate").code == 0


def test_json_is_one_document_with_the_numbers_of_the_report(run: Run, tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array([300, 100, 27]))
    built = json.loads(run("build", "lengths.npy", "--chunk-size", 128, "--k", 1, "--json").out)
    inspected = json.loads(run("inspect", "--json").out)
    assert built["summary"] == inspected["summary"]
    assert built["manifest"] == inspected["manifest"]
    summary = built["summary"]
    assert (summary["num_standalone"], summary["num_dependent"], summary["num_groups"]) == (1, 3, 1)
    assert summary["token_fill"] == pytest.approx(427 / (4 * 128))
    assert summary["peak_retained_tokens"] == 128
    validated = json.loads(run("validate", "--json").out)
    assert validated["ok"] is True
    assert validated["content_hash"] == built["manifest"]["content_hash"]


def test_validate_names_the_place_and_exits_with_4(run: Run, tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array([300, 100, 27]))
    run("build", "lengths.npy", "--chunk-size", 128, "--k", 1)
    manifest = tmp_path / "chunkplan-out" / "plan" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"chunk_size": 128', '"chunk_size": 127'))
    ran = run("validate")
    assert ran.code == 4
    assert "BROKEN  chunk-size: step 0, rank 0, chunk 1: " in ran.out


def test_a_plan_beside_a_new_analysis_is_not_called_damaged(run: Run, tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array([300, 100, 27]))
    run("build", "lengths.npy", "--chunk-size", 128, "--k", 1)
    np.save(tmp_path / "lengths.npy", np.array([300, 100, 28, 5]))
    ran = run("validate")
    assert ran.code == 4
    assert [line for line in ran.out.splitlines() if "BROKEN" in line] == [
        f"BROKEN  content-hash: the plan was built from another analysis than {tmp_path}/lengths.npy"
    ]
    assert "not checked  prefixes, batch-sizes" in ran.out and "1 invariant broken" in ran.out
    assert "hint: say where the plan's own analysis is with --analysis" in ran.err
    assert "damaged" not in ran.err


def write(path: str, content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / path).write_text(content, encoding="utf-8") and None


def newer_plan(folder: Path) -> None:
    plan = folder / "chunkplan-out" / "plan"
    plan.mkdir(parents=True)
    (plan / "manifest.json").write_text('{"kind": "plan", "schema_version": 99, "tool_version": "9.0"}')


def something_else(folder: Path) -> None:
    np.save(folder / "lengths.npy", np.array([3]))
    (folder / "photos").mkdir()
    (folder / "photos" / "one.jpg").write_text("")


def good_text(folder: Path) -> None:
    (folder / "good.jsonl").write_text('{"text": "a"}\n')


BUILD = ("build", "lengths.npy", "--chunk-size", 8, "--k", 1)
MISTAKES: dict[str, tuple[Callable[[Path], object], tuple[object, ...], int, str]] = {
    "no analysis yet": (lambda folder: None, ("build", "--chunk-size", 8, "--k", 1), 2, "there is no analysis"),
    "no plan yet": (lambda folder: None, ("inspect",), 2, "there is no plan"),
    "no plan to validate": (lambda folder: None, ("validate",), 2, "there is no plan"),
    "chunk size below 1": (something_else, ("build", "lengths.npy", "--chunk-size", 0, "--k", 1), 2, "chunk-size is 0"),
    "K below 1": (something_else, ("build", "lengths.npy", "--chunk-size", 8, "--k", 0), 2, "k is 0"),
    "chunk size not given": (something_else, ("build", "lengths.npy", "--k", 1), 2, "--chunk-size is missing"),
    "newer schema": (newer_plan, ("inspect",), 3, "schema version 99"),
    "unknown key in a config": (
        lambda folder: (something_else(folder), (folder / "c.toml").write_text("chunks = 3\n")),
        (*BUILD, "--config", "c.toml"),
        2,
        "c.toml: unknown entry `chunks`",
    ),
    "config that is not TOML": (
        lambda folder: (something_else(folder), (folder / "c.toml").write_text("chunks ==\n")),
        (*BUILD, "--config", "c.toml"),
        2,
        "not TOML",
    ),
    "output holds something else": (something_else, (*BUILD, "--output", "photos"), 2, "is not just a plan"),
    "data that was not analyzed": (good_text, ("build", "good.jsonl", "--chunk-size", 8, "--k", 1), 2, "neither an"),
    "an option of the wrong type": (
        something_else,
        (*BUILD, "--seed", "x"),
        2,
        "--seed is 'x', expected a whole number from 0",
    ),
    "a command that is none": (lambda folder: None, ("plan",), 2, "No such command"),
    "a seed below 0": (
        lambda folder: None,
        ("parity", "--lengths", "9,8", "--chunk-size", 8, "--k", 1, "--seed", -1),
        2,
        "--seed is -1, expected a whole number from 0",
    ),
    "a cluster beyond reason": (something_else, (*BUILD, "--dp", 10**8), 2, "dp is 100000000"),
    "an output within a file": (something_else, (*BUILD, "--output", "lengths.npy/plan"), 2, "Not a directory"),
    "lengths that are none": (write("x.npy", "no"), ("build", "x.npy", "--chunk-size", 8, "--k", 1), 3, "x.npy"),
    "parity of no numbers": (
        lambda folder: None,
        ("parity", "--lengths", "a,b", "--chunk-size", 8, "--k", 1),
        2,
        "--lengths is 'a,b', expected a number of tokens",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_a_message_a_hint_and_its_exit_code(run: Run, tmp_path: Path, mistake: str) -> None:
    prepare, words, code, message = MISTAKES[mistake]
    prepare(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    ran = run(*words)
    assert ran.code == code
    assert ran.out == ""
    assert ran.err.startswith("error: ")
    assert message in ran.err
    assert "\nhint: " in ran.err
    left = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path not in before and path.is_file()}
    cache = Path("chunkplan-out/cache")
    assert left <= {cache / "CACHEDIR.TAG", cache / "lock"}  # an empty cache at most


@pytest.mark.parametrize("error", ["ModuleNotFoundError('no torch')", "OSError('libtorch_cpu.so is missing')"])
def test_parity_without_torch_names_the_extra(tmp_path: Path, error: str) -> None:
    """A folder with a `torch` that cannot be imported, first on the path, stands for an environment without it."""
    (tmp_path / "torch.py").write_text(f"raise {error}\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from chunkplan_cli.main import main; main()"
    words = ["parity", "--lengths", "9,8", "--chunk-size", "4", "--k", "1"]
    ran = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "error: torch and transformers are needed" in ran.stderr
    assert pip_install("runtime") in ran.stderr


def test_parity_reports_a_scalar_and_exits_with_1_above_the_tolerance(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("parity", "--lengths", "70,13,9", "--chunk-size", 16, "--k", 2)
    document = json.loads(run(*words, "--json").out)
    assert 0 <= document["max_relative_error"] <= 1e-12
    assert (document["chunks"]["dependent"], document["chunks"]["mixed"]) == (4, 1)
    shown = run(*words)
    assert shown.code == 0
    assert "exact: worst relative error" in shown.out
    monkeypatch.setattr("chunkplan_runtime.parity.TOLERANCE", 1e-30)
    assert run(*words).code == 1
