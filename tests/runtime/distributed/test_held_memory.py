"""What a process of the trainer holds at most in a step is what the planner counts, by what its replicas share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from chunkplan import CostModel, PlanConfig, build
from chunkplan.cost.memory import StageMemory, stage_memory
from chunkplan.cost.model_config import shape_of_config
from tests.support.analyses import write_analysis
from tests.support.ports import free_port
from tests.support.process_pool import ProcessPool, process_pool
from tests.support.training_cases import run_main_and_count

SIZES = {"hidden_size": 128, "intermediate_size": 336, "head_dim": 32, "num_hidden_layers": 8}
MODELS: dict[str, dict[str, int]] = {
    "llama": {},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96},
}
#: ChunkSizes with which most is of states, and of activations.
FEW, MANY = 32, 256


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    with process_pool(2, joined=False) as started:
        yield started


@pytest.fixture(scope="module")
def made(tmp_path_factory: Any, tiny_config: Any, random_sequences: Any) -> Path:
    """Configs, and plans of two steps in which every rank has two chunks, so that there are sums beside the second."""
    folder: Path = tmp_path_factory.mktemp("held")
    for chunk_size in (FEW, MANY):
        analysis = folder / f"analysis-{chunk_size}"
        write_analysis(analysis, random_sequences([chunk_size] * 8, seed=1))
        for dp in (1, 2):
            config = PlanConfig(chunk_size=chunk_size, k=1, global_batch=2 * dp, dp=dp, cp="off")
            build(analysis, folder / f"plan-{dp}-{chunk_size}", config)
    for name, sizes in MODELS.items():
        (folder / f"{name}.json").write_text(json.dumps(tiny_config(name, **SIZES, **sizes)))
    return folder


def run(pool: ProcessPool, made: Path, output: Path, dp: int, chunk_size: int, *more: object) -> list[tuple[int, int]]:
    """Of each process the bytes between steps and the most in one, of what operators have made."""
    given = ["--plan", made / f"plan-{dp}-{chunk_size}", "--output", output, "--lr", "3e-3", "--device", "cpu"]
    arguments = [str(each) for each in (*given, "--max-steps", 2, *more)]
    told = pool.run(dp, run_main_and_count, size=dp, port=free_port(), arguments=[arguments])
    assert [code for code, *_ in told] == [0] * dp, told
    return [(between, most) for _, _, between, most in told]


def counted(config: Path, dp: int, chunk_size: int, **cost: Any) -> StageMemory:
    """What the planner counts of a stage with all layers that holds a chunk."""
    shape = shape_of_config(json.loads(config.read_text()), "a test")
    tokens: dict[str, Any] = {"retained_tokens": [chunk_size], "stage_input_tokens": [0], "kv_tokens": [0]}
    [found] = stage_memory(CostModel(shape=shape, **cost), dp=dp, layers=(8,), chunk_size=chunk_size, **tokens)
    return found


CASES = [
    ("llama", "optimizer", FEW, "none", "bf16"),
    ("llama", "optimizer", FEW, "none", "fp32"),
    ("llama", "optimizer", MANY, "full", "bf16"),
    ("llama", "gradients", FEW, "none", "bf16"),
    ("llama", "weights", FEW, "none", "bf16"),
    ("llama", "weights", MANY, "none", "bf16"),
    ("qwen3_moe", "optimizer", FEW, "none", "bf16"),
    ("qwen3_moe", "gradients", FEW, "none", "bf16"),
    ("qwen3_moe", "weights", FEW, "none", "bf16"),
]
#: Of optimizer states alone not with many activations: what is around layers is not counted, 1 % of so narrow a model.
SWEEP = [
    (model_type, sharding, chunk_size, level, precision)
    for model_type in MODELS
    for sharding in ("optimizer", "gradients", "weights")
    for chunk_size, level in ((FEW, "none"), (MANY, "full"), (MANY, "none"))
    for precision in ("bf16", "fp32")
    if (sharding, chunk_size, level) != ("optimizer", MANY, "none")
]


@pytest.mark.parametrize(
    ("model_type", "sharding", "chunk_size", "level", "precision"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.soak) for case in SWEEP if case not in CASES)],
)
def test_what_two_processes_hold_at_most_is_what_the_planner_counts(
    pool: ProcessPool,
    made: Path,
    tmp_path: Path,
    model_type: str,
    sharding: Any,
    chunk_size: int,
    level: str,
    precision: Any,
) -> None:
    """No less than is measured, and no more than a tenth above that.

    On a CPU no sum of gradients is there before a process waits for it, as if another one came late to all of them.
    """
    config = made / f"{model_type}.json"
    more = ["--precision", precision, "--sharding", sharding, "--checkpointing", level, "--model-config", config]
    found = counted(config, 2, chunk_size, sharding=sharding, checkpointing=level, precision=precision)
    predicted = found.total - found.reserved
    rows = {"bf16": 0, "fp32": 4}[precision]  # bytes of a weight that are shared between steps beside its states
    states = found.optimizer * (1 + rows / 8)
    for between, most in run(pool, made, tmp_path / "run", 2, chunk_size, *more):
        assert most <= predicted <= 1.1 * most
        assert between == pytest.approx(states, rel=0.01)  # norms are no matrices


@pytest.mark.parametrize(
    ("model_type", "level"),
    [
        ("llama", "none"),
        *(pytest.param("llama", level, marks=pytest.mark.soak) for level in ("keep-attention", "full")),
    ],
)
def test_what_a_process_holds_at_most_with_adapters_is_what_the_planner_counts(
    pool: ProcessPool, made: Path, tmp_path: Path, model_type: str, level: str
) -> None:
    """Weights that are loaded are not made by operators: their bytes are those of the file."""
    config = made / f"{model_type}.json"
    model = AutoConfig.for_model(**json.loads(config.read_text()))
    AutoModelForCausalLM.from_config(model, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    loaded = (tmp_path / "model" / "model.safetensors").stat().st_size
    more = ["--precision", "bf16", "--checkpointing", level, "--model", tmp_path / "model", "--lora-rank", 4]
    found = counted(config, 1, MANY, lora_rank=4, checkpointing=level)
    predicted = found.total - found.reserved
    [(_, most)] = run(pool, made, tmp_path / "run", 1, MANY, *more)
    assert most + loaded <= predicted <= 1.1 * (most + loaded)
