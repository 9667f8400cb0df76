"""A loss over the log-probabilities of a step is exact on any layout of processes; of it only numbers cross them."""

from __future__ import annotations

import pytest

from chunkplan.errors import UsageError
from chunkplan_runtime.execution.step_loss import load_loss
from chunkplan_runtime.parity import TOLERANCE
from chunkplan_runtime.train import main
from tests.runtime.test_parity import MODELS
from tests.support.places import ROOT
from tests.support.step_loss_cases import compare_step_loss, preference, with_entropy_bonus
from tests.support.training_cases import all_well, together
from tests.support.training_checks import lines, options, same_run

LLAMA = MODELS["llama with biases, tied"]


@pytest.mark.parametrize(
    ("plan", "how"),
    [
        ({"dp": 2, "lengths": [41, 13]}, {}),
        ({"dp": 2, "pp": 2, "k": 1, "schedule": "1f1b"}, {}),
        ({"dp": 2, "k": 1}, {"sharding": "weights"}),
        pytest.param({"pp": 2, "schedule": "zero-bubble"}, {"kv_offload": True}, marks=pytest.mark.soak),
        pytest.param({"dp": 4, "lengths": [41, 12, 5]}, {"sharding": "gradients"}, marks=pytest.mark.soak),
        pytest.param({"dp": 2, "pp": 2, "schedule": "interleaved"}, {}, marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("loss", [preference, pytest.param(with_entropy_bonus, marks=pytest.mark.soak)])
def test_loss_and_gradients_are_those_of_whole_sequences(pool, plan_of, plan, how, loss):
    world_size = plan.get("dp", 1) * plan.get("pp", 1)
    for value, expected, error in pool.run(world_size, compare_step_loss, **plan_of(LLAMA, **plan), loss=loss, **how):
        assert value == pytest.approx(expected, rel=1e-12)
        assert error <= TOLERANCE


@pytest.mark.parametrize("loss", [preference, with_entropy_bonus])
def test_ranks_that_share_sequences_have_them_once(pool, plan_of, loss):
    plan = plan_of(LLAMA, lengths=[40, 9, 5], dp=2, k=1, cp="auto")
    for value, expected, error in pool.run(2, compare_step_loss, **plan, loss=loss):
        assert value == pytest.approx(expected, rel=1e-12)
        assert error <= TOLERANCE


def test_a_run_with_a_loss_of_its_own_is_the_run_of_one_process(made, trainers, tmp_path):
    """And that of cross-entropy is the run without one; a later part of it has to have the same loss."""
    (tmp_path / "own.py").write_text(
        "def mean(tokens): return -tokens.log_probs.mean()\n"
        "def wide(tokens): return -tokens.log_probs.exp().mean() - 0.1 * tokens.entropies.square().mean()\n"
    )
    more = ("--precision", "fp64", "--model-config", made / "tied.json", "--max-steps", 3)
    runs = {
        "plain": (1, "one", ()),
        "mean": (1, "one", ("--loss", tmp_path / "own.py:mean")),
        "one": (1, "one", ("--loss", tmp_path / "own.py:wide", "--save-every", 2)),
        "four": (4, "both", ("--loss", tmp_path / "own.py:wide")),
    }
    for name, (size, plan, how) in runs.items():
        all_well(trainers, size, options(made, tmp_path / name, "--device", "cpu", *more, *how, plan=plan))
    same_run(tmp_path / "mean", tmp_path / "plain")
    same_run(tmp_path / "four", tmp_path / "one")
    assert lines(tmp_path / "one" / "metrics.jsonl")[0]["loss"] < 0
    other = options(made, tmp_path / "one", *more[:-1], 4, "--device", "cpu", "--resume", plan="one")
    [(code, said)] = together(trainers, 1, other)
    assert code == 2 and "--loss" in said


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        (None, "own.py:loss", "there is no file "),
        ("def loss(tokens): return", "own.py", "there is no file "),
        ("x = 1", "own.py:x", "there is no function 'x'"),
        ("x = 1", "own.py:loss", "there is no function 'loss'"),
        ("def loss(", "own.py:loss", "SyntaxError: "),
        ("import no_such_thing", "own.py:loss", "No module named 'no_such_thing'"),
    ],
)
def test_what_is_no_function_of_a_file_is_refused_before_anything_is_read(tmp_path, text, name, words):
    if text is not None:
        (tmp_path / "own.py").write_text(text)
    with pytest.raises(UsageError, match=words):
        load_loss(str(tmp_path / name))


@pytest.mark.parametrize("name", ["dynamic_fine_tuning", "mean_of_sequences", "with_entropy"])
def test_the_losses_of_the_example_are_losses(made, tmp_path, capsys, name):
    named = f"{ROOT / 'examples' / 'own_loss.py'}:{name}"
    assert main(options(made, tmp_path / "run", "--device", "cpu", "--max-steps", 2, "--loss", named)) == 0
    rows = lines(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 2 and all(row["loss"] > 0 and row["grad_norm"] > 0 for row in rows)
    assert f"learns    by {named}, adamw" in capsys.readouterr().err
