"""A run on a plan with trees is the run without them, of one rank or two, with any loss; it goes on from any step."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from chunkplan import PlanConfig, build
from chunkplan_runtime.models.model import new_model, read_config
from chunkplan_runtime.train import main
from chunkplan_runtime.training.executor import Executor
from tests.support.analyses import write_analysis
from tests.support.training_checks import learning, options
from tests.support.tree_cases import random_samples

#: Of sequences and of tokens.
LOSS = "def loss(tokens): return -(tokens.sums(tokens.log_probs) / 9).tanh().mean() - tokens.log_probs.mean() / 2"


@pytest.fixture(scope="module")
def trees(tmp_path_factory, tiny_config) -> Path:
    """An analysis and two plans of its steps, one with trees; and a model, and a loss."""
    folder, chance = tmp_path_factory.mktemp("trees"), random.Random(0)
    samples = [each for _ in range(2) for each in random_samples(chance, 1, 4, 34, 40)]
    write_analysis(folder / "analysis", samples)
    (folder / "config.json").write_text(json.dumps(tiny_config("qwen2")))
    (folder / "loss.py").write_text(LOSS)
    settings = {"chunk_size": 32, "k": 1, "global_batch": 6, "epochs": 2, "cp": "off"}
    for name, shares in (("plan", False), ("trees", True), ("pair", True)):
        dp = 2 if name == "pair" else 1
        build(folder / "analysis", folder / name, PlanConfig(share_prefixes=shares, dp=dp, **settings))
    return folder


@pytest.mark.parametrize("more", [(), ("--loss", "loss.py:loss")])
def test_a_run_with_trees_is_the_run_without_them(trees, more, tmp_path):
    """Up to norms and angles, which a run computes in float32."""
    more = [str(trees / each) if each.startswith("loss.py") else each for each in more]
    for name in ("plan", "trees", "pair"):
        assert main(options(trees, tmp_path / name, "--precision", "fp64", *more, plan=name)) == 0
    rows = [learning(tmp_path / name) for name in ("plan", "trees", "pair")]
    assert len(rows[0]) > 1
    for row, *others in zip(*rows, strict=True):
        for other in others:
            assert other["loss"] == pytest.approx(row["loss"], rel=1e-6)
            assert other["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-6)
            assert other["target_tokens"] == row["target_tokens"]


def test_a_stream_goes_on_from_any_step_with_its_trees(trees):
    executor = Executor(new_model(read_config(trees / "config.json"), torch.float64, seed=0))
    steps = list(executor.stream(trees / "trees"))
    stream = executor.stream(trees / "trees")
    stream.load_state_dict({**stream.state_dict(), "step": 1})
    begun = [each.begun for rank in next(iter(stream)).ranks for each in rank.tensors.values()]
    assert any(begun)
    assert begun == [each.begun for rank in steps[1].ranks for each in rank.tensors.values()]
