"""Fused kernels in the trainer: beside all that a run can do, its losses are those without them, to rounding."""

from __future__ import annotations

import signal

import pytest

from chunkplan_runtime.train import main
from tests.support.training_cases import together
from tests.support.training_checks import after_step, learning, lines, options, same_weights

pytestmark = pytest.mark.usefixtures("base")
FUSED = ("--fused-kernels", "torch", "--max-steps", 4)


def losses(output):
    """Of steps, and of evaluations where there are some."""
    evaluations = output / "evals.jsonl"
    rows = lines(evaluations) if evaluations.exists() else []
    return [row["loss"] for row in learning(output)] + [row["eval_loss"] for row in rows if row["eval_loss"]]


def without_model(words):
    """A command line that leaves the model to what follows."""
    place = words.index("--model-config")
    return words[:place] + words[place + 2 :]


@pytest.mark.parametrize(
    ("plan", "more"),
    [
        ("held", ("--eval-every", 2)),
        ("plan", ("--lora-rank", 4)),
        pytest.param("held", ("--eval-every", 2, "--lora-rank", 4, "--precision", "bf16"), marks=pytest.mark.soak),
    ],
)
def test_evaluation_and_adapters_are_those_without_fused_kernels(made, tmp_path, capsys, plan, more):
    """In bf16 both round, each otherwise."""
    for name, kernels in (("fused", FUSED), ("none", (*FUSED, "--fused-kernels", "none"))):
        words = options(made, tmp_path / name, *kernels, *more, "--model", made / "base", plan=plan)
        assert main(without_model(words)) == 0
        assert ("fused     by torch: 5 norms\n" in capsys.readouterr().err) == (name == "fused")
    found, expected = losses(tmp_path / "fused"), losses(tmp_path / "none")
    assert len(found) == (6 if plan == "held" else 4)
    assert found == pytest.approx(expected, rel=1e-2 if "bf16" in more else 1e-5)


@pytest.mark.soak
@pytest.mark.parametrize("sharding", ["weights", "gradients"])
def test_processes_that_share_weights_train_as_one_without_fused_kernels(made, trainers, tmp_path, sharding):
    assert main(options(made, tmp_path / "one", *FUSED, "--fused-kernels", "none", plan="two")) == 0
    arguments = options(made, tmp_path / "two", *FUSED, "--sharding", sharding, "--device", "cpu", plan="two")
    told = together(trainers, 2, arguments)
    assert [code for code, _ in told] == [0, 0], told
    assert "fused     by torch: 5 norms\n" in told[0][1]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_a_stopped_run_goes_on_bit_for_bit_and_may_go_on_without_fused_kernels(made, tmp_path, monkeypatch):
    more = (*FUSED, "--save-every", 2)
    assert main(options(made, tmp_path / "whole", *more)) == 0
    for name, kernels in (("stopped", "torch"), ("other", "none")):
        with monkeypatch.context() as patch:
            after_step(patch, 2, lambda: signal.raise_signal(signal.SIGINT))
            assert main(options(made, tmp_path / name, *more)) == 130
        assert main(options(made, tmp_path / name, *more, "--fused-kernels", kernels, "--resume")) == 0
    assert learning(tmp_path / "stopped") == learning(tmp_path / "whole")
    assert same_weights(tmp_path / "stopped" / "final", tmp_path / "whole" / "final")
    assert losses(tmp_path / "other") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
