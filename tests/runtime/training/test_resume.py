"""Checkpoints: a run that is stopped at any moment, by whatever means, goes on as if nothing had happened."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from chunkplan import PlanConfig, build
from chunkplan_runtime.train import main
from chunkplan_runtime.training.checkpoint import read_state, restore_random_states
from chunkplan_runtime.training.run_folder import RunFolder
from tests.support.training_checks import (
    after_step,
    command,
    cost_of_a_run,
    hidden_files,
    learning,
    lines,
    options,
    same_weights,
)

TORCHRUN = ["torch.distributed.run", "--nproc-per-node", "1", "--master-port", "0", "-m"]

#: What a machine that only trains need not have, and what training must not need.
ABSENT = ["polars", "ortools", "msgspec", "typer", "rich", "numba", "chunkplan.intake"]
ABSENT += ["chunkplan.planning", "chunkplan.schedule", "chunkplan.simulation"]


#: Imports once, then is forked for every command line that it reads: the module as it runs by itself, begun sooner.
FORKS = f"""
import json, os, runpy, sys
sys.modules.update(dict.fromkeys({ABSENT}))
import chunkplan_runtime.training.trainer
for line in sys.stdin:
    process = os.fork()
    if not process:
        sys.argv = ["train", *json.loads(line)]
        runpy.run_module("chunkplan_runtime.train", run_name="__main__")
    print(process, flush=True)
    print(os.waitpid(process, 0)[1], flush=True)
