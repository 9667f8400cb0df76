"""What sequences of a step begin with alike is run once, and gradients and losses are those of whole sequences."""

from __future__ import annotations

import random
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from chunkplan.errors import DataError, UsageError
from chunkplan.planfile.load import load_analysis
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.execution.losses import Distillation
from chunkplan_runtime.feed.stream import PlanStream, open_plan
from chunkplan_runtime.kv.host_memory import HostMemory
from chunkplan_runtime.models.checks import plan_stream
from chunkplan_runtime.models.compiled import CompiledLayers
from chunkplan_runtime.models.model import new_model
from chunkplan_runtime.models.parts import evaluate_in_float64
from chunkplan_runtime.models.tiny import tiny_document
from chunkplan_runtime.parity import compare_plan
from chunkplan_runtime.proof.prove import relative_errors, take_gradients
from chunkplan_runtime.training.executor import Executor
from tests.runtime.attention.test_latents import SHARING
from tests.runtime.test_parity import MODELS
from tests.support.alive import store_bytes
from tests.support.kept_attention import keeping_attention
from tests.support.tree_cases import random_tree_plan, tree_of

NAMES = (
    *("qwen2", "gpt_oss, sinks", "deepseek_v3, latents", "gemma2, softcaps and sliding window", "qwen3_moe"),
    *("gemma3n_text, layers that share keys and values", "llama4_text, tiles"),
)


@pytest.fixture
def model(tiny_config):
    def make(name, **changes):
        if name in MODELS:
            document = tiny_config(**MODELS[name], **changes)
        else:
            document = tiny_document(AutoConfig.for_model(name.partition(",")[0]).to_dict())
            document |= {"vocab_size": 97, "attn_temperature_tuning": False}
            if name.startswith("gemma3n"):
                document |= SHARING | {"intermediate_size": [48] * 5, "activation_sparsity_pattern": [0.0] * 5}
        return new_model(AutoConfig.for_model(**document), torch.float64, seed=3)

    return make


@pytest.fixture
def tree_plan(handmade_plan):
    return lambda seed, **how: random_tree_plan(random.Random(seed), handmade_plan, **how)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 6))])
@pytest.mark.parametrize("name", NAMES)
def test_trees_are_exact_however_they_are_cut(name, seed, model, tree_plan):
    """Of one to three levels, in chunks of any size, or whole in one beside other sequences, with any chunks kept."""
    made = model(name)
    for kv_offload in (False, True):
        report = compare_plan(*tree_plan(f"{name} {seed} {kv_offload}"), made, kv_offload=kv_offload)
        assert report.max_relative_error < 1e-12
        assert report.loss == pytest.approx(report.reference_loss, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("gpt_oss, sinks", {"keeps": True}),
        ("deepseek_v3, latents", {"checkpointing": "full", "keeps": True}),
        ("qwen2", {"checkpointing": "keep-attention"}),
        pytest.param("qwen2", {"compiles": True}, marks=pytest.mark.soak),
    ],
)
def test_trees_go_with_attention_that_is_kept_and_with_layers_that_run_again(name, how, model, tree_plan):
    made, other = model(name), model(name)
    stream = Executor(made).stream(*tree_plan(3, chunk_size=8))
    work = next(iter(stream))
    (rank,) = work.ranks
    with evaluate_in_float64(made.model), evaluate_in_float64(other.model):
        plain = RankExecutor(other).run(rank, work.step.num_target_tokens)
        if how.get("compiles"):
            CompiledLayers(made)
        made.set_checkpointing(how.get("checkpointing", "none"))
        found = RankExecutor(made).run(keeping_attention(rank) if how.get("keeps") else rank, 10)
        assert [each.loss for each in found.sequences] == pytest.approx([each.loss for each in plain.sequences])
    expected = take_gradients(other)
    scale = work.step.num_target_tokens / 10
    found = {name: gradient / scale for name, gradient in take_gradients(made).items()}
    assert max(relative_errors(found, expected, []).values()) < 1e-12


def by_sequence(tokens):
    """Sequences weigh by what they are likely, and tokens by where they are; some entropy."""
    sums = tokens.sums(tokens.log_probs)
    weights = torch.softmax(sums / 10, 0) * (1 + tokens.sequence_ids)
    return (weights * sums).sum() + (tokens.entropies * tokens.positions / 50).sum()


