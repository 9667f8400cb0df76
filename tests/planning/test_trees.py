"""Sequences that begin alike: what is run once, in which order, what is held; against all ways there are, on small
trees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import chunkplan.planning.trees as trees_module
from chunkplan import CostModel, PlanConfig, build, plan_step, validate
from chunkplan.errors import UsageError
from chunkplan.planfile.chunks import chunks_of_rows
from chunkplan.planning.branches import Branches, cut_tree, kept_chunks
from chunkplan.planning.trees import Tree, find_trees
from chunkplan.reporting.per_step import plan_chunks
from chunkplan.schedule.holdings import kv_tokens
from tests.support.plain import plain_cost
from tests.support.tree_search import every_cut, least_again
from tests.support.trees import Sequences, build_trees, rollouts, traces

COST = CostModel()


@pytest.fixture
def shares_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences share all that is equal, however little it is."""
    monkeypatch.setattr(trees_module, "LEAST_SHARED", 1)
    monkeypatch.setattr(trees_module, "LEAST_SHARED_PARTS", 1 << 30)


def found_in(sequences: Sequences, dp: int = 1) -> list[Tree]:
    lengths = np.array([ids.size for ids, _ in sequences])

    def tokens_of(sequence_id: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        ids, target = sequences[sequence_id]
        return ids.astype(np.int32), target

    return find_trees(np.arange(len(sequences)), lengths, tokens_of, dp, COST)


def num_run(trees: list[Tree]) -> int:
    return int(sum((tree.lengths - tree.begin).sum() for tree in trees))


@pytest.mark.parametrize("seed", range(8))
def test_every_token_is_run_once_but_the_last_one_of_each_branch(seed: int, shares_all: None) -> None:
    sequences = traces(np.random.default_rng(seed), 20, 12)
    texts = [tuple(zip(ids.tolist(), target.tolist(), strict=True)) for ids, target in sequences]
    distinct = {text[: stop + 1] for text in texts for stop in range(len(text))}
    trees = found_in(sequences)
    assert len(distinct) <= num_run(trees) <= len(distinct) + len(sequences)
    assert sorted(np.concatenate([tree.ids for tree in trees]).tolist()) == list(range(20))
    for tree in trees:
        assert (tree.parent < np.arange(tree.ids.size)).all()
        for place in np.flatnonzero(tree.parent >= 0).tolist():
            one, other = (texts[tree.ids[each]] for each in (place, tree.parent[place]))
            shared = int(tree.begin[place])
            assert one[: shared + 1] == other[: shared + 1]
            assert one[: shared + 2] != other[: shared + 2] or shared + 1 == min(len(one), len(other))
            assert tree.begin[tree.parent[place]] < shared


def test_a_few_equal_tokens_are_not_worth_a_tree() -> None:
    random = np.random.default_rng(0)
    assert all(tree.ids.size == 1 for tree in found_in(rollouts(random, [20], 4, 50)))
    assert max(tree.ids.size for tree in found_in(rollouts(random, [40], 4, 50))) == 4
    long = [(np.concatenate([np.arange(40), random.integers(0, 9, 4000)]), np.ones(4040, bool)) for _ in range(4)]
    assert all(tree.ids.size == 1 for tree in found_in(long))


def test_a_tree_with_more_work_than_a_rank_is_cut_where_that_makes_the_slowest_faster() -> None:
    sequences = rollouts(np.random.default_rng(0), [300], 32, 400)
    assert len(found_in(sequences, 1)) == 1
    cut = found_in(sequences, 4)
    assert 4 <= len(cut) <= 32
    assert num_run(found_in(sequences, 1)) < num_run(cut) < sum(ids.size for ids, _ in sequences) / 1.5


@st.composite
def chunk_trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """The chunk that each one in preorder depends on, -1 for the first, and what it takes to run each again."""
    parent = [-1]
    for chunk in range(1, draw(st.integers(1, 6))):
        above = chunk - 1
        for _ in range(draw(st.integers(0, 2))):
            above = parent[above] if parent[above] >= 0 else above
        parent.append(above)
    return parent, [draw(st.integers(1, 9)) for _ in parent]


@given(chunk_trees(), st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_order_and_retained_chunks_are_the_best_of_all_on_small_trees(tree: Any, k: int) -> None:
    parent, weight = tree
    last = np.arange(len(parent))
    for chunk in range(len(parent) - 1, 0, -1):
        last[parent[chunk]] = max(last[parent[chunk]], last[chunk])
    keeps = kept_chunks(last, np.array(weight), k)
    assert np.array(weight)[~keeps].sum() == least_again(parent, weight, k)
    for chunk in range(len(parent)):  # what is held while a chunk runs: those that it depends on
        held, above = 0, parent[chunk]
        while above >= 0:
            held, above = held + int(keeps[above]), parent[above]
        assert held <= k - 1


def test_of_a_chain_the_last_k_chunks_keep_activations() -> None:
    for k in (1, 2, 4, 9):
        assert kept_chunks(np.full(6, 5), np.ones(6, np.int64), k).tolist() == [False] * max(6 - k, 0) + [True] * min(
            k, 6
        )


@pytest.mark.soak
def test_packing_is_close_to_the_best_of_all_ways_to_cut_small_trees(shares_all: None) -> None:
    """In time, with chunks that cost as much as no, a third of a, and one token besides, and in chunks."""
    ratios, more, seed = [], [], 0
    while len(ratios) < 150:
        seed += 1
        random = np.random.default_rng(seed)
        chunk_size, k, overhead = int(random.integers(2, 5)), int(random.integers(1, 4)), int(random.choice([0, 3, 10]))

        def cost_of(branches: Branches, k: int = k, overhead: int = overhead) -> int:
            again = 10 * branches.tokens + overhead
            keeps = kept_chunks(branches.last_dependent, again, k)
            return int(3 * again.sum() + again[~keeps].sum())

        for tree in found_in(traces(random, int(random.integers(2, 5)), 4)):
            run = num_run([tree])
            if tree.ids.size > 1 and chunk_size < run <= 10:
                found = cut_tree(tree, chunk_size, cost_of)
                ratios.append(cost_of(found) / min(map(cost_of, every_cut(tree, chunk_size))))
                more.append(found.tokens.size - -(-run // chunk_size))
    assert min(ratios) >= 1
    assert np.mean(ratios) < 1.02
    assert max(ratios) < 1.15
    assert np.mean(more) < 0.1


@pytest.mark.parametrize("seed", range(6))
def test_a_plan_of_sequences_that_branch_anywhere_is_valid(seed: int, shares_all: None, tmp_path: Path) -> None:
    random = np.random.default_rng(seed)
    made = traces(random, 24, 60) if seed % 2 else rollouts(random, [150, 20, 70], 6, 90)
    options = [{}, {"dp": 3, "k": 1}, {"pp": 2, "dp": 2}, {"pp": 3, "schedule": "interleaved"}, {"k": 4}, {"dp": 2}][
        seed
    ]
    plan = build_trees(tmp_path, made, chunk_size=int(random.choice([16, 64, 200])), **options)
    assert validate(plan.path).violations == ()
    assert plan.manifest["totals"]["num_run_tokens"] < plan.manifest["totals"]["num_tokens"]
    steps = plan.steps().to_pylist()
    assert all(step["lower_bound_us"] <= step["predicted_us"] for step in steps)


def test_trees_are_of_one_step_and_a_sequence_that_comes_twice_is_in_none(tmp_path: Path) -> None:
    made = rollouts(np.random.default_rng(0), [100], 8, 40)
    plan = build_trees(tmp_path, made, global_batch=4, mix={"rollouts.jsonl": 1.5})
    assert validate(plan.path).ok
    for step in plan.iter_steps():
        begun = [
            each.sequence_id for rank in step.chunks.values() for c in rank for each in c.segments if not each.start
        ]
        twice = {each for each in begun if begun.count(each) > 1}
        inside = {*step.prefixes, *(other for other, _ in step.prefixes.values())}
        assert not inside & twice
    assert any(step.prefixes for step in plan.iter_steps())


def test_without_equal_tokens_a_plan_is_the_one_without_trees(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    made = [(random.integers(0, 1000, n), np.arange(n) > 0) for n in random.integers(1, 300, 40).tolist()]
    with_trees = build_trees(tmp_path, made, dp=2)
    config = PlanConfig(chunk_size=64, k=2, global_batch=16, dp=2, cp="off", tail_sharing=False)
    without = build(tmp_path / "analysis", tmp_path / "other", config, cost=plain_cost())
    assert with_trees.chunks().drop_columns("last_dependent") == without.chunks()
    assert with_trees.schedule() == without.schedule()
    assert with_trees.prefixes().num_rows == 0
    drop = ["lower_bound_us"]
    assert with_trees.steps().drop_columns(drop) == without.steps().drop_columns(drop)


@pytest.mark.parametrize(("sharding", "pp"), [("optimizer", 1), ("gradients", 1), ("weights", 2)])
def test_no_step_takes_longer_than_without_trees(sharding: str, pp: int, tmp_path: Path) -> None:
    """Of steps of few sequences on many ranks some share prefixes and some do not."""
    random = np.random.default_rng(5)
    made = [one for each in range(12) for one in rollouts(random, [40 + 20 * each], 4, 30 * each + 5)]
    options = {"dp": 4, "pp": pp, "global_batch": 8, "cost": replace(plain_cost(), sharding=sharding)}
    plan = build_trees(tmp_path, made, **options)
    alone = build_trees(
        tmp_path / "alone",
        made,
        share_prefixes=False,
        tail_sharing=False,
        cp="off",
        **options,
        **({"schedule": "1f1b"} if pp > 1 else {}),
    )
    took, whole = (each.steps()["predicted_us"].to_numpy() for each in (plan, alone))
    assert (took <= whole).all() and (took < whole).any()
    assert validate(plan.path).violations == ()
    shares = [bool(step.prefixes) for step in plan.iter_steps()]
    assert any(shares)


def test_a_part_of_a_tree_is_no_mixed_chunk(tmp_path: Path) -> None:
    plan = build_trees(tmp_path, rollouts(np.random.default_rng(0), [100, 60], 6, 50))
    chunks = [chunk for step in plan.iter_steps() for rank in step.chunks.values() for chunk in rank]
    assert {chunk.kind for chunk in chunks if chunk.group_id is not None} == {"dependent"}
    assert any(len(chunk.segments) > 1 for chunk in chunks if chunk.group_id is not None)
    assert "mixed" not in plan_chunks(plan).frame["kind"].to_list()


def test_a_step_in_memory_has_trees_too() -> None:
    ids = [each for each, _ in rollouts(np.random.default_rng(0), [100, 60], 5, 50)]
    lengths = [each.size for each in ids]
    step = plan_step(lengths, tokens=ids, share_prefixes=True, dp=1, cap=128, k=2)
    assert len(step.prefixes) == 8
    run = sum(chunk.num_tokens for chunk in step.chunks[0])
    assert run == sum(lengths) - sum(shared for _, shared in step.prefixes.values())
    assert step.predicted_us < plan_step(lengths, dp=1, cap=128, k=2).predicted_us
    with pytest.raises(UsageError, match="needs the tokens of all sequences"):
        plan_step(lengths, share_prefixes=True, dp=1, cap=128)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dp": 2, "cp": "auto"}, "share-prefixes does not go with cp"),
        ({"pp": 2, "schedule": "zero-bubble"}, "share-prefixes has no order of schedule zero-bubble"),
        ({"pp": 2, "schedule": "search"}, "share-prefixes has no order of schedule search"),
        ({"split": "none"}, "share-prefixes does not go with split none"),
        ({"micro_batches": "fewest"}, "share-prefixes does not go with micro-batches"),
        ({"tail_sharing": True}, "share-prefixes does not go with fill-tails"),
    ],
)
def test_what_does_not_go_with_trees_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        PlanConfig(chunk_size=64, k=1, share_prefixes=True, **options)


def test_trees_need_tokens_and_attention(tmp_path: Path) -> None:
    config = PlanConfig(chunk_size=64, k=1, share_prefixes=True)
    np.save(tmp_path / "lengths.npy", np.arange(1, 20))
    with pytest.raises(UsageError, match="holds lengths only, no tokens"):
        build(tmp_path / "lengths.npy", tmp_path / "plan", config)
    build_trees(tmp_path, rollouts(np.random.default_rng(0), [40], 3, 9))
    attention = COST.shape
    recurrent = replace(attention, kinds=tuple(replace(kind, state_elements=64) for kind in attention.kinds))
    with pytest.raises(UsageError, match="has recurrent layers"):
        build(tmp_path / "analysis", tmp_path / "plan", config, cost=CostModel(shape=recurrent))
    assert PlanConfig(chunk_size=64, k=1, pp=2, schedule="auto", share_prefixes=True).schedule == "1f1b"


def test_keys_and_values_of_a_branch_go_with_its_own_backward() -> None:
    """Those of a prompt stay until all branches are done: what is held at most is the prompt and a branch."""
    ids = [each for each, _ in rollouts(np.random.default_rng(0), [128], 12, 60)]
    step = plan_step([each.size for each in ids], tokens=ids, share_prefixes=True, dp=1, cap=128, k=2)
    chunks = chunks_of_rows(step.chunks[0])
    assert chunks.last_dependent.tolist() == [chunks.group_size[0] - 1, *range(1, chunks.group_size[0])]
    comes, goes = kv_tokens(chunks)
    held = most = 0
    for action in step.actions[0, 0]:
        held += comes[action.chunk_id] if action.op.startswith("forward") else 0
        most = max(most, held)
        held -= goes[action.chunk_id] if action.op == "backward" else 0
    assert held == 0
    assert most <= 256 < chunks.num_tokens.sum() - 128
