"""`Executor.from_model`: steps of a plan in a loop of one's own learn what a plain loop over sequences learns."""

from __future__ import annotations

import copy
import shutil
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from peft import IA3Config, get_peft_model
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from chunkplan.errors import DataError, UsageError
from chunkplan_runtime import Executor, PlanStream, open_plan
from chunkplan_runtime.models.parts import evaluate_in_float64
from tests.support.hf_cases import assert_same_gradients, whole_gradients, with_adapters
from tests.support.mixed_chunks import LENGTHS, MIXED


@pytest.fixture
def new_model(tiny_config):
    def make(model_type="llama", dtype=torch.float64, **changes):
        torch.manual_seed(1)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_config(model_type, **changes)), dtype=dtype)

    return make


@pytest.fixture
def new_plan(handmade_plan, random_sequences):
    """`make(steps, ...)` -> the folder of a plan of some sequences, and these."""

    def make(steps=({0: MIXED},), **how):
        sequences = random_sequences(LENGTHS)
        return handmade_plan(sequences, list(steps), **{"k": 2, **how})[0], sequences

    return make


def gradients_of(model):
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize(
    ("model_type", "k", "how"),
    [
        ("llama", 1, {"checkpointing": "keep-attention"}),
        ("qwen3", 2, {"kv_offload": True}),
        *(
            pytest.param(model_type, k, {"checkpointing": level}, marks=pytest.mark.soak)
            for model_type in ("llama", "qwen2", "mistral", "gemma2", "olmo2")
            for k in (1, 5)
            for level in ("none", "full", "offload")
        ),
    ],
)
def test_a_step_has_the_gradients_and_the_loss_of_an_untouched_model(model_type, k, how, new_model, new_plan):
    plan, sequences = new_plan([{0: MIXED[:3], 1: [[]], 2: MIXED[3:]}], k=k, dp=3)
    sizes = {"sliding_window": 7} if model_type == "gemma2" else {}
    model, untouched = new_model(model_type, **sizes), new_model(model_type, **sizes)
    untouched.set_attn_implementation("eager")
    executor = Executor.from_model(model, **how)
    with evaluate_in_float64(untouched):
        reference, loss = whole_gradients(untouched, sequences)
    for _ in range(2):
        with evaluate_in_float64(model):
            [found] = [executor.step(work) for work in executor.stream(plan)]
        assert found == pytest.approx(loss, rel=1e-12)
        assert_same_gradients(gradients_of(model), reference)


def test_adapters_of_peft_have_those_of_an_untouched_model(new_model, new_plan):
    plan, sequences = new_plan()
    model = with_adapters(new_model())
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)  # zero as they start, they would hide the gradients of the others
    untouched = copy.deepcopy(model)
    executor = Executor.from_model(model, checkpointing="full")
    with evaluate_in_float64(untouched):
        reference, _ = whole_gradients(untouched, sequences)
    with evaluate_in_float64(model):
        [executor.step(work) for work in executor.stream(plan)]
    assert_same_gradients(gradients_of(model), reference)


def test_a_torch_optimizer_learns_the_weights_that_a_plain_loop_learns(new_model, new_plan):
    steps = [{0: MIXED[:4]}, {0: MIXED[4:]}]
    plan, sequences = new_plan(steps)
    model, untouched = new_model("qwen3"), new_model("qwen3")
    before = copy.deepcopy(untouched.state_dict())
    executor = Executor.from_model(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-4) for each in (model, untouched)]
    with ExitStack() as both:
        for each in (model, untouched):
            both.enter_context(evaluate_in_float64(each))
        for work, own in zip(executor.stream(plan), ((0, 1, 3, 5, 2, 6), (4,)), strict=True):
            executor.step(work)
            reference, _ = whole_gradients(untouched, [sequences[each] for each in own])
            for name, weight in untouched.named_parameters():
                weight.grad = reference[name]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for name, weight in untouched.state_dict().items():
        moved = (weight - before[name]).norm()
        assert moved > 1e-3, "it has learned"
        assert (model.state_dict()[name] - weight).norm() <= 1e-10 * moved, name


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_model_stays_an_ordinary_one(implementation, new_model, new_plan, tmp_path):
    """It generates, gives logits, and is copied and saved as before, also after a step that failed in its middle."""
    plan, _ = new_plan()
    broken, _ = new_plan([{0: [[(1, 0, 5)]]}], actions=[("forward", 0)])
    model = new_model(dtype=torch.float32).eval()
    model.set_attn_implementation(implementation)
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])

    def outputs(of):
        return of(tokens).logits, of.generate(tokens[:1], max_new_tokens=4, do_sample=False)

    before = outputs(model)
    executor = Executor.from_model(model, checkpointing="full", kv_offload=True)
    for _ in range(2):
        assert model.config._attn_implementation == implementation
        assert not model.training
        model.save_pretrained(tmp_path / "saved")
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", attn_implementation=implementation)
        for each in (model, copy.deepcopy(model), saved):
            assert all(torch.equal(*pair) for pair in zip(outputs(each), before, strict=True))
        assert "chunkplan" not in (tmp_path / "saved" / "config.json").read_text()
        [executor.step(work) for work in executor.stream(plan)]
        with pytest.raises(DataError, match="no backward of chunk 0"):
            [executor.step(work) for work in executor.stream(broken)]


