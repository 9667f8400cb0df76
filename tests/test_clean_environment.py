"""Installed with what the core asks for, and nothing else, the planner works; what needs an extra names it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import which

import pytest

from chunkplan.extras import pip_install
from tests.support.packages import PROJECT, ROOT, build_copy, copy_sources

pytestmark = pytest.mark.soak

TOKENIZER = ("--tokenizer", "sample_data/tokenizer")
MODEL = ("--model", "sample_data/model/config.json")

#: In order, in one folder: what a planner's machine is for.
WORK = [
    ("analyze", "sample_data/chat.jsonl", "sample_data/math.jsonl", *TOKENIZER),
    ("tune", "--gpus", "8", "--chunk-sizes", "512,1024", "--ks", "1,2"),
    ("build", "--chunk-size", "512", "--k", "2", "--global-batch", "64", *MODEL),
    ("build", "--chunk-size", "512", "--k", "1", "--global-batch", "64", *MODEL, "--output", "other"),
    ("inspect",),
    ("inspect", "--step", "0"),
    ("validate",),
    ("simulate", "--step", "0"),
    ("diff", "chunkplan-out/plan", "other"),
    ("export", "--to", "jsonl", "--whole-only", "--output", "rows.jsonl"),
]

#: What asks for more, and the extra it has to name.
MORE = {
    "parity": (("parity", "--lengths", "70,13", "--chunk-size", "32", "--k", "1"), "runtime"),
    "calibrate": (("calibrate", *MODEL, "--output", "here.toml"), "runtime"),
    "page": (("inspect", "--html", "page.html"), "report"),
    "hub": (("analyze", "sample_data/math.jsonl", "--tokenizer", "some/name"), "hub"),
    "tiktoken": (("analyze", "sample_data/math.jsonl", "--tokenizer", "tiktoken:cl100k_base"), "tiktoken"),
    "ray": (("analyze", "sample_data/math.jsonl", *TOKENIZER, "--ray", "local"), "ray"),
}

IMPORT_ALL = """
import importlib, importlib.util, pkgutil
import chunkplan, chunkplan_cli, chunkplan_runtime
for name in chunkplan.__all__:
    getattr(chunkplan, name)
for package in (chunkplan, chunkplan_cli):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            print(module.name, error.name)
print(*map(importlib.util.find_spec, ("torch", "transformers")))
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module", autouse=True)
def packages_are_reached(tmp_path_factory: pytest.TempPathFactory) -> None:
    words = ["download", "--quiet", "--no-deps", "--dest", tmp_path_factory.mktemp("reached"), "shellingham"]
    reached = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True)
    if reached.returncode:
        pytest.skip(f"pip gets no packages here: {reached.stderr.strip().splitlines()[-1]}")


def pip_install_into(scripts: Path, *words: str | Path) -> None:
    subprocess.run([scripts / "python", "-m", "pip", "--quiet", "install", *words], check=True)


def program_of(package: str | Path, program: str, folder: Path) -> list[str | Path]:
    """How to start a program of a package that is not installed: by uvx; where there is none, by pip in `folder`."""
    if uvx := which("uvx"):
        return [uvx, "--python", sys.executable, "--from", package, program]
    environment = folder / program
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    pip_install_into(environment / "bin", package)
    return [environment / "bin" / program]


