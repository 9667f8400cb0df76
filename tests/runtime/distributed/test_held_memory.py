"""What a process of the trainer holds of weights, gradients and optimizer states is what the planner counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from chunkplan import CostModel, PlanConfig, build
from chunkplan.cost.memory import stage_memory
from chunkplan.cost.model_config import shape_of_config
from tests.support import training_checks
from tests.support.analyses import write_analysis
from tests.support.ports import free_port
from tests.support.process_pool import ProcessPool, process_pool
from tests.support.training_cases import run_main_and_count

SIZES = {"hidden_size": 128, "intermediate_size": 336, "head_dim": 32, "num_hidden_layers": 8}
ROUTED = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
CHUNK = 8


@pytest.fixture
def pool() -> Iterator[ProcessPool]:
    with process_pool(2, joined=False) as started:
        yield started


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_config, random_sequences) -> Path:
    folder = tmp_path_factory.mktemp("held")
    write_analysis(folder / "analysis", random_sequences([8] * 8, seed=1))
    build(folder / "analysis", folder / "plan", PlanConfig(chunk_size=CHUNK, k=1, global_batch=2, dp=2, cp="off"))
    for name, sizes in (("llama", {}), ("qwen3_moe", ROUTED)):
        (folder / f"{name}.json").write_text(json.dumps(tiny_config(name, **SIZES, **sizes)))
    return folder


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_what_two_processes_hold_at_most_with_shared_gradients_is_what_the_planner_counts(
    pool: ProcessPool, made: Path, tmp_path: Path, model_type: str
) -> None:
    """No less than is measured, and no more than a tenth above that: in a step of few tokens, so that states count."""
    config = made / f"{model_type}.json"
    more = ["--device", "cpu", "--precision", "bf16", "--sharding", "gradients", "--model-config", str(config)]
    arguments = training_checks.options(made, tmp_path / "run", *more)
    told = pool.run(2, run_main_and_count, size=2, port=free_port(), arguments=[arguments])
    pool.stop()
    assert [code for code, *_ in told] == [0, 0], told
    cost = CostModel(shape=shape_of_config(json.loads(config.read_text()), "a test"), sharding="gradients")
    [found] = stage_memory(
        cost, dp=2, layers=(8,), retained_tokens=[CHUNK], stage_input_tokens=[0], kv_tokens=[0], chunk_size=CHUNK
    )
    predicted = found.total - found.reserved
    for _, _, between, most in told:
        assert most <= predicted <= 1.1 * most
        assert between == pytest.approx(found.optimizer, rel=0.01)  # norms are no matrices
