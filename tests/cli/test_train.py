"""`chunkplan train`: the trainer on the plan of the workspace, on as many processes as the plan is for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chunkplan.errors import UsageError
from chunkplan.options import Option, options_of
from chunkplan.planfile.load import load_plan
from chunkplan_cli.declared import CliValues
from chunkplan_cli.train import _typed, refuse_few_gpus
from chunkplan_runtime.train import read_options
from chunkplan_runtime.training.config import TrainConfig
from tests.support.command_line import Run
from tests.support.places import ROOT

FOLDER = str(ROOT / "sample_data" / "model")
MODEL = ("--model-config", FOLDER)


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).parent / "chunkplan"), *words],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose workspace has an analysis and a plan for two ranks."""
    folder = tmp_path_factory.mktemp("planned")
    records = [{"text": "some words " * count} for count in (9, 30, 200, 12)] * 4
    (folder / "data.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    tokenizer = str(ROOT / "sample_data" / "tokenizer")
    for words in (
        ("analyze", "data.jsonl", "--tokenizer", tokenizer),
        (
            "build",
            "--chunk-size",
            "128",
            "--k",
            "1",
            "--dp",
            "2",
            "--cp",
            "off",
            "--global-batch",
            "8",
            "--model",
            FOLDER,
        ),
    ):
        ran = run(folder, *words)
        assert ran.returncode == 0, ran.stderr
    return folder


def test_fewer_gpus_than_processes_are_refused_with_what_to_type(planned: Path) -> None:
    plan = load_plan(planned / "chunkplan-out" / "plan")
    for num_processes, available in ((2, 2), (2, 8), (2, 0)):  # without a GPU it trains on the CPU
        refuse_few_gpus(plan, num_processes, available)
    with pytest.raises(UsageError, match=r"2 processes take a GPU each, this machine has 1 GPU\s") as refused:
        refuse_few_gpus(plan, 2, 1)
    assert refused.value.hint.startswith("`chunkplan train --nproc 1` runs the plan's ranks in turn; on several")


@pytest.mark.soak
def test_it_trains_with_the_plan_of_the_workspace_on_as_many_processes_as_that_is_for(planned: Path) -> None:
    """What was started is said as torchrun takes it; the command that `build` names is this one."""
    built = run(planned, "build", "--like", "chunkplan-out/plan", "--output", "chunkplan-out/like")
    assert "to train: chunkplan train --plan chunkplan-out/like --model NAME" in built.stderr
    ran = run(planned, "train", *MODEL)
    assert ran.returncode == 0, ran.stderr
    assert "started as: torchrun --nproc-per-node 2 -m chunkplan_runtime.train --plan chunkplan-out/plan" in ran.stderr
    assert "2 processes (2 data parallel)" in ran.stderr
    assert len((planned / "chunkplan-out" / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    again = run(planned, "train", *MODEL)
    assert again.returncode == 2
    assert again.stderr.endswith("final of an earlier run is there\nhint: give another --output, or remove that run\n")
    assert "Traceback" not in again.stderr and "ChildFailedError" not in again.stderr


def test_one_process_is_this_one_and_a_file_has_what_is_not_typed(planned: Path) -> None:
    """The file's plan and output stand, and what is typed wins."""
    (planned / "run.toml").write_text('plan = "chunkplan-out/plan"\noutput = "elsewhere"\nlr = 0.5\nmax-steps = 2\n')
    ran = run(planned, "train", "--config", "run.toml", "--nproc", "1", "--max-steps", "1", "--no-kv-offload", *MODEL)
    assert ran.returncode == 0, ran.stderr
    assert "torchrun" not in ran.stderr
    config = json.loads((planned / "elsewhere" / "config.json").read_text())
    config = config["config"]
    assert (config["lr"], config["max_steps"], config["kv_offload"]) == (0.5, 1, False)


def test_mistakes_are_found_before_a_process_is_started(
    planned: Path, tmp_path: Path, command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(planned)
    for words, message in {
        (): "error: --model or --model-config: neither is given",
        ("--lr", "fast", *MODEL): "error: --lr is 'fast', expected a number above 0",
        ("--plan", "none", *MODEL): "none",
        ("--config", "none.toml", *MODEL): "error: none.toml: cannot be read",
    }.items():
        ran = command("train", *words, width=200)
        assert ran.code == 2 and message in ran.err and "hint: " in ran.err, ran.err
        assert "started as" not in ran.err
    monkeypatch.chdir(tmp_path)
    ran = command("train", *MODEL, width=200)
    assert ran.code == 2 and "there is no plan in the workspace" in ran.err


def test_processes_that_cannot_share_the_plan_are_not_started(
    planned: Path, command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(planned)
    ran = command("train", "--nproc", "3", "--output", "three", *MODEL, width=200)
    assert ran.code == 2, ran.err
    error, hint = ran.err.splitlines()
    assert error.endswith("3 processes cannot share the plan's 2 data-parallel ranks evenly")
    like = "chunkplan build --like chunkplan-out/plan --dp 3 --output chunkplan-out/plan-dp3"
    assert hint.startswith("hint: `torchrun --nproc-per-node N` or `chunkplan train --nproc N` with 1 or 2 processes ")
    assert f" in all, or `{like}` builds one of the same steps" in hint


@pytest.mark.soak
def test_a_run_that_fails_on_its_processes_ends_with_its_own_exit_code(planned: Path) -> None:
    ran = run(planned, "train", "--output", "wide", "--attention", "flash-attn-2", *MODEL)
    assert ran.returncode == 2, ran.stderr
    assert "started as" in ran.stderr and "Traceback" not in ran.stderr
    assert "hint: " in ran.stderr.splitlines()[-1]


#: Each option can have one of these.
EXAMPLES = ("1", "0.5", "2", "cpu", "torch-cpu", "full", "tensorboard", "user/name")


def is_value(one: Option, typed: str) -> bool:
    """Whether `typed` is something that an option may be."""
    try:
        one.check(one.domain.load(one.read(typed)))
    except UsageError:
        return False
    return True


def test_every_flag_is_passed_on_as_it_is_typed() -> None:
    """Whatever the trainer takes, in the form that it takes."""
    for name, one in options_of(TrainConfig).items():
        is_switch = one.domain.metavar == ""
        typed = next(each for each in (*one.domain.choices, *EXAMPLES) if is_switch or is_value(one, each))
        given = CliValues({name: False if is_switch else one.read(typed)})
        given.typed[name] = typed
        needed = [] if name in ("model", "model_config") else ["--model", "m"]
        needed += [f"--{required}=x" for required in ("plan", "output") if required != name]
        needed += ["--lora-rank", "4"] if name.startswith("lora_") and name != "lora_rank" else []
        needed += ["--eval-every", "1"] if name in ("early_stopping", "keep_best") else []
        needed += ["--report-to", "wandb"] if name in ("run_name", "wandb_project") else []
        needed += {"sample_every": ["--sample-prompt", "x"], "sample_prompt": ["--sample-every", "1"]}.get(name, [])
        config = read_options([*needed, *_typed(given)])
        assert getattr(config, name) == one.domain.load(given[name]), name
