"""What a process of the trainer holds at most in a step is what the planner counts.

That is no less than what is measured, and no more than a tenth above it.
"""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from chunkplan import CostModel, PlanConfig, build, plan_report
from chunkplan.cost.checkpointing import CHECKPOINTINGS
from chunkplan.cost.memory import stage_memory
from chunkplan.cost.model_config import shape_of_config
from chunkplan.cost.token_bytes import ResidentTokens
from tests.support.analyses import write_analysis
from tests.support.training_cases import run_main_and_count, together

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 336,
    "head_dim": 32,
    "num_hidden_layers": 8,
    "max_position_embeddings": 4096,
}
MODELS = {"llama": {}, "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}}
#: ChunkSizes with which most is of states, and of activations.
FEW, MANY = 32, 256


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_config, random_sequences):
    """Configs, and plans of two steps in which every rank has two chunks, so that there are sums beside the second."""
    folder = tmp_path_factory.mktemp("held")
    for chunk_size in (FEW, MANY):
        analysis = folder / f"analysis-{chunk_size}"
        write_analysis(analysis, random_sequences([chunk_size] * 8, seed=1))
        for dp in (1, 2):
            config = PlanConfig(chunk_size=chunk_size, k=1, global_batch=2 * dp, dp=dp, cp="off")
            build(analysis, folder / f"plan-{dp}-{chunk_size}", config)
    for name, sizes in MODELS.items():
        (folder / f"{name}.json").write_text(json.dumps(tiny_config(name, **SIZES, **sizes)))
    return folder


def run(trainers, plan, output, size, *more):
    """Of each of `size` processes the bytes between steps and the most in one, of what operators have made."""
    given = ["--plan", plan, "--output", output, "--lr", "3e-3", "--device", "cpu"]
    arguments = [str(each) for each in (*given, "--max-steps", 2, *more)]
    told = together(trainers, size, arguments, run=run_main_and_count)
    assert [code for code, *_ in told] == [0] * size, told
    return [(between, most) for _, _, between, most in told]


def counted(config, dp, chunk_size, **cost):
    """What the planner counts of a stage with all layers that holds a chunk."""
    shape = shape_of_config(json.loads(config.read_text()), "a test")
    held = [ResidentTokens(chunk_size)]
    [found] = stage_memory(CostModel(shape=shape, **cost), dp=dp, layers=(8,), chunk_size=chunk_size, held=held)
    return found


def check_fullest(trainers, config, folder, sequences, planned, cost, of_step=0):
    """Build a plan and run it: what `inspect` says of the fullest process is what is measured, less `of_step` bytes."""
    model = CostModel(shape=shape_of_config(json.loads(config.read_text()), "a test"), **cost)
    write_analysis(folder / "analysis", sequences)
    build(folder / "analysis", folder / "plan", planned, cost=model)
    memory = plan_report(folder / "plan").memory.memory
    more = [f"--{name}={cost[name]}" for name in ("precision", "sharding", "checkpointing")]
    held = run(trainers, folder / "plan", folder / "run", planned.dp * planned.pp, *more, "--model-config", config)
    most = max(most for _, most in held) - of_step
    assert most <= memory.total - memory.reserved <= 1.1 * most


#: Model, what replicas share, ChunkSize, level, precision.
CASES = [
    ("llama", "optimizer", MANY, "none", "bf16"),
    ("llama", "weights", FEW, "none", "fp32"),
    ("qwen3_moe", "gradients", FEW, "none", "bf16"),
]
#: In fp32, of so few and narrow layers, what two of them take is more than a tenth where levels lie between.
SWEEP = [
    (model_type, sharding, chunk_size, level, precision)
    for model_type in MODELS
    for sharding in ("optimizer", "gradients", "weights")
    for precision, levels in (("bf16", CHECKPOINTINGS), ("fp32", ("none", "full")))
    for chunk_size, level in ((FEW, "none"), *((MANY, level) for level in levels))
]


@pytest.mark.parametrize(
    ("model_type", "sharding", "chunk_size", "level", "precision"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.soak) for case in SWEEP if case not in CASES)],
)
def test_two_processes(trainers, made, tmp_path, model_type, sharding, chunk_size, level, precision):
    """No sum of gradients is there before a process waits for it, as if another one came late to all of them."""
    config = made / f"{model_type}.json"
    more = ["--precision", precision, "--sharding", sharding, "--checkpointing", level, "--model-config", config]
    found = counted(config, 2, chunk_size, sharding=sharding, checkpointing=level, precision=precision)
    predicted = found.total - found.reserved
    rows = {"bf16": 0, "fp32": 4}[precision]  # bytes of a weight that are shared between steps beside its states
    states = found.optimizer * (1 + rows / 8)
    for between, most in run(trainers, made / f"plan-2-{chunk_size}", tmp_path / "run", 2, *more):
        assert most <= predicted <= 1.1 * most
        assert between == pytest.approx(states, rel=0.01)  # norms are no matrices