@pytest.mark.parametrize("seed", range(3))
def test_a_loss_of_the_step_sees_all_tokens_of_all_sequences(seed, model, tree_plan, handmade_plan):
    """...and so do the losses of sequences, as where each is run whole."""
    plan, analysis = tree_plan(seed)
    tokens, tree, whole = load_analysis(analysis).tokens(), model("qwen2"), model("qwen2")
    samples = [tokens(number) for number in range(load_analysis(analysis).num_sequences)]
    chunks = [[(number, 0, len(ids))] for number, (ids, _) in enumerate(samples)]
    work = next(iter(Executor(tree).stream(plan, analysis)))
    apart = next(iter(Executor(whole).stream(*handmade_plan(samples, [{0: chunks}]))))
    with evaluate_in_float64(tree.model), evaluate_in_float64(whole.model):
        losses = [Executor(made).step(each, by_sequence) for made, each in ((tree, work), (whole, apart))]
        found, expected = (
            RankExecutor(made).evaluate(each.ranks[0], 7) for made, each in ((tree, work), (whole, apart))
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert max(relative_errors(take_gradients(tree), take_gradients(whole), []).values()) < 1e-12
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)
    assert [(each.sequence_id, each.num_target_tokens) for each in found.sequences] == [
        (each.sequence_id, each.num_target_tokens) for each in expected.sequences
    ]
    assert [each.loss for each in found.sequences] == pytest.approx([each.loss for each in expected.sequences])


#: Two that go on with the tokens of another one, in three chunks: the first part, and two that depend on it.
SAMPLES = [
    (np.array([5, 6, 7, 8, *more]), np.array([False, *[True] * 6])) for more in ([1, 2, 3], [2, 3, 4], [9, 9, 9])
]
CHUNKS, PREFIXES = [[(0, 0, 5)], [(0, 5, 7), (1, 3, 7)], [(2, 3, 7)]], {1: (0, 3), 2: (1, 3)}


@pytest.fixture
def small_tree(handmade_plan):
    def make(samples=SAMPLES, chunks=CHUNKS, prefixes=PREFIXES, order=None):
        tree, actions = tree_of(CHUNKS, PREFIXES, [True] * 3)
        return handmade_plan(samples, [{0: chunks}], actions=order or actions, tree=tree._replace(prefixes=prefixes))

    return make


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("f0 f1 f2 b0 b1 b2", "the backward of tokens 0 to 5 of sequence 0 is out of order"),
        ("f0 f1 b1 b0 f2 b2", "the backward of tokens 0 to 5 of sequence 0 is out of order"),
        ("f0 f2 b2 f1 b1 b0", "the forward of tokens 11 to 15 of sequence 0 is out of order: tokens from 5 to 11"),
    ],
)
def test_orders_of_trees_that_would_not_be_exact_are_refused(order, message, small_tree, model):
    ops = {"f": "forward", "b": "backward"}
    plan = small_tree(order=[(ops[each[0]], int(each[1])) for each in order.split()])
    executor = Executor(model("qwen2"))
    with pytest.raises(DataError, match=message):
        executor.step(next(iter(executor.stream(*plan))))


def test_parts_whose_dependents_are_done_may_go_backward_in_any_order(small_tree, model):
    for order in ("f0 f1 f2 b1 b2 b0", "f0 f1 f2 b2 b1 b0", "f0 f1 b1 f2 b2 b0"):
        ops = {"f": "forward", "b": "backward"}
        plan = small_tree(order=[(ops[each[0]], int(each[1])) for each in order.split()])
        assert compare_plan(*plan, model("qwen2")).max_relative_error < 1e-12


def test_sequences_whose_tokens_or_targets_are_not_those_of_the_tree_are_refused_with_their_record(small_tree, model):
    executor = Executor(model("qwen2"))
    for name, place in (("token", 1), ("target", 2)):
        ids, target = SAMPLES[2]
        other = (np.where(np.arange(7) == place, 50, ids), target)
        other = other if name == "token" else (ids, target & (np.arange(7) != place))
        plan = small_tree(samples=[*SAMPLES[:2], other])
        with pytest.raises(DataError, match=f"^[^ ]*, row 2: token {place} of sequence 2, or whether") as raised:
            next(iter(executor.stream(*plan)))
        assert "tokens 0 to 3" in raised.value.message
    with pytest.raises(DataError, match="tokens before 3 of sequence 2 are not in the tree before it"):
        next(iter(executor.stream(*small_tree(prefixes={1: (0, 3)}))))


