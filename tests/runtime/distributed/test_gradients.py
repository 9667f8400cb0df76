"""On any layout of processes, loss, gradients and their norm are those of whole sequences on one process."""

from __future__ import annotations

import numpy as np
import pytest

from chunkplan import build_like
from chunkplan.operations import OPS
from chunkplan.planfile.chunks import chunks_of_rows
from chunkplan.planfile.load import load_plan
from chunkplan.schedule.actions import Actions
from chunkplan.schedule.holdings import peak_retained, peak_snapshots
from chunkplan_runtime.parity import TOLERANCE
from tests.runtime.execution.test_split_backward import RECURRENT as WITH_STATES
from tests.runtime.test_parity import MODELS
from tests.support.distributed_cases import compare_master_weights, compare_steps, four_layers, gradients_with_dropout
from tests.support.memory_cases import observe_memory
from tests.support.router_cases import compare_router_loss, gradients_with_noise
from tests.support.small_plans import by_tokens
from tests.support.wait_cases import compare_waiting, compare_without_reserve, used_groups


def check(pool, world_size, made, *, run=compare_steps, **how):
    """Returns how many chunks each process's ranks have in the first step."""
    found = pool.run(world_size, run, **made, **how)
    for steps in found:
        for compared in steps:
            assert compared.error <= TOLERANCE
            assert compared.loss == pytest.approx(compared.reference_loss, rel=1e-12)
            assert compared.evaluated_loss in (None, pytest.approx(compared.reference_loss, rel=1e-12))
            assert compared.norm == pytest.approx(compared.reference_norm, rel=1e-12)
    return [steps[0].chunks for steps in found]


#: Mamba-2 and attention, in turn.
RECURRENT = WITH_STATES["nemotron_h"]


def exact(model, plan, soak=False, **how):
    """A case: the entries of a model or its name, settings of the plan, options of `compare_steps`."""
    settings = [f"{name}={value}" for name, value in {**plan, **how}.items()]
    name = model if isinstance(model, str) else model["model_type"]
    given = MODELS[model] if isinstance(model, str) else model
    return pytest.param(given, plan, how, id=", ".join([name, *settings]), marks=[pytest.mark.soak] * soak)


TIED, FOUR = "llama with biases, tied", {"dp": 2, "pp": 2}
QWEN3 = four_layers(MODELS["qwen3"])
OF_FOUR, ALL = {"global_batch": 4, "pp": 2}, {"lora": True, "kv_offload": True, "checkpointing": True}
MANY = {"lengths": [40, 2, 22], "chunk_size": 3, "pp": 4}
ON_HOST = {"checkpointing": "offload", "steps": (0, 1, 0)}

EXACT = [
    *(exact("qwen2", {"dp": dp, "pp": pp}, evaluates=True) for dp, pp in ((2, 1), (2, 2), (1, 4))),
    *(exact("qwen2", {"dp": 1, "pp": pp}, soak=True, evaluates=True) for pp in (1, 2)),
    # Layers that keep a state run once a segment, of which processes have different numbers.
    exact(RECURRENT, {"dp": 2, "pp": 1, "tail_sharing": True}, soak=True, evaluates=True),
    exact(RECURRENT, {**FOUR, "tail_sharing": True}, evaluates=True),
    exact(RECURRENT, {**FOUR, "k": 1, "schedule": "zero-bubble", "tail_sharing": True}),
    exact(RECURRENT, {"pp": 4, "k": 1, "schedule": "zero-bubble", "tail_sharing": True}, soak=True),
    exact(TIED, {**FOUR, "tail_sharing": True}),
    exact("deepseek_v3, latents", {**FOUR, "tail_sharing": True}),
    exact("gemma2, softcaps and sliding window", {**FOUR, "tail_sharing": True}, soak=True),
    exact("qwen3_moe", {**FOUR, "tail_sharing": True}, soak=True),
    # Adapters, and what saves memory.
    exact("gemma3_text", {**FOUR, "k": 1, "schedule": "search"}, soak=True, lora=True),
    exact("gemma3_text", {**FOUR, "k": 1, "schedule": "1f1b"}, soak=True, kv_offload=True),
    exact("gemma3_text", {**FOUR, "k": 1, "schedule": "search"}, soak=True, checkpointing=True),
    exact("gemma3_text", {**FOUR, "k": 1, "schedule": "1f1b"}, **ALL),
    # Attention that chunks keep, and inputs of layers, on the host too: while links are open no memory may be taken.
    exact(QWEN3, {**OF_FOUR, "k": 1, "schedule": "zero-bubble"}, keep_attention=True, checkpointing=True),
    exact(QWEN3, {**OF_FOUR, "k": 1, "schedule": "1f1b"}, soak=True, keep_attention=True, kv_offload=True),
    exact(
        QWEN3,
        {**OF_FOUR, "k": 1, "schedule": "1f1b", "dp": 2},
        soak=True,
        keep_attention=True,
        checkpointing="offload",
        lora=True,
    ),
    exact(
        QWEN3, {**OF_FOUR, "k": 1, "schedule": "search", "dp": 2}, soak=True, keep_attention=True, checkpointing="full"
    ),
    exact(QWEN3, {**OF_FOUR, "k": 3, "schedule": "1f1b"}, **ON_HOST, kv_offload=True, evaluates=True),
    exact(QWEN3, {**OF_FOUR, "k": 2, "schedule": "zero-bubble"}, **ON_HOST, lora=True),
    exact(QWEN3, {**OF_FOUR, "k": 2, "schedule": "interleaved"}, soak=True, **ON_HOST),
    exact(QWEN3, {**OF_FOUR, "k": 2, "schedule": "zero-bubble-v", "dp": 2}, soak=True, **ON_HOST),
    # Stages of unequal size.
    exact("gemma2, softcaps and sliding window", {"pp": 2}, stage_layers=(3, 1)),
    exact("gemma2, softcaps and sliding window", {"pp": 3}, stage_layers=(1, 2, 1)),
    # A sequence of many chunks.
    exact("qwen2", {**MANY, "k": 1, "schedule": "1f1b"}),
    exact("qwen2", {**MANY, "k": 5, "schedule": "search"}),
    exact("qwen2", {**MANY, "k": 100, "schedule": "1f1b"}, soak=True),
]


