"""What docs/training.md says of several processes is so: its commands run, by torchrun, and leave what it says.

Training runs as written, but on two processes with a plan like the one of the page, which takes half the time.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore
from torch.distributed.run import get_args_parser, parse_args

from chunkplan import PlanConfig, load_plan
from chunkplan.errors import UsageError
from chunkplan.options import options_of
from chunkplan.planfile.plan import Plan
from chunkplan_cli.app import run_command
from chunkplan_runtime.distributed.job import TIMEOUT, Groups
from chunkplan_runtime.failures import watchdog as watching
from chunkplan_runtime.failures.watchdog import DEAD_AFTER, last_activity, lost_process
from chunkplan_runtime.kv.pages import PageMemory, PageSlice
from chunkplan_runtime.kv.store import GatheredMemory
from chunkplan_runtime.layout import (
    NO_ACTIVITY,
    Activity,
    Exchanges,
    OwnedTokens,
    RankLayout,
    SharedPart,
    Span,
    choose_layout,
)
from chunkplan_runtime.train import read_options
from chunkplan_runtime.training.config import TrainConfig
from chunkplan_runtime.training.screen import group_lines
from tests.support.places import ROOT
from tests.support.ports import free_port
from tests.support.training_checks import lines

PAGE = (ROOT / "docs" / "training.md").read_text(encoding="utf-8").split("\n## Several processes\n")[1]
SCREEN, MEASURED, LIKE, SEVERAL_MACHINES, DIED, WARNING = re.findall(r"```text\n(.*?)```", PAGE, re.S)

#: What the page says without showing it.
GROUPS = "groups    7 of processes, 2 of them for shared sequences; made in 0.05 s\n"
SUSPENDED = (
    "error: process 3 of 4 (stage 1 of pipeline 1) is suspended at step 1 (stopped by a signal): nothing "
    "heard of it for 10 s\n"
    "hint: if it is still there, `kill -CONT 4711` has it end as the others do, `kill -KILL 4711` at "
    "once; --resume continues from the last checkpoint\n"
)
EXCHANGING = (
    "error: process 3 of 4 (data parallel) died at step 12: nothing heard of it for 10 s; last heard of "
    "in step 12, rank 3, in the backward of chunk 0; process 0 waits for it in step 12, rank 0, in the "
    "backward of chunk 0, adding up gradients of the page of tokens 0 to 65536 of sequence 17 with "
    "processes 1, 2, 3; so do processes 1, 2\n"
    "hint: its own output says why (out of memory, a lost machine); --resume continues from the last "
    "checkpoint\n"
)
FETCHING = (
    "warning: process 1 of 4 (data parallel) has not moved for 5.0 min: step 12, rank 1, in the forward "
    "of chunk 0, fetching the page of tokens 0 to 65536 of sequence 17 from processes 0, 2, 3\n"
)
SCRIPTS = Path(sys.executable).parent

#: What is another where there are two processes in place of four.
ON_TWO = {
    "4 processes (2 data parallel x 2 pipeline stages)": "2 processes (2 pipeline stages)",
    "groups    6 of processes, 1 of them for shared sequences;": "groups    4 of processes;",
    ", pipeline 0, the slowest of 2": "",
    "pipelines were done after 1.53 to 1.99 s\n": "",
    "x86_64": platform.machine(),
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """An empty folder beside the sample data, after the commands of the page; also what training said."""
    folder = tmp_path_factory.mktemp("documented")
    (folder / "sample_data").symlink_to(ROOT / "sample_data")
    block, shown = re.findall(r"```sh\n(.*?)```", PAGE, re.S)
    *first, training = block.replace("\\\n", " ").splitlines()
    first.append(LIKE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for command in first:
            patch.setattr("sys.argv", shlex.split(command))
            with pytest.raises(SystemExit) as end:
                run_command()
            assert not end.value.code, command
    port = free_port()
    program, *arguments = shlex.split(
        training.replace("--nproc-per-node 4", "--nproc-per-node 2").replace("/plan ", "/plan-dp1 ")
    )
    done = subprocess.run(
        [str(SCRIPTS / program), *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PET_MASTER_PORT": str(port)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    words = shlex.split(shown)
    table = subprocess.run(
        [str(SCRIPTS / words[0]), *words[1:]], cwd=folder, capture_output=True, text=True, check=True
    )
    return folder, done.stderr, table.stdout


def without_times(screen: str) -> list[str]:
    """Its lines, from the first step on with N for numbers."""
    head, step, rest = screen.partition("\nstep ")
    head = re.sub(r"made in [\d.]+ s", "made in N s", head)
    rest = re.sub(r" +", " ", re.sub(r"\d[\d,.]*", "N", rest))
    return (head + step + rest).splitlines()


@pytest.mark.soak
def test_the_commands_say_what_is_said(ran):
    folder, said, table = ran
    screens = [SCREEN, MEASURED]
    plans = [Path("chunkplan-out") / name for name in ("plan", "plan-dp1")]
    plans = [f"{plan} ({load_plan(folder / plan).content_hash[:12]})" for plan in plans]
    for four, two in {**ON_TWO, plans[0]: plans[1]}.items():
        assert any(four in screen for screen in screens)
        screens = [screen.replace(four, two) for screen in screens]
    assert without_times(said) == without_times(screens[0])
    assert without_times("\n" + table) == without_times("\n" + screens[1])
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", SCREEN)]
    assert [row["loss"] for row in lines(folder / "run" / "metrics.jsonl")] == pytest.approx(losses, rel=1e-3)


@pytest.mark.soak
def test_the_run_leaves_what_is_said(ran):
    output = ran[0] / "run"
    [table] = re.findall(r"`processes`, a row for each:\n\n(.*?)\n\n", PAGE, re.S)
    named = {name for cell in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`(\w+)`", cell)}
    for row in lines(output / "metrics.jsonl"):
        assert [set(process) for process in row["processes"]] == [named] * 2
        assert [(each["stage"], each["pipeline"]) for each in row["processes"]] == [(0, 0), (1, 0)]
    events = json.loads((output / "timeline.json").read_text())["traceEvents"]
    titles = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert re.findall("measured|replayed|planned", " ".join(titles)) == ["measured", "replayed"], (
        "the plan is for an H100"
    )
    for name in ("weights", "optimizer"):
        assert len(list((output / "checkpoints" / "step-00000002" / name).glob("*.safetensors"))) == 2
    assert (output / "final" / "model.safetensors").exists() and (output / "final" / "tokenizer.json").exists()


@pytest.mark.soak
def test_numbers_of_processes_are_those_that_are_said(ran):
    plan = load_plan(ran[0] / "chunkplan-out" / "plan")
    assert choose_layout(plan, 4, 0).dp == 2
    for size in (1, 2, 3, 8):
        with pytest.raises(UsageError) as refused:
            choose_layout(plan, size, 0)
        assert "with 4 processes in all" in str(refused.value.hint)
    unshared = Plan(plan.path, {"config": {"dp": 8, "pp": 1}})
    assert [choose_layout(unshared, size, 0).dp for size in (8, 4, 2, 1)] == [8, 4, 2, 1]


@pytest.mark.docs
def test_what_is_said_of_faults_is_what_processes_print():
    for became, screen in {"gone": DIED, "suspended": SUSPENDED}.items():
        heard = f"nothing heard of it for {DEAD_AFTER:g} s"
        error = lost_process(became, RankLayout(2, 2, 3).describe(), "at step 1", heard, 4711)
        assert f"error: {error}\nhint: {error.hint}\n" == screen
    assert timedelta(hours=1) == TIMEOUT


@pytest.mark.docs
def test_the_warning_of_a_process_that_does_not_move_is_as_it_comes(capsys, monkeypatch) -> None:
    """But for how long it takes."""
    place = WARNING.partition("5.0 min: ")[2].strip()
    assert watching.STALLED_AFTER == 300
    monkeypatch.setattr(watching, "STALLED_AFTER", 0.05)
    heartbeat = watching.Heartbeat(HashStore(), 1, 2)
    with heartbeat.reporting(lambda: Activity(place), lambda: None):
        for look in range(6):
            assert capsys.readouterr().err == "", look
            heartbeat.look_for_stall(RankLayout(1, 2, 1).describe(), 0.01)
    assert capsys.readouterr().err.splitlines()[0] == WARNING.strip().replace("5.0 min", "50.0 ms")


@pytest.mark.docs
def test_what_is_said_of_one_that_died_within_an_exchange_is_as_it_comes():
    """`tests/runtime/failures/test_exchange_faults.py` has some that do."""
    doing = "step 12, rank {}, in the backward of chunk 0"
    exchanges = [Exchanges(RankLayout(dp=4, process=rank)) for rank in range(4)]
    activities = {3: Activity(doing.format(3))}
    for rank, each in enumerate(exchanges[:3]):
        words = EXCHANGING.partition("in the backward of chunk 0, ")[2].partition(" processes")[0]
        with each.waiting(words, (0, 1, 2, 3)):
            activities[rank] = Activity(doing.format(rank) + each.at.words, each.at.waits_for)
    heard = "nothing heard of it for 10 s" + last_activity(3, dict(sorted(activities.items())))
    error = lost_process("gone", RankLayout(4, 1, 3).describe(), "at step 12", heard)
    assert f"error: {error}\nhint: {error.hint}\n" == EXCHANGING


@pytest.mark.docs
def test_what_a_process_says_that_waits_for_a_page_is_as_it_comes():
    """`tests/runtime/distributed/test_train_sharing.py` has one that waits."""
    span, holding = Span(17, 0, 65536, 99000, 0), OwnedTokens(((0, 99000),))
    exchanges = Exchanges(RankLayout(dp=4, process=1))
    part = SharedPart(span, (1,), (((0, 65536),),), (0, 1, 2, 3), (holding,) * 4, 1)
    memory = GatheredMemory(PageMemory(), part, exchanges)
    page = memory.new_page(0, 65536, (torch.empty(1, 1, 0, 1),))
    words = memory._words("fetching", PageSlice(page, 0, 65536, 0), "from")
    with exchanges.waiting(words, part.pages):
        assert FETCHING.strip().endswith(f"in the forward of chunk 0{exchanges.at.words}")
    assert exchanges.at == NO_ACTIVITY


@pytest.mark.docs
def test_the_line_about_groups_is_as_it_comes():
    exchanges = Exchanges(RankLayout(dp=4, pp=2), {(0, 1): None, (0, 2): None})
    groups = Groups(exchanges.layout, torch.device("cpu"), "mesh", {0: "link"}, "ends", exchanges, 0.0512)
    assert group_lines(groups) == [GROUPS.strip()]


@pytest.mark.docs
def test_the_options_that_are_named_are_there():
    known = {one.flag for config in (TrainConfig, PlanConfig) for one in options_of(config).values()}
    known |= {name for action in get_args_parser()._actions for name in action.option_strings}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", PAGE))
    assert len(named) > 20
    of_others = {
        "--gpus",
        "--hardware",
        "--like",
        "--nodes",
        "--run",
        "--trace",
    }  # of `tune`, `build`, sbatch, `simulate`
    assert named - of_others <= known


@pytest.mark.docs
def test_the_files_that_are_named_exist():
    paths = re.findall(r"`(tests/[\w/.]+)`", PAGE)
    assert len(paths) > 2
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_command_for_several_machines_is_one_that_torchrun_and_the_trainer_take():
    _, *arguments = shlex.split(SEVERAL_MACHINES.replace("\\\n", " "))
    launched = parse_args(arguments)
    assert (launched.nnodes, launched.training_script) == ("2", "chunkplan_runtime.train")
    assert read_options(launched.training_script_args).model == "NAME"


def test_the_script_for_slurm_starts_a_torchrun_on_each_machine(tmp_path):
    commands = {"scontrol": 'printf "%s\\n" node1 node2', "srun": 'printf "%s\\n" "$@"'}
    for name, line in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"JOB_ID": "7", "JOB_NODELIST": "node[1-2]", "NNODES": "2", "GPUS_ON_NODE": "8", "CPUS_PER_TASK": "32"}
    done = subprocess.run(
        ["bash", str(ROOT / "examples" / "train.slurm"), "the plan", "model", "output", "--lr", "1e-5"],
        env={"PATH": f"{tmp_path}:/bin:/usr/bin", **{f"SLURM_{name}": value for name, value in slurm.items()}},
        capture_output=True,
        text=True,
        check=True,
    )
    *srun, torchrun = (part.splitlines() for part in done.stdout.partition("torchrun\n"))
    assert "--kill-on-bad-exit=1" in srun[0]
    launched = parse_args(torchrun)
    assert (launched.nnodes, launched.nproc_per_node, launched.rdzv_endpoint) == ("2", "8", "node1:29500")
    config = read_options(launched.training_script_args)
    assert (str(config.plan), config.model, config.resume, config.lr) == ("the plan", "model", True, 1e-5)