def test_several_executors_of_a_model_do_as_the_last_one_was_made_to(new_model, new_plan):
    plan, _ = new_plan()
    model, found = new_model(), []
    executors = [Executor.from_model(model, checkpointing=level) for level in ("full", "keep-products", "none")]
    layer = model.model.layers[0]
    assert layer.forward.func.__name__ == "_seeded"  # no checkpoint is left
    assert layer.forward.args[2].__func__ is type(layer).forward  # and it is seeded once
    for executor in executors:
        [executor.step(work) for work in executor.stream(plan)]
        found.append(gradients_of(model))
    assert all(torch.equal(found[0][name], each[name]) for each in found[1:] for name in found[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_computes_in_the_models_dtype_and_in_the_autocast_around_a_step(dtype, new_model, new_plan):
    """With K = 1 chunks run forward without gradients first: autocast must not remember that."""
    plan, sequences = new_plan(k=1)
    model, exact = new_model("qwen3", dtype), new_model("qwen3", torch.float32)
    executor = Executor.from_model(model)
    reference, loss = whole_gradients(exact, sequences)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.float32):
        [found] = [executor.step(work) for work in executor.stream(plan)]
        [evaluated] = [executor.evaluate(work) for work in executor.stream(plan)]
        assert torch.is_autocast_enabled("cpu") == (dtype == torch.float32)
    assert found == pytest.approx(loss, rel=0.01)
    assert evaluated == pytest.approx(found, rel=1e-6)
    gradients = gradients_of(model)
    assert {gradient.dtype for gradient in gradients.values()} == {dtype}
    errors = [float((gradients[name].float() - reference[name]).norm() / reference[name].norm()) for name in reference]
    assert 1e-4 < max(errors) < 0.1


def test_a_step_without_targets_adds_no_gradients(new_model, handmade_plan, random_sequences):
    [(ids, _)] = random_sequences([12])
    plan, _ = handmade_plan([(ids, np.zeros(12, bool))], [{0: [[(0, 0, 8)], [(0, 8, 12)]]}])
    model = new_model()
    executor = Executor.from_model(model)
    assert [executor.step(work) for work in executor.stream(plan)] == [0.0]
    assert gradients_of(model) == {}
    assert [executor.evaluate(work) for work in executor.stream(plan)] == [0.0]


def without_rows(model):
    model.config.vocab_size += 1
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda make: torch.nn.Linear(2, 2), "Linear: not a model of transformers"),
        (lambda make: torch.compile(make()), "OptimizedModule: not a model of transformers"),
        (lambda make: make().half(), "weights in torch.float16 need loss scaling"),
        (lambda make: make().to("meta"), "the weights are on meta, expected one device"),
        (lambda make: make().model, "no head that predicts tokens"),
        (lambda make: AutoModel.from_config(make().config), "no head that predicts tokens"),
        (lambda make: make(attention_dropout=0.1), "attention_dropout is 0.1"),
        (lambda make: get_peft_model(make(), IA3Config(task_type="CAUSAL_LM")), "IA3"),
        (lambda make: without_rows(make()), "the config's vocabulary has 98, the model 97"),
    ],
)
def test_a_model_that_chunks_would_get_wrong_is_refused(change, message, new_model):
    with pytest.raises(UsageError, match=message) as refused:
        Executor.from_model(change(new_model))
    assert refused.value.hint