@pytest.mark.parametrize(("model", "plan", "how"), EXACT)
def test_gradients_are_those_of_one_process(pool, plan_of, model, plan, how):
    check(pool, plan.get("dp", 1) * plan.get("pp", 1), plan_of(model, **plan), **how)


#: By what crosses a stage's border or is kept for later chunks: tied weights, windows, mixtures, sinks, latents.
FEW = (
    *("llama with biases, tied", "gemma2, softcaps and sliding window", "qwen3_moe", "gpt_oss, sinks"),
    "deepseek_v3, latents",
)


@pytest.mark.parametrize(
    "name", [*FEW, *(pytest.param(name, marks=pytest.mark.soak) for name in MODELS if name not in FEW)]
)
def test_every_model_is_exact_as_two_stages(pool, plan_of, name):
    """With host memory that is there before links are opened: the model's config says how much a token needs."""
    check(pool, 2, plan_of(MODELS[name], lengths=[20, 5, 3], pp=2, k=1), kv_offload=True)


@pytest.fixture(scope="module")
def growing(plan_of):
    """A plan of two stages whose steps have sequences of 300 and of 1,500 tokens: pages of several sizes."""
    model = {"model_type": "qwen2", "max_position_embeddings": 2048}
    return plan_of(model, lengths=[300, 1500], chunk_size=256, k=1, pp=2, global_batch=1)


def test_stages_with_kv_on_the_host_do_not_wait_for_each_other_where_memory_waits_for_the_device(pool, growing):
    check(pool, 2, growing, run=compare_waiting, kv_offload=True, steps=(0, 1, 0), evaluates=True)


def test_taking_host_memory_while_links_are_open_is_noticed(pool, growing):
    with pytest.raises(AssertionError, match="taking host memory while links are open"):
        pool.run(2, compare_without_reserve, **growing, kv_offload=True)


def test_every_group_is_used_before_the_first_step(pool, plan_of):
    """Of all processes, of replicas of a stage, of two directions of a link, of both ends of a pipeline."""
    plan = plan_of(MODELS["llama with biases, tied"], dp=2, pp=2)
    for before, during in pool.run(4, used_groups, **plan):
        assert len({group for group, _ in during}) == 5
        assert during <= before


