"""`ChunkTrainer` learns what plain `Trainer` learns from whole sequences, and the rest of `Trainer` works around it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from chunkplan import PlanConfig, build
from chunkplan.errors import DataError, UsageError
from chunkplan.planfile.load import load_plan
from chunkplan_runtime import ChunkTrainer, open_plan
from chunkplan_runtime.models.precise import evaluate_in_float64
from chunkplan_runtime.parity import _relative_errors, _vanishing
from tests.support.analyses import write_analysis
from tests.support.mixed_chunks import LENGTHS, MIXED

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning"),
]


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small only wait for a second one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def made(tmp_path_factory, random_sequences):
    """A folder with the analysis of eleven sequences, a plan of nine of them over two epochs, and one of the others."""
    folder = tmp_path_factory.mktemp("chunk_trainer")
    write_analysis(folder / "analysis", random_sequences([25, 6, 14, 40, 5, 9, 17, 4, 33, 8, 12], seed=4))
    build(folder / "analysis", folder / "plan", PlanConfig(chunk_size=8, k=2, global_batch=3, epochs=2, holdout=2))
    return folder


@pytest.fixture
def new_model(tiny_config):
    def make(model_type="llama", dtype=torch.float64, **changes):
        torch.manual_seed(1)
        config = AutoConfig.for_model(**tiny_config(model_type, **changes))
        return AutoModelForCausalLM.from_config(config, dtype=dtype)

    return make


@pytest.fixture
def new_trainer(made, new_model, tmp_path):
    """`make(**settings)` -> a ChunkTrainer of the plan of `made` and a Llama; some settings are its own arguments."""

    def make(model=None, kind=ChunkTrainer, callbacks=(), plan=None, eval_plan=None, **settings):
        data = {"plan": plan or made / "plan", "eval_plan": eval_plan} if issubclass(kind, ChunkTrainer) else {}
        for name in ("train_dataset", "eval_dataset", "data_collator", "compute_loss_func"):
            data |= {name: settings.pop(name)} if name in settings else {}
        settings = {"output_dir": str(tmp_path / "run"), "save_strategy": "no", "logging_steps": 1, **settings}
        args = TrainingArguments(report_to=[], disable_tqdm=True, use_cpu=True, learning_rate=1e-2, **settings)
        return kind(model or new_model(), args=args, callbacks=list(callbacks), **data)

    return make


class Gradients(TrainerCallback):
    """Keeps the gradients of the first step, and stops."""

    def __init__(self):
        self.found = {}

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        control.should_training_stop = True
        return control


def whole_gradients(model, sequences):
    """Plain training of one step: sequences whole, one after another; loss too."""
    num_targets = sum(int(target.sum()) for _, target in sequences)
    total = 0.0
    for ids, target in sequences:
        ids, target = torch.from_numpy(np.asarray(ids)).long(), torch.from_numpy(np.asarray(target))
        logits = model(ids[None]).logits[0, :-1][target[1:]]
        loss = cross_entropy(logits, ids[1:][target[1:]], reduction="sum") / num_targets
        loss.backward()
        total += loss.item()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients, total


def assert_same_gradients(found, reference):
    assert found.keys() == reference.keys()
    assert max(_relative_errors(found, reference, _vanishing(reference)).values()) <= 1e-12


@pytest.mark.parametrize(
    ("k", "checkpointing"), [(1, False), (2, False), (5, False), (2, True)], ids=["k1", "k2", "k5", "checkpointed"]
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


def test_ranks_and_chunks_without_sequences_change_nothing(new_trainer, new_model, handmade_plan, random_sequences):
    sequences = random_sequences(LENGTHS)
    plan, _ = handmade_plan(sequences, [{0: MIXED[:3], 1: [[]], 2: [[], *MIXED[3:]]}], k=2, dp=3)
    model, gradients = new_model("qwen3"), Gradients()
    trainer = new_trainer(model, plan=plan, callbacks=[gradients], max_grad_norm=0)
    with evaluate_in_float64(model):
        reference, _ = whole_gradients(model, sequences)
        trainer.train()
    assert_same_gradients(gradients.found, reference)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
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


def with_adapters(model, **options):
    torch.manual_seed(2)
    targets = ["q_proj", "v_proj", "down_proj"]
    config = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **options)
    return get_peft_model(model, config, autocast_adapter_dtype=False).to(model.dtype)


class Sequences(Dataset):
    """The sequences of a plan in its order, as a plain Trainer takes them."""

    def __init__(self, plan, analysis):
        tokens = analysis.tokens()
        ids = [
            segment.sequence_id
            for step in plan.iter_steps()
            for chunks in step.chunks.values()
            for chunk in chunks
            for segment in chunk.segments
            if segment.start == 0
        ]
        self.sequences = [tuple(torch.from_numpy(array.copy()) for array in tokens(number)) for number in ids]

    def __len__(self):
        return len(self.sequences)

    def __getitem__(self, index):
        return self.sequences[index]


def pad(sequences):
    def joined(rows, value):
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

    ids = [ids.long() for ids, _ in sequences]
    labels = [torch.where(target, row, -100) for row, (_, target) in zip(ids, sequences, strict=True)]
    return {
        "input_ids": joined(ids, 0),
        "attention_mask": joined([torch.ones_like(row) for row in ids], 0),
        "labels": joined(labels, -100),
    }


def loss_in_float64(outputs, labels, num_items_in_batch):
    """What transformers computes as well, which casts logits to float32 first."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100, reduction="sum") / num_items_in_batch