def test_what_is_published_is_checked_and_runs_from_its_file(tmp_path: Path) -> None:
    """`build` makes sdist and wheel, twine finds nothing wrong, and the wheel is run with what pip resolves today."""
    source, dist = tmp_path / "source", tmp_path / "dist"
    source.mkdir()
    copy_sources(source)
    subprocess.run([*program_of("build", "pyproject-build", tmp_path), "--outdir", dist, source], check=True)
    [wheel], [sdist] = dist.glob("*.whl"), dist.glob("*.tar.gz")
    subprocess.run([*program_of("twine", "twine", tmp_path), "check", "--strict", wheel, sdist], check=True)
    chunkplan = program_of(wheel, "chunkplan", tmp_path)
    data = ("--tokenizer", ROOT / "sample_data" / "tokenizer", "--workspace", tmp_path / "out")
    subprocess.run([*chunkplan, "analyze", ROOT / "sample_data" / "math.jsonl", *data], check=True)
    asked = ("--model", "Qwen/Qwen2.5-7B", "--gpus", "8xH100", "--workspace", tmp_path / "gain", "--json")
    gain = [*chunkplan, "gain", ROOT / "sample_data" / "math.jsonl", "--tokenizer", data[1], *asked]
    found = json.loads(subprocess.run(gain, check=True, capture_output=True, text=True).stdout)
    assert found["cost_model"]["shape"]["name"] == "Qwen2.5-7B" and found["baselines"]
    plan = ("--chunk-size", "512", "--k", "2", "--global-batch", "64", "--workspace", tmp_path / "out", "--json")
    built = subprocess.run([*chunkplan, "build", *plan], check=True, capture_output=True, text=True)
    assert json.loads(built.stdout)["manifest"]["totals"]["num_sequences"] == 300


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`run(program, *words)` in a folder with the sample data, by the environment that has the wheel."""
    folder = tmp_path_factory.mktemp("clean")
    (folder / "source").mkdir()
    wheel = build_copy(folder / "source").wheel
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    scripts = folder / "venv" / "bin"
    pip_install_into(scripts, "--constraint", ROOT / "constraints.txt", wheel)
    work = folder / "work"
    work.mkdir()
    (work / "sample_data").symlink_to(ROOT / "sample_data")
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}

    def run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [scripts / program, *words], cwd=work, env=environment, capture_output=True, text=True, check=False
        )

    return run


def test_the_core_is_whole_and_has_nothing_of_the_extras(run: Run) -> None:
    checked = run("python", "-m", "pip", "check")
    assert checked.returncode == 0, checked.stdout
    listed = json.loads(run("python", "-m", "pip", "list", "--format", "json").stdout)
    names = {each["name"].lower() for each in listed}
    for extra in ("runtime", "lora", "hf", "report", "ray", "tiktoken"):
        for requirement in PROJECT["project"]["optional-dependencies"][extra]:
            assert requirement.partition(">")[0].partition("=")[0] not in names


def test_every_module_but_those_of_the_runtime_is_imported_without_torch_or_a_warning(run: Run) -> None:
    """Those that draw pages alone need plotly, and those for another framework need that."""
    done = run("python", "-W", "error", "-c", IMPORT_ALL)
    *unable, found = done.stdout.splitlines()
    assert (found, done.stderr) == ("None None", "")
    others = [line for line in unable if not re.fullmatch(r"chunkplan\.reporting\.page\..* plotly", line)]
    needs = {"megatron": "megatron", "megatron_bridge": "megatron", "nemo_rl": "nemo_rl", "prime_rl": "prime_rl"}
    needs["torchtitan"] = "grain"
    assert others == [f"chunkplan.adapters.{name} {needed}" for name, needed in needs.items()]


def test_the_planner_works(run: Run) -> None:
    helped = run("chunkplan", "--help")
    assert helped.returncode == 0
    for words in WORK:
        done = run("chunkplan", *words)
        assert done.returncode == 0, (words, done.stderr)
        assert "warning" not in done.stderr.lower(), (words, done.stderr)


def test_every_command_has_its_help(run: Run) -> None:
    from chunkplan_cli.app import app

    for command in app().registered_commands:
        done = run("chunkplan", command.callback.__name__, "--help")
        assert (done.returncode, done.stderr) == (0, "")
        assert "Example" in done.stdout


def test_what_needs_an_extra_names_it(run: Run) -> None:
    run("chunkplan", *WORK[0])
    run("chunkplan", *WORK[2])
    for words, extra in MORE.values():
        done = run("chunkplan", *words)
        assert (done.returncode, done.stdout) == (2, ""), (words, done.stderr)
        assert pip_install(extra) in done.stderr
        assert "Traceback" not in done.stderr
    done = run(
        "python",
        "-m",
        "chunkplan_runtime.train",
        "--plan",
        "chunkplan-out/plan",
        "--model-config",
        MODEL[1],
        "--output",
        "run",
    )
    assert done.returncode == 2
    assert pip_install("runtime") in done.stderr and "Traceback" not in done.stderr