@pytest.mark.parametrize("pp", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_plan_of_more_ranks_than_processes_is_exact(pool, plan_of, pp):
    plan = plan_of(dp=8 // pp, pp=pp, schedule="search" if pp > 1 else "algorithm2")
    for world_size in (4, 2, 1)[: 3 - pp + 1]:
        chunks = check(pool, world_size, plan)
        assert {len(ranks) for ranks in chunks} == {8 // world_size}


@pytest.mark.parametrize(
    "name, dp, k, how",
    [
        ("llama with biases, tied", 2, 1, []),
        pytest.param("qwen3_moe", 1, 2, [], marks=pytest.mark.soak),
        ("gemma3_text", 1, 1, ["lora", "kv_offload", "checkpointing"]),
        pytest.param("qwen3_moe", 2, 1, ["checkpointing"], marks=pytest.mark.soak),
        pytest.param("deepseek_v3, latents", 2, 2, ["kv_offload"], marks=pytest.mark.soak),
        pytest.param("llama with biases, tied", 2, 2, ["lora"], marks=pytest.mark.soak),
    ],
)
def test_split_backwards_are_exact(pool, plan_of, name, dp, k, how):
    """Also in the steps after one that has left nothing of its halves."""
    plan = plan_of(MODELS[name], dp=dp, pp=2, k=k, schedule="zero-bubble", global_batch=4)
    assert any(action.op == "backward_weight" for action in next(load_plan(plan["plan"]).iter_steps()).actions[0, 0])
    check(pool, 2 * dp, plan, steps=(0, 1), **dict.fromkeys(how, True))


@pytest.mark.parametrize("dp, pp", [(4, 1), (2, 2)])
def test_ranks_of_unequal_work_or_none_are_exact(pool, plan_of, dp, pp):
    model = MODELS["llama with biases, tied"]
    chunks = check(pool, 4, plan_of(model, lengths=[41, 3], dp=dp, pp=pp, k=1))
    assert sorted(chunks[:dp]) == [[1]] * (dp - 1) + [[6]]
    check(pool, 4, plan_of(model, lengths=[41], dp=dp, pp=pp, k=1))


@pytest.mark.parametrize(
    "dp, pp, name",
    [
        pytest.param(1, 2, "llama with biases, tied", marks=pytest.mark.soak),
        pytest.param(2, 1, "qwen3", marks=pytest.mark.soak),
        (2, 2, "llama with biases, tied"),
    ],
)
def test_steps_after_each_other_are_exact_also_short_ones_and_some_without_targets(pool, plan_of, dp, pp, name):
    plan = plan_of(MODELS[name], lengths=[17, 5, 20, 4, 9], no_targets=[1, 2], dp=dp, pp=pp, global_batch=2)
    check(pool, dp * pp, plan, steps=(0, 1, 2, 2, 0), evaluates=True)
    nothing = plan_of(MODELS[name], lengths=[17, 5], no_targets=[0, 1], dp=dp, pp=pp)
    check(pool, dp * pp, nothing, steps=(0, 0), evaluates=True)


@pytest.mark.parametrize(
    "dp, schedule",
    [
        (2, "1f1b"),
        *(
            pytest.param(*each, marks=pytest.mark.soak)
            for each in ((2, "zero-bubble"), (1, "1f1b"), (1, "zero-bubble"))
        ),
    ],
)
def test_gradients_of_bfloat16_are_summed_in_float32(pool, plan_of, dp, schedule):
    """Chunks give the same bits as on one process, and their sum differs by its order alone."""
    model = MODELS["llama with biases, tied"]
    found = pool.run(2 * dp, compare_master_weights, **plan_of(model, chunk_size=3, dp=dp, pp=2, schedule=schedule))
    assert max(error for error, _ in found) < 1e-6


@pytest.mark.parametrize("targets, trained", [(("3.self_attn.q_proj",), [0, 2]), (("0.self_attn.q_proj",), [2, 0])])
def test_a_stage_that_trains_nothing_passes_gradients_on(pool, plan_of, targets, trained):
    found = pool.run(4, compare_master_weights, **plan_of(dp=2, pp=2), targets=targets)
    assert [count for _, count in found] == [trained[0], trained[0], trained[1], trained[1]]
    assert max(error for error, _ in found) < 1e-6


def test_dropout_is_the_same_whatever_k_and_however_many_stages(pool, plan_of):
    found = {}
    for pp in (1, 4):
        for k in (1, 100):
            # One order for all K, so that sums are the same to the last bit.
            order = {"schedule": "1f1b"} if pp > 1 else {}
            plan = plan_of(lengths=[30, 9, 3, 1], pp=pp, k=k, tail_sharing=False, **order)
            # What runs forward twice, because of K or of checkpointing, and what runs once.
            stages = pool.run(pp, gradients_with_dropout, **plan, checkpointing=k == 1)
            found[pp, k] = {name: gradient for stage in stages for name, gradient in stage.items()}
        assert all(np.array_equal(found[pp, 1][name], found[pp, 100][name]) for name in found[pp, 1])
        assert found[pp, 1].keys() == found[1, 1].keys()
        for name, gradient in found[1, 1].items():
            assert np.linalg.norm(found[pp, 1][name] - gradient) <= 1e-12 * np.linalg.norm(gradient)


def routed(model_type="mixtral", **changes):
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5}
    return {"model_type": model_type, "output_router_logits": True, **experts, **changes}


@pytest.mark.parametrize(
    "scope, dp, pp, how",
    [
        pytest.param("batch", 2, 1, ["checkpointing"], marks=pytest.mark.soak),
        ("batch", 2, 1, ["weights"]),
        pytest.param("sequence", 2, 1, [], marks=pytest.mark.soak),
        pytest.param("sequence", 1, 2, ["checkpointing"], marks=pytest.mark.soak),
        *(pytest.param(scope, 2, 2, [], marks=pytest.mark.soak) for scope in ("batch", "sequence")),
        pytest.param("sequence", 2, 1, ["weights"], marks=pytest.mark.soak),
        pytest.param("batch", 1, 2, [], marks=pytest.mark.soak),
    ],
)
def test_the_load_balancing_loss_is_that_of_whole_sequences_in_every_layout(pool, plan_of, scope, dp, pp, how):
    """Over the batch, tokens of all processes and layers of all stages are counted before the first backward."""
    plan = plan_of(routed(), dp=dp, pp=pp, tail_sharing=True)
    options = {name: True for name in how if name != "weights"} | ({"sharding": "weights"} if "weights" in how else {})
    for error, added, expected in pool.run(dp * pp, compare_router_loss, **plan, scope=scope, **options):
        assert error <= TOLERANCE
        assert added == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "world_size, scope",
    [(2, "batch"), *(pytest.param(1, scope, marks=pytest.mark.soak) for scope in ("batch", "sequence"))],
)
def test_the_load_balancing_loss_is_exact_where_ranks_share_sequences(pool, plan_of, tmp_path, world_size, scope):
    """Or did, of one process with a plan like that."""
    plan = plan_of(routed(), lengths=[300, 5, 9, 3], dp=2, cp="auto", chunk_size=64)
    assert any(chunk.cp_size > 1 for chunk in next(load_plan(plan["plan"]).iter_steps()).chunks[0])
    if world_size == 1:
        plan["plan"] = build_like(plan["plan"], tmp_path / "like", dp=1).path
    for error, added, expected in pool.run(world_size, compare_router_loss, **plan, scope=scope):
        assert error <= TOLERANCE
        assert added == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "model", [routed(router_jitter_noise=0.3), routed("phimoe", router_jitter_noise=0.9, input_jitter_noise=0.2)]
)
def test_noise_of_routers_is_the_same_whatever_k_and_however_many_stages(pool, plan_of, model):
    found = []
    for pp, k in ((1, 100), (2, 1)):
        plan = plan_of(model, lengths=[30, 9, 3, 1], pp=pp, k=k, tail_sharing=False)
        stages = pool.run(pp, gradients_with_noise, **plan, scope="batch")
        found.append({name: gradient for stage in stages for name, gradient in stage.items()})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        assert np.linalg.norm(found[1][name] - gradient) <= 1e-12 * np.linalg.norm(gradient)