def plain(made, **more):
    """What makes a plain Trainer see the batches of the plan of `made`."""
    plan, analysis = open_plan(made / "plan")
    return {
        "kind": Trainer,
        "train_dataset": Sequences(plan, analysis),
        "data_collator": pad,
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": 3,
        "num_train_epochs": 1,
        "remove_unused_columns": False,
        **more,
    }


@pytest.mark.parametrize(
    "learning",
    [
        {"optim": "sgd", "max_grad_norm": 0.5, "lr_scheduler_type": "cosine", "warmup_steps": 2},
        {"optim": "adamw_torch", "weight_decay": 0.1, "lr_scheduler_type": "linear", "adam_epsilon": 1e-4},
    ],
    ids=["sgd", "adamw"],
)
def test_a_run_learns_the_weights_that_plain_trainer_learns(learning, made, new_trainer, new_model):
    """Six steps: same clipping, same schedule, and after all of them the same weights, in float64."""
    models = [new_model("qwen3"), new_model("qwen3")]
    trainers = [
        new_trainer(models[0], **learning),
        new_trainer(models[1], **learning, **plain(made, compute_loss_func=loss_in_float64)),
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


def test_a_run_learns_what_transformers_own_loss_teaches(made, new_trainer, new_model):
    """As above with nothing of transformers replaced, as far as float32 goes; the loss of the whole run too."""
    trainers = [new_trainer(new_model("llama")), new_trainer(new_model("llama"), **plain(made))]
    results = [trainer.train() for trainer in trainers]
    assert results[0].training_loss == pytest.approx(results[1].training_loss, rel=1e-5)
    for mine, other in zip(*(trainer.model.parameters() for trainer in trainers), strict=True):
        assert (mine - other).abs().max() < 1e-4


class Events(TrainerCallback):
    """Keeps the names of events in their order."""

    def __init__(self):
        self.names = []
        for name in dir(TrainerCallback):
            if name.startswith("on_"):
                setattr(self, name, lambda *args, _name=name, **kwargs: self.names.append(_name))


def test_callbacks_are_called_when_plain_trainer_calls_them(made, new_trainer, tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 3}
    called = []
    _, analysis = open_plan(made / "plan")
    evaluation = Sequences(load_plan(made / "plan-eval"), analysis)
    for number, more in enumerate([{}, plain(made, eval_dataset=evaluation, per_device_eval_batch_size=3)]):
        events = Events()
        more = {**more, "output_dir": str(tmp_path / str(number)), "max_steps": 3}
        trainer = new_trainer(callbacks=[events], **settings, **more)
        trainer.train()
        called.append(events.names)
    assert called[0] == called[1]
    assert {"on_step_end", "on_evaluate", "on_prediction_step", "on_save", "on_train_end"} <= set(called[0])


def test_epochs_are_those_of_the_plan(new_trainer):
    trainer = new_trainer(save_strategy="epoch", eval_strategy="epoch")
    trainer.train()
    assert trainer.state.num_train_epochs == 2
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [3, 6]
    assert [entry["epoch"] for entry in trainer.state.log_history if "loss" in entry] == pytest.approx(
        [1 / 3, 2 / 3, 1, 4 / 3, 5 / 3, 2]
    )
    saved = sorted(path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*"))
    assert saved == ["checkpoint-3", "checkpoint-6"]


def learned(trainer):
    timed = ("runtime", "per_second")
    return [
        {name: value for name, value in entry.items() if not name.endswith(timed)}
        for entry in trainer.state.log_history
        if "train_loss" not in entry
    ]


@pytest.mark.parametrize("adapters", [False, True], ids=["weights", "adapters"])
def test_a_resumed_run_is_the_run_bit_for_bit(adapters, new_trainer, new_model, tmp_path):
    """From the end of an epoch and from the middle of one; with dropout in the adapters."""

    def trainer(folder):
        model = new_model(dtype=torch.float32)
        model = with_adapters(model, lora_dropout=0.2) if adapters else model
        return new_trainer(model, output_dir=str(tmp_path / folder), save_strategy="steps", save_steps=1)

    whole = trainer("whole")
    whole.train()
    weights = whole.model.state_dict()
    for step in (3, 5):
        resumed = trainer(f"from-{step}")
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert learned(resumed) == learned(whole)
        assert all((weights[name] == weight).all() for name, weight in resumed.model.state_dict().items())
    saved = {path.name for path in (tmp_path / "whole" / "checkpoint-3").iterdir()}
    assert ("adapter_model.safetensors" in saved, "model.safetensors" in saved) == (adapters, not adapters)


def test_done_steps_are_not_read_again(new_trainer):
    trainer = new_trainer()
    trainer.state.global_step = 5
    batches = list(trainer.get_train_dataloader())
    assert batches[:2] == [{}, {}], "the second epoch's first two of three steps"
    assert [batch["work"].step.step for batch in batches[2:]] == [5]


def test_only_a_checkpoint_of_this_plan_is_resumed(made, new_trainer, tmp_path):
    build(made / "analysis", tmp_path / "other", PlanConfig(chunk_size=8, k=1, global_batch=3, seed=1))
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    trainer = new_trainer(plan=tmp_path / "other", **settings)
    with pytest.raises(UsageError, match="there is no checkpoint in"):
        trainer.train(resume_from_checkpoint=True)
    trainer.train()
    with pytest.raises(UsageError, match=r"a checkpoint of plan \w+, this one is"):
        new_trainer(**settings).train(resume_from_checkpoint=True)
    with pytest.raises(UsageError, match="there is no checkpoint in"):
        new_trainer(**settings).train(resume_from_checkpoint=str(tmp_path))
    settings["max_steps"] = 2
    assert new_trainer(plan=tmp_path / "other", **settings).train(resume_from_checkpoint=True).global_step == 2
    state = tmp_path / "run" / "checkpoint-2" / "trainer_state.json"
    document = json.loads(state.read_text())
    del document["stateful_callbacks"]["PlanIdentity"]
    state.write_text(json.dumps(document))
    with pytest.raises(UsageError, match="a checkpoint of no plan"):
        new_trainer(plan=tmp_path / "other", **settings).train(resume_from_checkpoint=True)


def test_evaluation_is_the_mean_over_all_target_tokens(made, new_trainer, new_model):
    plan, analysis = open_plan(made / "plan-eval")
    model = new_model()
    _, expected = whole_gradients(model, [(i.numpy(), t.numpy()) for i, t in Sequences(plan, analysis)])
    metrics = new_trainer(model).evaluate()
    assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert metrics["eval_samples_per_second"] > 0
    metrics = new_trainer(model, eval_plan=made / "plan").evaluate(metric_key_prefix="again")
    assert metrics["again_loss"] != pytest.approx(expected, rel=1e-3), "of the plan that was given"
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_best_model_is_kept_and_stopping_early_works(new_trainer):
    trainer = new_trainer(
        callbacks=[EarlyStoppingCallback(1)],
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
    )
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert trainer.state.best_metric == min(losses)
    assert trainer.evaluate()["eval_loss"] == min(losses)


class Generates(TrainerCallback):
    """Uses the model as callbacks do that show samples."""

    def on_step_end(self, args, state, control, model, **kwargs):
        self.implementation = model.config._attn_implementation
        self.generated = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_models_attention_is_its_own_but_within_a_step(implementation, new_trainer, new_model, tmp_path):
    model, samples = new_model(), Generates()
    model.set_attn_implementation(implementation)
    trainer = new_trainer(model, callbacks=[samples], max_steps=2, save_strategy="steps", save_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    assert samples.generated.shape == (1, 5)
    assert samples.implementation == model.config._attn_implementation == implementation
    for folder in (tmp_path / "final", tmp_path / "run" / "checkpoint-1"):
        assert "chunkplan" not in (folder / "config.json").read_text()
    trainer.evaluate()
    assert model.config._attn_implementation == implementation
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert all((mine == other).all() for mine, other in zip(reloaded.parameters(), model.parameters(), strict=True))


def test_an_error_in_a_step_leaves_the_model_with_its_attention(
    new_trainer, new_model, handmade_plan, random_sequences
):
    plan, _ = handmade_plan(random_sequences([9]), [{0: [[(0, 0, 9)]]}], actions=[("forward", 0)])
    model = new_model()
    with pytest.raises(DataError, match="no backward of chunk 0"):
        new_trainer(model, plan=plan).train()
    assert model.config._attn_implementation == "sdpa"


def test_tokens_and_sequences_are_counted(made, new_trainer):
    totals = load_plan(made / "plan").manifest["totals"]
    for counted in ("all", "non_padding"):
        trainer = new_trainer(include_num_input_tokens_seen=counted)
        result = trainer.train()
        assert trainer.state.num_input_tokens_seen == totals["num_tokens"]
    logged = [entry for entry in trainer.state.log_history if "train_tokens_per_second" in entry]
    assert len(logged) == 6
    weights = trainer.model.num_parameters(exclude_embeddings=True)
    assert trainer.state.total_flos == 6 * weights * totals["num_tokens"]
    sequences = result.metrics["train_samples_per_second"] * result.metrics["train_runtime"]
    assert sequences == pytest.approx(totals["num_sequences"], rel=0.05)


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
    errors = _relative_errors(gradients.found, reference, _vanishing(reference))
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


def test_keys_and_values_in_host_memory_change_nothing(made, new_model, new_trainer, tmp_path):
    trainers = [
        ChunkTrainer(
            new_model(),
            args=TrainingArguments(str(tmp_path / "run"), report_to=[], use_cpu=True, max_steps=2, save_strategy="no"),
            plan=made / "plan",
            kv_offload=offload,
        )
        for offload in (False, True)
    ]
    for trainer in trainers:
        trainer.train()
    pairs = zip(*(trainer.model.parameters() for trainer in trainers), strict=True)
    assert all((mine == other).all() for mine, other in pairs)


def test_what_the_plan_decides_is_told_and_the_callers_arguments_stay(made, new_trainer, new_model, tmp_path, caplog):
    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, per_device_train_batch_size=4)
    args._n_gpu = 2
    trainer = ChunkTrainer(new_model(), args=args, plan=made / "plan")
    (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("chunkplan")]
    assert message == (
        f"set by the plan {made / 'plan'}: num_train_epochs=2 (not 3), per_device_train_batch_size=3 (not 4), "
        "one GPU (not 2)"
    )
    assert (trainer.args.num_train_epochs, trainer.args.train_batch_size, trainer.args.n_gpu) == (2, 3, 1)
    assert (args.num_train_epochs, args.per_device_train_batch_size, args.n_gpu) == (3, 4, 2)
    caplog.clear()
    new_trainer(num_train_epochs=2)
    assert not caplog.records


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2", "--global-batch"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy='group_by_length'", "--seed"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1", "cross-entropy"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0", "noise"),
        ({"bf16_full_eval": True}, "bf16_full_eval=True", "leave it out"),
        ({"torch_compile": True}, "torch_compile=True", "leave it out"),
        ({"use_liger_kernel": True}, "use_liger_kernel=True", "leave it out"),
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
def test_an_argument_that_could_only_be_ignored_is_refused(name, made, new_model):
    with pytest.raises(UsageError, match=f"ChunkTrainer takes no {name}"):
        ChunkTrainer(new_model(), plan=made / "plan", **{name: pad})
    with pytest.raises(UsageError, match="no argument 'trainset'"):
        ChunkTrainer(new_model(), plan=made / "plan", trainset=[])


def test_other_precisions_and_processes_are_refused(new_trainer, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(UsageError, match="mixed precision 'fp16' needs loss scaling"):
        new_trainer()
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    with pytest.raises(UsageError, match="one process, found 2"):
        new_trainer()


def test_models_that_chunks_would_get_wrong_are_refused(made, tiny_config, new_trainer, new_model):
    config = AutoConfig.for_model(**tiny_config())
    for model, message in (
        (torch.nn.Linear(2, 2), "Linear: not a model of transformers"),
        (AutoModelForSequenceClassification.from_config(config), "no head that predicts tokens"),
        (new_model().model, "no head that predicts tokens"),
        (new_model(attention_dropout=0.1), "attention_dropout is 0.1"),
        (AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_layer=1, n_embd=8, n_head=2)), "'gpt2'"),
        (new_model(vocab_size=50), "the model's vocabulary has 50"),
        (new_model(max_position_embeddings=16), "the model takes 16 positions"),
        (get_peft_model(new_model(), IA3Config(task_type="CAUSAL_LM")), "IA3"),
        (with_adapters(new_model(), alora_invocation_tokens=[1]), "LORA, alora_invocation_tokens"),
    ):
        with pytest.raises(UsageError, match=message):
            new_trainer(model)
    spread = new_model()
    spread.hf_device_map = {"model": 0, "lm_head": "cpu"}
    with pytest.raises(UsageError, match="several devices"):
        new_trainer(spread)


def test_what_a_chunk_trainer_cannot_do_is_refused(made, new_trainer, new_model, tmp_path, random_sequences):
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
    build(made / "analysis", tmp_path / "all", PlanConfig(chunk_size=8, k=2, global_batch=3))
    with pytest.raises(UsageError, match="there is no evaluation plan"):
        new_trainer(plan=tmp_path / "all").evaluate()
    with pytest.raises(UsageError, match="there is no evaluation plan"):
        new_trainer(plan=tmp_path / "all", eval_strategy="epoch")


def test_the_plan_beside_has_to_hold_what_the_plan_holds_out(made, new_trainer, tmp_path):
    for folder, held_out in (("plan", 2), ("other", 3)):
        build(made / "analysis", tmp_path / folder, PlanConfig(chunk_size=8, k=2, global_batch=3, holdout=held_out))
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
    assert done.stdout.endswith("| pip install 'chunkplan[hf]'\n")
