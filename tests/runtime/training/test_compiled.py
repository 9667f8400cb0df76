"""Compiled layers in the trainer: its losses are those without, to rounding."""

from __future__ import annotations

import pytest
import torch

from chunkplan_runtime.models import compiled
from chunkplan_runtime.train import main
from tests.support.training_cases import run_main_compiled, together
from tests.support.training_checks import learning, options

STEPS = ("--max-steps", 3)


def losses(output):
    return [row["loss"] for row in learning(output)]


@pytest.mark.parametrize(
    ("backend", "precision"),
    [("aot_eager", "bf16"), *(pytest.param("inductor", each, marks=pytest.mark.soak) for each in ("fp32", "bf16"))],
)
def test_a_run_with_compiled_layers_is_one_without_to_rounding(made, tmp_path, capsys, monkeypatch, backend, precision):
    """And stops at nothing when it evaluates, saves or goes on."""
    torch._dynamo.reset()
    if backend != "inductor":
        monkeypatch.setattr(compiled, "BACKEND", {"backend": backend})
    for name, more in (("compiled", ("--compile", "--eval-every", 2)), ("none", ())):
        words = options(made, tmp_path / name, *STEPS, *more, "--precision", precision, plan="held")
        assert main(words) == 0
        said = capsys.readouterr().err
        assert ("compiled  2 layers, " in said) == (name == "compiled") and "note: layers" not in said
    assert losses(tmp_path / "compiled") == pytest.approx(
        losses(tmp_path / "none"), rel=1e-2 if precision == "bf16" else 1e-5
    )


@pytest.mark.soak
@pytest.mark.parametrize("sharding", ["optimizer", "weights", "gradients"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_processes_that_share_weights_train_as_one_without_compiled_layers(
    made, trainers, tmp_path, sharding, precision
):
    how = ("--precision", precision)
    assert main(options(made, tmp_path / "one", *STEPS, *how, plan="two")) == 0
    more = ("--compile", "--sharding", sharding, "--device", "cpu")
    arguments = options(made, tmp_path / "two", *STEPS, *how, *more, plan="two")
    told = together(trainers, 2, arguments, run=run_main_compiled)
    assert [code for code, _ in told] == [0, 0], told
    assert "compiled  2 layers, " in told[0][1] and "note: layers" not in told[0][1]
    assert losses(tmp_path / "two") == pytest.approx(
        losses(tmp_path / "one"), rel=1e-2 if precision == "bf16" else 1e-5
    )
