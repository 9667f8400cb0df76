"""A run on a plan with trees is the run without them, of one rank or two, with any loss; it goes on from any step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from chunkplan import PlanConfig, build
from chunkplan_runtime.models.model import new_model, read_config
from chunkplan_runtime.train import main
from chunkplan_runtime.training.executor import Executor
from tests.support.loss_cases import write_samples
from tests.support.training_checks import learning

#: Of sequences and of tokens.
OWN = "def loss(tokens): return -(tokens.sums(tokens.log_probs) / 9).tanh().mean() - tokens.log_probs.mean() / 2"


@pytest.fixture(scope="module")
def trees(tmp_path_factory, tiny_config) -> Path:
    """Rollouts of four prompts, plans of their steps without trees and with them, a saved model, and a loss."""
    folder, random = tmp_path_factory.mktemp("trees"), np.random.default_rng(0)
    samples = []
    for size in (34, 50, 41, 35):
        prompt = random.integers(0, 97, size)
        for _ in range(3):
            ids = np.concatenate([prompt, random.integers(0, 97, random.integers(5, 30))])
            samples.append((ids, np.arange(len(ids)) >= size))
    write_samples(folder / "analysis", "grpo with a reference", samples)
    torch.manual_seed(3)
    config = AutoConfig.for_model(**tiny_config("qwen2"))
    AutoModelForCausalLM.from_config(config, dtype=torch.float64).save_pretrained(folder / "model")
    (folder / "loss.py").write_text(OWN)
    settings = {"chunk_size": 32, "k": 1, "global_batch": 6, "epochs": 2, "cp": "off"}
    for name, shares in (("plan", False), ("trees", True), ("pair", True)):
        dp = 2 if name == "pair" else 1
        build(folder / "analysis", folder / name, PlanConfig(share_prefixes=shares, dp=dp, **settings))
    return folder


def arguments(trees, output, plan, *more):
    where = ["--plan", trees / plan, "--model", trees / "model", "--output", output, "--device", "cpu"]
    return [*map(str, (*where, "--precision", "fp64", *more))]


@pytest.mark.parametrize("loss", ["grpo", "loss.py:loss"])
def test_a_run_with_trees_is_the_run_without_them(trees, loss, tmp_path):
    """Up to norms and angles, which a run computes in float32. GRPO with rewards, a reference and old policies."""
    more = ["--lr", "1e-2", "--warmup", 0, "--loss", trees / loss if ":" in loss else loss]
    more += ["--loss-options", "beta=0.2", "--loss-options", "entropy=0.05"] if loss == "grpo" else []
    for name in ("plan", "trees", "pair"):
        assert main(arguments(trees, tmp_path / name, name, *more)) == 0
    rows = [learning(tmp_path / name) for name in ("plan", "trees", "pair")]
    assert len(rows[0]) == 4
    for row, *others in zip(*rows, strict=True):
        for other in others:
            assert other["loss"] == pytest.approx(row["loss"], rel=1e-6, abs=1e-7)
            assert other["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-6)
            assert other["target_tokens"] == row["target_tokens"]


def test_scores_of_a_plan_with_trees_are_those_without_them(trees, tmp_path):
    found = []
    for name in ("plan", "trees"):
        assert main(arguments(trees, tmp_path / name, name), scores=True) == 0
        table = pa.concat_tables([pq.read_table(path) for path in (tmp_path / name).glob("*.parquet")])
        found.append(table.sort_by("sequence_id").to_pylist())
    assert len(found[0]) == 12
    for row, other in zip(*found, strict=True):
        assert other["positions"] == row["positions"]
        assert other["log_probs"] == pytest.approx(row["log_probs"], rel=1e-6)


def test_a_stream_goes_on_from_any_step_with_its_trees(trees):
    executor = Executor(new_model(read_config(trees / "model"), torch.float64, seed=0))
    steps = list(executor.stream(trees / "trees"))
    stream = executor.stream(trees / "trees")
    stream.load_state_dict({**stream.state_dict(), "step": 1})
    begun = [each.begun for rank in next(iter(stream)).ranks for each in rank.tensors.values()]
    assert any(begun)
    assert begun == [each.begun for rank in steps[1].ranks for each in rank.tensors.values()]
