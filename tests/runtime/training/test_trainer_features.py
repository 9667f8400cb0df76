"""What `Trainer` has around a step works around a step of `ChunkTrainer`: callbacks, checkpoints, evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, TrainerCallback, TrainingArguments

from chunkplan import PlanConfig, build
from chunkplan.errors import DataError, UsageError
from chunkplan.planfile.load import load_plan
from chunkplan_runtime import ChunkTrainer, open_plan
from tests.support.hf_cases import Sequences, plain, whole_gradients, with_adapters

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning"),
]


class Events(TrainerCallback):
    """Keeps the names of events in their order."""

    def __init__(self):
        self.names = []
        for name in dir(TrainerCallback):
            if name.startswith("on_"):
                setattr(self, name, lambda *args, _name=name, **kwargs: self.names.append(_name))


def test_callbacks_are_called_when_plain_trainer_calls_them(plans, new_trainer, tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 3}
    called = []
    _, analysis = open_plan(plans / "plan")
    evaluation = Sequences(load_plan(plans / "plan-eval"), analysis)
    for number, more in enumerate([{}, plain(plans, eval_dataset=evaluation, per_device_eval_batch_size=3)]):
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


@pytest.mark.parametrize("adapters", [pytest.param(False, marks=pytest.mark.soak), True], ids=["weights", "adapters"])
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


def test_a_finished_run_goes_on_with_a_plan_of_more_epochs(plans, new_trainer, tmp_path):
    """From its end, with the steps and losses of one that had them from the start."""
    settings = {"save_strategy": "epoch", "lr_scheduler_type": "constant"}
    whole = new_trainer(output_dir=str(tmp_path / "whole"), **settings)
    whole.train()
    config = PlanConfig(chunk_size=8, k=2, global_batch=3, epochs=1, holdout=2)
    build(plans / "analysis", tmp_path / "plan", config)
    new_trainer(plan=tmp_path / "plan", **settings).train()
    with pytest.raises(UsageError, match="num_train_epochs=2, the plan has 1"):
        new_trainer(plan=tmp_path / "plan", num_train_epochs=2, **settings)
    longer = new_trainer(num_train_epochs=2, **settings)
    assert longer.train(resume_from_checkpoint=True).global_step == 6
    assert [entry["step"] for entry in learned(longer)] == [1, 2, 3, 4, 5, 6]
    assert [(entry["step"], entry["loss"]) for entry in learned(longer)[3:]] == [
        (entry["step"], entry["loss"]) for entry in learned(whole)[3:]
    ]
    weights = whole.model.state_dict()
    assert all((weights[name] == weight).all() for name, weight in longer.model.state_dict().items())


@pytest.mark.parametrize(
    "how",
    [
        {},  # linear
        {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.5},
        pytest.param({"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-3}}),
        pytest.param({"lr_scheduler_type": "polynomial"}, marks=pytest.mark.soak),
        pytest.param({"max_steps": 3}, marks=pytest.mark.soak),
    ],
    ids=["default", "warm-up by share", "cosine", "polynomial", "max_steps"],
)
def test_a_run_that_learns_by_its_number_of_steps_does_not_go_on_with_more(how, plans, new_trainer, tmp_path):
    """Unless it ends where it was to end."""
    how = {"save_strategy": "steps", "save_steps": 2, **how}
    plan = tmp_path / "plan"
    if "max_steps" in how:
        plan = plans / "plan"
    else:
        build(plans / "analysis", plan, PlanConfig(chunk_size=8, k=2, global_batch=3, epochs=1, holdout=2))
    new_trainer(plan=plan, **how).train()
    with pytest.raises(UsageError, match="of 3 steps, this one has 6: learning rates") as refused:
        new_trainer(**{**how, "max_steps": -1}).train(resume_from_checkpoint=True)
    assert "max_steps=3" in refused.value.hint and 'lr_scheduler_type="constant"' in refused.value.hint
    assert new_trainer(**{**how, "max_steps": 3}).train(resume_from_checkpoint=True).global_step == 3


@pytest.mark.parametrize(
    "how",
    [
        {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2},
        pytest.param({"lr_scheduler_type": "inverse_sqrt"}, marks=pytest.mark.soak),
        pytest.param({"warmup_steps": 4}, id="still warming up"),
    ],
)
def test_a_run_goes_on_with_more_steps_where_those_that_are_done_learned_alike(how, new_trainer, tmp_path):
    def trained(folder, max_steps, **more):
        how_saved = {"save_strategy": "steps", "save_steps": 3, "output_dir": str(tmp_path / folder)}
        trainer = new_trainer(max_steps=max_steps, **how_saved, **how)
        trainer.train(**more)
        return [(entry["loss"], entry["learning_rate"]) for entry in learned(trainer)]

    trained("run", 3)
    assert trained("run", 6, resume_from_checkpoint=True) == trained("whole", 6)


def test_a_scheduler_of_ones_own_goes_on_with_more_steps(new_model, plans, tmp_path):
    for max_steps, resume in ((1, None), (2, True)):
        model = new_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        args = TrainingArguments(
            str(tmp_path), report_to=[], use_cpu=True, max_steps=max_steps, save_strategy="steps", save_steps=1
        )
        trainer = ChunkTrainer(model, args=args, plan=plans / "plan", optimizers=(optimizer, schedule))
        assert trainer.train(resume_from_checkpoint=resume).global_step == max_steps


def test_done_steps_are_not_read_again(new_trainer):
    trainer = new_trainer()
    trainer.state.global_step = 5
    batches = list(trainer.get_train_dataloader())
    assert batches[:2] == [{}, {}], "the second epoch's first two of three steps"
    assert [batch["work"].step.step for batch in batches[2:]] == [5]


def test_evaluation_is_the_mean_over_all_target_tokens(plans, new_trainer, new_model):
    plan, analysis = open_plan(plans / "plan-eval")
    model = new_model()
    _, expected = whole_gradients(model, [(i.numpy(), t.numpy()) for i, t in Sequences(plan, analysis)])
    metrics = new_trainer(model).evaluate()
    assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert metrics["eval_samples_per_second"] > 0
    metrics = new_trainer(model, eval_plan=plans / "plan").evaluate(metric_key_prefix="again")
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


@pytest.mark.parametrize("implementation", [pytest.param("sdpa", marks=pytest.mark.soak), "eager"])
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


def test_tokens_and_sequences_are_counted(plans, new_trainer):
    totals = load_plan(plans / "plan").manifest["totals"]
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


def test_what_the_plan_decides_is_reported_and_the_callers_arguments_stay(
    plans, new_trainer, new_model, tmp_path, caplog
):
    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, per_device_train_batch_size=4)
    args._n_gpu = 2
    trainer = ChunkTrainer(new_model(), args=args, plan=plans / "plan")
    (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("chunkplan")]
    assert message == (
        f"set by the plan {plans / 'plan'}: num_train_epochs=2 (not 3), per_device_train_batch_size=3 (not 4), "
        "one GPU (not 2)"
    )
    assert (trainer.args.num_train_epochs, trainer.args.train_batch_size, trainer.args.n_gpu) == (2, 3, 1)
    assert (args.num_train_epochs, args.per_device_train_batch_size, args.n_gpu) == (3, 4, 2)
    caplog.clear()
    new_trainer(num_train_epochs=2)
    assert not caplog.records


def test_an_optimizer_and_a_schedule_of_the_callers_own_are_used(plans, new_model, tmp_path):
    args = TrainingArguments(
        str(tmp_path), report_to=[], use_cpu=True, max_steps=1, logging_steps=1, save_strategy="no"
    )
    models = [new_model(), new_model()]
    own = torch.optim.SGD(models[0].parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ConstantLR(own, factor=1.0)
    trainers = [
        ChunkTrainer(models[0], args=args, plan=plans / "plan", optimizers=(own, schedule)),
        ChunkTrainer(
            models[1], args=args, plan=plans / "plan", optimizer_cls_and_kwargs=(torch.optim.Adagrad, {"lr": 0.1})
        ),
    ]
    for trainer in trainers:
        trainer.train()
    assert trainers[0].lr_scheduler is schedule
    assert trainers[0].state.log_history[0]["learning_rate"] == 0.5
    assert isinstance(getattr(trainers[1].optimizer, "optimizer", trainers[1].optimizer), torch.optim.Adagrad)


def test_fused_kernels_train_the_same_model_to_rounding(new_trainer, new_model):
    """In float32, in which torch has a kernel of its own; another name is refused."""
    losses = []
    for kernels in ("none", "torch"):
        model = new_model(dtype=torch.float32)
        trainer = new_trainer(model, fused_kernels=kernels, max_steps=3)
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
        assert ("forward" in vars(model.model.norm)) == (kernels == "torch")
    assert len(losses[0]) == 3 and losses[1] == pytest.approx(losses[0], rel=1e-5)
    with pytest.raises(UsageError, match=r"^fused_kernels is 'triton'"):
        new_trainer(fused_kernels="triton")
