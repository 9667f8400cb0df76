"""Early stopping and the best checkpoint: by evaluation loss, on any number of processes, stopped and resumed."""

from __future__ import annotations

import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file

from chunkplan_runtime.train import main
from chunkplan_runtime.training.checkpoint import BestLoss
from chunkplan_runtime.training.run_folder import RunFolder
from tests.support.training_cases import all_well
from tests.support.training_checks import after_step, learning, lines, options, same_weights

#: A rate at which the evaluation loss falls for some steps, and then rises.
STOPPING = ("--eval-every", 1, "--early-stopping", 2, "--save-every", 0, "--lr", "3e-2", "--precision", "fp64")


@pytest.fixture(scope="module")
def stopped(made, tmp_path_factory):
    output = tmp_path_factory.mktemp("stopped") / "run"
    assert main(options(made, output, *STOPPING, plan="twenty")) == 0
    return output


def evaluations(output):
    return [(row["step"], row["eval_loss"]) for row in lines(output / "evals.jsonl")]


def held_by(checkpoint):
    [file] = (checkpoint / "weights").iterdir()
    return {name: weight for name, weight in load_file(file).items() if not name.startswith("step:")}


def test_a_run_stops_after_evaluations_without_improvement_and_leaves_the_best(made, tmp_path, capsys):
    output = tmp_path / "run"
    assert main(options(made, output, *STOPPING, plan="twenty")) == 0
    said = capsys.readouterr().err
    losses = [loss for _, loss in evaluations(output)]
    best = losses.index(min(losses))
    assert 1 <= best == len(losses) - 3 < 37, "of a plan of 40 steps"
    assert f"stopped   early: 2 evaluations were no lower than {min(losses):.4f}\n" in said
    checkpoint = RunFolder(output).checkpoints()[-1]
    assert checkpoint.name == f"step-{best + 1:08d}"
    what = f"evaluation loss {min(losses):.4f} after step {best}"
    assert f"best      {checkpoint}: {what}; final/ has its weights\n" in said
    final = load_file(output / "final" / "model.safetensors")
    assert all(torch.equal(weight, final[name]) for name, weight in held_by(checkpoint).items())


def test_a_run_without_it_has_the_same_steps_and_goes_on(made, stopped, tmp_path):
    """And it keeps its best checkpoint where that is asked for, beside the last ones."""
    num_steps = len(learning(stopped)) + 2
    more = ("--eval-every", 1, "--keep-best", "--save-every", 1, "--keep-last", 2, "--max-steps", num_steps)
    assert main(options(made, tmp_path, *STOPPING[4:], *more, plan="twenty")) == 0
    assert learning(tmp_path)[: num_steps - 2] == learning(stopped)
    best = min(evaluations(tmp_path), key=lambda row: row[1])[0] + 1
    kept = sorted({best, num_steps - 1, num_steps})
    assert [path.name for path in RunFolder(tmp_path).checkpoints()] == [f"step-{step:08d}" for step in kept]
    if best == min(evaluations(stopped), key=lambda row: row[1])[0] + 1:
        assert same_weights(tmp_path / "final", stopped / "final")


def test_a_stopped_run_goes_on_to_the_same_end(made, stopped, tmp_path, monkeypatch, capsys):
    """Killed between the best evaluation and the end; and where it had only the model to write."""
    last = evaluations(stopped)[-1][0]
    with monkeypatch.context() as patch:
        after_step(patch, last - 1, lambda: signal.raise_signal(signal.SIGINT))
        assert main(options(made, tmp_path / "run", *STOPPING, plan="twenty")) == 130
    assert main(options(made, tmp_path / "run", *STOPPING, "--resume", plan="twenty")) == 0
    assert learning(tmp_path / "run") == learning(stopped)
    assert evaluations(tmp_path / "run") == evaluations(stopped)
    assert same_weights(tmp_path / "run", stopped)
    every = ("--save-every", 1, "--keep-last", 1)
    assert main(options(made, tmp_path / "saved", *STOPPING, *every, plan="twenty")) == 0
    shutil.rmtree(tmp_path / "saved" / "final")
    capsys.readouterr()
    assert main(options(made, tmp_path / "saved", *STOPPING, *every, "--resume", plan="twenty")) == 0
    assert "stopped   early" in capsys.readouterr().err
    assert learning(tmp_path / "saved") == learning(stopped)
    assert same_weights(tmp_path / "saved" / "final", stopped / "final")


@pytest.mark.soak
def test_two_processes_stop_where_one_does(made, trainers, stopped, tmp_path):
    said = all_well(trainers, 2, options(made, tmp_path, "--device", "cpu", *STOPPING, plan="pair"))
    assert "stopped   early: 2 evaluations" in said and "final/ has its weights" in said
    assert [step for step, _ in evaluations(tmp_path)] == [step for step, _ in evaluations(stopped)]
    assert [row[1] for row in evaluations(tmp_path)] == pytest.approx(
        [row[1] for row in evaluations(stopped)], rel=1e-9
    )
    mine, others = (load_file(path / "final" / "model.safetensors") for path in (tmp_path, stopped))
    for name, weight in mine.items():
        torch.testing.assert_close(weight, others[name], rtol=1e-8, atol=1e-8)


def test_what_could_never_stop_is_refused(made, tmp_path, capsys):
    assert main(options(made, tmp_path / "run", "--early-stopping", 2, plan="twenty")) == 2
    assert "--early-stopping without --eval-every" in capsys.readouterr().err
    assert main(options(made, tmp_path / "run", "--keep-best", "--eval-every", 2)) == 2
    assert "--keep-best without a plan of held-out sequences" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_equal_loss_is_no_lower_and_none_counts_for_nothing():
    best = BestLoss(2, [(1, 3.0), (2, None), (3, 3.0)])
    assert (best.loss, best.step, best.since, best.should_stop) == (3.0, 1, 1, False)
    assert best.add(4, 2.5) and not best.add(5, 2.6) and not best.add(6, 2.5)
    assert (best.step, best.should_stop) == (4, True)
