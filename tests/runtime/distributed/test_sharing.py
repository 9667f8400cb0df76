"""Processes that share sequences have the gradients of whole sequences, by heads, by pages and by both."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from graphlib import CycleError
from itertools import product

import numpy as np
import pytest
import torch

from chunkplan import PlanConfig, build, build_like, validate
from chunkplan.cost.exchange import exchange_times
from chunkplan.cost.hardware import load_hardware
from chunkplan.cost.memory import exchange_bytes
from chunkplan.cost.model import CostModel
from chunkplan.cost.model_config import shape_of_config
from chunkplan.cost.shape import QWEN2_5_7B
from chunkplan.errors import UsageError
from chunkplan.planfile.load import load_plan
from chunkplan_runtime.layout import choose_layout
from tests.runtime.distributed.test_gradients import check
from tests.runtime.test_parity import MODELS
from tests.support.analyses import write_analysis
from tests.support.distributed_cases import compare_master_weights, four_layers
from tests.support.memory_cases import exchange_peaks
from tests.support.reduction_cases import layers_ahead, record
from tests.support.shared_plans import given_blocks
from tests.support.sharing_cases import made_groups, refused_backend, sent_bytes
from tests.support.wait_cases import compare_waiting, used_groups

#: Two shared sequences, one of a single chunk, and those that are packed, split and alone beside them.
LENGTHS = [97, 5, 9, 3, 26, 30, 8]

#: Of a sequence of so many tokens the first rank, how many share it, and how many of them share heads.
BY_HEADS = {97: (0, 4, 4), 26: (2, 2, 2)}
BY_PAGES = {97: (0, 4, 1), 26: (2, 2, 1)}
BY_BOTH = {97: (0, 4, 2), 26: (2, 2, 2), 30: (0, 2, 1)}
WAYS = {"heads": BY_HEADS, "pages": BY_PAGES, "both": BY_BOTH}


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_config, random_sequences):
    """`make(blocks, model, **settings of the plan)`: see `given_blocks`."""

    def make(blocks, model=None, lengths=LENGTHS, **plan):
        folder = tmp_path_factory.mktemp("sharing")
        write_analysis(folder / "analysis", random_sequences(lengths, seed=3))
        settings = {"chunk_size": 8, "k": 2, "dp": 4, "cp": "auto", "global_batch": len(lengths), **plan}
        with given_blocks(blocks):
            cost = CostModel(shape=replace(QWEN2_5_7B, kinds=(replace(QWEN2_5_7B.kinds[0], num_kv_heads=8),)))
            built = build(folder / "analysis", folder / "plan", PlanConfig(**settings), cost=cost, workers=1)
        assert validate(built.path).ok
        found = {chunk for chunks in next(built.iter_steps()).chunks.values() for chunk in chunks if chunk.cp_size > 1}
        shapes = {(chunk.cp_first_rank, chunk.cp_size, chunk.cp_heads) for chunk in found}
        assert shapes == set(blocks.values())
        has_latents = model is not None and "kv_lora_rank" in model  # each head then has keys of its own
        heads = {"num_attention_heads": 8, "num_key_value_heads": 8 if has_latents else 4}
        config = tiny_config(**four_layers({**(model or {"model_type": "qwen2"}), **heads}))
        (folder / "config.json").write_text(json.dumps(config))
        return {"plan": folder / "plan", "config": folder / "config.json"}

    return make


@pytest.mark.parametrize(
    "way, k",
    [("both", 2)]
    + [
        pytest.param(*each, marks=pytest.mark.soak) for each in (*product(("heads", "pages"), (1, 2, 100)), ("both", 1))
    ],
)
def test_ranks_that_share_sequences_have_the_gradients_of_one_process(pool, made, way, k):
    check(pool, 4, made(WAYS[way], k=k), evaluates=True)


@pytest.mark.parametrize(
    "name, way",
    [
        ("gemma2, softcaps and sliding window", "both"),
        pytest.param("gemma2, softcaps and sliding window", "pages", marks=pytest.mark.soak),
        ("deepseek_v3, latents", "pages"),
        *(
            pytest.param(name, way, marks=pytest.mark.soak)
            for name in MODELS
            for way in WAYS
            if "gemma2" not in name and (name, way) != ("deepseek_v3, latents", "pages")
        ),
    ],
)
def test_models_are_exact_where_processes_share_sequences(pool, made, name, way):
    check(pool, 4, made(WAYS[way], MODELS[name], k=2))


@pytest.mark.parametrize("way", [pytest.param("heads", marks=pytest.mark.soak), "pages"])
def test_pipelines_that_share_sequences_are_exact(pool, made, way):
    """Two of two stages; with tied embeddings, in an evaluation too."""
    blocks = {97: (0, 2, 2), 26: (0, 2, 1)} if way == "heads" else {97: (0, 2, 1), 26: (0, 2, 2)}
    model = MODELS["llama with biases, tied"]
    check(pool, 4, made(blocks, model, dp=2, pp=2, k=1), evaluates=True)


@pytest.mark.parametrize(
    "dp, pp, blocks",
    [
        pytest.param(4, 1, BY_BOTH, marks=pytest.mark.soak),
        (2, 1, {97: (0, 2, 1), 30: (0, 2, 2)}),
        pytest.param(2, 2, {97: (0, 2, 2)}, marks=pytest.mark.soak),
        (1, 1, {}),
    ],
)
def test_a_plan_like_one_of_eight_ranks_is_exact_on_fewer_processes(pool, made, tmp_path, dp, pp, blocks):
    model = {"model_type": "qwen2", "sliding_window": 10, "use_sliding_window": True, "max_window_layers": 2}
    eight = {97: (0, 8, 4), 26: (4, 2, 1), 30: (4, 4, 2), 9: (2, 2, 2)}
    plan = made(eight, model, dp=8, pp=pp, chunk_size=4, k=2)
    with pytest.raises(UsageError, match=f"as many replicas as it has ranks, 8, not {dp}"):
        choose_layout(load_plan(plan["plan"]), dp * pp, 0)
    with given_blocks(blocks):
        like = build_like(plan["plan"], tmp_path / "like", dp=dp)
    assert validate(like.path).ok
    assert set(like.chunks().column("cp_size").to_pylist() if blocks else [1]) == {
        1,
        *(n for _, n, _ in blocks.values()),
    }
    check(pool, dp * pp, {**plan, "plan": like.path}, evaluates=True)


@pytest.mark.parametrize("way", [*(pytest.param(way, marks=pytest.mark.soak) for way in ("heads", "pages")), "both"])
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("gpt_oss, sinks", {"checkpointing": True}),
        pytest.param("deepseek_v3, latents", {"kv_offload": True}, marks=pytest.mark.soak),
        pytest.param(
            "gemma3_text", {"kv_offload": True, "checkpointing": "full", "lora": True}, marks=pytest.mark.soak
        ),
    ],
)
def test_shared_chunks_that_keep_attention_are_exact(pool, made, way, name, how):
    """What nobody attends with again nobody sends in the recompute, and nobody waits for."""
    check(pool, 4, made(WAYS[way], MODELS[name], k=1), keep_attention=True, **how)


@pytest.mark.soak
@pytest.mark.parametrize("way", [*(pytest.param(way, marks=pytest.mark.soak) for way in ("heads", "pages")), "both"])
def test_adapters_and_what_saves_memory_are_exact_where_processes_share_sequences(pool, made, way):
    plan = made(WAYS[way], MODELS["gemma3_text"], k=1)
    check(pool, 4, plan, lora=True, kv_offload=True, checkpointing=True, evaluates=True)
    check(pool, 4, plan, kv_offload=True, checkpointing="offload")


@pytest.mark.parametrize(
    "blocks",
    [{97: (0, 2, 2), 26: (0, 2, 1)}, pytest.param({97: (0, 2, 1), 30: (0, 2, 2)}, marks=pytest.mark.soak)],
    ids=["heads", "pages"],
)
def test_pipelines_that_share_sequences_with_kv_on_the_host_do_not_wait_for_the_device(pool, made, blocks):
    plan = made(blocks, MODELS["gemma2, softcaps and sliding window"], dp=2, pp=2, k=1)
    check(pool, 4, plan, run=compare_waiting, kv_offload=True, evaluates=True)


@pytest.mark.soak
def test_bfloat16_sums_gradients_in_float32_where_processes_share_sequences(pool, made, tmp_path):
    """Chunks and pages are others than on one process, so that results differ by rounding."""
    plan = made(BY_BOTH, k=1)
    alone = build_like(plan["plan"], tmp_path / "alone", dp=1).path
    found = pool.run(4, compare_master_weights, **plan, alone=alone)
    assert max(error for error, _ in found) < 2e-2


@pytest.mark.parametrize("heads", [*(pytest.param(heads, marks=pytest.mark.soak) for heads in (4, 1)), 2])
def test_what_is_sent_in_a_layer_is_what_the_planner_counts(pool, made, heads):
    """Its formula in bytes: a link of a byte a nanosecond, behind which nothing hides."""
    plan = made({96: (0, 4, heads)}, lengths=[96], k=100)
    [step] = load_plan(plan["plan"]).iter_steps()
    rows = step.chunks[0]
    assert len(rows) == 3
    shape = shape_of_config(json.loads(plan["config"].read_text()), "")
    links = replace(load_hardware("h100"), gpu_link_bytes=1e9, link_ns=0)
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        cost = CostModel(shape=shape, hardware=links, precision=precision)
        tokens, prefix = (np.array([getattr(row, name) for row in rows]) for name in ("cp_tokens", "prefix_tokens"))
        pages = np.arange(len(rows)) + 1
        size = np.full(len(rows), 4)
        times = exchange_times(cost, tokens, prefix, pages, size, size * 0 + heads, attention_pairs=0.0 * tokens)
        expected = shape.num_layers * (times.forward.sum() + times.backward.sum())
        for counts in pool.run(4, sent_bytes, **plan, dtype=dtype):
            assert sum(counts.values()) == pytest.approx(expected, rel=1e-12)
            kinds = {("heads", dtype)} if heads > 1 else set()
            kinds |= {("pages", dtype), ("gradients", torch.float32)} if heads < 4 else set()
            assert set(counts) == kinds


@pytest.mark.parametrize(
    "heads, k", [(1, 2), *(pytest.param(*each, marks=pytest.mark.soak) for each in ((4, 1), (4, 2), (1, 1)))]
)
def test_what_exchanging_takes_in_a_layer_is_what_the_planner_predicts(pool, made, heads, k):
    plan = made({96: (0, 4, heads)}, lengths=[96], k=k)
    shape = shape_of_config(json.loads(plan["config"].read_text()), "")
    precision, dtype = ("fp32", torch.float32) if k == 1 else ("bf16", torch.bfloat16)
    predicted = exchange_bytes(CostModel(shape=shape, precision=precision), 8, (8, 8), heads, 4 // heads)
    for peaks in pool.run(4, exchange_peaks, **plan, dtype=dtype):
        [(kind, measured)] = peaks.items()
        assert kind == ("heads" if heads > 1 else "pages")
        assert measured <= predicted <= 1.1 * measured, (predicted, measured)


def test_pages_out_of_reach_of_a_window_are_not_sent(pool, made):
    """Of a prefix of 64 tokens, 7 are seen; a process sends as many as that has that has most of them."""
    model = {"model_type": "mistral", "sliding_window": 8, "num_hidden_layers": 1}
    plan = made({96: (0, 4, 1)}, model, lengths=[96], k=100)
    width = 2 * 4 * 8  # keys and values of 4 heads of 8 numbers
    tokens = [32, *2 * [32 + 4 * 4]]  # those that each chunk fetches: its own, and of 7 at most 4 from each process
    for counts in pool.run(4, sent_bytes, **plan, dtype=torch.float32):
        assert counts == {
            ("pages", torch.float32): 2 * sum(tokens) * 3 // 4 * width * 4,  # forward and backward
            ("gradients", torch.float32): sum(tokens) * 3 // 4 * width * 4,
        }


def test_groups_that_share_sequences_are_used_before_the_first_step(pool, made):
    """Of all processes, of replicas, of those that share heads and of those that share pages; one of two is both."""
    for before, during in pool.run(4, used_groups, **made(BY_BOTH)):
        assert len({group for group, _ in during}) == 4
        assert during <= before


#: Processes 2 and 3 run one chunk, which all share, and 0 and 1 meet in another one after it.
ONE_MEETING_AFTER_ANOTHER = {97: (0, 4, 4), 26: (0, 2, 1)}


@pytest.mark.parametrize(
    "blocks, reduces_early",
    [
        pytest.param({97: (0, 4, 4)}, True, marks=pytest.mark.soak),
        pytest.param({97: (0, 4, 1), 26: (0, 2, 2), 30: (2, 2, 1)}, True, marks=pytest.mark.soak),
        (ONE_MEETING_AFTER_ANOTHER, False),
    ],
    ids=["all meet last", "pairs meet last", "some meet later"],
)
def test_only_where_a_process_meets_another_after_its_last_chunk_nothing_is_reduced_before_all_are_done(
    pool, made, blocks, reduces_early
):
    """All have the same shared chunk last, or each its own; but not one that another process goes on after."""
    plan = made(blocks, lengths=list(blocks), k=1)
    processes = record(pool, plan)
    assert {process.reduces_early for process in processes} == {reduces_early}
    num_layers = len(processes[0].layers)
    expected = [*(reversed(range(num_layers)) if reduces_early else [0] * num_layers), 0, 0]  # head, embeddings
    assert [layers_ahead(process) for process in processes] == [expected] * 4
    check(pool, 4, plan)


def test_reducing_in_last_backwards_whoever_meets_would_launch_in_no_one_order(pool, made):
    """The test above has this plan too, in which what is launched has one order."""
    plan = made(ONE_MEETING_AFTER_ANOTHER, lengths=list(ONE_MEETING_AFTER_ANOTHER), k=1)
    with pytest.raises(CycleError):
        record(pool, plan, always=True)


@pytest.mark.parametrize("way", [*(pytest.param(way, marks=pytest.mark.soak) for way in ("heads", "pages")), "both"])
def test_weights_that_are_gathered_for_every_chunk_leave_the_same_gradients(pool, made, way):
    plan = made(WAYS[way], MODELS["gemma2, softcaps and sliding window"], k=2)
    check(pool, 4, plan, sharding="weights", checkpointing=True, evaluates=True)


def test_a_backend_that_cannot_exchange_is_refused_by_name_before_the_first_step(pool):
    for said in pool.run(2, refused_backend):
        assert said.startswith("processes cannot share sequences: the backend idle does not exchange tensors on cpu (")
        assert "`--cp off`" in said


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 152), marks=pytest.mark.soak)], ids=["few", "many"])
def test_random_plans_are_exact_and_nobody_waits_for_ever(pool, made, seeds):
    """Any blocks in any order of widths, by heads and pages.

    And what processes launch has one order, with what they reduce in their last backwards.
    """
    for seed in seeds:
        chance = random.Random(seed)
        pp = chance.choice([1, 1, 2])
        dp = 2 if pp == 2 else chance.choice([2, 3, 4])
        lengths = chance.sample(range(2, 120), chance.randint(2, 9))
        blocks = random_blocks(chance, lengths, dp)
        settings = {"k": chance.choice([1, 2, 5]), "split": chance.choice(["full", "cost"])}
        plan = made(blocks, lengths=lengths, dp=dp, pp=pp, chunk_size=chance.randint(4, 9), **settings)
        check(pool, dp * pp, plan)
        record(pool, plan, dp * pp)


@pytest.mark.parametrize(
    "seeds", [range(10, 11), pytest.param(range(11, 28), marks=pytest.mark.soak)], ids=["few", "many"]
)
def test_random_plans_are_exact_where_weights_are_gathered_for_every_chunk(pool, made, seeds):
    for seed in seeds:
        chance = random.Random(seed)
        pp = chance.choice([1, 1, 2])
        dp = 2 if pp == 2 else chance.choice([2, 4])
        lengths = chance.sample(range(2, 120), chance.randint(2, 9))
        settings = {"k": chance.choice([1, 2, 5]), "pp": pp, "split": chance.choice(["full", "cost"])}
        plan = made(
            random_blocks(chance, lengths, dp), lengths=lengths, dp=dp, chunk_size=chance.randint(4, 9), **settings
        )
        check(pool, dp * pp, plan, sharding=chance.choice(["gradients", "weights"]), evaluates=True)


def random_blocks(chance, lengths, dp):
    """Who shares which of these sequences, of `dp` ranks."""
    blocks = {}
    for tokens in lengths:
        size = chance.choice(PlanConfig(chunk_size=8, k=1, dp=dp, cp="auto").cp_sizes)
        if 1 < size <= tokens // 2:
            first = chance.randrange(0, dp, size)
            blocks[tokens] = (first, size, chance.choice([heads for heads in (1, 2, 4) if size % heads == 0]))
    return blocks


@pytest.mark.parametrize(
    "blocks, how, sizes",
    [
        (BY_PAGES, {"dp": 4}, [[4, 4], [4, 4], [2, 4, 4], [2, 4, 4]]),
        (BY_BOTH, {"dp": 4}, [[2, 2, 4], [2, 2, 4], [2, 2, 4], [2, 2, 4]]),
        ({97: (0, 2, 1)}, {"dp": 2, "pp": 2}, [[2] * 5] * 4),
    ],
)
def test_a_process_makes_the_groups_that_its_plan_uses_and_no_second_one_of_all_processes(
    pool, made, blocks, how, sizes
):
    """Of replicas, and those that share; in a pipeline two of a link, and of both ends. The default group is there."""
    found = pool.run(4, made_groups, **made(blocks, **how))
    assert found == [(1 + len(each), each) for each in sizes]
