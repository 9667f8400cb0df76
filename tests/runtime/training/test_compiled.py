"""Compiled layers in the trainer: its losses are those without, to rounding."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from chunkplan import PlanConfig, build
from chunkplan_runtime.models import compiled
from chunkplan_runtime.train import main
from tests.support.training_cases import run_main_compiled, together
from tests.support.training_checks import cost_of_a_run, learning, options

STEPS = ("--max-steps", 3)


def losses(output):
    return [row["loss"] for row in learning(output)]


@pytest.mark.parametrize(
    ("backend", "precision"),
    [
        ("aot_eager", "fp32"),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in product(("inductor",), ("fp32", "bf16"))),
        pytest.param("aot_eager", "bf16", marks=pytest.mark.soak),
    ],
)
def test_a_run_with_compiled_layers_is_one_without_to_rounding(made, tmp_path, capfd, monkeypatch, backend, precision):
    """As planned, and stops at nothing when it evaluates, saves or goes on. A run says where they are not compiled."""
    torch._dynamo.reset()
    if backend != "inductor":
        monkeypatch.setattr(compiled, "BACKEND", {"backend": backend})
    plan, cost = tmp_path / "plan", replace(cost_of_a_run(made), compile=True, precision=precision)
    config = PlanConfig(chunk_size=8, k=2, global_batch=3, epochs=3, holdout=2, cp="off")
    build(made / "analysis", plan, config, cost=cost)
    more = (*STEPS, "--device", "cpu", "--precision", precision)
    assert main(options(made, tmp_path / "compiled", *more, "--eval-every", 2, plan=plan)) == 0
    said = capfd.readouterr().err
    assert "compiled  2 layers, once for all chunks: the first steps take minutes longer\n" in said
    assert "predicts  no times" not in said and "note: layers" not in said
    assert main(options(made, tmp_path / "none", *more, "--no-compile", plan=plan)) == 0
    said = capfd.readouterr().err
    assert "compiled  " not in said and "note: layers" not in said
    assert "the plan's times are for --compile; this run has --no-compile" in said
    assert "`chunkplan build` with `--no-compile`" in said
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