@pytest.mark.parametrize(
    ("config", "router_loss", "message"),
    [
        ({"model_type": "mamba2"}, None, "share prefixes in a mamba2 model whose layers keep a state or count"),
        (
            {"model_type": "llama4_text"},
            None,
            "a llama4_text model whose layers keep a state or count the tokens before",
        ),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, None, "tokens see those that come after"),
        ({"model_type": "qwen3_moe"}, "batch", "a qwen3_moe model whose routers have a load-balancing loss"),
    ],
)
def test_models_that_are_not_exact_with_trees_are_refused_by_name(config, router_loss, message, small_tree):
    plan, analysis = open_plan(*small_tree())
    with pytest.raises(UsageError, match=message) as raised:
        plan_stream(AutoConfig.for_model(**config), plan, analysis, router_loss=router_loss)
    assert "--share-prefixes" in raised.value.hint


def test_a_step_with_trees_is_refused_where_routers_have_a_loss(small_tree, model):
    made = model("qwen3_moe")
    work = next(iter(Executor(made).stream(*small_tree())))
    executor = Executor(made, router_loss="batch")
    for refused in (lambda: executor.stream(*small_tree()), lambda: executor.step(work)):
        with pytest.raises(UsageError, match="whose routers have a load-balancing loss"):
            refused()


def test_a_teacher_is_not_asked_of_tokens_that_sequences_share(small_tree, model):
    executor = Executor(model("qwen2"))
    with pytest.raises(UsageError, match="in this plan sequences share prefixes"):
        executor.step(next(iter(executor.stream(*small_tree()))), Distillation(lambda *_: None))


def test_pages_of_branches_are_given_back_before_the_next_ones_are_there(handmade_plan, model):
    """Depth first a tree of any number of branches has pages of its trunk and one branch; forwards alone too."""
    target = np.arange(13) >= 8
    samples = [(np.array([*range(1, 9), *[number] * 5]), target) for number in range(20, 30)]
    prefixes = {number: (number - 1, 7) for number in range(1, 10)}
    chunks = [[(0, 0, 8)], [(0, 8, 13)], *([(number, 7, 13)] for number in range(1, 10))]
    tree, actions = tree_of(chunks, prefixes, [False] * 11)
    plan, analysis = handmade_plan(samples, [{0: chunks}], actions=actions, tree=tree)
    executor = RankExecutor(model("qwen2"))
    (work,) = next(iter(PlanStream(*open_plan(plan, analysis), vocab_size=97, max_positions=256))).ranks
    seen = []

    @contextmanager
    def around(action):
        yield
        seen.append(store_bytes(executor.stores[0]))

    executor.run(work, 50, around)
    token = 2 * 2 * 2 * 8 * 8  # keys and values of 2 layers, of 2 heads of 8 numbers of 8 bytes
    assert max(seen) == (2 * 8 + 6) * token  # of the trunk with gradients
    seen.clear()
    forward = executor._forward
    executor._forward = lambda *given: (forward(*given), seen.append(store_bytes(executor.stores[0])))[0]
    executor.evaluate(work, 50)
    assert max(seen) == (8 + 6) * token
    assert executor.stores[0].is_empty


@pytest.mark.parametrize("name", ["gpt_oss, sinks", "deepseek_v3, latents"])
def test_all_host_memory_of_a_step_is_taken_before_it_begins(name, model, tree_plan, monkeypatch):
    executor, taken = RankExecutor(model(name), kv_offload=True), []
    reserve, new = HostMemory.reserve, HostMemory._new

    def reserve_all(memory, *given):
        reserve(memory, *given)
        taken.clear()

    monkeypatch.setattr(HostMemory, "reserve", reserve_all)
    monkeypatch.setattr(HostMemory, "_new", lambda memory, *kind: (taken.append(kind), new(memory, *kind))[1])
    for seed in range(6):
        stream = PlanStream(*open_plan(*tree_plan(seed, chunk_size=8)), vocab_size=97, max_positions=256)
        (work,) = next(iter(stream)).ranks
        executor.evaluate(work, 50)
        assert taken == []
        executor.memory = None  # with none of an evaluation
        executor.run(work, 50)
        assert taken == []