@pytest.mark.parametrize(
    "schedule, k",
    [
        ("1f1b", 1),
        ("search", 3),
        ("zero-bubble", 3),
        *(
            pytest.param(*each, marks=pytest.mark.soak)
            for each in (("1f1b", 3), ("search", 1), ("zero-bubble", 1), ("auto", 1), ("auto", 3))
        ),
    ],
)
def test_stages_hold_what_the_plan_predicts_and_nothing_of_a_chunk_that_is_done(pool, plan_of, schedule, k):
    plan = plan_of(lengths=[23, 5, 9, 3, 30, 1, 8, 41, 2, 12, 7, 4], k=k, pp=4, schedule=schedule)
    found = pool.run(4, observe_memory, **plan)
    assert [stage.leaks for stage in found] == [[]] * 4
    step = next(load_plan(plan["plan"]).iter_steps())
    retained, inputs, kv, _ = predicted_tokens(step, 4)
    assert [stage.retained for stage in found] == retained
    assert max(stage.retained for stage in found) == step.peak_retained_tokens
    assert [stage.inputs for stage in found] == inputs
    assert [stage.kv for stage in found] == kv


def predicted_tokens(step, pp):
    """By kind (activations, saved inputs, KV, pending) and stage, the most tokens that the planner says are held."""
    stages = [step.actions[0, stage] for stage in range(pp)]
    flat = [action for stage in stages for action in stage]
    actions = Actions(
        np.array([OPS.index(action.op) for action in flat], np.int8),
        np.array([action.chunk_id for action in flat], np.int32),
        np.array([action.virtual_stage for action in flat], np.int32),
        np.cumsum([0, *map(len, stages)]),
    )
    chunks = chunks_of_rows(step.chunks[0])
    by_kind = [
        peak_snapshots(chunks, actions, by_tokens(np.tile(np.eye(8)[kind], (pp, 1))))[0, :, kind].tolist()
        for kind in range(4)
    ]
    assert by_kind[0] == peak_retained(chunks, actions).tolist()
    return by_kind
