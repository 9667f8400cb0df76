"""What `ChunkTrainer` could only ignore or get wrong is refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from peft import IA3Config, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    TrainerCallback,
)

from chunkplan import PlanConfig, build, build_like
from chunkplan.errors import DataError, UsageError
from chunkplan.extras import pip_install
from chunkplan_runtime import ChunkTrainer
from tests.support.analyses import write_analysis
from tests.support.hf_cases import pad, with_adapters
from tests.support.shared_plans import given_blocks

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning"),
]


def test_only_a_checkpoint_of_this_plan_is_resumed(plans, new_trainer, tmp_path):
    build(plans / "analysis", tmp_path / "other", PlanConfig(chunk_size=8, k=1, global_batch=3, seed=1))
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1, "lr_scheduler_type": "constant"}
    trainer = new_trainer(plan=tmp_path / "other", **settings)
    with pytest.raises(UsageError, match="there is no checkpoint in"):
        trainer.train(resume_from_checkpoint=True)
    trainer.train()
    with pytest.raises(
        UsageError, match=r"a checkpoint of another plan: plan\.seed was 1, is 0; plan\.holdout was not given, is 2"
    ):
        new_trainer(**settings).train(resume_from_checkpoint=True)
    with pytest.raises(UsageError, match="there is no checkpoint in"):
        new_trainer(**settings).train(resume_from_checkpoint=str(tmp_path))
    settings["max_steps"] = 2
    assert new_trainer(plan=tmp_path / "other", **settings).train(resume_from_checkpoint=True).global_step == 2
    state = tmp_path / "run" / "checkpoint-2" / "trainer_state.json"
    document = json.loads(state.read_text())
    del document["stateful_callbacks"]["PlanIdentity"]
    state.write_text(json.dumps(document))
    with pytest.raises(UsageError, match="it does not say which samples its steps have"):
        new_trainer(plan=tmp_path / "other", **settings).train(resume_from_checkpoint=True)


def test_a_run_goes_on_with_a_plan_like_its_own(plans, new_trainer, new_model, tmp_path):
    """In the middle of an epoch, which has three steps; for other ranks, and with more epochs."""
    build_like(plans / "plan", tmp_path / "like", dp=3, chunk_size=6)
    build(plans / "analysis", tmp_path / "more", PlanConfig(chunk_size=8, k=2, global_batch=3, epochs=3, holdout=2))
    settings = {"lr_scheduler_type": "constant", "save_strategy": "steps", "save_steps": 2}
    models = {name: new_model() for name in ("whole", "run", "like", "more")}
    new_trainer(models["whole"], output_dir=str(tmp_path / "whole"), max_steps=4, lr_scheduler_type="constant").train()
    new_trainer(models["run"], max_steps=2, **settings).train()
    for name in ("like", "more"):
        trainer = new_trainer(models[name], plan=tmp_path / name, max_steps=4, **settings)
        trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
        for weight, expected in zip(*(models[each].parameters() for each in (name, "whole")), strict=True):
            torch.testing.assert_close(weight, expected, rtol=1e-9, atol=1e-9)


def test_without_the_planner_it_says_what_builds_the_plan_for_its_process(
    new_trainer, random_sequences, tmp_path, monkeypatch
):
    write_analysis(tmp_path / "analysis", random_sequences([30, 9]))
    with given_blocks({30: (0, 2, 1)}):
        plan = build(tmp_path / "analysis", tmp_path / "plan", PlanConfig(chunk_size=5, k=1, dp=2, cp=2)).path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("polars", "numba", "ortools")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "chunkplan.building")
    with pytest.raises(UsageError, match="ranks of the plan share sequences, and polars is missing") as refused:
        new_trainer(plan=plan)
    assert f"`chunkplan build --like {plan} --dp 1 --output {plan}-dp1`" in refused.value.hint
    assert not (tmp_path / "run" / "plan").exists()


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2", "--global-batch"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy='group_by_length'", "--seed"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1", "cross-entropy"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0", "noise"),
        ({"bf16_full_eval": True}, "bf16_full_eval=True", "leave it out"),
        ({"torch_compile": True}, "torch_compile=True", "leave it out"),
        ({"use_liger_kernel": True}, "use_liger_kernel=True", 'fused_kernels="liger"'),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True", "--chunk-size"),
        ({"ignore_data_skip": True}, "ignore_data_skip=True", "right step"),
        ({"torch_empty_cache_steps": 2}, "torch_empty_cache_steps=2", "empty_cache"),
        ({"optim": "adalomo"}, "optim='adalomo'", "adamw_torch"),
        ({"max_steps": 7}, "max_steps=7, the plan has 6 steps", "--epochs"),
        ({"num_train_epochs": 5}, "num_train_epochs=5, the plan has 2", "--epochs"),
        ({"num_train_epochs": 1.5}, "num_train_epochs=1.5, the plan has 2", "max_steps"),
    ],
)
def test_a_setting_that_could_only_be_ignored_is_refused(settings, message, hint, new_trainer):
    with pytest.raises(UsageError) as refused:
        new_trainer(**settings)
    assert message in str(refused.value)
    assert hint in refused.value.hint


@pytest.mark.parametrize(
    "name",
    [
        "train_dataset",
        "eval_dataset",
        "data_collator",
        "model_init",
        "compute_loss_func",
        "compute_metrics",
        "preprocess_logits_for_metrics",
    ],
)
def test_an_argument_that_could_only_be_ignored_is_refused(name, plans, new_model):
    with pytest.raises(UsageError, match=f"ChunkTrainer takes no {name}"):
        ChunkTrainer(new_model(), plan=plans / "plan", **{name: pad})
    with pytest.raises(UsageError, match="no argument 'trainset'"):
        ChunkTrainer(new_model(), plan=plans / "plan", trainset=[])


def test_other_precisions_are_refused(new_trainer, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(UsageError, match="mixed precision 'fp16' needs loss scaling"):
        new_trainer()


def test_models_that_chunks_would_get_wrong_are_refused(plans, tiny_config, new_trainer, new_model):
    config = AutoConfig.for_model(**tiny_config())
    for model, message in (
        (torch.nn.Linear(2, 2), "Linear: not a model of transformers"),
        (AutoModelForSequenceClassification.from_config(config), "no head that predicts tokens"),
        (new_model().model, "no head that predicts tokens"),
        (new_model(attention_dropout=0.1), "attention_dropout is 0.1"),
        (
            AutoModelForCausalLM.from_config(AutoConfig.for_model("diffllama", hidden_size=64, num_hidden_layers=1)),
            "'diffllama' are off by",
        ),
        (new_model(vocab_size=50), "the model's vocabulary has 50"),
        (new_model(max_position_embeddings=16), "the model takes 16 positions"),
        (get_peft_model(new_model(), IA3Config(task_type="CAUSAL_LM")), "IA3"),
        (with_adapters(new_model(), alora_invocation_tokens=[1]), "LORA, alora_invocation_tokens"),
    ):
        with pytest.raises(UsageError, match=message):
            new_trainer(model)
    spread = new_model()
    spread.lm_head.to("meta")
    with pytest.raises(UsageError, match="on cpu and meta, expected one device"):
        new_trainer(spread)


def test_what_a_chunk_trainer_cannot_do_is_refused(plans, new_trainer, new_model, tmp_path, random_sequences):
    class OwnLoss(ChunkTrainer):
        def compute_loss(self, *args, **kwargs):
            return 0

    with pytest.raises(UsageError, match=r"OwnLoss\.compute_loss would never be called"):
        new_trainer(kind=OwnLoss)
    trainer = new_trainer()
    for refused in (trainer.predict, trainer.compute_loss):
        with pytest.raises(UsageError):
            refused([])
    with pytest.raises(UsageError, match="evaluate takes no eval_dataset"):
        trainer.evaluate([1])
    build(plans / "analysis", tmp_path / "all", PlanConfig(chunk_size=8, k=2, global_batch=3))
    with pytest.raises(UsageError, match="there is no evaluation plan"):
        new_trainer(plan=tmp_path / "all").evaluate()
    with pytest.raises(UsageError, match="there is no evaluation plan"):
        new_trainer(plan=tmp_path / "all", eval_strategy="epoch")


def test_the_plan_beside_has_to_hold_what_the_plan_holds_out(plans, new_trainer, tmp_path):
    for folder, held_out in (("plan", 2), ("other", 3)):
        build(plans / "analysis", tmp_path / folder, PlanConfig(chunk_size=8, k=2, global_batch=3, holdout=held_out))
    (tmp_path / "plan-eval").rename(tmp_path / "mine")
    (tmp_path / "other-eval").rename(tmp_path / "plan-eval")
    with pytest.raises(DataError, match=r"not what .+ holds out"):
        new_trainer(plan=tmp_path / "plan")
    new_trainer(plan=tmp_path / "plan", eval_plan=tmp_path / "mine").evaluate()


def test_an_epoch_that_a_callback_stops_is_refused_and_not_skipped(new_trainer):
    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = True
            return control

    with pytest.raises(UsageError, match="stopped an epoch early"):
        new_trainer(callbacks=[Stops()]).train()


def test_the_package_alone_needs_no_torch_and_the_trainer_names_what_it_needs():
    code = """
import sys
import chunkplan_runtime
assert "torch" not in sys.modules and "transformers" not in sys.modules
from chunkplan.errors import UsageError
sys.modules["accelerate"] = None
try:
    from chunkplan_runtime import ChunkTrainer
except UsageError as error:
    print(error, "|", error.hint)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.startswith("ChunkTrainer needs accelerate"), done.stderr
    assert done.stdout.endswith(f"| {pip_install('hf')}\n")