def test_a_level_a_router_loss_and_an_autocast_that_are_not_there_are_refused(new_model, new_plan):
    model = new_model(dtype=torch.float32)
    for options, message in (
        ({"checkpointing": "some"}, "^checkpointing is 'some'"),
        ({"checkpointing": None}, "^checkpointing is None"),
        ({"checkpointing": "full:1"}, "^checkpointing is full:1, of 1 layers: the model has 2"),
        ({"router_loss": "step"}, "router_loss is 'step'"),
        ({"router_loss": "batch"}, "no load-balancing loss for model type 'llama'"),
        ({"seed": None}, "seed is None, expected a whole number from 0"),
        ({"seed": -1}, "seed is -1"),
        ({"kv_offload": "no"}, "kv_offload is 'no', expected true or false"),
    ):
        with pytest.raises(UsageError, match=message) as refused:
            Executor.from_model(model, **options)
        assert refused.value.hint.startswith("use one of") or f"{next(iter(options))}=" in refused.value.hint
    executor, (plan, _) = Executor.from_model(model), new_plan()
    work = next(iter(executor.stream(plan)))
    for run in (executor.step, executor.evaluate):
        with torch.autocast("cpu", dtype=torch.float16), pytest.raises(UsageError, match="needs loss scaling"):
            run(work)
    assert gradients_of(model) == {}
    assert executor.step(work) > 0


def test_a_step_that_would_leave_no_gradients_or_none_to_trust_is_refused(new_model, new_plan):
    plan, _ = new_plan()
    model = new_model(dtype=torch.float32)
    executor = Executor.from_model(model)
    [work] = list(executor.stream(plan))

    def assert_refused(message, run=executor.step, given=work):
        with pytest.raises(UsageError, match=message) as refused:
            run(given)
        assert refused.value.hint
        assert gradients_of(model) == {}

    for off in (torch.no_grad, torch.inference_mode):
        with off():
            assert_refused("gradients are switched off around it")
            assert executor.evaluate(work) > 0
    for given in (None, work.step, [work], {"input_ids": torch.ones(1, 3)}):
        for run in (executor.step, executor.evaluate):
            assert_refused(f"expected a step of a plan, not {type(given).__name__}", run, given)
    model.requires_grad_(False)
    assert_refused("all weights are frozen")
    assert executor.evaluate(work) > 0
    model.lm_head.requires_grad_()
    assert executor.step(work) > 0
    assert [*gradients_of(model)] == ["lm_head.weight"]
    model.half()
    assert_refused("weights in torch.float16 need loss scaling")


@pytest.mark.parametrize("part", ["model.layers.1", "model.norm", "lm_head"])
def test_weights_of_several_dtypes_go_together_in_an_autocast_or_are_refused(part, new_model, new_plan):
    plan, _ = new_plan()
    model = new_model(dtype=torch.bfloat16)
    model.get_submodule(part).float()
    executor = Executor.from_model(model)
    [work] = list(executor.stream(plan))
    for run in (executor.step, executor.evaluate):
        with pytest.raises(
            UsageError, match=r"weights in torch\.bfloat16 and torch\.float32 do not go together"
        ) as told:
            run(work)
        assert "torch.autocast" in told.value.hint
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert run(work) > 0


def test_a_plan_that_the_model_does_not_take_is_refused_by_name_with_what_to_do(new_model, new_plan, tmp_path):
    plan, _ = new_plan()
    moved = shutil.copytree(plan, tmp_path / "moved" / "plan")
    staged, _ = new_plan([{0: [[(1, 0, 5)]]}], pp=2, actions=[])
    for model, folder, message, hint in (
        (new_model(vocab_size=50), plan, "the model's vocabulary has 50", "analyze with the tokenizer"),
        (new_model(max_position_embeddings=16), plan, "the model takes 16 positions", "--max-length 16"),
        (new_model(), staged, "for 2 pipeline stages", "chunkplan build --like"),
        (new_model(), moved, "the analysis of the plan .* is not at", "say where it is with analysis="),
        (new_model(), tmp_path / "nothing", "nothing", ""),
    ):
        with pytest.raises(UsageError, match=message) as refused:
            Executor.from_model(model).stream(folder)
        assert hint in refused.value.hint


def test_a_step_of_a_stream_for_another_model_is_refused(new_model, new_plan):
    plan, _ = new_plan()
    looks_ahead = {"use_bidirectional_attention": True, "layer_types": ["full_attention"] * 2, "sliding_window": 8}
    work = next(iter(PlanStream(*open_plan(plan), vocab_size=10**6, max_positions=None)))
    for model, message in (
        (new_model(vocab_size=50), r"token id \d+ and position \d+, the model takes those below 50 and 256"),
        (new_model(max_position_embeddings=16), "position 2[29], the model takes those below 97 and 16"),
        (new_model("gemma3_text", **looks_ahead), "the plan splits sequences"),
    ):
        executor = Executor.from_model(model)
        for run in (executor.step, executor.evaluate):
            with pytest.raises(UsageError, match=message) as refused:
                run(work)
            assert refused.value.hint
        assert gradients_of(model) == {}