@pytest.mark.parametrize(
    ("model_type", "dp", "sharding", "chunk_size", "level"),
    [
        ("qwen3_moe", 1, "optimizer", MANY, "none"),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (
                ("llama", 2, "weights", MANY, "none"),
                ("llama", 1, "optimizer", MANY, "none"),
                ("llama", 2, "optimizer", FEW, "none"),
                ("llama", 1, "optimizer", MANY, "keep-attention"),
                ("llama", 1, "optimizer", MANY, "full"),
                ("llama", 2, "optimizer", MANY, "none"),
                ("llama", 2, "gradients", MANY, "keep-products"),
                ("llama", 2, "weights", FEW, "none"),
                *(("qwen3_moe", 1, "optimizer", MANY, level) for level in CHECKPOINTINGS[1:]),
                ("qwen3_moe", 2, "optimizer", FEW, "none"),
                ("qwen3_moe", 2, "gradients", MANY, "keep-products"),
                ("qwen3_moe", 2, "weights", MANY, "none"),
            )
        ),
    ],
)
def test_adapters(trainers, made, tmp_path, model_type, dp, sharding, chunk_size, level):
    """Of a process alone, weights that are loaded are not made by operators: their bytes are those of the file.

    But for those of experts, which operators put together into one weight.
    """
    config = made / f"{model_type}.json"
    model = AutoConfig.for_model(**json.loads(config.read_text()))
    made_whole = AutoModelForCausalLM.from_config(model, dtype=torch.bfloat16)
    made_whole.save_pretrained(tmp_path / "model")
    experts = sum(weight.nbytes for name, weight in made_whole.named_parameters() if ".experts." in name)
    loaded = (tmp_path / "model" / "model.safetensors").stat().st_size - experts if dp == 1 else 0
    more = ["--precision", "bf16", "--checkpointing", level, "--model", tmp_path / "model", "--lora-rank", 4]
    more += ["--sharding", sharding]
    found = counted(config, dp, chunk_size, lora_rank=4, checkpointing=level, sharding=sharding)
    predicted = found.total - found.reserved
    for _, most in run(trainers, made / f"plan-{dp}-{chunk_size}", tmp_path / "run", dp, *more):
        assert most + loaded <= predicted <= 1.1 * (most + loaded)


@pytest.mark.parametrize(
    ("model_type", "dp", "schedule", "chunk_size", "sharding", "level", "precision"),
    [
        ("llama", 1, "auto", MANY, "optimizer", "none", "bf16"),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (
                ("llama", 1, "auto", FEW, "optimizer", "none", "bf16"),
                ("llama", 1, "auto", MANY, "optimizer", "full", "bf16"),
                ("llama", 1, "zero-bubble", MANY, "optimizer", "none", "bf16"),
                ("llama", 1, "zero-bubble", MANY, "optimizer", "none", "fp32"),
                ("llama", 2, "auto", MANY, "optimizer", "none", "bf16"),
                ("llama", 2, "auto", MANY, "weights", "none", "bf16"),
                ("llama", 2, "auto", MANY, "weights", "full", "fp32"),
                ("qwen3_moe", 1, "auto", MANY, "optimizer", "none", "bf16"),
                ("qwen3_moe", 1, "auto", MANY, "optimizer", "full", "bf16"),
            )
        ),
    ],
)
def test_stages_of_a_pipeline(
    trainers, made, tmp_path, random_sequences, model_type, dp, schedule, chunk_size, sharding, level, precision
):
    """Of the fullest one, as `inspect` says.

    In each of two steps a rank has four chunks, so that there are sums of gradients while a stage holds two of them.
    """
    cost = {"sharding": sharding, "checkpointing": level, "precision": precision}
    planned = PlanConfig(chunk_size=chunk_size, k=1, global_batch=4 * dp, dp=dp, pp=2, cp="off", schedule=schedule)
    sequences = random_sequences([chunk_size] * 8 * dp, seed=1)
    check_fullest(trainers, made / f"{model_type}.json", tmp_path, sequences, planned, cost)


@pytest.mark.parametrize(
    ("dp", "k", "num_chunks", "sharding", "level", "precision", "kv_offload"),
    [
        (1, 1, 6, "optimizer", "full", "bf16", True),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (
                (1, 2, 6, "optimizer", "none", "bf16", False),
                (1, 1, 6, "optimizer", "none", "bf16", False),
                (1, 1, 16, "optimizer", "full", "bf16", False),
                (1, 1, 11.5, "optimizer", "none", "bf16", False),
                (1, 3, 9, "optimizer", "none", "bf16", False),
                (1, 2, 16, "optimizer", "none", "bf16", False),
                (1, 2, 16, "optimizer", "full", "bf16", False),
                (1, 2, 16, "optimizer", "keep-attention", "bf16", False),
                (1, 4, 2, "optimizer", "none", "bf16", False),
                (1, 2, 6, "optimizer", "none", "fp32", False),
                (2, 1, 6, "optimizer", "none", "bf16", False),
                (2, 2, 16, "optimizer", "full", "bf16", False),
                (2, 2, 16, "weights", "none", "bf16", False),
                (2, 2, 6, "gradients", "full", "bf16", False),
                (2, 1, 4, "optimizer", "full", "bf16", False),
                (1, 1, 16, "optimizer", "none", "bf16", True),
                (1, 2, 16, "optimizer", "full", "bf16", True),
                (2, 2, 16, "weights", "full", "bf16", True),
                (2, 2, 6, "optimizer", "none", "bf16", True),
            )
        ),
    ],
)
def test_split_sequences(
    trainers, made, tmp_path, random_sequences, dp, k, num_chunks, sharding, level, precision, kv_offload
):
    """In each of two steps a rank has one of `num_chunks` chunks of which K hold activations, and a shorter sequence.

    With KV offload that fills a chunk: the fullest moment is still one in which keys are there. Half a chunk more is
    cut into parts that differ by a token.
    """
    cost = {"sharding": sharding, "checkpointing": level, "precision": precision, "kv_offload": kv_offload}
    split = "full" if num_chunks == int(num_chunks) else "even"
    planned = PlanConfig(chunk_size=MANY, k=k, global_batch=2 * dp, dp=dp, cp="off", epochs=2, split=split)
    lengths = [int(num_chunks * MANY), MANY if kv_offload else FEW]
    sequences = random_sequences(lengths * dp, seed=1)
    of_step = 12 * sum(lengths)  # token ids, positions and labels
    check_fullest(trainers, made / "llama.json", tmp_path, sequences, planned, cost, of_step)