"""


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.soak)], ids="{} times".format)
def killed(request, made, tmp_path_factory):
    """Two runs of 20 steps without the planner: one in one go, one killed 2 times; if 4, of 40, and one of torchrun."""
    folder, steps = tmp_path_factory.mktemp("killed"), 10 * request.param
    more = ("--save-every", 3, "--keep-last", 2, "--precision", "bf16", "--lr-schedule", "cosine", "--warmup", 5)
    more = (*more, "--log-sequences", "--max-steps", steps)
    whole = options(made, folder / "whole", *more, plan="forty")
    if request.param == 4:
        ran = command(whole, sys.executable, "-m", *TORCHRUN, "chunkplan_runtime.train")
        assert ran.returncode == 0, ran.stderr
    arguments = options(made, folder / "broken", *more, "--resume", plan="forty")
    metrics = folder / "broken" / "metrics.jsonl"
    moments = random.Random(5)
    with subprocess.Popen(
        [sys.executable, "-c", FORKS],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as forks:
        if request.param != 4:
            print(json.dumps(whole), file=forks.stdin, flush=True)
            forks.stdout.readline()
            assert int(forks.stdout.readline()) == 0
        for stop in (1, *sorted(moments.sample(range(8, steps - 4), request.param - 1)), None):
            print(json.dumps(arguments), file=forks.stdin, flush=True)
            process = int(forks.stdout.readline())
            if stop is None:
                break
            give_up = time.monotonic() + 60
            while not metrics.exists() or len(metrics.read_bytes().splitlines()) < stop:
                assert time.monotonic() < give_up
                time.sleep(0.002)
            time.sleep(moments.random() * (0.1 if stop > 1 else 0))  # the first time before there is a checkpoint
            os.kill(process, signal.SIGKILL)
            assert int(forks.stdout.readline()) == signal.SIGKILL, "it was still at work"
            if stop == 1:
                assert not RunFolder(folder / "broken").checkpoints()
        end = int(forks.stdout.readline())
    return folder, steps, end


@pytest.mark.soak
def test_a_run_killed_at_random_moments_ends_as_one_that_was_not(killed):
    """Bit for bit: weights, metrics without times, sequences; what was half written is gone. It needs no planner."""
    folder, steps, end = killed
    assert end == 0
    whole, broken = folder / "whole", folder / "broken"
    assert [row["step"] for row in learning(whole)] == list(range(steps))
    assert learning(broken) == learning(whole)
    assert lines(broken / "sequences.jsonl") == lines(whole / "sequences.jsonl")
    assert same_weights(broken / "final", whole / "final")
    last = steps // 3 * 3
    assert [path.name for path in RunFolder(broken).checkpoints()] == [f"step-{step:08d}" for step in (last - 3, last)]
    for checkpoint in RunFolder(broken).checkpoints():
        assert same_weights(checkpoint, whole / "checkpoints" / checkpoint.name)
    assert hidden_files(broken) == []


@pytest.mark.parametrize(
    ("precision", "number", "code", "checkpointing"),
    [
        pytest.param("fp32", signal.SIGTERM, 143, "none", marks=pytest.mark.soak),
        ("bf16", signal.SIGINT, 130, "keep-products:1,full:1"),
        pytest.param("fp64", signal.SIGINT, 130, "none", marks=pytest.mark.soak),
        pytest.param("bf16-pure", signal.SIGTERM, 143, "none", marks=pytest.mark.soak),
    ],
)
def test_a_stopped_run_says_how_to_resume_and_goes_on_bit_for_bit(
    made, tmp_path, monkeypatch, capsys, precision, number, code, checkpointing
):
    """Ctrl-C ends it with the step and a checkpoint of it, SIGTERM at once."""
    more = ("--precision", precision, "--save-every", 3, "--lr-schedule", "linear", "--max-steps", 9)
    more = (*more, "--checkpointing", checkpointing)
    assert main(options(made, tmp_path / "whole", *more)) == 0
    output = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        after_step(patch, 7, lambda: signal.raise_signal(number))
        assert main(options(made, output, *more)) == code
    done = 8 if number == signal.SIGINT else 6
    checkpoint = output / "checkpoints" / f"step-{done:08d}"
    assert f"stopped; the same command with --resume goes on from {checkpoint}" in capsys.readouterr().err
    assert not (output / "final").exists()
    assert len(lines(output / "metrics.jsonl")) == 8
    assert main(options(made, output, *more, "--resume")) == 0
    assert f"resumed   at step {done}" in capsys.readouterr().err
    assert learning(output) == learning(tmp_path / "whole")
    assert same_weights(output / "final", tmp_path / "whole" / "final")


def test_a_second_ctrl_c_stops_a_run_at_once(made, tmp_path, monkeypatch, capfd):
    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        after_step(patch, 4, twice)
        assert main(options(made, tmp_path, "--save-every", 3)) == 130
    assert "stopping after this step, with a checkpoint; Ctrl-C again stops at once\n" in capfd.readouterr().err
    assert [path.name for path in RunFolder(tmp_path).checkpoints()] == ["step-00000003"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_run_stopped_before_its_first_checkpoint_starts_again(made, tmp_path, monkeypatch, capsys):
    """As it is by Ctrl-C in its first step, and wherever no checkpoints are asked for."""
    with monkeypatch.context() as patch:
        after_step(patch, 1, lambda: signal.raise_signal(signal.SIGINT))
        assert main(options(made, tmp_path / "none", "--save-every", 0, "--max-steps", 3)) == 130
    assert len(learning(tmp_path / "none")) == 2 and RunFolder(tmp_path / "none").checkpoints() == []
    with monkeypatch.context() as patch:
        after_step(patch, 0, lambda: signal.raise_signal(signal.SIGINT))
        assert main(options(made, tmp_path, "--max-steps", 3)) == 130
    assert "no checkpoint yet; the same command with --resume starts from the beginning" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").open("a").write('{"step": 2, "lo')
    assert main(options(made, tmp_path, "--max-steps", 3, "--resume")) == 0
    assert [row["step"] for row in learning(tmp_path)] == [0, 1, 2]


def test_what_a_killed_run_left_behind_is_removed_whichever_machine_it_was_on(made, stopped, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    for left in (run / ".final.tmp-node7-12-ab3_x", run / "checkpoints" / ".step-00000006.tmp-node7.site-12-ab3_x"):
        (left / "weights").mkdir(parents=True)
    (run / ".config.json.tmp-99").touch()
    (run / ".notes.tmp-1").touch()
    assert main(options(made, run, "--resume", "--save-every", 2)) == 0
    assert [path.name for path in hidden_files(run)] == [".notes.tmp-1"], "only what is a run's own"


@pytest.mark.soak
def test_evaluations_are_cut_back_with_the_metrics(made, tmp_path, monkeypatch):
    more = ("--save-every", 2, "--eval-every", 1)
    assert main(options(made, tmp_path / "whole", *more, plan="held")) == 0
    with monkeypatch.context() as patch:
        after_step(patch, 3, lambda: signal.raise_signal(signal.SIGTERM))
        assert main(options(made, tmp_path / "run", *more, plan="held")) == 143
    assert main(options(made, tmp_path / "run", *more, "--resume", plan="held")) == 0
    rows = [lines(tmp_path / name / "evals.jsonl") for name in ("run", "whole")]
    assert [row["step"] for row in rows[0]] == list(range(len(learning(tmp_path / "whole"))))
    assert [row["eval_loss"] for row in rows[0]] == [row["eval_loss"] for row in rows[1]]


@pytest.fixture(scope="module")
def stopped(made, tmp_path_factory):
    """A run that was stopped after step 4, with checkpoints at 2 and 4."""
    output = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.MonkeyPatch.context() as patch:
        after_step(patch, 4, lambda: signal.raise_signal(signal.SIGTERM))
        assert main(options(made, output, "--save-every", 2)) == 143
    return output


def test_random_numbers_go_on_where_they_were(stopped):
    state = read_state(RunFolder(stopped).checkpoints()[-1])
    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        restore_random_states(state, torch.device("cpu"))
        drawn.append(torch.rand(4))
    assert torch.equal(*drawn)


def test_only_as_many_checkpoints_as_asked_for_are_kept(stopped, made, tmp_path):
    assert [path.name for path in RunFolder(stopped).checkpoints()] == ["step-00000002", "step-00000004"]
    assert main(options(made, tmp_path, "--save-every", 1, "--keep-last", 1, "--max-steps", 3)) == 0
    assert [path.name for path in RunFolder(tmp_path).checkpoints()] == ["step-00000003"]
    assert main(options(made, tmp_path / "none", "--save-every", 0, "--max-steps", 2)) == 0
    assert RunFolder(tmp_path / "none").checkpoints() == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--plan", "seed"), "plan.seed was 0, is 1"),
        (("--plan", "fewer"), "plan.epochs was 6, is 5"),
        (("--model-config", "other.json"), "model.intermediate_size was 48, is 56"),
        (("--lr", "0.1", "--beta2", "0.9"), "--lr was 0.003, is 0.1; --beta2 was 0.999, is 0.9"),
        (("--precision", "fp64"), "--precision was fp32, is fp64"),
        (("--lr-schedule", "cosine"), "--lr-schedule was constant, is cosine"),
        (("--seed", "1"), "--seed was 0, is 1"),
        (("--max-steps", "3"), "--max-steps was not given, is 3\nhint: it has done 4 steps already: resume with"),
    ],
)
def test_a_run_does_not_go_on_with_another_plan_model_or_way_of_learning(
    made, stopped, tmp_path, capsys, tiny_config, more, message
):
    shutil.copytree(stopped, tmp_path / "run")
    (tmp_path / "other.json").write_text(json.dumps(tiny_config("qwen2", intermediate_size=56)))
    for name, changes in {"seed": {"seed": 1}, "fewer": {"epochs": 5}}.items() if "--plan" in more else ():
        config = PlanConfig(**{"chunk_size": 8, "k": 2, "global_batch": 3, "epochs": 6, **changes})
        build(made / "analysis", tmp_path / name, config)
    places = {**{name: str(tmp_path / name) for name in ("seed", "fewer")}, "other.json": str(tmp_path / "other.json")}
    arguments = [*options(made, tmp_path / "run", "--resume"), *(places.get(word, word) for word in more)]
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    assert learning(tmp_path / "run") == learning(stopped), "nothing is lost"


def test_a_run_may_go_on_with_other_habits(made, stopped, tmp_path):
    shutil.copytree(stopped, tmp_path / "run")
    habits = ("--save-every", 5, "--keep-last", 1, "--loss-spike-factor", 0, "--log-sequences")
    habits += ("--checkpointing", "full:1,none:1")
    assert main(options(made, tmp_path / "run", "--resume", *habits)) == 0
    assert [path.name for path in RunFolder(tmp_path / "run").checkpoints()] == ["step-00000010"]
    assert len(learning(tmp_path / "run")) == 12


def test_a_finished_run_does_not_go_on_without_a_checkpoint_or_more_steps(made, tmp_path, capsys):
    for save_every, steps, why in ((0, 3, "there is no checkpoint to go on from"), (2, 2, "no more than its 2 steps")):
        output = tmp_path / str(save_every)
        assert main(options(made, output, "--max-steps", 2, "--save-every", save_every)) == 0
        assert main(options(made, output, "--max-steps", steps, "--save-every", save_every, "--resume")) == 2
        told = capsys.readouterr().err
        assert f"is finished: {output / 'final'} is there, and {why}" in told
        assert f"hint: `--model {output / 'final'}` with another --output" in told
        assert "begins the plan again from its first step" in told
        assert len(learning(output)) == 2 and (output / "final").is_dir()
        assert main(options(made, output, "--max-steps", 2)) == 2
        told = capsys.readouterr().err
        assert "final of an earlier run is there\nhint: give another --output, or remove that run" in told


@pytest.mark.parametrize(
    ("more", "steps", "longer"),
    [
        (("--save-every", 2, "--precision", "bf16"), ("--max-steps", 4), ("--max-steps", 8)),
        pytest.param(("--save-every", 3, "--warmup", 2), ("--max-epochs", 2), (), marks=pytest.mark.soak),
    ],
)
def test_a_finished_run_goes_on_with_more_steps_as_if_it_had_had_them(made, tmp_path, capsys, more, steps, longer):
    """Also where its last checkpoint is of an earlier step than its last one."""
    assert main(options(made, tmp_path / "whole", *more, *longer)) == 0
    output = tmp_path / "run"
    assert main(options(made, output, *more, *steps)) == 0
    assert len(learning(output)) < len(learning(tmp_path / "whole"))
    assert main(options(made, output, *more, *longer, "--resume")) == 0
    assert f"removed   {output / 'final'}: the run goes on" in capsys.readouterr().err
    assert learning(output) == learning(tmp_path / "whole")
    assert same_weights(output / "final", tmp_path / "whole" / "final")


def test_a_finished_run_goes_on_with_a_plan_of_more_epochs_as_if_it_had_had_them(made, tmp_path, capsys):
    """And names what its plan has, where more is asked for than that; another plan is refused."""

    def plan(**changes):
        config = PlanConfig(**{"chunk_size": 8, "k": 2, "global_batch": 3, "cp": "off", **changes})
        build(made / "analysis", tmp_path / "plan", config, cost=cost_of_a_run(made))

    def run(folder, *more):
        code = main(options(made, tmp_path / folder, "--save-every", 3, *more, plan=tmp_path / "plan"))
        return code, capsys.readouterr().err

    plan(epochs=2)
    assert run("run")[0] == run("cosine", "--lr-schedule", "cosine")[0] == 0
    for flag, number in (("--max-epochs", 3), ("--max-steps", 6)):
        code, told = run("run", "--resume", flag, number)
        assert (
            code == 2 and f"and its plan has 2 epochs, 4 steps: {flag} is {number}\nhint: build the plan again" in told
        )
    plan(epochs=3, seed=1)
    code, told = run("run", "--resume")
    assert code == 2 and "is of another run: plan.seed was 0, is 1\n" in told
    plan(epochs=3)
    code, told = run("cosine", "--lr-schedule", "cosine", "--resume")
    assert code == 2 and "learning rates of the steps that are done go by how many there are" in told
    code, told = run("run", "--resume", "--max-epochs", 2)
    assert code == 2 and "no more than its 4 steps are asked for" in told
    code, told = run("run", "--resume")
    assert code == 0 and "resumed   at step 3" in told
    assert run("whole")[0] == 0
    assert learning(tmp_path / "run") == learning(tmp_path / "whole") and len(learning(tmp_path / "run")) == 6
    assert same_weights(tmp_path / "run" / "final", tmp_path / "whole" / "final")
    assert run("run", "--resume")[1].startswith(f"error: the run in {tmp_path / 'run'} is finished")


def test_a_run_that_learns_by_its_number_of_steps_does_not_go_on_with_another(made, tmp_path, capsys):
    more = ("--save-every", 3, "--lr-schedule", "cosine")
    assert main(options(made, tmp_path, *more, "--max-steps", 4)) == 0
    assert main(options(made, tmp_path, *more, "--max-steps", 8, "--resume")) == 2
    told = capsys.readouterr().err
    assert "is of another run: --max-steps was 4, is 8" in told
    assert "hint: learning rates of the steps that are done go by how many there are: resume with" in told
    assert (tmp_path / "final").is_dir()


def test_resume_where_nothing_was_begun_begins(made, tmp_path):
    assert main(options(made, tmp_path / "new", "--max-steps", 1, "--resume")) == 0
    assert len(learning(tmp_path / "new")) == 1


@pytest.mark.parametrize("name", ["weights/*", "optimizer/*", "state.json"])
def test_a_torn_checkpoint_is_named_and_the_one_before_serves(made, stopped, tmp_path, capsys, name):
    shutil.copytree(stopped, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step-00000004"
    [file] = newest.glob(name)
    file.write_bytes(file.read_bytes()[:-100])
    assert main(options(made, tmp_path / "run", "--resume")) == 3
    told = capsys.readouterr().err
    assert str(file) in told and "remove this checkpoint" in told
    shutil.rmtree(newest)
    assert main(options(made, tmp_path / "run", "--resume")) == 0
    assert len(learning(tmp_path / "run")) == 12


@pytest.mark.parametrize("step", [4, pytest.param(6, marks=pytest.mark.soak)])
def test_a_full_disk_while_saving_is_reported_and_the_checkpoint_before_serves(
    made, tmp_path, monkeypatch, capsys, step
):
    """Files may have 50 kB from step 4 on (a checkpoint's weights have more), or from the last one on (the model's)."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    more = ("--save-every", 3, "--max-steps", 7)
    assert main(options(made, tmp_path / "whole", *more)) == 0
    output = tmp_path / "run"
    try:
        with monkeypatch.context() as patch:
            after_step(patch, step, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1])))
            assert main(options(made, output, *more)) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error, hint = capsys.readouterr().err.splitlines()[-2:]
    assert str(output / ("checkpoints/step-00000006" if step == 4 else "final")) in error
    assert "cannot be written" in error and "File too large" in error
    assert "disk has room" in hint
    assert hidden_files(output) == []
    assert not (output / "final").exists()
    assert main(options(made, output, *more, "--resume")) == 0
    assert learning(output) == learning(tmp_path / "whole")
    assert same_weights(output / "final", tmp_path / "whole" / "final")


