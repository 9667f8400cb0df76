"""The load-balancing loss of routers has the gradients of a whole step or of whole sequences, and noise is replayed."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from chunkplan import PlanConfig, build, build_like
from chunkplan.errors import UsageError
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.feed.stream import PlanStream, open_plan
from chunkplan_runtime.models.checks import check_plan
from chunkplan_runtime.models.model import new_model
from chunkplan_runtime.models.parts import evaluate_in_float64
from chunkplan_runtime.models.router_loss import RouterLoss, router_loss_scope
from chunkplan_runtime.models.trained import add_lora
from chunkplan_runtime.proof.prove import (
    relative_errors,
    spread_weights,
    take_gradients,
    train_routers,
    train_whole,
    vanishing_gradients,
)
from tests.support.mixed_chunks import LENGTHS, MIXED
from tests.support.router_cases import OF_WHOLE_SEQUENCES
from tests.support.shared_plans import given_blocks

MODELS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
    },
    "qwen3_moe": {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "num_hidden_layers": 3},
    "gpt_oss": {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 7},
}

#: So much that a mistake is far above rounding in every weight.
WEIGHT = 0.5


@pytest.fixture
def model(tiny_config):
    def make(model_type="mixtral", **changes):
        document = tiny_config(model_type, **MODELS.get(model_type, {}), **changes)
        config = AutoConfig.for_model(**document, router_aux_loss_coef=WEIGHT, output_router_logits=True)
        made = new_model(config, torch.float64, seed=1)
        spread_weights(made.model)
        return made

    return make


@pytest.fixture
def step(handmade_plan, random_sequences):
    """`make(k)` -> a step with packed, split and mixed chunks, and its whole sequences."""

    def make(k):
        drawn = random_sequences(LENGTHS)
        plan, analysis = open_plan(*handmade_plan(drawn, [{0: MIXED}], k=k))
        work = next(iter(PlanStream(plan, analysis, vocab_size=97, max_positions=None, prefetch=0)))
        return work, [(torch.from_numpy(tokens), torch.from_numpy(target)) for tokens, target in drawn]

    return make


def run_chunks(model, work, scope, seed=0):
    executor = RankExecutor(model, seed=seed, router_loss=scope or "none")
    [rank] = work.ranks
    executor.router_loss.begin_step(work.step.num_tokens, partial(executor.evaluate, rank, what="counting"))
    loss = executor.run(rank, work.step.num_target_tokens).loss
    return loss + executor.router_loss.value, take_gradients(model)


def run_whole(model, sequences, of_routers):
    attention = model.config._attn_implementation
    model.model.set_attn_implementation("eager")
    num_targets = sum(int(target.sum()) for _, target in sequences)
    loss = sum(train_whole(model, tokens, target, num_targets) for tokens, target in sequences)
    loss += of_routers(model, [tokens for tokens, _ in sequences])
    model.model.set_attn_implementation(attention)
    return loss, take_gradients(model)


def assert_same(found, whole):
    errors = relative_errors(found[1], whole[1], vanishing_gradients(whole[1]))
    assert max(errors.values()) <= 1e-12, max(errors, key=errors.__getitem__)
    assert found[0] == pytest.approx(whole[0], rel=1e-12)


@pytest.mark.parametrize(
    ("k", "checkpointing"), [(2, True), *(pytest.param(k, False, marks=pytest.mark.soak) for k in (1, 5))]
)
@pytest.mark.parametrize("scope", ["batch", "sequence"])
@pytest.mark.parametrize("name", MODELS)
def test_the_load_balancing_loss_is_that_of_whole_sequences(name, scope, k, checkpointing, model, step):
    """Over the batch as transformers computes it itself, of all sequences in one padded batch."""
    work, sequences = step(k)
    run = model(name)
    with evaluate_in_float64(run.model):
        whole = run_whole(run, sequences, OF_WHOLE_SEQUENCES[scope])
        if checkpointing:
            run.set_checkpointing("full")
        assert_same(run_chunks(run, work, scope), whole)
        without = run_chunks(run, work, None)
    assert not torch.allclose(
        without[1]["model.layers.0.input_layernorm.weight"], whole[1]["model.layers.0.input_layernorm.weight"]
    )


@pytest.mark.parametrize("scope", OF_WHOLE_SEQUENCES)
def test_adapters_get_the_gradient_of_routers_that_are_frozen(scope, model, step):
    work, sequences = step(1)
    run = add_lora(model(), rank=2, alpha=4.0, dropout=0.0, targets=("q_proj", "v_proj"))
    spread_weights(run.model)
    with evaluate_in_float64(run.model):
        whole = run_whole(run, sequences, OF_WHOLE_SEQUENCES[scope])
        found = run_chunks(run, work, scope)
    assert all("lora" in name for name in found[1])
    assert_same(found, whole)


def test_padding_counts_nowhere(model, handmade_plan, random_sequences, step):
    """A rank with nothing but a token of padding changes neither what is counted nor over how many tokens."""
    _, sequences = step(2)
    plan, analysis = open_plan(*handmade_plan(random_sequences(LENGTHS), [{0: [*MIXED, []]}], k=2))
    work = next(iter(PlanStream(plan, analysis, vocab_size=97, max_positions=None, prefetch=0)))
    assert any(not chunk.segments for chunk in work.ranks[0].chunks.values())
    for scope, reference in OF_WHOLE_SEQUENCES.items():
        run = model()
        with evaluate_in_float64(run.model):
            assert_same(run_chunks(run, work, scope), run_whole(run, sequences, reference))


def test_an_evaluation_between_two_steps_changes_nothing(model, step):
    work, sequences = step(1)
    run = model()
    with evaluate_in_float64(run.model):
        whole = run_whole(run, sequences, train_routers)
        executor = RankExecutor(run, router_loss="batch")
        [rank] = work.ranks
        for _ in range(2):
            executor.evaluate(rank, work.step.num_target_tokens)
            executor.router_loss.begin_step(work.step.num_tokens, partial(executor.evaluate, rank, what="counting"))
            loss = executor.run(rank, work.step.num_target_tokens).loss + executor.router_loss.value
            assert_same((loss, take_gradients(run)), whole)


NOISY = {
    "mixtral": {"router_jitter_noise": 0.3},
    "phimoe": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.9,
        "input_jitter_noise": 0.2,
        "sliding_window": None,
    },
}


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("mixtral", None),
        ("phimoe", "batch"),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in (("mixtral", "batch"), ("phimoe", None))),
    ],
)
def test_a_chunk_that_runs_again_draws_the_noise_of_routers_that_it_drew(name, scope, model, step, monkeypatch):
    run = model(name, **NOISY[name])
    with evaluate_in_float64(run.model):
        kept = run_chunks(run, step(100)[0], scope, seed=3)
        assert_same(run_chunks(run, step(1)[0], scope, seed=3), kept)
        assert run_chunks(run, step(1)[0], scope, seed=4)[0] != pytest.approx(kept[0], rel=1e-6)
        run.set_checkpointing("full")
        assert_same(run_chunks(run, step(2)[0], scope, seed=3), kept)


def test_what_transformers_has_no_such_loss_for_is_refused_by_name(tiny_config):
    def scope(model_type, asked=None, **changes):
        return router_loss_scope(AutoConfig.for_model(model_type, **changes), asked, "config.json")

    assert scope("mixtral") == scope("llama") == scope("mixtral", "none", output_router_logits=True) == "none"
    assert scope("mixtral", output_router_logits=True) == scope("mixtral", "batch") == "batch"
    assert scope("mixtral", "sequence") == "sequence"
    for model_type in ("deepseek_v3", "llama"):
        with pytest.raises(UsageError, match=f"computes no load-balancing loss for model type '{model_type}'") as told:
            scope(model_type, "batch")
        assert "--router-loss none" in str(told.value.hint)
    with pytest.raises(UsageError, match="load-balancing loss of model type 'doge' is one of its own"):
        scope("doge", output_router_logits=True)
    with pytest.raises(UsageError, match="router_loss is 'step'"):
        scope("mixtral", "step")


def test_by_sequence_no_two_processes_may_share_one(model, tmp_path):
    with given_blocks({40: (0, 2, 1)}):
        np.save(tmp_path / "lengths.npy", [40, 3])
        plan = build(tmp_path / "lengths.npy", tmp_path / "plan", PlanConfig(chunk_size=8, k=1, dp=2, cp="auto"))
    with pytest.raises(UsageError, match="with --router-loss sequence processes cannot share sequences") as refused:
        check_plan(model().config, plan, "sequence")
    assert "`--cp off`" in str(refused.value.hint) and "`--router-loss batch`" in str(refused.value.hint)
    check_plan(model().config, build_like(plan.path, tmp_path / "one", dp=1), "sequence")
    check_plan(model().config, plan, "batch")


def test_a_loss_of_no_weight_is_refused(model):
    made = model()
    made.model.router_aux_loss_coef = 0.0
    with pytest.raises(UsageError, match=r"router_aux_loss_coef is 0\.0"):
        RouterLoss(made, "batch")
