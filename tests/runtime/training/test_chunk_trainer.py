"""`ChunkTrainer` learns what plain `Trainer` learns from whole sequences."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import TrainingArguments

from chunkplan import PlanConfig, build, load_plan
from chunkplan_runtime import ChunkTrainer
from chunkplan_runtime.models.parts import evaluate_in_float64
from chunkplan_runtime.proof.prove import relative_errors, vanishing_gradients
from tests.support.analyses import write_analysis
from tests.support.hf_cases import (
    Gradients,
    assert_same_gradients,
    loss_in_float64,
    plain,
    whole_gradients,
    with_adapters,
)
from tests.support.mixed_chunks import LENGTHS, MIXED
from tests.support.router_cases import OF_WHOLE_SEQUENCES
from tests.support.shared_plans import given_blocks

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning"),
]


@pytest.mark.parametrize(
    ("k", "checkpointing"),
    [*(pytest.param(k, False, marks=pytest.mark.soak) for k in (1, 5)), (2, False), (2, True)],
    ids=["k1", "k5", "k2", "checkpointed"],
)
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_training_step_has_the_gradients_and_the_loss_of_whole_sequences(
    model_type, k, checkpointing, new_trainer, new_model, handmade_plan, random_sequences
):
    sequences = random_sequences(LENGTHS)
    plan, _ = handmade_plan(sequences, [{0: MIXED}], k=k)
    model, gradients = new_model(model_type), Gradients()
    trainer = new_trainer(
        model, plan=plan, callbacks=[gradients], max_grad_norm=0, gradient_checkpointing=checkpointing
    )
    with evaluate_in_float64(model):
        reference, loss = whole_gradients(model, sequences)
        trainer.train()
    assert_same_gradients(gradients.found, reference)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize(
    "router_loss", [None, "sequence", *(pytest.param(asked, marks=pytest.mark.soak) for asked in ("batch", "none"))]
)
def test_the_load_balancing_loss_of_routers_is_that_of_whole_sequences(
    router_loss, plans, tmp_path, new_model, handmade_plan, random_sequences
):
    """In the gradients and in the loss that is logged, as `Trainer` has it."""
    sequences = random_sequences(LENGTHS)
    plan, _ = handmade_plan(sequences, [{0: MIXED}], k=1)
    asked = {"output_router_logits": router_loss is None, "router_aux_loss_coef": 0.5}
    model, gradients = new_model("mixtral", num_local_experts=4, **asked), Gradients()
    model.set_experts_implementation("eager")
    args = TrainingArguments(str(tmp_path), max_grad_norm=0, report_to=[], use_cpu=True, logging_steps=1)
    trainer = ChunkTrainer(model, args, plan=plan, callbacks=[gradients], router_loss=router_loss)
    with evaluate_in_float64(model):
        tokens = [torch.from_numpy(ids) for ids, _ in sequences]
        of_routers = OF_WHOLE_SEQUENCES.get(router_loss or "batch", lambda model, tokens: 0.0)
        added = of_routers(SimpleNamespace(model=model), tokens)
        routers = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        reference, loss = whole_gradients(model, sequences)
        trainer.train()
    total = {name: gradient + routers.get(name, 0.0) for name, gradient in reference.items()}
    assert_same_gradients(gradients.found, total)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss + added, rel=1e-6)


def test_ranks_and_chunks_without_sequences_change_nothing(new_trainer, new_model, handmade_plan, random_sequences):
    sequences = random_sequences(LENGTHS)
    plan, _ = handmade_plan(sequences, [{0: MIXED[:3], 1: [[]], 2: [[], *MIXED[3:]]}], k=2, dp=3)
    model, gradients = new_model("qwen3"), Gradients()
    trainer = new_trainer(model, plan=plan, callbacks=[gradients], max_grad_norm=0)
    with evaluate_in_float64(model):
        reference, _ = whole_gradients(model, sequences)
        trainer.train()
    assert_same_gradients(gradients.found, reference)


def test_of_a_plan_in_which_ranks_share_sequences_it_builds_one_for_its_process(
    new_trainer, new_model, random_sequences, tmp_path, caplog
):
    sequences = random_sequences(LENGTHS)
    write_analysis(tmp_path / "analysis", sequences)
    config = PlanConfig(chunk_size=5, k=1, dp=4, cp="auto", global_batch=len(LENGTHS))
    with given_blocks({30: (0, 4, 2), 23: (2, 2, 1)}):
        plan = build(tmp_path / "analysis", tmp_path / "plan", config, workers=1)
    assert set(plan.chunks().column("cp_size").to_pylist()) == {1, 2, 4}
    model, gradients = new_model("qwen3"), Gradients()
    with caplog.at_level("WARNING"):
        trainer = new_trainer(model, plan=plan.path, eval_plan=plan.path, callbacks=[gradients], max_grad_norm=0)
    with evaluate_in_float64(model):
        reference, loss = whole_gradients(model, sequences)
        evaluated = trainer.evaluate()["eval_loss"]
        trainer.train()
    assert_same_gradients(gradients.found, reference)
    assert trainer.state.log_history[-2]["loss"] == pytest.approx(loss, rel=1e-6) == evaluated
    for name in ("plan", "eval-plan"):
        like = load_plan(tmp_path / "run" / name)
        assert (like.config.dp, like.config.cp, like.config.k) == (1, "off", 1)
        assert f"trained with {like.path}, like it" in caplog.text


@pytest.mark.parametrize(
    "checkpointing", [pytest.param(False, marks=pytest.mark.soak), True], ids=["kept", "checkpointed"]
)
def test_adapters_of_peft_have_the_gradients_of_whole_sequences(
    checkpointing, new_trainer, new_model, handmade_plan, random_sequences
):
    sequences = random_sequences(LENGTHS)
    plan, _ = handmade_plan(sequences, [{0: MIXED}], k=1)
    model, gradients = with_adapters(new_model()), Gradients()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)  # zero as they start, they would hide the gradients of the others
    trainer = new_trainer(
        model, plan=plan, callbacks=[gradients], max_grad_norm=0, gradient_checkpointing=checkpointing
    )
    with evaluate_in_float64(model):
        reference, _ = whole_gradients(model, sequences)
        trainer.train()
    assert all("lora" in name for name in gradients.found)
    assert_same_gradients(gradients.found, reference)


@pytest.mark.parametrize(
    "learning",
    [
        {"optim": "sgd", "max_grad_norm": 0.5, "lr_scheduler_type": "cosine", "warmup_steps": 2},
        pytest.param(
            {"optim": "adamw_torch", "weight_decay": 0.1, "lr_scheduler_type": "linear", "adam_epsilon": 1e-4},
            marks=pytest.mark.soak,
        ),
    ],
    ids=["sgd", "adamw"],
)
def test_a_run_learns_the_weights_that_plain_trainer_learns(learning, plans, new_trainer, new_model):
    """Six steps: same clipping, same schedule, and after all of them the same weights, in float64."""
    models = [new_model("qwen3"), new_model("qwen3")]
    trainers = [
        new_trainer(models[0], **learning),
        new_trainer(models[1], **learning, **plain(plans, compute_loss_func=loss_in_float64)),
    ]
    before = {name: weight.clone() for name, weight in models[0].state_dict().items()}
    for model, trainer in zip(models, trainers, strict=True):
        with evaluate_in_float64(model):
            trainer.train()
    ours, theirs = (model.state_dict() for model in models)
    for name, weight in theirs.items():
        assert (weight - before[name]).norm() > 1e-6, "it has learned"
        assert (ours[name] - weight).norm() <= 1e-11 * (weight - before[name]).norm(), name
    logs = [[entry for entry in trainer.state.log_history if "loss" in entry] for trainer in trainers]
    assert len(logs[0]) == 6
    for mine, other in zip(*logs, strict=True):
        assert mine["learning_rate"] == other["learning_rate"]
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-11)


def test_a_run_learns_what_transformers_own_loss_teaches(plans, new_trainer, new_model):
    """As above with nothing of transformers replaced, as far as float32 goes; the loss of the whole run too."""
    trainers = [new_trainer(new_model("llama")), new_trainer(new_model("llama"), **plain(plans))]
    results = [trainer.train() for trainer in trainers]
    assert results[0].training_loss == pytest.approx(results[1].training_loss, rel=1e-5)
    for mine, other in zip(*(trainer.model.parameters() for trainer in trainers), strict=True):
        assert (mine - other).abs().max() < 1e-4


def test_bf16_computes_forwards_in_bfloat16_and_keeps_float32_gradients(
    new_trainer, new_model, handmade_plan, random_sequences
):
    """With K = 1 every chunk but the last runs forward without gradients first: autocast must not remember that."""
    sequences = random_sequences(LENGTHS)
    plan, _ = handmade_plan(sequences, [{0: MIXED}], k=1)
    model, gradients = new_model("qwen3", dtype=torch.float32), Gradients()
    trainer = new_trainer(model, plan=plan, callbacks=[gradients], max_grad_norm=0, bf16=True)
    reference, loss = whole_gradients(model, sequences)
    trainer.train()
    errors = relative_errors(gradients.found, reference, vanishing_gradients(reference))
    assert 1e-4 < max(errors.values()) < 0.05
    assert {gradient.dtype for gradient in gradients.found.values()} == {torch.float32}
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss, rel=0.01)


def test_a_step_without_targets_changes_nothing(new_trainer, new_model, handmade_plan, random_sequences):
    ((ids, target),) = random_sequences([12])
    plan, _ = handmade_plan([(ids, np.zeros(12, bool)), (ids, target)], [{0: [[(0, 0, 8)], [(0, 8, 12)]]}])
    model = new_model()
    before = [parameter.clone() for parameter in model.parameters()]
    trainer = new_trainer(model, plan=plan)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == 0
    assert all((mine == other).all() for mine, other in zip(model.parameters(), before, strict=True))


def test_keys_and_values_in_host_memory_change_nothing(plans, new_model, new_trainer, tmp_path):
    trainers = [
        ChunkTrainer(
            new_model(),
            args=TrainingArguments(str(tmp_path / "run"), report_to=[], use_cpu=True, max_steps=2, save_strategy="no"),
            plan=plans / "plan",
            kv_offload=offload,
        )
        for offload in (False, True)
    ]
    for trainer in trainers:
        trainer.train()
    pairs = zip(*(trainer.model.parameters() for trainer in trainers), strict=True)
    assert all((mine == other).all() for mine, other in pairs)