def test_a_second_run_in_a_folder_at_work_is_refused(made, tmp_path, capsys):
    folder = RunFolder(tmp_path)
    folder.lock()
    (tmp_path / "metrics.jsonl").touch()  # of the run at work, not of an earlier one
    for more in ([], ["--resume"]):
        assert main(options(made, tmp_path, *more)) == 2
        assert "another run is at work in" in capsys.readouterr().err
    folder.unlock()
    assert main(options(made, tmp_path)) == 2
    assert "metrics.jsonl of an earlier run is there" in capsys.readouterr().err
    assert main(options(made, tmp_path, "--resume", "--device", "cuda:99")) == 2, "what is refused lets go again"
    assert main(options(made, tmp_path, "--resume", "--max-steps", 1)) == 0


def test_a_file_system_without_locks_can_be_trained_on(made, tmp_path, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(errno.EBADF, "as NFS answers for a folder")

    monkeypatch.setattr("fcntl.flock", flock)
    assert main(options(made, tmp_path / "run", "--max-steps", 1)) == 0


@pytest.mark.parametrize(
    ("entry", "value"),
    [("step", -1), ("step", "3"), ("random", ["zz"]), ("losses", None), ("fixed", None), ("stream", {})],
)
def test_a_state_that_no_run_wrote_is_damaged_data(made, tmp_path, capsys, entry, value):
    assert main(options(made, tmp_path, "--save-every", 3, "--max-steps", 3)) == 0
    shutil.rmtree(tmp_path / "final")
    path = tmp_path / "checkpoints" / "step-00000003" / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), entry: value}))
    assert main(options(made, tmp_path, "--save-every", 3, "--max-steps", 3, "--resume")) == 3
    assert str(path) in capsys.readouterr().err


def test_files_of_another_checkpoint_are_refused(made, tmp_path, capsys):
    assert main(options(made, tmp_path, "--save-every", 2, "--max-steps", 4)) == 0
    shutil.rmtree(tmp_path / "final")
    folders = [tmp_path / "checkpoints" / f"step-0000000{step}" / "optimizer" for step in (2, 4)]
    [[first], [second]] = [list(folder.iterdir()) for folder in folders]
    shutil.copy(first, second)
    assert main(options(made, tmp_path, "--save-every", 2, "--max-steps", 4, "--resume")) == 3
    assert f"{second}: it is torn, or of another checkpoint" in capsys.readouterr().err
    second.unlink()
    assert main(options(made, tmp_path, "--save-every", 2, "--max-steps", 4, "--resume")) == 3
    assert f"{second}: cannot be read: " in capsys.readouterr().err
